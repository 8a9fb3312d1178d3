"""With which factor a micro-batch reaches a step, from looks at some elements of the gradients."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from funcga.tools.doctor.windows import Finding, MicroBatch, Window


class Look(NamedTuple):
    """A look at the gradients: after a "backward", after a "clip", or "before" either or a step.

    is_new: whether a gradient was written to since the look before.
    change: three numbers, perhaps on a device: the products of some elements with themselves in the
        look before, with those in this one, and of these with themselves.
    """

    kind: str
    micro_batch: MicroBatch | None
    is_new: bool
    change: Any


def _factor(before: float, both: float, now: float) -> float:
    """What gradients were multiplied by; NaN if that is no factor, or if they were 0."""
    if before == both == now:
        return 1.0
    if now == 0:
        return 0.0
    if before == 0 or not math.isfinite(now):
        return math.nan
    # The part of them that is no multiple of what they were; 16 bits round it.
    rest = 1 - both * both / (before * now)
    return both / before if rest < 1e-4 else math.nan


def settle(
    window: Window, looks: Sequence[Look], changes: Sequence[Sequence[float]], scale: float
) -> None:
    """Follows the gradient of each micro-batch to the step, and writes that into the window.

    scale: the factor of the GradScaler; 0 if there is none.
    """
    is_old = changes[0][0] > 0
    clips: list[float] = []
    for look, change in zip(looks, changes, strict=True):
        factor, now = _factor(*change), change[2]
        if not math.isfinite(now):
            window.unknown = "gradients are not finite"
        if look.kind == "clip":
            if window.by_hand * scale > 1.5 and not window.unknown:
                window.findings.append(Finding("clipped before unscaling"))
            clips += [factor] * (factor != 1)
        elif look.micro_batch is None:
            _apply(window, factor, is_empty=now == 0)
            is_old = is_old and now > 0
        elif look.is_new:
            if clips:
                window.findings.append(Finding("clipped inside the window", {"factor": clips[0]}))
                window.scale(math.prod(clips))
            clips, window.by_hand = [], 1.0
            window.parts.append((look.micro_batch, 1.0))
    if window.is_step and is_old:
        window.findings.append(Finding("left over"))
    if window.is_step and window.by_hand * scale > 1.5:
        window.findings.append(Finding("never unscaled", {"factor": scale}))


def _apply(window: Window, factor: float, is_empty: bool) -> None:
    """What somebody has done to the gradients between two events."""
    if is_empty and window.unknown:
        # They were seen to be wrong, and erased: somebody tries again.
        window.parts, window.unknown = [], ""
    elif math.isnan(factor):
        window.unknown = window.unknown or "gradients change between backward and step"
    else:
        window.scale(factor)
        window.by_hand *= factor
