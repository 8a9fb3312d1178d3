"""Rules: what a leaf of one library is called in another, and how its axes lie there."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from funcga._types import Array
from funcga.errors import FuncgaError


@dataclass(frozen=True)
class Rule:
    r"""Renames a leaf whose dotted path is `pattern`, all of it, to `replacement`, and permutes its
    axes.

    Names are swapped through a third: Rule("a", "tmp"), Rule("b", "a"), Rule("tmp", "b"), as each
    rule is tried on what those before it made.

    Args:
        pattern: A regular expression.
        replacement: What `re.sub` makes of it, with groups as `\1`. None leaves the leaf out: it
            has no counterpart.
        axes: How the array's axes are permuted: None; a tuple as for numpy.transpose; "oi->io" or
            "io->oi" for weights of any rank; or a function of a NumPy array, for what axes alone
            cannot say. "oi->io" takes `[out, in, *spatial]` to `[*spatial, in, out]`, as from the
            linear and convolutional layers of torch to those of flax; "io->oi" is the way back.

    Example:
        >>> rules = [funcga.trees.Rule(r"fc1\.(.*)", r"Dense_0.\1"), *funcga.trees.torch_to_flax]
        >>> tree, like = {"fc1.bias": np.ones(2)}, {"Dense_0": {"bias": np.zeros(2)}}
        >>> funcga.trees.match(tree, like, rules=rules)
        {'Dense_0': {'bias': array([1., 1.])}}
    """

    pattern: str
    replacement: str | None
    axes: tuple[int, ...] | str | Callable[[Array], Array] | None = None


class Pair(NamedTuple):
    """Two leaves that match, by their paths, and what takes the left one's axes to the right
    one's, in order.
    """

    left: str
    right: str
    rules: tuple[Rule, ...]


def pairs(lefts: Iterable[str], rights: Iterable[str], rules: Sequence[Rule]) -> list[Pair]:
    """The Pair of every left path, in order; one that matches nothing is paired with its own name.

    Each rule is tried in order on what those before it have made of the path, and may be left out;
    the first path that the right tree has wins, where an earlier rule goes before a later one, and
    a rule before none. Raises FuncgaError if two leaves end up as one.
    """
    right_paths = {*rights}
    by_right: dict[str, Pair] = {}
    for left in lefts:
        pair = _pair(left, right_paths, rules)
        if pair is None:
            continue
        if pair.right in by_right:
            raise FuncgaError(
                f"`{by_right[pair.right].left}` and `{left}` of the left tree are both "
                f"`{pair.right}` by these rules. Make a pattern narrower, so that each leaf has a "
                "path of its own."
            )
        by_right[pair.right] = pair
    return [*by_right.values()]


def _pair(left: str, rights: set[str], rules: Sequence[Rule]) -> Pair | None:
    """The Pair of a left path; None if a rule leaves it out."""
    # The first spelling that the right tree has wins: they come in the order of preference.
    spellings = _spellings(left, rules)
    for path, used in spellings.items():
        if path in rights:
            return Pair(left, path, used)
    # A path that a rule leaves out may still match by another rule, which was looked for first.
    omitting = [rule for rule in rules if rule.replacement is None]
    is_left_out = any(re.fullmatch(rule.pattern, path) for path in spellings for rule in omitting)
    return None if is_left_out else Pair(left, left, ())


def _spellings(path: str, rules: Sequence[Rule]) -> dict[str, tuple[Rule, ...]]:
    """All that the rules can make of a path, the first choice first, and those of them that are
    used.
    """
    spellings: dict[str, tuple[Rule, ...]] = {path: ()}
    for rule in rules:
        after: dict[str, tuple[Rule, ...]] = {}
        for before, used in spellings.items():
            match = re.fullmatch(rule.pattern, before)
            # Of two ways to one spelling the first counts, so the renamed one goes before the one
            # that is left.
            if match and rule.replacement is not None:
                after.setdefault(match.expand(rule.replacement), (*used, rule))
            after.setdefault(before, used)
        spellings = after
    return spellings


def permuted(array: Array, pair: Pair) -> Array:
    """The left array of a pair, of NumPy, with its axes as the right one has them."""
    # Each rule permutes what those before it have made.
    for rule in pair.rules:
        if callable(rule.axes):
            array = rule.axes(array)
        elif rule.axes is not None:
            axes = rule.axes
            array = array.transpose(AXES[axes](array.ndim) if isinstance(axes, str) else axes)
    return array


# Orders of axes by name, for arrays of any number of them: the kernel's own axes stay together.
AXES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "oi->io": lambda ndim: (*range(2, ndim), 1, 0),
    "io->oi": lambda ndim: (ndim - 1, ndim - 2, *range(ndim - 2)),
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
"""From the names and layouts of torch.nn to those of flax, linen and nnx: linear, convolutional,
normalisation and embedding layers. What a layer's `weight` is, is decided by what the flax tree has
in that place."""

flax_to_torch = (
    Rule(r"(?:params|batch_stats)\.(.*)", r"\1"),
    Rule(r"(.*\.)?kernel", r"\1weight", axes="io->oi"),
    Rule(r"(.*\.)?(?:scale|embedding)", r"\1weight"),
    Rule(r"(.*\.)?(mean|var)", r"\1running_\2"),
)
"""The way back: from the names and layouts of flax to those of torch.nn."""
