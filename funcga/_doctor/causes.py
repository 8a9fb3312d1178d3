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


def judge(windows: Sequence[Window]) -> list[Finding]:
    """Adds to each window its shares, its factor, and what is found. Returns one finding of each
    name, as it was in the window that is furthest off.
    """
    most: dict[str, int] = defaultdict(int)
    for window in windows:
        reached = sum(coefficient != 0 for coefficient in window.coefficients)
        most[window.optimizer] = max(most[window.optimizer], reached // window.ranks)
    stepping = {each.place for window in windows for each in window.micro_batches if each.steps}
    for window in windows:
        _drop_strays(window, stepping)
        window.findings += _of_events(window)
        if window.is_step and not window.unknown:
            window.findings += [*_of_losses(window, most)]
        if window.unknown and window.is_step:
            words: dict[str, object] = {"window": window.number, "why": window.unknown}
            window.findings.append(Finding("unknown", words))
        names = [each.name for each in window.findings if not is_note(each)]
        window.causes = tuple(dict.fromkeys(names))
    ordered = sorted(windows, key=off)
    worst = {each.name: each for window in ordered for each in window.findings}
    return [*worst.values()][::-1]


def _drop_strays(window: Window, stepping: set[int]) -> None:
    """Drops micro-batches that did not reach the step, and are of a place that never does.

    An attack on inputs, the first pass of SAM and the loss of another optimizer are such.
    """
    pairs = [*zip(window.micro_batches, window.coefficients, strict=True)]
    here = {each.place for each, a in pairs if a} if window.is_step else stepping
    pairs = [
        (each, a)
        for each, a in pairs
        if (a and window.is_step) or not here or (each.place in here and not each.steps)
    ]
    window.micro_batches = [each for each, _ in pairs]
    window.coefficients = [a for _, a in pairs]


def off(window: Window) -> float:
    """How far its gradient is from that of the mean."""
    pairs = zip(window.shares, window.of_targets, strict=True)
    return _off(window.factor) + sum(abs(share - right) for share, right in pairs)


def _of_events(window: Window) -> Iterator[Finding]:
    pairs = [*zip(window.micro_batches, window.coefficients, strict=True)]
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
        kinds[", ".join(term.name for term in each.terms)].append((each, coefficient))
    for kind, group in kinds.items():
        losses = [each.terms for each, _ in group]
        coefficients = [abs(a) / window.ranks for _, a in group]
        # Terms that are alike may be parts of one batch, and not of the same targets.
        parts = {(term.name, term.factors) for term in losses[0]}
        if len(parts) < len(losses[0]) or not all(term.counts for loss in losses for term in loss):
            window.unknown = f"a loss of {kind} cannot be read as one mean or sum over targets"
            continue
        weighing, *others = [_weighing(terms, coefficients) for terms in zip(*losses, strict=True)]
        window.factor = weighing.factor
        window.shares, window.of_targets = weighing.shares, weighing.of_targets
        if any(other.kind != weighing.kind for other in others):
            window.unknown = f"the terms of {kind} weigh targets differently"
        elif weighing.factor > 0:
            yield from _of_weighing(weighing, group, window, most)
        else:
            window.unknown = "a loss has no targets"


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
    def kind(self) -> tuple[bool, bool]:
        return self.is_even, self.terms[0].is_mean

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
            places = len({each.place for each, _ in group})
            name = _name_of_division(n, factor, weighing.terms[0].outer, most[window.optimizer])
            name = "two losses" if name == "not divided" and n == places else name
            yield Finding(name, words)
        elif weighing.is_even:
            words["divisor"] = weighing.targets / factor
            yield Finding(_name_of_count(weighing, n), words)


def _name_of_count(weighing: Weighing, n: float) -> str:
    """By what a sum is divided that is not the number of its targets."""
    if _close(weighing.factor, weighing.targets):
        return "sum"
    if n > 1 and _close(weighing.factor, 1 / n):
        return "divided twice"
    # Sums over features have a large factor, and some losses one of their own.
    own = abs(math.prod(weighing.terms[0].factors))
    is_own = weighing.factor > 2.5 or _close(weighing.factor, own)
    return "constant factor" if is_own else "another count"


def _name_of_uneven(weighing: Weighing, group: Group) -> str:
    if not _alike(weighing.masses):
        return "wrong weight"
    ranks = [each.rank for each, _ in group]
    # Each process has one count of targets, other than that of another one.
    is_between = len({*zip(ranks, weighing.of_targets, strict=True)}) == len({*ranks}) > 1
    return "ranks weigh the same" if is_between else "uneven tokens"


def _name_of_division(n: float, factor: float, outer: float, most: int) -> str:
    """Why the mean of n means is off by a factor.

    outer: what each mean is divided by; most: the largest n of this optimizer's windows.
    """
    if n > 1 and outer == 1:
        return "not divided"
    if not _close(outer, round(outer)) or not _close(outer, n / factor):
        return "constant factor"
    if most == 1:
        return "stepped too often"
    if n < most and _close(outer, most):
        return "short window"
    return "divided twice" if _close(outer, n * n) else "divided by another n"
