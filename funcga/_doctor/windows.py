"""What was seen of a training loop, in plain numbers: losses, micro-batches and windows."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import NamedTuple


@dataclass(frozen=True)
class Term:
    """A reduction under a loss, and how it weighs what it reduces.

    Attributes:
        name: Such as "cross entropy, sum".
        each: The factor with which each target enters the loss, without its sign.
        counts: What may be meant by the number of its targets, the likeliest first: elements that
            no mask hides, the sum of their weights, rows.
        divisors: The scalars by which it is divided afterwards.
        unread: The operation at which reading ended; "" if there is none.
    """

    name: str
    each: float
    counts: tuple[float, ...]
    divisors: tuple[float, ...] = ()
    unread: str = ""


def merged(terms: Sequence[Term]) -> tuple[Term, ...]:
    """The terms, with those that weigh their targets alike as one."""
    found: dict[tuple[object, ...], Term] = {}
    for term in terms:
        key = (term.name, term.each, term.divisors, term.unread)
        if key in found:
            sums = zip(found[key].counts, term.counts, strict=True)
            term = replace(term, counts=tuple(a + b for a, b in sums))
        found[key] = term
    return tuple(found.values())


@dataclass
class MicroBatch:
    """One call of `backward`.

    Attributes:
        terms: The reductions of its loss, as its graph has them.
        loss_scale: The factor of a GradScaler; 1 without one.
        steps: How many steps of optimizers its gradient has entered.
        is_reduced: True if a wrapped module reduced gradients over processes in it.
        rank: The process that it ran in.
    """

    terms: tuple[Term, ...] = ()
    loss_scale: float = 1.0
    steps: int = 0
    is_reduced: bool = False
    rank: int = 0


class Finding(NamedTuple):
    """The name of a cause or a note, and what its texts are filled in with."""

    name: str
    words: dict[str, object] = {}  # noqa: RUF012 - never written to


@dataclass
class Window:
    """What one `optimizer.step()` got.

    Attributes:
        number: Counted from 1, over all optimizers.
        optimizer: Its class, with a number if there are several.
        micro_batches: The calls of `backward` since its last step, also those that were lost.
        coefficients: The factor with which each of them reached the step; 0 if it did not. One
            that clips all of them after the last is left out.
        findings: What happened to the gradients.
        by_hand: What the gradients were multiplied by after the last backward, other than clipping
            and unscaling.
        precision: How exactly the coefficients are known, relative.
        ranks: Over how many processes the gradient is a mean.
        shares: The share of each in the gradient, if the gradients of all targets were the same.
        of_targets: The share of each in the targets, which is right. Both are () if unknown.
        factor: What the step got, over the mean over all targets of the window: 1 is right, and
            NaN is unknown.
        causes: The names of what is wrong.
        unknown: Why it cannot be judged; "" if it can.
        is_part: True if other processes take part in the step, and were not seen.
        sketches: Some elements of its gradient after the last backward and at the step, where
            processes compare them.
        is_step: False if the optimizer did not step: at the end, or as GradScaler skipped it.
    """

    number: int
    optimizer: str
    micro_batches: Sequence[MicroBatch]
    coefficients: Sequence[float]
    findings: list[Finding] = field(default_factory=list)
    by_hand: float = 1.0
    precision: float = 1e-5
    ranks: int = 1
    shares: tuple[float, ...] = ()
    of_targets: tuple[float, ...] = ()
    factor: float = nan
    causes: tuple[str, ...] = ()
    unknown: str = ""
    is_part: bool = False
    sketches: tuple[Sequence[float], Sequence[float]] = ((), ())
    is_step: bool = True

    @property
    def ok(self) -> bool | None:
        """True if it is exact, False if not, None if that cannot be told."""
        if self.causes:
            return False
        return None if self.unknown else True
