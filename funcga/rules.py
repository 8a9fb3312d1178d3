"""Rules: what a leaf of one library is called in another, and how its axes lie there."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from funcga.errors import FuncgaError


@dataclass(frozen=True)
class Rule:
    r"""A leaf whose dotted path is `pattern`, all of it, is called `replacement` on the other side.

    pattern: a regular expression; replacement: what `re.sub` makes of it, with groups as `\1`, or None: such a leaf has
    no counterpart, and is left out. axes: how the array's axes are permuted: None, a tuple as for numpy.transpose,
    "oi->io" or "io->oi" for weights of any rank, or a function of a NumPy array, for what axes alone cannot say.
    "oi->io" takes [out, in, *spatial] to [*spatial, in, out]: the linear and convolutional layers of torch to those of
    flax; "io->oi" is the way back.

    Names are swapped through a third: Rule("a", "tmp"), Rule("b", "a"), Rule("tmp", "b"), as each rule is tried on what
    those before it made. Raises FuncgaError for a pattern or axes that are none.

    >>> rules = [funcga.Rule(r"fc1\.(.*)", r"Dense_0.\1"), *funcga.rules.torch_to_flax]
    """

    pattern: str
    replacement: str | None
    axes: tuple[int, ...] | str | Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        try:
            if not isinstance(self.pattern, str):
                raise TypeError("the pattern is no text")
            # The replacement's groups are looked up only where something matches, and this matches.
            re.sub(f"{self.pattern}|$", self.replacement or "", "")
        except (re.error, IndexError, TypeError) as error:
            raise FuncgaError(
                f"Rule({self.pattern!r}, {self.replacement!r}) is no regular expression with its replacement: {error}. "
                rf"Write funcga.Rule(r'fc1\.(.*)', r'Dense_0.\1'), for instance."
            ) from error
        if not _is_axes(self.axes):
            raise FuncgaError(
                f"Rule({self.pattern!r}, ..., axes={self.axes!r}): these are no axes. Write 'oi->io', 'io->oi', a "
                f"permutation such as (1, 0), or a function of a NumPy array."
            )


def _is_axes(axes: Any) -> bool:
    if isinstance(axes, tuple):
        return all(type(axis) is int for axis in axes) and sorted(axes) == [*range(len(axes))]
    return axes is None or callable(axes) or axes in ("oi->io", "io->oi")


def as_rules(rules: Any) -> tuple[Rule, ...]:
    """The rules that a caller gave. Raises FuncgaError for what is none."""
    found = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    if not isinstance(rules, Iterable) or not all(isinstance(rule, Rule) for rule in found):
        raise FuncgaError(
            f"rules={rules!r} is no list of rules. Write rules=[funcga.Rule(r'fc1\\.(.*)', r'Dense_0.\\1'), "
            f"*funcga.rules.torch_to_flax], for instance."
        )
    return found


class Pair(NamedTuple):
    """Two leaves that match, by their paths, and what takes the left one's axes to the right one's, in order."""

    left: str
    right: str
    rules: tuple[Rule, ...]


def pairs(lefts: Iterable[str], rights: Iterable[str], rules: Sequence[Rule]) -> list[Pair]:
    """The Pair of every left path, in order; one that matches nothing is paired with its own name.

    Each rule is tried in order on what those before it have made of the path, and may be left out; the first path that
    the right tree has wins, where an earlier rule goes before a later one, and a rule before none. Raises FuncgaError
    if two leaves end up as one, or one can end up as more than can be looked through.
    """
    there = {*rights}
    found: dict[str, Pair] = {}
    for left in lefts:
        pair = _pair(left, there, rules)
        if pair is None:
            continue
        if pair.right in found:
            raise FuncgaError(
                f"`{found[pair.right].left}` and `{left}` of the left tree are both `{pair.right}` by these rules. "
                f"Make a pattern narrower, so that each leaf has a path of its own."
            )
        found[pair.right] = pair
    return [*found.values()]


def _pair(left: str, there: set[str], rules: Sequence[Rule]) -> Pair | None:
    spellings = _spellings(left, rules)
    for path, used in spellings.items():
        if path in there:
            return Pair(left, path, used)
    return None if any(_is_left_out(path, rules) for path in spellings) else Pair(left, left, ())


def _is_left_out(path: str, rules: Sequence[Rule]) -> bool:
    return any(rule.replacement is None and re.fullmatch(rule.pattern, path) for rule in rules)


_MOST = 4096
"""The spellings of one path that are looked through: k rules that match it can make 2**k."""


def _spellings(path: str, rules: Sequence[Rule]) -> dict[str, tuple[Rule, ...]]:
    """All that the rules can make of a path, the first choice first, and those of them that are used."""
    found: dict[str, tuple[Rule, ...]] = {path: ()}
    for rule in rules:
        made: dict[str, tuple[Rule, ...]] = {}
        for before, used in found.items():
            match = re.fullmatch(rule.pattern, before)
            if match and rule.replacement is not None:
                made.setdefault(match.expand(rule.replacement), (*used, rule))
            made.setdefault(before, used)
        if len(made) > _MOST:
            raise FuncgaError(
                f"these rules can call `{path}` more than {_MOST} names, as each may be left out. Make the pattern "
                f"{rule.pattern!r}, and others that match much, narrower."
            )
        found = made
    return found


def permuted(array: Any, pair: Pair) -> Any:
    """The left array of a pair, of NumPy, with its axes as the right one has them.

    Raises FuncgaError if it has not the axes that a rule permutes, or the rule's function fails or makes no array.
    """
    for rule in pair.rules:
        array = _permuted(array, rule, pair)
    return array


def _permuted(array: Any, rule: Rule, pair: Pair) -> Any:
    if rule.axes is None:
        return array
    if not isinstance(rule.axes, str | tuple):
        return _made(array, rule.axes, rule, pair)
    count = len(array.shape)
    axes = rule.axes if isinstance(rule.axes, tuple) else AXES[rule.axes](count)
    if len(axes) != count:
        raise FuncgaError(
            f"Rule({rule.pattern!r}, ..., axes={rule.axes!r}) permutes {len(axes)} axes, and `{pair.left}`, which "
            f"these rules call `{pair.right}`, is {array.dtype}[{', '.join(map(str, array.shape))}]. Make the pattern "
            f"narrower, or write another rule for this leaf before it."
        )
    return array.transpose(axes)


def _made(array: Any, function: Callable[[Any], Any], rule: Rule, pair: Pair) -> Any:
    what = (
        f"the function axes= of Rule({rule.pattern!r}, ...), called with `{pair.left}`, "
        f"{array.dtype}[{', '.join(map(str, array.shape))}],"
    )
    how = "Write a function from one array of NumPy to another: axes=lambda array: array.reshape(4, 2, 3)."
    try:
        found = function(array)
    except Exception as error:
        raise FuncgaError(f"{what} raised {type(error).__name__}: {error}. {how}") from error
    if type(found).__module__ != "numpy" or not hasattr(found, "transpose"):
        raise FuncgaError(f"{what} returned a {type(found).__name__}, which is no array of NumPy. {how}")
    return found


AXES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "oi->io": lambda count: (*range(2, count), 1, 0),
    "io->oi": lambda count: (count - 1, count - 2, *range(count - 2)),
}

torch_to_flax = (
    Rule(r"(.*\.)?weight", r"\1kernel", axes="oi->io"),
    Rule(r"(.*\.)?weight", r"\1scale"),
    Rule(r"(.*\.)?weight", r"\1embedding"),
    Rule(r"(.*\.)?running_(mean|var)", r"\1\2"),
    Rule(r"(.*\.)?num_batches_tracked", None),
    Rule(r"(.*)", r"params.\1"),
    Rule(r"(.*)", r"batch_stats.\1"),
)
"""From the names and layouts of torch.nn to those of flax, linen and nnx: linear, convolutional, normalisation and
embedding layers. What a layer's `weight` is, is decided by what the flax tree has in that place."""

flax_to_torch = (
    Rule(r"(?:params|batch_stats)\.(.*)", r"\1"),
    Rule(r"(.*\.)?kernel", r"\1weight", axes="io->oi"),
    Rule(r"(.*\.)?(?:scale|embedding)", r"\1weight"),
    Rule(r"(.*\.)?(mean|var)", r"\1running_\2"),
)
"""The way back: from the names and layouts of flax to those of torch.nn."""
