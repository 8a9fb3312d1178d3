"""Rules: what a leaf of one library is called in another, and how its axes lie there."""

import re
from collections.abc import Callable, Collection, Iterable
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
    """The path of a left leaf, and the rules that make it and its axes those of a right leaf, in
    order.
    """

    left: str
    rules: tuple[Rule, ...]


def pairs(lefts: Iterable[str], rights: Collection[str], rules: Iterable[Rule]) -> dict[str, Pair]:
    """The Pair of every left path, by right path; one that matches nothing keeps its own path.

    Each rule is tried in order on what those before it have made of the path, and may be left out;
    the first path that the right tree has wins, where an earlier rule goes before a later one, and
    a rule before none. Raises FuncgaError if two leaves end up as one.
    """
    rules = tuple(rules)
    by_right: dict[str, Pair] = {}
    for left in lefts:
        spellings = _spellings(left, rules)
        # They come in the order of preference. One that a rule leaves out may still match by
        # another rule.
        right = next((path for path in spellings if path is not None and path in rights), left)
        if right not in rights and None in spellings:
            continue
        if right in by_right:
            raise FuncgaError(
                f"`{by_right[right].left}` and `{left}` of the left tree are both `{right}` by "
                "these rules. Make a pattern narrower, so that each leaf has a path of its own."
            )
        by_right[right] = Pair(left, spellings[right])
    return by_right


def _spellings(path: str, rules: Iterable[Rule]) -> dict[str | None, tuple[Rule, ...]]:
    """All that the rules can make of a path, the first choice first, and those of them that are
    used; None is a path that is left out.
    """
    spellings: dict[str | None, tuple[Rule, ...]] = {path: ()}
    for rule in rules:
        after: dict[str | None, tuple[Rule, ...]] = {}
        for before, used in spellings.items():
            match = before is not None and re.fullmatch(rule.pattern, before)
            # Of two ways to one spelling the first counts, so the renamed one goes before the one
            # that is left.
            if match:
                made = None if rule.replacement is None else match.expand(rule.replacement)
                after.setdefault(made, (*used, rule))
            after.setdefault(before, used)
        spellings = after
    return spellings


def permuted(array: Array, rules: Iterable[Rule]) -> Array:
    """The left array of a pair, of NumPy, with its axes as the right one has them."""
    # Each rule permutes what those before it have made.
    for rule in rules:
        axes = AXES[rule.axes] if isinstance(rule.axes, str) else rule.axes
        if callable(axes):
            array = axes(array)
        elif axes is not None:
            array = array.transpose(axes)
    return array


# Orders of axes by name, for arrays of any number of them: the kernel's own axes stay together.
AXES: dict[str, Callable[[Array], Array]] = {
    "oi->io": lambda weight: weight.transpose(*range(2, weight.ndim), 1, 0),
    "io->oi": lambda weight: weight.transpose(-1, -2, *range(weight.ndim - 2)),
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
