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
    _drop_strays(windows)
    for name in {window.optimizer for window in windows}:
        _judge([window for window in windows if window.optimizer == name])
    ordered = sorted(windows, key=off)
    worst = {each.name: each for window in ordered for each in window.findings}
    return [*worst.values()][::-1]


def _judge(windows: Sequence[Window]) -> None:
    """Judges the windows of one optimizer."""
    most = max(sum(a != 0 for _, a in window.parts) // window.ranks for window in windows)
    _drop_skipped(windows)
    for window in windows:
        window.findings += _of_events(window)
        if window.is_step and not window.unknown:
            window.findings += [*_of_losses(window, most)]
    _compare(windows)
    for window in windows:
        if window.unknown and window.is_step:
            window.shares, window.of_targets, window.factor = (), (), math.nan
            words = {"window": window.number, "why": window.unknown}
            window.findings.append(Finding("unknown", words))
        window.findings = [Finding(name, window.lines | words) for name, words in window.findings]
        window.causes = tuple(name for name in dict(window.findings) if name not in NOTES)


def _compare(windows: Sequence[Window]) -> None:
    """Takes a factor for that of a loss only if it is the same in all windows, or what divides them
    is.
    """
    known = [window for window in windows if window.factor > 0]
    factors = [window.factor for window in known]
    divisors = [
        dict(window.findings).get("constant factor", {}).get("total", 0.0) / window.factor
        for window in known
    ]
    if known and (_alike(factors) or _alike(divisors)):
        return
    for window in windows:
        if "constant factor" in dict(window.findings):
            window.findings = [each for each in window.findings if each.name != "constant factor"]
            window.unknown = _FACTORS


def _drop_strays(windows: list[Window]) -> None:
    """Drops micro-batches that did not reach the step, and are of a place that never does.

    An attack on inputs, the first pass of SAM and the loss of another optimizer are such.
    """
    stepping = {each.place for window in windows for each, _ in window.parts if each.steps}
    for window in windows:
        live = {each.place for each, a in window.parts if a}
        places = live if window.is_step else stepping
        window.parts = [part for part in window.parts if _is_of(window, places, *part)]
    windows[:] = [window for window in windows if window.parts or window.is_step]


def _is_of(window: Window, places: set[int], each: MicroBatch, coefficient: float) -> bool:
    if not places or (coefficient and window.is_step):
        return True
    return each.place in places and not each.steps


def _drop_skipped(windows: Sequence[Window]) -> None:
    """Drops the micro-batches of updates that were skipped on purpose: as many as most windows
    have were erased together.
    """
    whole = [window for window in windows if window.is_step and all(a for _, a in window.parts)]
    for count, number in Counter(len(window.parts) for window in whole).most_common(1):
        # Half of them is enough, but where each micro-batch alone would be a window.
        if 2 * number <= len(windows) - (count > 1):
            return
        for window in windows:
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
    if "skipped" in dict(window.findings) and not window.is_step:
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
        words = {
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
_FACTORS = "losses are multiplied or divided by numbers of their own"


def _best(window: Window, most: int) -> tuple["Weighing | None", tuple[str, ...], str]:
    """How losses weigh their targets, what is wrong, and what cannot be told. Terms of one head are
    several losses, or chunks of one: either may be exact.
    """
    losses = [each.terms for each, _ in window.parts]
    whole = [[*_joined(terms)] for terms in losses]
    found = [_judged(window, each, most) for each in (whole, losses) if _is_readable(each)]
    if not found:
        kinds = {", ".join(term.name for term in terms) for terms in losses}
        return None, (), f"a loss of {'; '.join(sorted(kinds))} cannot be read as one mean or sum"
    weighing, names = min(found, key=lambda each: ("" in each[1], len(each[1])))
    definite = {each for _, each in found if "" not in each}
    if not {*names} <= {*NOTES} and (len(definite) > 1 or not _is_readable(whole)):
        return weighing, (), "it may be of several losses, or of several rows"
    return weighing, tuple(filter(None, names)), _FACTORS if "" in names else ""


def _is_readable(losses: Losses) -> bool:
    is_one_kind = len({tuple((term.name, term.head) for term in terms) for terms in losses}) == 1
    return is_one_kind and all(term.counts for terms in losses for term in terms)


def _joined(terms: Sequence[Term]) -> Iterator[Term]:
    """Terms, with one for those that are sums of one kind."""
    heads = defaultdict[object, list[Term]](list)
    for term in terms:
        heads[term.name, term.head].append(term)
    for alike in heads.values():
        first = alike[0]
        if len(alike) == 1:
            yield first
        elif all(term.counts and _close(term.each, first.each) for term in alike):
            weights, targets = zip(*(term.counts[0] for term in alike), strict=True)
            yield replace(first, counts=((math.fsum(weights), math.fsum(targets)),))
        else:
            yield Term("several means")


class Weighing(NamedTuple):
    """How the terms at one place of the losses of micro-batches weigh their targets.

    Attributes:
        terms: Of the micro-batches.
        shares: Of each micro-batch in the gradient.
        of_targets: The share of each in the targets.
        targets: How many there are.
        factor: The sum of the masses.
        weights: What the first is multiplied by. Whoever scales a loss divides its gradient by
            that.
        is_of_means: Whether all micro-batches have the same part in the gradient, whatever their
            targets.
        is_even: Whether every target weighs the same.
    """

    terms: Sequence[Term]
    shares: tuple[float, ...]
    of_targets: tuple[float, ...]
    targets: float
    factor: float
    weights: Sequence[float]
    is_of_means: bool
    is_even: bool

    @property
    def features(self) -> float:
        """How many targets a row has, at least one."""
        return max(self.targets / math.fsum(term.rows for term in self.terms), 1.0)

    @property
    def error(self) -> tuple[bool, float]:
        """How far it is from a mean."""
        return not self.is_even, _off(self.factor)

    def may_be_other(self, n: float) -> bool:
        """Whether n divides it, or something else of the same size: halves of squared errors, or a
        sum over as many features.
        """
        term = self.terms[0]
        if self.is_of_means:
            return n == 2 and 0.5 in self.weights
        # What divides it is known if it is its own count, or that of the window.
        counts = [self.targets, *(targets for _, targets in term.counts)]
        is_known = any(_close(d, each) for d in (term.size, *term.divisors) for each in counts)
        return n > 1 and _close(self.features, n) and not is_known


def _weighing(terms: Sequence[Term], coefficients: Sequence[float]) -> Weighing:
    """How terms weigh their targets, by the count of targets that fits best."""
    options = [*zip(*(term.counts for term in terms), strict=False)]
    if any(term.own for term in terms):
        # Elements with weights of their own may be those of a product of rows.
        options.append(tuple((term.rows, term.rows) for term in terms))
    found = (_weighed(terms, coefficients, pairs) for pairs in options)
    return min(found, key=lambda each: each.error)


def _weighed(
    terms: Sequence[Term], coefficients: Sequence[float], pairs: Sequence[tuple[float, float]]
) -> Weighing:
    """How terms weigh their targets. pairs: the weights of these, and their number."""
    # A mean over no targets is NaN, and somebody leaves it out.
    masses = [
        coefficient * term.each * weight if weight else 0.0
        for coefficient, term, (weight, _) in zip(coefficients, terms, pairs, strict=True)
    ]
    counts = [count for _, count in pairs]
    total, targets = math.fsum(masses), math.fsum(counts)
    shares = tuple(mass / (total or math.nan) for mass in masses)
    of_targets = tuple(count / (targets or math.nan) for count in counts)
    weights = [each for each in terms[0].weights if not _close(each * coefficients[0], 1)]
    return Weighing(
        terms,
        shares,
        of_targets,
        targets,
        factor=abs(total),
        weights=weights,
        is_of_means=_alike(masses) and terms[0].count != 1,
        is_even=all(map(_close, shares, of_targets)),
    )


def _judged(window: Window, losses: Losses, most: int) -> tuple[Weighing, tuple[str, ...]]:
    """How the worst of the terms of losses weigh their targets, and what is wrong with them; "" for
    something that cannot be told.
    """
    coefficients = [a / window.ranks for _, a in window.parts]
    weighings = [_weighing(terms, coefficients) for terms in zip(*losses, strict=True)]
    worst = max(weighings, key=lambda each: each.error)
    if any(name not in NOTES for name, _ in window.findings):
        return worst, ()  # an event has a name already
    if not all(each.factor > 0 for each in weighings):
        return worst, ("",)
    # Beside a term that is right and has no factor of its own, others may have one.
    weights = [each.weights for each in weighings]
    shared = math.prod(functools.reduce(operator.and_, map(Counter, weights)).elements())
    is_right = any(
        _close(each.factor, 1) and _close(math.prod(own), shared)
        for each, own in zip(weighings, weights, strict=True)
    )
    base = shared if is_right else None
    names = dict.fromkeys(name for each in weighings for name in _names(each, window, most, base))
    return worst, _of_terms(weighings, tuple(names), len(losses) / window.ranks)


def _of_terms(weighings: Sequence[Weighing], names: tuple[str, ...], n: float) -> tuple[str, ...]:
    """What is wrong with a loss, of what is with its terms. They may be divided by their own
    number, and multiplied by weights.
    """
    if "constant factor" in names and len(names) > 1:
        return ("",)
    if len(weighings) == 1:
        return names
    term, is_n = weighings[0].terms[0], len(weighings) == n
    kinds = {(each.terms[0].name, each.terms[0].head) for each in weighings}
    is_mean_of_n = any(_close(each.terms[0].averaged, n) for each in weighings) or (
        is_n and len(kinds) == 1 and any(_close(each, n) for each in term.divisors)
    )
    if is_mean_of_n and not names:
        return ("",)
    doubtful = ["stepped too often", "divided by another n", *["divided twice"] * is_n]
    return tuple("" if name in doubtful else name for name in names)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4)  # as 16 bits round, over some thousand elements


def _alike(values: Sequence[float]) -> bool:
    return _close(min(values), max(values))


def _off(factor: float) -> float:
    """How far a factor is from 1."""
    return abs(math.log(factor)) if 0 < factor < math.inf else 0.0


def _names(weighing: Weighing, window: Window, most: int, base: float | None) -> Iterator[str]:
    """What is wrong with one of several terms; "" for something that cannot be told.

    most: the largest number of micro-batches of all windows. base: the weight of another term,
    which is right.
    """
    n = len(window.parts) / window.ranks
    places = Counter(each.place for each, _ in window.parts)
    is_whole = math.isclose(weighing.factor, 1, rel_tol=max(window.precision, 1e-4))
    if weighing.is_even and is_whole:
        if weighing.may_be_other(n):
            yield ""
    elif not _alike([a for _, a in window.parts]):
        yield "scaled inside the window"
    elif weighing.is_of_means and _close(weighing.factor, len(places)) and not is_whole:
        # A discriminator's losses, on real and on false data, are not parts of one batch.
        yield "two losses" if len({*places.values()}) == 1 else "not divided"
    else:
        yield from _names_of_weights(weighing, window, most, base, is_whole)


def _names_of_weights(
    weighing: Weighing, window: Window, most: int, base: float | None, is_whole: bool
) -> Iterator[str]:
    """Why targets weigh differently, and why all of them weigh too much or too little."""
    n = len(window.parts) / window.ranks
    if not weighing.is_even:
        is_weighed = is_whole and len({each.place for each, _ in window.parts}) < n
        yield _name_of_uneven(weighing, window, is_weighed)
    if not (is_whole or window.is_part or _is_weight(weighing, base)):
        yield _name_of_factor(weighing, window.by_hand, n, most)


def _name_of_uneven(weighing: Weighing, window: Window, is_weighed: bool) -> str:
    ranks = [each.rank for each, _ in window.parts]
    # Each process has one count of targets, other than that of another one.
    is_between = len({*zip(ranks, weighing.of_targets, strict=True)}) == len({*ranks}) > 1
    if _alike(weighing.shares):
        return "ranks weigh the same" if is_between else "uneven tokens"
    is_plain = all(len(term.counts) == 1 and not term.own for term in weighing.terms)
    return "wrong weight" if is_weighed and is_plain else ""


def _is_weight(weighing: Weighing, base: float | None) -> bool:
    """Whether a term is off by its own weight, beside another one of weight `base`."""
    own = math.prod(weighing.weights) / (base or math.nan)
    return _close(weighing.factor, own) or _close(weighing.factor, own * weighing.features)


def _name_of_factor(weighing: Weighing, by_hand: float, n: float, most: int) -> str:
    """Why a gradient is off by a factor; "" if that cannot be told."""
    factor, term, weights = weighing.factor, weighing.terms[0], weighing.weights
    is_sum = any(_close(abs(term.each) * each, 1) for each in (1.0, weighing.features))
    own = math.prod(weights)
    if _close(factor, by_hand):
        return "" if _close(factor * n, 1) else "scaled by hand"
    may_divide = n > 1 and any(_close(w, n) or _close(w * n, 1) for w in (*weights, own))
    if may_divide or any(each.own for each in weighing.terms):
        return ""  # the factor may be a division by n, or undo one
    if is_sum and term.rows > 1:
        return "constant factor"  # nothing divides it
    if weighing.is_of_means:
        return _name_of_division(n, own, term.outer, most)
    return _name_of_sum(weighing, own, n) if weighing.is_even else ""


def _name_of_sum(weighing: Weighing, own: float, n: float) -> str:
    """Why a sum is divided wrongly; "" if that cannot be told."""
    factor, term = weighing.factor, weighing.terms[0]
    over = own / factor  # how much more it is divided by than by the number of its targets
    if _close(over, 2):
        return ""  # half of a squared error
    if _close(over, 1) or _close(over * weighing.features, 1):
        return "constant factor"
    if _close(over, n):
        return "divided twice"
    # Labels that are counted before they are shifted: one more in each row.
    divisor = weighing.targets / factor
    is_count = _close(own, 1) and 0.8 < factor < 1 and _close(divisor, round(divisor))
    return "another count" if is_count and term.name == "NllLoss" else ""


def _name_of_division(n: float, own: float, outer: float, most: int) -> str:
    """Why the mean of n means is off by a factor; "" if that cannot be told.

    own, outer: what each mean is multiplied and divided by; most: the largest n of all windows.
    """
    if _close(outer, n):
        return "constant factor"  # the weight of the loss
    if _close(outer, own) or (_close(outer, 1) and own < 1):
        return "not divided"
    if n < most and _close(outer, most):
        return "short window"
    if _close(outer, n * n):
        return "divided twice"
    if not _close(own, 1) or not _close(outer, round(outer)) or _close(outer, 2 * n):
        return ""  # half of a squared error is as common
    return "stepped too often" if most == 1 else "divided by another n"
