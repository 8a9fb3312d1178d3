"""What is wrong with a window, from how its micro-batches weigh their targets.

The *mass* of a micro-batch is the factor with which it reached the step, times the number of its
targets, times the weight of each in its loss. Where the step gets the gradient of the mean over all
targets of the window, masses are shares of the targets: their ratios say whether targets weigh
alike, and their sum, the factor, is 1.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from funcga._doctor.windows import Finding, MicroBatch, Term, Window
from funcga._verify.causes import texts

Group = list[tuple[MicroBatch, float]]  # micro-batches of one kind of loss, with their coefficients


def is_note(finding: Finding) -> bool:
    """Whether it is no error."""
    return finding.name in texts("funcga._doctor")["notes"]


def judge(windows: Sequence[Window]) -> None:
    """Adds to each window its shares, its factor, and the findings that follow from them."""
    most: dict[str, int] = defaultdict(int)
    for window in windows:
        reached = sum(coefficient != 0 for coefficient in window.coefficients)
        most[window.optimizer] = max(most[window.optimizer], reached // window.ranks)
    for window in windows:
        window.findings += _of_events(window)
        if window.is_step and not window.unknown:
            window.findings += [*_of_losses(window, most)]
        if window.unknown and window.is_step:
            words: dict[str, object] = {"window": window.number, "why": window.unknown}
            window.findings.append(Finding("unknown", words))
        names = [each.name for each in window.findings if not is_note(each)]
        window.causes = tuple(dict.fromkeys(names))


def off(window: Window) -> float:
    """How far its gradient is from that of the mean."""
    pairs = zip(window.shares, window.of_targets, strict=True)
    return _off(window.factor) + sum(abs(share - right) for share, right in pairs)


def worst_first(windows: Sequence[Window]) -> list[Finding]:
    """One finding of each name, as it was in the window that is furthest off."""
    ordered = sorted(windows, key=off)
    found = {each.name: each for window in ordered for each in window.findings}
    return [*found.values()][::-1]


def _of_events(window: Window) -> Iterator[Finding]:
    pairs = [*zip(window.micro_batches, window.coefficients, strict=True)]
    # What another optimizer has stepped with is not lost.
    waiting = [coefficient for each, coefficient in pairs if not each.steps]
    words: dict[str, object] = {"count": len(pairs), "lost": waiting.count(0)}
    reduced = sum(each.is_reduced for each, _ in pairs) // window.ranks
    if window.is_step and 0 in waiting:
        yield Finding("erased", words)
    if not window.is_step and waiting:
        yield Finding("skipped" if window.unknown else "never stepped", words)
    if reduced > 1:
        yield Finding("reduced too often", {"count": reduced})


def _of_losses(window: Window, most: dict[str, int]) -> Iterator[Finding]:
    """The findings of each kind of loss: micro-batches of one kind are parts of one batch."""
    kinds: dict[str, Group] = defaultdict(list)
    for each, coefficient in zip(window.micro_batches, window.coefficients, strict=True):
        if coefficient or not each.steps:
            kinds[", ".join(term.name for term in each.terms)].append((each, coefficient))
    if not kinds:
        window.unknown = "no backward was seen before the step"
    for kind, group in kinds.items():
        terms = _common([each.terms for each, _ in group])
        if terms is None:
            window.unknown = f"a loss of {kind} cannot be read as one mean or sum over targets"
            continue
        weighing = _weighing(terms, [abs(a) / window.ranks for _, a in group])
        window.factor = weighing.factor
        window.shares, window.of_targets = weighing.shares, weighing.of_targets
        if weighing.factor > 0:
            yield from _of_weighing(weighing, group, window, most)
        else:
            window.unknown = "a loss has no targets"


def _common(losses: Sequence[Sequence[Term]]) -> list[Term] | None:
    """One term for each loss that weighs its targets as all terms of it do; None if they differ."""
    first = [terms[0] for terms in losses]
    if not all(term.counts for terms in losses for term in terms):
        return None  # reading ended before a sum
    if all(len(terms) == 1 for terms in losses):
        return first
    for others in zip(*losses, strict=True):
        ratios = [other.each / one.each for other, one in zip(others, first, strict=True)]
        if not _alike(ratios) or not all(other.is_mean for other in others):
            return None
    # A factor of its own, such as 0.9 of a term beside 0.1 of another one, is none of the window.
    own = [term.each * term.counts[0] * term.outer for term in first]
    return [term.times(1 / own[0]) for term in first] if _alike(own) else None


class Weighing(NamedTuple):
    """How micro-batches weigh their targets."""

    terms: Sequence[Term]
    masses: Sequence[float]
    shares: tuple[float, ...]
    of_targets: tuple[float, ...]
    targets: float

    @property
    def factor(self) -> float:
        return math.fsum(self.masses)

    @property
    def is_even(self) -> bool:
        """Whether every target weighs the same."""
        return all(map(_close, self.shares, self.of_targets))


def _weighing(terms: Sequence[Term], coefficients: Sequence[float]) -> Weighing:
    """How terms weigh their targets, by the count of targets that fits best."""
    found = []
    for counts in zip(*(term.counts for term in terms), strict=False):
        # A mean over no targets is NaN, and somebody leaves it out.
        masses = [
            coefficient * term.each * count if count else 0.0
            for coefficient, term, count in zip(coefficients, terms, counts, strict=True)
        ]
        shares, of_targets = (
            tuple(each / (math.fsum(values) or math.nan) for each in values)
            for values in (masses, counts)
        )
        found.append(Weighing(terms, masses, shares, of_targets, math.fsum(counts)))
    return min(found, key=lambda each: (not each.is_even, _off(each.factor)))


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)  # as 16 bits round, over some thousand elements


def _alike(values: Sequence[float]) -> bool:
    return _close(min(values), max(values))


def _off(factor: float) -> float:
    """How far a factor is from 1."""
    return abs(math.log(factor)) if 0 < factor < math.inf else 0.0


def _of_weighing(
    weighing: Weighing, group: Group, window: Window, most: dict[str, int]
) -> Iterator[Finding]:
    factor, n = weighing.factor, len(group) / window.ranks
    pairs = zip(weighing.shares, weighing.of_targets, strict=True)
    share, right = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    words: dict[str, object] = {
        "window": window.number,
        "factor": factor,
        "share": share,
        "right": right,
        "total": weighing.targets,
        "n": round(n),
    }
    named = not all(map(is_note, window.findings))
    if not _alike([coefficient for _, coefficient in group]):
        # They were erased or clipped, or somebody has multiplied them.
        if not named:
            yield Finding("scaled inside the window", words)
    elif not weighing.is_even:
        yield Finding(_name_of_uneven(weighing, group), words)
    if window.is_part:
        window.unknown = "other processes are not seen; across=group gathers what they weigh"
        window.factor = math.nan
    elif not named and not math.isclose(factor, 1, rel_tol=max(window.precision, 1e-4)):
        if _close(factor, window.by_hand):
            yield Finding("scaled by hand", words)
        elif _alike(weighing.masses) and weighing.terms[0].is_mean:
            words["divisor"] = n / factor
            name = _name_of_division(window, n, weighing.terms[0].outer, most[window.optimizer])
            yield Finding(name, words)
        elif weighing.is_even:
            words["divisor"] = weighing.targets / factor
            near = "another count" if 0.5 < factor < 2 else "constant factor"
            yield Finding("sum" if _close(factor, weighing.targets) else near, words)


def _name_of_uneven(weighing: Weighing, group: Group) -> str:
    if not _alike(weighing.masses):
        return "wrong weight"
    ranks = [each.rank for each, _ in group]
    # Each process has one count of targets, other than that of another one.
    is_between = len({*zip(ranks, weighing.of_targets, strict=True)}) == len({*ranks}) > 1
    return "ranks weigh the same" if is_between else "uneven tokens"


def _name_of_division(window: Window, n: float, outer: float, most: int) -> str:
    """Why the mean of n means is off by a factor.

    outer: what each mean is divided by; most: the largest n of this optimizer's windows.
    """
    if n > 1 and outer == 1:
        # A discriminator's two losses, on real and on false data, look the same.
        return "not divided" if window.is_alone else "two losses"
    if not _close(outer, round(outer)) or not _close(outer, n / window.factor):
        return "constant factor"
    if most == 1:
        return "stepped too often"
    if n < most and _close(outer, most):
        return "short window"
    return "divided twice" if _close(outer, n * n) else "divided by another n"
