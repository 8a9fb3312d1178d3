"""Remainder: a difference so small that the fold is right but for a small term of the loss, or for rounding."""

import math

from funcga._verify.diagnosis import grouped
from funcga._verify.naming import Case, causes_of, is_linear
from funcga._verify.probe import Probe
from funcga._verify.responses import respond
from funcga._verify.splits import Splits
from funcga._verify.tolerance import Limit
from funcga._verify.verdict import Cause

_SMALL = 1e-5
_VAGUE = {"batch statistics", "coupled rows", "in-batch negatives", "other normaliser", "not decomposable"}


def without_remainder(probe: Probe, splits: Splits, causes: list[Cause], limit: Limit) -> tuple[list[Cause], list[str]]:
    """These causes, or in their place what explains a very small difference: one cause, or a note."""
    worst = max((math.inf if row.error else row.relative for row in splits.rows), default=0.0)
    if not limit.relative < worst <= _SMALL or not {cause.name for cause in causes} <= _VAGUE:
        return causes, []
    loose = limit._replace(relative=10 * worst)
    failed = [i for i in splits.failed if is_linear(probe.folds[i])]
    if len(failed) < len(splits.failed) or not all(
        _is_right(probe, leaves, splits, loose) for leaves in grouped(probe, failed)
    ):
        return causes, []
    whole = probe.values(probe.every)
    if not any(whole[i].ndim for i in failed) and any(leaf is not None and leaf.ndim for leaf in whole):
        return [], [
            f"{probe.paths[failed[0]]} differs by {worst:.1e}, though every gradient agrees: that is rounding, where "
            f"large numbers cancel, or a small term that no gradient comes from"
        ]
    return [_small_term(probe.paths[failed[0]], worst)], []


def _is_right(probe: Probe, leaves: list[int], splits: Splits, limit: Limit) -> bool:
    """Whether the fold is exact for these leaves within a limit."""
    found = respond(probe, *splits.parts, leaves, limit)
    case = Case(probe, probe.folds[leaves[0]], leaves, found, splits.parts, limit, growing=False)
    return found.kind.name != "unknown" and not causes_of(case)


def _small_term(path: str, worst: float) -> Cause:
    return Cause(
        "small remainder",
        "The fold is right for this loss but for a small term, such as the epsilon of a mean that is divided by "
        "(mask.sum() + 1e-6): every micro-batch adds its own to the count.",
        "mask.sum().clamp(min=1), or jnp.maximum(mask.sum(), 1), instead of an epsilon that is added",
        f"{path} differs by {worst:.1e}, and in all that is larger it is what the fold is for",
    )
