"""What is wrong with a window, from how its micro-batches weigh their targets.

The *mass* of a micro-batch is the factor with which it reached the step, times the number of its
targets, times the weight of each in its loss. Where the step gets the gradient of the mean over all
targets of the window, masses are shares of the targets: their ratios say whether targets weigh
alike, and their sum, the factor, is 1.
"""

import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from funcga.tools.doctor.windows import Finding, MicroBatch, Term, Window
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
    _drop_strays(windows)
    _drop_skipped(windows)
    for window in windows:
        window.findings += _of_events(window)
        if window.is_step and not window.unknown:
            window.findings += [*_of_losses(window, most)]
    _compare(windows)
    for window in windows:
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


def _compare(windows: Sequence[Window]) -> None:
    """Takes a factor for that of a loss only if it is the same in all windows of an optimizer, or
    what divides them is.
    """
    factors, divisors = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for window in windows:
        words = next((each for name, each in window.findings if name == "constant factor"), {})
        if window.factor > 0:
            factors[window.optimizer].append(window.factor)
            divisor = float(str(words.get("total", 0))) / window.factor
            divisors[window.optimizer].append(divisor)
    for window in windows:
        name = window.optimizer
        if not (factors[name] and (_alike(factors[name]) or _alike(divisors[name]))):
            others = [each for each in window.findings if each.name != "constant factor"]
            if len(others) < len(window.findings):
                window.findings, window.unknown = others, _FACTORS


def _drop_strays(windows: list[Window]) -> None:
    """Drops micro-batches that did not reach the step, and are of a place that never does.

    An attack on inputs, the first pass of SAM and the loss of another optimizer are such.
    """
    stepping = {each.place for window in windows for each, _ in window.parts if each.steps}
    for window in windows:
        here = {each.place for each, a in window.parts if a} if window.is_step else stepping
        window.parts = [part for part in window.parts if _is_of(window, here, *part)]
    windows[:] = [window for window in windows if window.parts or window.is_step]


def _is_of(window: Window, places: set[int], each: MicroBatch, coefficient: float) -> bool:
    if not places or (coefficient and window.is_step):
        return True
    return each.place in places and not each.steps


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
        # Half of them is enough, but where each micro-batch alone would be a window.
        if 2 * number > of_all[optimizer] - (count > 1):
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
    if len({each.steps for each, a in window.parts if a}) > 1:
        window.unknown = "another optimizer has stepped with some of its gradients"
        return
    weighing, names, window.unknown = _best(window, most)
    if weighing is not None:
        window.factor = weighing.factor
        window.shares, window.of_targets = weighing.shares, weighing.of_targets
        share, right = max(
            zip(weighing.shares, weighing.of_targets, strict=True),
            key=lambda pair: abs(pair[0] - pair[1]),
        )
        n = len(window.parts) / window.ranks
        words: dict[str, object] = {
            "window": window.number,
            "factor": weighing.factor,
            "share": share,
            "right": right,
            "total": weighing.targets,
            "n": round(n),
            "divisor": (n if weighing.is_of_means else weighing.targets)
            / (weighing.factor or math.nan),
        }
        for name in names:
            yield Finding(name, words)
    if window.is_part:
        window.unknown = "other processes are not seen; across=group gathers what they weigh"


Losses = Sequence[Sequence[Term]]  # the terms of each micro-batch


def _best(window: Window, most: int) -> tuple["Weighing | None", tuple[str, ...], str]:
    """How losses weigh their targets, what is wrong, and what cannot be told. Terms of one head are
    several losses, or chunks of one: either may be exact.
    """
    losses = [each.terms for each, _ in window.parts]
    whole = [[*_joined(terms)] for terms in losses]
    found = [_judged(window, each, most) for each in (whole, losses) if _is_readable(each)]
    if not found:
        return None, (), f"a loss of {_kinds(losses)} cannot be read as one mean or sum"
    weighing, names = min(found, key=lambda each: ("" in each[1], len(each[1])))
    definite = {each for _, each in found if "" not in each}
    if not {*names} <= {*NOTES} and (len(definite) > 1 or not _is_readable(whole)):
        return weighing, (), "it may be of several losses, or of several rows"
    return weighing, tuple(filter(None, names)), _FACTORS if "" in names else ""


_FACTORS = "losses are multiplied or divided by numbers of their own"


def _kinds(losses: Losses) -> str:
    return "; ".join(sorted({", ".join(term.name for term in terms) for terms in losses}))


def _is_readable(losses: Losses) -> bool:
    is_one_kind = len({tuple((term.name, term.head) for term in terms) for terms in losses}) == 1
    return is_one_kind and all(term.counts for terms in losses for term in terms)


def _joined(terms: Sequence[Term]) -> Iterator[Term]:
    """Terms, with one for those that are sums of one kind."""
    heads: dict[object, list[Term]] = {}
    for term in terms:
        heads.setdefault((term.name, term.head), []).append(term)
    for first, *rest in heads.values():
        if not rest:
            yield first
        elif all(term.counts and _close(term.each, first.each) for term in (first, *rest)):
            pairs = (term.counts[0] for term in (first, *rest))
            weights, targets = map(math.fsum, zip(*pairs, strict=True))
            yield replace(first, counts=((weights, targets),))
        else:
            yield Term("several means")


class Weighing(NamedTuple):
    """How the terms at one place of the losses of micro-batches weigh their targets."""

    terms: Sequence[Term]
    masses: Sequence[float]
    counts: Sequence[float]
    coefficient: float  # with which the first of them reached the step

    @property
    def weights(self) -> list[float]:
        """What the first is multiplied by. Whoever scales a loss divides its gradient by that."""
        return [each for each in self.terms[0].weights if not _close(each * self.coefficient, 1)]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each micro-batch in the gradient."""
        return _parts(self.masses)

    @property
    def of_targets(self) -> tuple[float, ...]:
        """The share of each in the targets."""
        return _parts(self.counts)

    @property
    def targets(self) -> float:
        """How many there are."""
        return math.fsum(self.counts)

    @property
    def factor(self) -> float:
        """The sum of the masses."""
        return abs(math.fsum(self.masses))

    @property
    def features(self) -> float:
        """How many targets a row has, at least one."""
        return max(self.targets / math.fsum(term.rows for term in self.terms), 1.0)

    @property
    def is_of_means(self) -> bool:
        """Whether all micro-batches have the same part in the gradient, whatever their targets."""
        return _alike(self.masses) and self.terms[0].is_mean

    def may_be_features(self, n: float) -> bool:
        """Whether a sum over as many features as micro-batches may be divided by n once more."""
        term = self.terms[0]
        is_total = any(_close(each, self.targets) for each in term.divisors)
        return n > 1 and _close(self.features, n) and not (term.is_mean or is_total)

    def may_be_halves(self, n: float) -> bool:
        """Whether they may be halves of squared errors, as well as be divided by n."""
        return n == 2 and self.is_of_means and 0.5 in self.weights

    @property
    def is_even(self) -> bool:
        """Whether every target weighs the same."""
        return all(map(_close, self.shares, self.of_targets))


def _parts(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(each / (math.fsum(values) or math.nan) for each in values)


def _weighing(terms: Sequence[Term], coefficients: Sequence[float]) -> Weighing:
    """How terms weigh their targets, by the count of targets that fits best."""
    found = []
    is_own = any(term.own for term in terms)
    # Elements with weights of their own may be those of a product of rows.
    rows = [((term.rows, term.rows),) * is_own for term in terms]
    for pairs in zip(*map(operator.add, (term.counts for term in terms), rows), strict=False):
        # A mean over no targets is NaN, and somebody leaves it out.
        masses = [
            coefficient * term.each * weight if weight else 0.0
            for coefficient, term, (weight, _) in zip(coefficients, terms, pairs, strict=True)
        ]
        targets = [targets for _, targets in pairs]
        found.append(Weighing(terms, masses, targets, coefficients[0]))
    return min(found, key=lambda each: (not each.is_even, _off(each.factor)))


def _judged(window: Window, losses: Losses, most: int) -> tuple[Weighing, tuple[str, ...]]:
    """How the worst of the terms of losses weigh their targets, and what is wrong with them; "" for
    something that cannot be told.
    """
    coefficients = [a / window.ranks for _, a in window.parts]
    weighings = [_weighing(terms, coefficients) for terms in zip(*losses, strict=True)]
    worst = max(weighings, key=lambda each: (not each.is_even, _off(each.factor)))
    if any(name not in NOTES for name, _ in window.findings):
        return worst, ()  # an event has a name already
    if not all(each.factor > 0 for each in weighings):
        return worst, ("",)
    n = len(window.parts) / window.ranks
    # Beside a term that is right and has no factor of its own, others may have one.
    weights = [each.weights for each in weighings]
    shared = math.prod(functools.reduce(operator.and_, map(Counter, weights)).elements())
    is_right = any(
        _close(each.factor, 1) and _close(math.prod(own), shared)
        for each, own in zip(weighings, weights, strict=True)
    )
    base = shared if is_right else None
    names = dict.fromkeys(
        name for each in weighings for name in _names(each, window, n, most, base)
    )
    if _is_average(weighings, n) and (names or _repeats(weighings)):
        return worst, ("",)
    if "constant factor" in names and len(names) > 1:
        return worst, ("",)  # what else is wrong may come of what a term is multiplied by
    return worst, tuple(names)


def _is_average(weighings: Sequence[Weighing], n: float) -> bool:
    """Whether a division by n may be one by the number of terms."""
    term = weighings[0].terms[0]
    return 1 < len(weighings) == n and any(
        _close(each, n) for each in (*term.divisors, term.averaged)
    )


def _repeats(weighings: Sequence[Weighing]) -> bool:
    """Whether all terms are of one kind, and none has a head of its own."""
    return len({(each.terms[0].name, each.terms[0].head) for each in weighings}) == 1


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)  # as 16 bits round, over some thousand elements


def _alike(values: Sequence[float]) -> bool:
    return _close(min(values), max(values))


def _off(factor: float) -> float:
    """How far a factor is from 1."""
    return abs(math.log(factor)) if 0 < factor < math.inf else 0.0


def _names(
    weighing: Weighing, window: Window, n: float, most: int, base: float | None
) -> Iterator[str]:
    """What is wrong with one of several terms; "" for something that cannot be told."""
    places = Counter(each.place for each, _ in window.parts)
    is_whole = math.isclose(weighing.factor, 1, rel_tol=max(window.precision, 1e-4))
    if weighing.is_even and is_whole:
        if weighing.may_be_halves(n) or weighing.may_be_features(n):
            yield ""
    elif not _alike([a for _, a in window.parts]):
        yield "scaled inside the window"
    elif weighing.is_of_means and _close(weighing.factor, len(places)) and not is_whole:
        # A discriminator's losses, on real and on false data, are not parts of one batch.
        yield "two losses" if len({*places.values()}) == 1 else "not divided"
    else:
        if not weighing.is_even:
            yield _name_of_uneven(weighing, window, is_whole and len(places) < n)
        if not (is_whole or window.is_part):
            yield from _names_of_factor(weighing, window, n, most, base)


def _name_of_uneven(weighing: Weighing, window: Window, is_weighed: bool) -> str:
    ranks = [each.rank for each, _ in window.parts]
    # Each process has one count of targets, other than that of another one.
    is_between = len({*zip(ranks, weighing.of_targets, strict=True)}) == len({*ranks}) > 1
    if _alike(weighing.masses):
        return "ranks weigh the same" if is_between else "uneven tokens"
    is_plain = all(len(term.counts) == 1 and not term.own for term in weighing.terms)
    return "wrong weight" if is_weighed and is_plain else ""


def _names_of_factor(
    weighing: Weighing, window: Window, n: float, most: int, base: float | None
) -> Iterator[str]:
    """Why a gradient is off by a factor. base: the weight of another term, which is right."""
    factor, term = weighing.factor, weighing.terms[0]
    weights, features = weighing.weights, weighing.features
    own = math.prod(weights)
    is_sum = any(_close(abs(term.each) * each, 1) for each in (1.0, features))
    if _close(factor, window.by_hand):
        yield "" if _close(factor * n, 1) else "scaled by hand"
    elif base and any(_close(factor, own / base * each) for each in (1.0, features)):
        return
    elif any(each.own for each in weighing.terms) or _may_divide((*term.factors, own), n):
        yield ""  # the factor may be a division by n, or undo one
    elif is_sum and term.rows > 1:
        yield "constant factor"  # nothing divides it
    elif weighing.is_of_means:
        yield _name_of_division(n, own, term.outer, most)
    else:
        yield _name_of_sum(weighing, own, n) if weighing.is_even else ""


def _may_divide(weights: Sequence[float], n: float) -> bool:
    """Whether a factor of a loss may be a division by n, or undo one."""
    return n > 1 and any(_close(abs(each), n) or _close(abs(each) * n, 1) for each in weights)


def _name_of_sum(weighing: Weighing, own: float, n: float) -> str:
    """Why a sum is divided wrongly; "" if that cannot be told."""
    factor, term = weighing.factor, weighing.terms[0]
    if _close(2 * factor, own):
        return ""  # half of a squared error
    if n > 1 and _close(factor, own / n):
        return "divided twice"
    if _close(factor, own) or _close(factor, own * weighing.features):
        return "constant factor"
    # Labels that are counted before they are shifted: one more in each row.
    divisor = weighing.targets / factor
    is_count = _close(own, 1) and 0.8 < factor < 1 and _close(divisor, round(divisor))
    return "another count" if is_count and term.name == "NllLoss" else ""


def _name_of_division(n: float, own: float, outer: float, most: int) -> str:
    """Why the mean of n means is off by a factor; "" if that cannot be told.

    own, outer: what each mean is multiplied and divided by; most: the largest n of all windows.
    """
    if n > 1 and (_close(outer, own) or (outer == 1 and own < 1)):
        return "not divided"
    if n < most and _close(outer, most):
        return "short window" if _close(own, 1) else ""
    if n > 1 and _close(outer, n * n):
        return "divided twice"
    if _close(outer, n):
        return "constant factor"  # the weight of the loss
    if not _close(own, 1) or not _close(outer, round(outer)) or _close(outer, 2 * n):
        return ""  # half of a squared error is as common
    return "stepped too often" if most == 1 else "divided by another n"
