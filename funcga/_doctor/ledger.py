"""With which factor a micro-batch reaches a step, from looks at some elements of the gradients."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from funcga._doctor.windows import Finding, MicroBatch, Window


class Event(NamedTuple):
    """A look at the gradients: after a "backward", after a "clip", or "before" either or a step.

    is_new: whether a gradient was written to since the look before.
    before, both, now: products of some elements in the look before and in this one.
    differs: 1 if any bit of them does.
    """

    kind: str
    micro_batch: MicroBatch | None
    is_new: bool
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
        if not math.isfinite(event.now):
            window.unknown = "gradients are not finite"
        if event.kind == "clip":
            if window.by_hand * scale > 1.5 and not window.unknown:
                window.findings.append(Finding("clipped before unscaling"))
            clips += [event.factor] * (event.factor != 1)
        elif event.micro_batch is None:
            _change(window, event)
            is_old = is_old and event.now > 0
        elif event.is_new:
            if clips:
                window.findings.append(Finding("clipped inside the window", {"factor": clips[0]}))
                window.scale(math.prod(clips))
            clips, window.by_hand = [], 1.0
            window.micro_batches.append(event.micro_batch)
            window.coefficients.append(1.0)
    if window.is_step and is_old:
        window.findings.append(Finding("left over"))
    if window.is_step and window.by_hand * scale > 1.5:
        window.findings.append(Finding("never unscaled", {"factor": scale}))


def _change(window: Window, event: Event) -> None:
    """What somebody has done to the gradients."""
    if event.now == 0 and window.unknown:
        # They were seen to be wrong, and erased: somebody tries again.
        window.micro_batches, window.coefficients, window.unknown = [], [], ""
    elif math.isnan(event.factor):
        window.unknown = window.unknown or "gradients change between backward and step"
    else:
        window.scale(event.factor)
        window.by_hand *= event.factor
