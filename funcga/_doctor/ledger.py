"""With which factor a micro-batch reaches a step, from looks at some elements of the gradients."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from funcga._doctor.windows import Finding, MicroBatch, Window

CHANGED = "gradients change between backward and step by more than a factor"
ASSIGNED = "gradients are assigned, and not added up by backward"


class Event(NamedTuple):
    """A look at the gradients: after a "backward", after one has "failed", after a "clip", or
    "before" any of these or a step.

    before, both, now: products of some elements in the look before and in this one.
    differs: 1 if any bit of them does.
    """

    kind: str
    micro_batch: MicroBatch | None
    before: float
    both: float
    now: float
    differs: float

    @property
    def factor(self) -> float:
        """What gradients were multiplied by; NaN if that is no factor, or if they were 0."""
        if not self.differs:
            return 1.0
        if self.now == 0:
            return 0.0
        if self.before == 0 or not math.isfinite(self.now):
            return math.nan
        # The part of them that is no multiple of what they were; 16 bits round it.
        rest = 1 - self.both * self.both / (self.before * self.now)
        return self.both / self.before if rest < 1e-4 else math.nan


def settle(window: Window, events: Sequence[Event], scale: float) -> None:
    """Follows the gradient of each micro-batch to the step, and writes that into the window.

    scale: the factor of the GradScaler; 0 if there is none.
    """
    is_old = events[0].before > 0
    clips: list[float] = []
    for event in events:
        factor = event.factor
        if event.kind == "failed" or not math.isfinite(event.now):
            window.unknown = "a backward failed, or its gradients are not finite"
        if event.kind == "backward" and (window.is_alone or event.differs):
            assert event.micro_batch is not None
            if clips:
                window.findings.append(Finding("clipped inside the window", {"factor": clips[0]}))
                window.scale(math.prod(clips))
            clips, window.by_hand = [], 1.0
            window.micro_batches.append(event.micro_batch)
            window.coefficients.append(1.0)
        elif event.kind == "clip":
            if window.by_hand * scale > 1.5:
                window.findings.append(Finding("clipped before unscaling"))
            clips += [1.0 if math.isnan(factor) else factor] * (factor != 1)
        elif event.kind == "before" and event.now == 0 and window.unknown:
            # Somebody has seen that, erased it, and tries again.
            window.micro_batches, window.coefficients, window.unknown = [], [], ""
            is_old = False
        elif event.kind == "before" and math.isnan(factor):
            window.unknown = window.unknown or (CHANGED if event.before else ASSIGNED)
        elif event.kind == "before" and factor != 1:
            window.scale(factor)
            window.by_hand *= factor
            is_old = is_old and factor != 0
    if window.is_step and is_old:
        window.findings.append(Finding("left over"))
    if window.is_step and window.by_hand * scale > 1.5:
        window.findings.append(Finding("never unscaled", {"factor": scale}))
