"""Bits: whether a step gives the same ones for the same micro-batches, in whatever order they come.

Asked of the arguments as they are given, in their own dtypes, with the sizes of micro-batches kept:
the gradient of a micro-batch depends on its size.
"""

import numpy as np

from funcga._accumulate import accumulate
from funcga._call import Program
from funcga._exact import Lift
from funcga._fold.outputs import broadcast_folds
from funcga._types import Tree
from funcga._verify.causes import Cause, cause, note
from funcga._verify.probe import Probe, Rows

# How many orders are looked at.
_ORDERS = 8


def of_bits(
    probe: Probe, program: Program, n: int, random: np.random.Generator
) -> tuple[list[Cause], list[str]]:
    """(causes, notes) of a step of this program over n micro-batches, all of one size."""
    size = probe.rows // n
    blocks = [tuple(range(size * k, size * k + size)) for k in range(n)]
    if probe.threaded:
        return [], [note("bits of state")]
    step = accumulate(
        program.grad_fn,
        microbatch_size=size,
        fold=program.fold,
        weight=program.weight,
        in_axes=program.in_axes,
    )
    first, again = (_bits(probe, step, blocks) for _ in range(2))
    paths = probe.paths
    line = (
        "torch.use_deterministic_algorithms(True)"
        if probe.backend.name == "torch"
        else "deterministic kernels"
    )
    if (place := _other(first, again)) is not None:
        return [cause("bits not repeatable", where=paths[place], line=line)], []
    # What keeps the order, such as concat(), is to have another result in another one.
    output = probe.output
    leaf_folds = broadcast_folds(program.fold, output, len(first), probe.backend)
    ordered = {place for place, (fold, _) in enumerate(leaf_folds) if fold.reducer.monoid.ordered}
    for _ in range(_ORDERS):
        order = [blocks[k] for k in random.permutation(n)]
        other = _bits(probe, step, order)
        if (place := _other(first, other, ordered)) is not None:
            differ = np.asarray(first[place] != other[place])
            key = (
                "order of kernels"
                if isinstance(leaf_folds[place][0].reducer.lift, Lift)
                else "order of sums"
            )
            return [
                cause(
                    key, where=paths[place], differ=int(differ.sum()), size=differ.size, line=line
                )
            ], []
    return [], []


def _bits(probe: Probe, step: object, blocks: list[Rows]) -> list[np.ndarray | None]:
    """The leaves of the step's result for these micro-batches, in this order."""
    rows = tuple(row for block in blocks for row in block)
    result: Tree = step(*probe.gathered(rows), **probe.kwargs)  # type: ignore[operator]
    return [None if leaf is None else np.asarray(leaf) for leaf in probe.numbers(result)]


def _other(
    left: list[np.ndarray | None],
    right: list[np.ndarray | None],
    ordered: set[int] = frozenset(),  # type: ignore[assignment]
) -> int | None:
    """The first leaf whose bits are others, but for those that keep the order."""
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        if (
            place not in ordered
            and a is not None
            and b is not None
            and not np.array_equal(a, b, equal_nan=True)
        ):
            return place
    return None
