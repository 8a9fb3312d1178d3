"""With which factor each micro-batch reaches a step, from looks at a sketch of the gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from funcga._doctor.windows import Finding, MicroBatch

CHANGED = "gradients change between backward and step by more than a factor"


class Change(NamedTuple):
    """How a sketch differs from the one before: products of the two, and whether any bit does."""

    before: float
    both: float
    now: float
    differs: float

    def factor(self, precision: float) -> float:
        """What it was multiplied by; NaN if that is no factor, or if it was 0 before."""
        if not self.differs:
            return 1.0
        if self.before == 0 or not math.isfinite(self.now):
            return math.nan
        # The part of it that is no multiple of what it was.
        rest = 1 - self.both * self.both / (self.before * self.now) if self.now else 0.0
        return self.both / self.before if rest < (8 * precision) ** 2 + 1e-9 else math.nan


class Event(NamedTuple):
    """A look at the gradients: after "backward", after "clip", or "before" either and the step."""

    kind: str
    change: Change
    micro_batch: MicroBatch | None = None
    is_scaled: bool = False


@dataclass
class Settled:
    """What became of each micro-batch of a window."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    coefficients: list[float] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unknown: str = ""
    by_hand: float = 1.0

    def scale(self, factor: float) -> None:
        self.coefficients = [each * factor for each in self.coefficients]


def settle(events: Sequence[Event], precision: float, alone: bool) -> Settled:
    """Follows the gradient of each micro-batch to the step.

    precision: of one gradient, relative. alone: True if there is no other optimizer, so that every
    call of backward is for this one.
    """
    window = Settled()
    is_old = bool(events) and events[0].change.before > 0
    clipped, was_clipped = 1.0, False
    for event in events:
        factor = event.change.factor(precision)
        if not math.isfinite(event.change.now):
            window.unknown = "gradients are not finite"
        if event.kind == "backward":
            if not (alone or event.change.differs):
                continue
            if was_clipped:
                window.findings.append(Finding("clipped inside the window", {"factor": clipped}))
                window.scale(clipped)
                clipped, was_clipped = 1.0, False
            window.by_hand = 1.0
            if is_old:
                window.findings.append(Finding("left over"))
                is_old = False
            assert event.micro_batch is not None
            window.micro_batches.append(event.micro_batch)
            window.coefficients.append(1.0)
        elif event.kind == "clip":
            if event.is_scaled:
                window.findings.append(Finding("clipped before unscaling"))
            was_clipped = was_clipped or factor != 1
            clipped *= 1.0 if math.isnan(factor) else factor
        elif not (event.change.differs and math.isfinite(event.change.now)):
            continue
        elif event.change.now == 0:
            window.scale(0.0)
            is_old = False
        elif math.isnan(factor):
            assigned = event.change.before == 0
            window.unknown = (
                "gradients are assigned, and not added up by backward" if assigned else CHANGED
            )
        else:
            window.scale(factor)
            window.by_hand *= factor
    return window
