"""What is wrong with a window, from how its micro-batches weigh their targets.

The *mass* of a micro-batch is its coefficient times the number of its targets times what each of
them weighs in its loss. With the gradient of the mean over the window, the masses are the shares of
the targets: their ratios say whether targets weigh alike, and their sum, the factor, is 1.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from funcga._doctor.windows import Finding, MicroBatch, Term, Window

NOTES = {
    "sum", "constant factor", "scaled by hand", "reduced too often", "skipped", "two losses",
}  # fmt: skip
"""The findings that are no errors."""


def judge(windows: Sequence[Window]) -> None:
    """Adds to each window its shares, its factor, and the findings that follow from them."""
    sizes: dict[str, int] = defaultdict(int)
    for window in windows:
        reached = sum(coefficient != 0 for coefficient in window.coefficients)
        sizes[window.optimizer] = max(sizes[window.optimizer], reached)
    for window in windows:
        window.findings += _of_events(window)
        if window.is_step and not window.unknown:
            window.findings += [*_of_losses(window, sizes[window.optimizer], many=len(sizes) > 1)]
        window.causes = tuple(
            dict.fromkeys(each.name for each in window.findings if each.name not in NOTES)
        )


def worst_first(windows: Sequence[Window]) -> list[Finding]:
    """One finding of each name, as it was in the window that it spoils most."""
    worst: dict[str, tuple[float, Finding]] = {}
    for window in windows:
        pairs = zip(window.shares, window.of_targets, strict=True)
        off = _off(window.factor) + math.fsum(abs(share - right) for share, right in pairs)
        for finding in window.findings:
            if finding.name not in worst or off > worst[finding.name][0]:
                worst[finding.name] = (off, finding)
    return [finding for _, finding in sorted(worst.values(), key=lambda pair: -pair[0])]


def _of_events(window: Window) -> Iterator[Finding]:
    pairs = [*zip(window.micro_batches, window.coefficients, strict=True)]
    lost = sum(coefficient == 0 and not each.steps for each, coefficient in pairs)
    if window.is_step and lost:
        yield Finding("erased", {"lost": lost, "count": len(pairs)})
    waiting = sum(not each.steps for each, _ in pairs)
    if not window.is_step and not window.unknown and waiting:
        yield Finding("never stepped", {"count": waiting})
    if not window.is_step and window.unknown:
        yield Finding("skipped")
    reduced = sum(each.is_reduced for each, _ in pairs) // window.ranks
    if reduced > 1:
        yield Finding("reduced too often", {"count": reduced})


def _of_losses(window: Window, most: int, many: bool) -> Iterator[Finding]:
    """The findings of each kind of loss: micro-batches of one kind are parts of one batch."""
    kinds: dict[tuple[str, ...], list[tuple[MicroBatch, float]]] = defaultdict(list)
    for each, coefficient in zip(window.micro_batches, window.coefficients, strict=True):
        # One that is erased after it has entered another step was not for this one.
        if coefficient or not each.steps:
            kinds[tuple(term.name for term in each.terms)].append((each, coefficient))
    if not kinds:
        window.unknown = "no backward was seen before the step"
    for group in kinds.values():
        unread = [term.unread for each, _ in group for term in each.terms if term.unread]
        if unread:
            window.unknown = f"a loss ends in {unread[0]}, which cannot be read"
            continue
        weighing = _weighing(group, window)
        if weighing is None:
            window.unknown = "a loss has several terms that weigh targets differently"
            continue
        window.shares, window.of_targets = weighing.shares, weighing.of_targets
        window.factor = weighing.factor
        yield from _of_weighing(weighing, window, most, many)
    if not all(math.isfinite(share) for share in window.shares):
        window.unknown, window.shares, window.of_targets = "a loss has no targets", (), ()


class Weighing(NamedTuple):
    """How the micro-batches of a window weigh their targets."""

    masses: tuple[float, ...]
    counts: tuple[float, ...]
    coefficients: tuple[float, ...]
    ranks: tuple[int, ...]
    outer: float
    is_of_sum: bool
    precision: float

    @property
    def factor(self) -> float:
        return math.fsum(self.masses)

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(mass / self.factor if self.factor else math.nan for mass in self.masses)

    @property
    def of_targets(self) -> tuple[float, ...]:
        total = math.fsum(self.counts)
        return tuple(count / total if total else math.nan for count in self.counts)

    @property
    def is_even(self) -> bool:
        """Whether every target weighs the same."""
        return all(map(self.close, self.shares, self.of_targets))

    @property
    def has_equal_masses(self) -> bool:
        return all(self.close(mass, max(self.masses)) for mass in self.masses)

    @property
    def is_exact(self) -> bool:
        return self.is_even and self.close(self.factor, 1)

    def close(self, a: float, b: float) -> bool:
        return abs(a - b) <= self.precision * max(abs(a), abs(b))


def _weighing(group: Sequence[tuple[MicroBatch, float]], window: Window) -> Weighing | None:
    """How a group weighs its targets, by the count of targets that fits best; None if its losses
    have terms that weigh differently.
    """
    terms = _common([each.terms for each, _ in group], window.precision)
    if terms is None:
        return None
    coefficients = tuple(abs(coefficient) / window.ranks for _, coefficient in group)
    weights = [a * term.each for a, term in zip(coefficients, terms, strict=True)]
    found = []
    for which in range(min(len(term.counts) for term in terms)):
        counts = tuple(term.counts[which] for term in terms)
        # Without targets a mean is NaN, and adds nothing if somebody leaves it out.
        masses = tuple(
            w * count if count else 0.0 for w, count in zip(weights, counts, strict=True)
        )
        weighing = Weighing(
            masses,
            counts,
            coefficients,
            tuple(each.rank for each, _ in group),
            _outer(terms[0]),
            all(map(_is_of_sum, terms)),
            window.precision,
        )
        # Rows are meant only where a sum is divided by them.
        if (
            which == 0
            or weighing.is_even
            or which < len(terms[0].counts) - 1
            or weighing.has_equal_masses
        ):
            found.append(weighing)
    return min(found, key=lambda each: (not each.is_exact, not each.is_even, _off(each.factor)))


def _common(terms: Sequence[Sequence[Term]], precision: float) -> list[Term] | None:
    """One term for each micro-batch that weighs its targets as all terms of its loss do."""
    first = [each[0] for each in terms]
    if all(len(each) == 1 for each in terms):
        return first
    close = lambda a, b: abs(a - b) <= precision * abs(a)
    for others in zip(*terms, strict=True):
        ratios = [other.each / one.each for other, one in zip(others, first, strict=True)]
        if not all(close(ratios[0], ratio) for ratio in ratios) or "mean" not in others[0].name:
            return None
    # What the first term has as a factor of its own, such as 0.9 beside a second one with 0.1.
    own = [term.each * term.counts[0] * math.prod(term.divisors) for term in first]
    if not all(close(own[0], each) for each in own):
        return None
    return [replace(term, each=term.each / own[0]) for term in first]


def _outer(term: Term) -> float:
    """What a mean is divided by; a sum over its own count is a mean."""
    divisors = [*term.divisors]
    own = [each for each in divisors if any(math.isclose(each, count) for count in term.counts)]
    if "sum" in term.name and own:
        divisors.remove(own[0])
    return math.prod(divisors)


def _is_of_sum(term: Term) -> bool:
    """Whether it is a sum that nothing divides by its own count."""
    counts = [count for count in term.counts if any(math.isclose(count, d) for d in term.divisors)]
    return "sum" in term.name and not counts


def _off(factor: float) -> float:
    """How far a factor is from 1."""
    return abs(math.log(factor)) if 0 < factor < math.inf else math.inf


def _of_weighing(weighing: Weighing, window: Window, most: int, many: bool) -> Iterator[Finding]:
    n = len(weighing.masses) / window.ranks
    words: dict[str, object] = {
        "window": window.number,
        "factor": weighing.factor,
        "shares": _percentages(weighing.shares),
        "right": _percentages(weighing.of_targets),
        "total": math.fsum(weighing.counts),
        "n": round(n),
    }
    named = {each.name for each in window.findings} - NOTES
    coefficients = weighing.coefficients
    if not all(weighing.close(each, coefficients[0]) for each in coefficients):
        # They were erased or clipped, or somebody has multiplied them.
        if not named:
            yield Finding("scaled inside the window", words)
        return
    if not weighing.is_even:
        yield Finding(_name_of_uneven(weighing), words)
    if window.is_part:
        window.unknown = "other processes are not seen; across=group gathers what they weigh"
        window.factor = math.nan
        return
    if weighing.close(weighing.factor, 1) or "never unscaled" in named:
        return
    if weighing.close(weighing.factor, window.by_hand):
        yield Finding("scaled by hand", words)
    elif weighing.has_equal_masses and not weighing.is_of_sum:
        yield _of_division(weighing, words, n, most, many)
    elif weighing.is_even:
        yield _of_count(weighing, words)


def _percentages(shares: Sequence[float]) -> str:
    shown = ", ".join(f"{share:.0%}" for share in shares[:8])
    return shown + ", ..." * (len(shares) > 8)


def _name_of_uneven(weighing: Weighing) -> str:
    if not weighing.has_equal_masses:
        return "wrong weight"
    by_rank = defaultdict[int, list[float]](list)
    for rank, count in zip(weighing.ranks, weighing.counts, strict=True):
        by_rank[rank].append(count)
    alike_within = all(weighing.close(min(each), max(each)) for each in by_rank.values())
    return "ranks weigh the same" if len(by_rank) > 1 and alike_within else "uneven tokens"


def _of_division(
    weighing: Weighing, words: dict[str, object], n: float, most: int, many: bool
) -> Finding:
    """Micro-batches that all have the same part in the gradient, which is not 1/n."""
    divisor = n / weighing.factor
    words |= {"divisor": divisor}
    if n > 1 and weighing.outer == 1:
        # A discriminator's two losses, on real and on false data, look the same.
        return Finding("two losses" if many else "not divided", words)
    whole = math.isclose(divisor, round(divisor), rel_tol=1e-4)
    if not whole or not math.isclose(weighing.outer, divisor, rel_tol=1e-4):
        return Finding("constant factor", words)
    if most == 1:
        return Finding("stepped too often", words)
    if n < most and math.isclose(divisor, most, rel_tol=1e-4):
        return Finding("short window", words)
    if math.isclose(divisor, n * n, rel_tol=1e-4):
        return Finding("divided twice", words)
    return Finding("divided by another n", words)


def _of_count(weighing: Weighing, words: dict[str, object]) -> Finding:
    """Targets that weigh the same, and are divided by something else than their number."""
    each = max(weighing.masses) / max(weighing.counts)
    words |= {"divisor": 1 / each}
    if math.isclose(each, 1, rel_tol=1e-4):
        return Finding("sum", words)
    return Finding("another count" if 0.5 < weighing.factor < 2 else "constant factor", words)
