"""What is wrong with a window, from how its micro-batches weigh their targets.

The *mass* of a micro-batch is the factor with which it reached the step, times the number of its
targets, times the weight of each in its loss. Where the step gets the gradient of the mean over all
targets of the window, masses are shares of the targets: their ratios say whether targets weigh
alike, and their sum, the factor, is 1.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from funcga.tools.doctor.windows import Finding, Term, Window
from funcga.tools.verify.causes import texts

NOTES = texts("funcga.tools.doctor")["notes"]
"""The findings that are no errors, by name."""


def judge(windows: list[Window]) -> list[Finding]:
    """Adds to each window its shares, its factor, and what is found; one of strays alone is none.
    Returns one finding of each name, as it was in the window that is furthest off.
    """
    most = max(
        (sum(a != 0 for _, a in window.parts) // window.ranks for window in windows), default=0
    )
    stepping = {each.place for window in windows for each, _ in window.parts if each.steps}
    for window in windows:
        _drop_strays(window, stepping)
    windows[:] = [window for window in windows if window.parts or window.is_step]
    _drop_skipped(windows)
    for window in windows:
        window.findings += _of_events(window)
        if window.is_step and not window.unknown:
            window.findings += [*_of_losses(window, most)]
        _conclude(window)
    ordered = sorted(windows, key=off)
    worst = {each.name: each for window in ordered for each in window.findings}
    return [*worst.values()][::-1]


def _conclude(window: Window) -> None:
    """Names the causes in a window. One that cannot be judged has no shares and no factor."""
    if window.unknown and window.is_step:
        window.shares, window.of_targets, window.factor = (), (), math.nan
        words = {"window": window.number, "why": window.unknown}
        window.findings.append(Finding("unknown", words))
    window.findings = [Finding(name, window.lines | words) for name, words in window.findings]
    names = [name for name, _ in window.findings if name not in NOTES]
    window.causes = tuple(dict.fromkeys(names))


def _drop_strays(window: Window, stepping: set[int]) -> None:
    """Drops micro-batches that did not reach the step, and are of a place that never does.

    An attack on inputs, the first pass of SAM and the loss of another optimizer are such.
    """
    here = {each.place for each, a in window.parts if a} if window.is_step else stepping
    window.parts = [
        (each, a)
        for each, a in window.parts
        if (a and window.is_step) or not here or (each.place in here and not each.steps)
    ]


def _drop_skipped(windows: Sequence[Window]) -> None:
    """Drops the micro-batches of updates that were skipped on purpose: as many as most windows
    have were erased together.
    """
    whole = Counter(
        (window.optimizer, len(window.parts))
        for window in windows
        if window.is_step and all(a for _, a in window.parts)
    )
    of_all = Counter(window.optimizer for window in windows)
    for (optimizer, count), number in whole.items():
        if 2 * number > of_all[optimizer]:
            for window in windows:
                if window.optimizer == optimizer:
                    _drop_erased(window, count)


def _drop_erased(window: Window, count: int) -> None:
    live = [(each, a) for each, a in window.parts if a]
    lost = len(window.parts) - len(live)
    if lost and len(live) in (count, 0) and lost % count == 0:
        window.parts = live or window.parts
        window.findings.append(Finding("skipped"))


def off(window: Window) -> float:
    """How far its gradient is from that of the mean."""
    pairs = zip(window.shares, window.of_targets, strict=True)
    return _off(window.factor) + sum(abs(share - right) for share, right in pairs)


def _of_events(window: Window) -> Iterator[Finding]:
    if any(each.name == "skipped" for each in window.findings) and not window.is_step:
        return
    count = len(window.parts)
    lost = sum(coefficient == 0 for _, coefficient in window.parts)
    reduced = sum(each.is_reduced for each, _ in window.parts) // window.ranks
    if window.is_step and lost and not window.unknown:
        yield Finding("erased", {"count": count, "lost": lost})
    if not window.is_step and count:
        yield Finding("skipped" if window.unknown else "never stepped", {"count": count})
    if reduced > 1:
        yield Finding("reduced too often", {"count": reduced})


def _of_losses(window: Window, most: int) -> Iterator[Finding]:
    """Whether micro-batches weigh their targets rightly, if their losses are of one kind."""
    window.unknown = _unreadable(window)
    if window.unknown:
        return
    coefficients = [a / window.ranks for _, a in window.parts]
    positions = zip(*(each.terms for each, _ in window.parts), strict=True)
    weighing, *others = [_weighing(terms, coefficients) for terms in positions]
    window.factor = weighing.factor
    window.shares, window.of_targets = weighing.shares, weighing.of_targets
    if any(other.kind != weighing.kind for other in others) or not weighing.factor > 0:
        window.unknown = "a loss has no targets, or terms that weigh them differently"
        return
    pairs = zip(weighing.shares, weighing.of_targets, strict=True)
    share, right = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    n = len(window.parts) / window.ranks
    words: dict[str, object] = {
        "window": window.number,
        "factor": weighing.factor,
        "share": share,
        "right": right,
        "total": weighing.targets,
        "n": round(n),
        "divisor": (n if weighing.is_of_means else weighing.targets) / weighing.factor,
    }
    for name in _names(weighing, window, n, most):
        if name:
            yield Finding(name, words)
        else:
            window.unknown = "losses are multiplied or divided by numbers of their own"
    if window.is_part:
        window.unknown = "other processes are not seen; across=group gathers what they weigh"


def _unreadable(window: Window) -> str:
    """Why the losses of a window are not parts of one batch; "" if they are."""
    if len({each.steps for each, a in window.parts if a}) > 1:
        return "another optimizer has stepped with some of its gradients"
    losses = [each.terms for each, _ in window.parts]
    kinds = {", ".join(term.name for term in terms) for terms in losses}
    # Terms that are alike may be of different targets.
    is_twice = len({(term.name, term.factors) for term in losses[0]}) < len(losses[0])
    if len(kinds) > 1 or is_twice or not all(term.counts for loss in losses for term in loss):
        return f"a loss of {'; '.join(kinds)} cannot be read as one mean or sum"
    return ""


class Weighing(NamedTuple):
    """How micro-batches weigh their targets."""

    terms: Sequence[Term]
    masses: Sequence[float]
    shares: tuple[float, ...]
    of_targets: tuple[float, ...]
    targets: float

    @property
    def factor(self) -> float:
        """The sum of the masses."""
        return abs(math.fsum(self.masses))

    @property
    def is_of_means(self) -> bool:
        """Whether all micro-batches have the same part in the gradient, whatever their targets."""
        return _alike(self.masses) and self.terms[0].is_mean

    @property
    def is_even(self) -> bool:
        """Whether every target weighs the same."""
        return all(map(_close, self.shares, self.of_targets))

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether all weigh alike, and whether the loss is a mean."""
        return self.is_even, self.terms[0].is_mean


def _weighing(terms: Sequence[Term], coefficients: Sequence[float]) -> Weighing:
    """How terms weigh their targets, by the count of targets that fits best."""
    found = []
    for pairs in zip(*(term.counts for term in terms), strict=False):
        # A mean over no targets is NaN, and somebody leaves it out.
        masses = [
            coefficient * term.each * weight if weight else 0.0
            for coefficient, term, (weight, _) in zip(coefficients, terms, pairs, strict=True)
        ]
        counts = [targets for _, targets in pairs]
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


def _names(weighing: Weighing, window: Window, n: float, most: int) -> Iterator[str]:
    """What is wrong; "" for something that cannot be told."""
    if any(name not in NOTES for name, _ in window.findings):
        return  # an event has a name already
    places = Counter(each.place for each, _ in window.parts)
    is_exact = math.isclose(weighing.factor, 1, rel_tol=max(window.precision, 1e-4))
    if not _alike([a for _, a in window.parts]):
        yield "scaled inside the window"
    elif len(places) > 1 and weighing.is_of_means and _close(weighing.factor, len(places)):
        # A discriminator's losses, on real and on false data, are not parts of one batch.
        yield "two losses" if len({*places.values()}) == 1 else "not divided"
    else:
        if not weighing.is_even:
            yield _name_of_uneven(weighing, window, is_exact and len(places) < n)
        if not (is_exact or window.is_part):
            yield from _names_of_factor(weighing, window, n, most)


def _name_of_uneven(weighing: Weighing, window: Window, is_weighed: bool) -> str:
    ranks = [each.rank for each, _ in window.parts]
    # Each process has one count of targets, other than that of another one.
    is_between = len({*zip(ranks, weighing.of_targets, strict=True)}) == len({*ranks}) > 1
    if _alike(weighing.masses):
        return "ranks weigh the same" if is_between else "uneven tokens"
    return "wrong weight" if is_weighed and len(weighing.terms[0].counts) == 1 else ""


def _names_of_factor(weighing: Weighing, window: Window, n: float, most: int) -> Iterator[str]:
    factor, term = weighing.factor, weighing.terms[0]
    own, counts = abs(math.prod(term.factors)), {count for pair in term.counts for count in pair}
    is_sum = own > 1 and any(_close(own, count) for count in counts)  # a mean, times its rows
    if _close(factor, window.by_hand):
        yield "scaled by hand"
    elif weighing.is_of_means and not is_sum:
        yield _name_of_division(n, factor, term.outer, most)
    elif weighing.is_even:
        # A sum may be divided by nothing, or by rows of several features.
        is_own = factor > 2.5 or _close(factor, own)
        of_tokens = "another count" if term.name.startswith("NllLoss") else ""
        name = "constant factor" if is_own else of_tokens
        yield "divided twice" if n > 1 and _close(factor, 1 / n) else name


def _name_of_division(n: float, factor: float, outer: float, most: int) -> str:
    """Why the mean of n means is off by a factor; "" if that cannot be told.

    outer: what each mean is divided by; most: the largest n of all windows.
    """
    if n > 1 and outer == 1:
        return "not divided"
    if not _close(outer, round(outer)) or not _close(outer, n / factor):
        return "constant factor"
    if n < most and _close(outer, most):
        return "short window"
    if _close(outer, 2 * n):
        return ""  # half of a squared error is as common
    if most == 1:
        return "stepped too often"
    return "divided twice" if _close(outer, n * n) else "divided by another n"
