"""Magnitude: whether gradients below the floor of a Limit are small, or nothing but rounding."""

from typing import Any

import numpy as np

from funcga.verification.probe import Probe, Rows
from funcga.verification.tolerance import Limit

_NUDGE, _STEADY = 4, 0.3


def fitted(probe: Probe, limit: Limit, eps: float, parts: tuple[Rows, Rows]) -> tuple[Limit, list[str]]:
    """The Limit with a floor that is below the largest gradient; a note if that may be nothing but rounding.

    Parameters that are changed by some epsilons change a gradient as little, and what is rounding alone completely.
    """
    sizes = {rows: _size(probe, rows) for rows in (probe.every, *parts)}
    rows = max(sizes, key=lambda rows: sizes[rows])
    top = sizes[rows]
    if not 0 < top < limit.floor / limit.relative:
        return limit, []
    nudged = [_nudged(probe, rows, 1 + sign * _NUDGE * eps) for sign in (1, -1)]
    if all(_apart(after, probe.values(rows)) <= _STEADY * top for after in nudged):
        return limit._replace(floor=limit.floor * top), []
    return limit, [
        f"no gradient is larger than {top:.1e}, which may be rounding and nothing else: whether the fold is right for "
        f"this loss cannot be told from these arguments"
    ]


def _size(probe: Probe, rows: Rows) -> float:
    """The largest element of all arrays, or of all scalars where there are none; 0 where the loss refuses the rows."""
    try:
        found = [leaf for leaf in probe.values(rows) if leaf is not None]
    except Exception:
        return 0.0
    arrays = [leaf for leaf in found if leaf.ndim] or found
    return max((float(np.abs(leaf[np.isfinite(leaf)]).max(initial=0.0)) for leaf in arrays), default=0.0)


def _nudged(probe: Probe, rows: Rows, factor: float) -> list[Any]:
    """What grad_fn returns where all that is passed whole is multiplied by this factor."""
    arrays, trees = probe.backend.arrays, probe.backend.trees

    def times(leaf: Any) -> Any:
        return leaf * factor if arrays.is_array(leaf) and arrays.kind(leaf.dtype) == "float" else leaf

    args = []
    for part, value in zip(probe.arguments.parts, probe.gathered(rows), strict=True):
        leaves, structure = trees.flatten(value)
        args.append(value if part.axes else trees.unflatten(structure, [times(leaf) for leaf in leaves]))
    return probe.numbers(probe.raw(*args, **probe.kwargs))


def _apart(after: list[Any], before: list[Any]) -> float:
    """The largest difference in any array."""
    pairs = [(x, y) for x, y in zip(after, before, strict=True) if x is not None]
    arrays = [(x, y) for x, y in pairs if x.ndim] or pairs
    return max((float(np.abs(x - y).max(initial=0.0)) for x, y in arrays), default=0.0)
