"""What was seen of a training loop: the terms of losses, micro-batches and windows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Number = Any  # a float; before the step perhaps a tensor without axes, which waits on its device


@dataclass(frozen=True)
class Term:
    """A sum under a loss: a mean is one that is divided by its own count.

    Attributes:
        name: Of what is summed: an operation of autograd, such as "NllLoss". Without counts,
            reading ended there.
        factors: What it is multiplied by on its way to the loss.
        divisors: What it is divided by, other than by means.
        size: Of how many elements means are taken.
        averaged: Of how many losses it is the mean.
        own: Above 0 if elements have weights that are no mask, or it is a penalty on parameters.
        head: Of which parameter its scores are.
        rows: Of how many rows its elements are.
        counts: Pairs of the sum of the weights of its elements, and what may be meant by the number
            of targets: elements that no mask hides, or all elements.
    """

    name: str = ""
    factors: tuple[Number, ...] = ()
    divisors: tuple[Number, ...] = ()
    size: float = 1.0
    averaged: float = 1.0
    own: Number = 0.0
    head: int = 0
    rows: float = 1.0
    counts: tuple[tuple[Number, Number], ...] = ()

    def times(self, *factors: Number) -> "Term":
        """The term with further factors."""
        return replace(self, factors=(*self.factors, *factors))

    def over(self, *divisors: Number) -> "Term":
        """The term with further divisors."""
        return replace(self, divisors=(*self.divisors, *divisors))

    def plain(self) -> "Term":
        """It with floats, for which this waits."""
        return replace(
            self,
            factors=tuple(map(float, self.factors)),
            divisors=tuple(map(float, self.divisors)),
            counts=tuple((float(weight), float(targets)) for weight, targets in self.counts),
            own=float(self.own),
        )

    def _is_count(self, number: float) -> bool:
        """Whether it may be the number of its targets."""
        return any(math.isclose(number, count) for pair in self.counts for count in pair)

    @property
    def weights(self) -> list[float]:
        """What it is multiplied by, without signs, and but for numbers of targets or rows."""
        factors = map(abs, self.factors)
        return [each for each in factors if not (self._is_count(each) or each == self.rows)]

    @property
    def each(self) -> float:
        """The factor with which each target enters the loss."""
        divisor = float(math.prod(self.divisors) * self.size)
        return math.prod(self.factors) / divisor if divisor else math.nan

    @property
    def count(self) -> float:
        """Its own count, if it is a mean, which is divided by that; else 1."""
        divisors = (self.size, *self.divisors)
        return next((each for each in divisors if each and self._is_count(each)), 1.0)

    @property
    def outer(self) -> float:
        """What it is divided by, but for its own count: the number of micro-batches, if that."""
        return float(math.prod(self.divisors) * self.size / self.count)


@dataclass
class MicroBatch:
    """One call of `backward`.

    Attributes:
        terms: What its loss adds up.
        is_reduced: True if a wrapped module reduced gradients over processes in it.
        steps: How many steps of optimizers its gradient has entered.
        rank: The process that it ran in.
        place: Of the call in the program.
    """

    terms: Sequence[Term] = ()
    is_reduced: bool = False
    steps: int = 0
    rank: int = 0
    place: int = 0


class Finding(NamedTuple):
    """The name of a cause or a note, and what its texts are filled in with."""

    name: str
    words: dict[str, Any] = {}  # noqa: RUF012 - nobody writes to it


@dataclass
class Window:
    """What one `optimizer.step()` got.

    Attributes:
        number: Counted from 1, over all optimizers.
        optimizer: Its class, with a number if there are several.
        parts: The calls of `backward` since its last step, also those that were lost, and the
            factor with which each of them reached the step; 0 if it did not. One that clips all of
            them after the last is left out.
        findings: What happened to the gradients.
        by_hand: What they were multiplied by after the last backward, other than clipping.
        precision: How exactly that is known, relative.
        ranks: Over how many processes the gradient is a mean.
        shares: The share of each micro-batch in the gradient, if all targets had the same one.
        of_targets: The share of each in the targets, which is right. Both are () if unknown.
        factor: What the step got, over the mean over all targets of the window: 1 is right, and
            NaN is unknown.
        causes: The names of what is wrong.
        lines: Of the program: the last "backward", the "step", and "zero_grad" if it has erased
            micro-batches.
        unknown: Why it cannot be judged; "" if it can.
        is_part: True if other processes take part in the step, and were not seen.
        is_step: False if the optimizer did not step: at the end, or as GradScaler skipped it.
    """

    number: int = 0
    optimizer: str = ""
    parts: list[tuple[MicroBatch, float]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    by_hand: float = 1.0
    precision: float = 0.0
    ranks: int = 1
    shares: tuple[float, ...] = ()
    of_targets: tuple[float, ...] = ()
    factor: float = math.nan
    causes: tuple[str, ...] = ()
    lines: dict[str, str] = field(default_factory=dict)
    unknown: str = ""
    is_part: bool = False
    is_step: bool = True

    def scale(self, factor: float) -> None:
        """Multiplies what the gradients hold."""
        self.parts = [(each, coefficient * factor) for each, coefficient in self.parts]

    @property
    def ok(self) -> bool | None:
        """True if it is exact, False if not, None if that cannot be told."""
        if self.causes:
            return False
        return None if self.unknown else True
