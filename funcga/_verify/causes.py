"""Causes: why micro-batches do not give the result of the whole batch, and the line that fixes it.

What two groups of rows show of the loss, its Kind, is compared with what its fold takes it for. A
mean needs a weight that is what the loss divides by; a sum needs none; what is neither of them has
no fold. The texts are in causes.toml.
"""

import importlib.resources
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from funcga._types import Tree
from funcga._verify.denominators import (
    Mixture,
    at_least_one,
    divided_twice,
    lines,
    not_additive,
    spoilt_by_zero,
)
from funcga._verify.divisors import ROWS, Count, counts, form
from funcga._verify.probe import Limit, Probe, Rows, relative
from funcga._verify.remedies import coupled_line
from funcga._verify.responses import GROUP, Kind, Splits, respond
from funcga.folds import Fold


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong.

    Attributes:
        name: A short identifier that stays, such as "uneven tokens".
        what: What is wrong, in a sentence or two.
        fix: The line to write instead.
        evidence: The figures by which it was recognised.
    """

    name: str
    what: str
    fix: str
    evidence: str


@cache
def _texts() -> dict[str, dict[str, str]]:
    source = (
        importlib.resources.files("funcga._verify")
        .joinpath("causes.toml")
        .read_text(encoding="utf-8")
    )
    return tomllib.loads(source)


def cause(key: str, **words: object) -> Cause:
    """The Cause of this entry of causes.toml, with these words filled in."""
    name = key.partition(":")[0]
    texts = _texts().get(name, {}) | _texts()[key]
    words = {"subject": "loss"} | words
    what, fix, evidence = (
        " ".join(texts[part].split()).format(**words) for part in ("what", "fix", "evidence")
    )
    return Cause(name, what, fix, evidence)


def note(key: str, **words: object) -> str:
    """The note of this name in causes.toml, with these words filled in."""
    return " ".join(_texts()["notes"][key].split()).format(**words)


def diagnose(
    probe: Probe, splits: Splits, draws: bool, limit: Limit, random: np.random.Generator
) -> list[Cause]:
    """The causes of what the splits have shown; at least one if a leaf failed or a split could
    not be computed.
    """
    # Where the order of the rows alone changes the result, groups of rows show nothing more.
    if probe.additive(splits.reordered):
        row = splits.rows[-1]
        key = f"randomness: by position, {probe.backend.name}" if draws else "row order"
        return [cause(key, subject=probe.subject, difference=row.relative, where=row.leaf)]
    causes: dict[str, Cause] = {}
    pairs = [*_pairs(probe, splits, random)]
    for leaves in _grouped(probe, probe.additive(splits.failed)):
        # Of the pairs of groups the first one that shows something decides.
        explanations = (causes_of(_case(probe, leaves, pair, splits, limit)) for pair in pairs)
        for explained in next(filter(None, explanations), []):
            causes.setdefault(explained.name, explained)
        # The value of a loss fails for the same reasons as its gradients.
        if causes and probe.whole[leaves[0]].ndim:
            break
    if not causes and (splits.failed or any(row.error for row in splits.rows)):
        return [_unexplained(probe, splits, limit)]
    return [*causes.values()]


def _pairs(
    probe: Probe, splits: Splits, random: np.random.Generator
) -> Iterator[tuple[Rows, Rows]]:
    """Two groups of rows each: few at first, then all."""
    size = min(GROUP, probe.rows // 2)
    for _ in range(3 if probe.rows > 2 else 1):
        order = [int(i) for i in random.permutation(probe.rows)]
        yield tuple(order[:size]), tuple(order[size : 2 * size])
    yield splits.parts


def _grouped(probe: Probe, failed: list[int]) -> Iterator[list[int]]:
    """The leaves that are looked at together: arrays under one fold in one part of the output,
    or one scalar.
    """

    def key(i: int) -> tuple[Fold, str]:
        return probe.folds[i], (re.match(r"output\[\d+\]", probe.paths[i]) or [""])[0]

    arrays = [i for i in probe.additive() if probe.whole[i].ndim]
    for group in dict.fromkeys(key(i) for i in reversed(failed) if probe.whole[i].ndim):
        yield [i for i in arrays if key(i) == group]
    yield from ([i] for i in failed if not probe.whole[i].ndim)


@dataclass(frozen=True)
class Case:
    """Some leaves under one fold, and the Kind that two groups of rows, a and b, have shown of
    them.

    parts: two parts of the whole batch, on which what a and b suggest is tried.
    """

    probe: Probe
    leaves: Sequence[int]
    a: Rows
    b: Rows
    kind: Kind
    parts: tuple[Rows, Rows]
    limit: Limit

    @property
    def fold(self) -> Fold:
        """The fold of the leaves."""
        return self.probe.folds[self.leaves[0]]

    @property
    def linear(self) -> bool:
        """Whether the fold takes means, which it multiplies by the weight."""
        return self.fold.reducer.linear

    @property
    def ratio(self) -> float:
        """How much A weighs for each B in the loss."""
        return self.kind.ratios[0]

    def cause(self, key: str, **words: object) -> Cause:
        """The Cause of this entry, for these leaves."""
        where = self.probe.paths[self.leaves[0]]
        ratio = self.ratio if self.kind.ratios else None
        usual = {
            "where": where,
            "a": len(self.a),
            "b": len(self.b),
            "ratio": ratio,
            "subject": self.probe.subject,
        }
        return cause(key, **usual | words)

    @cached_property
    def weights(self) -> tuple[float, float, float]:
        """The weights of A, of B and of both together."""
        return self.probe.weigh(self.a), self.probe.weigh(self.b), self.probe.weigh(self.a + self.b)

    @cached_property
    def agrees(self) -> bool:
        """Whether the fold weighs A and B as the loss does, which takes a mean."""
        a, b, _ = self.weights
        return self.linear and abs(a - self.ratio * b) <= 100 * self.limit.relative * max(
            a, self.ratio * b
        )

    @cached_property
    def divisor(self) -> Count | None:
        """What the loss divides by: rows, or the first expression of the batch that fits every
        part of it.
        """
        return next((count for count in (ROWS, *counts(self.probe)) if self._fits(count.of)), None)

    def _fits(self, count: Callable[[Rows], float]) -> bool:
        """Whether the loss is a mean over what this counts: of A and B, and of two parts of the
        whole batch.
        """
        tolerance = 100 * self.limit.relative
        # A and B first, which costs no call of the loss.
        left, right = count(self.a), self.ratio * count(self.b)
        if left == 0 or not abs(left - right) <= tolerance * max(left, right):
            return False
        # Then two parts of the whole batch: the mean of both, weighed by their counts, must be that
        # of all rows.
        values = [self.probe.try_values(rows) for rows in self.parts]
        parts = [[leaves[i] for i in self.leaves] for leaves in values if leaves is not None]
        # A loss that refuses some batches is given the benefit of the doubt.
        if len(parts) < 2:
            return True
        shares = [count(rows) / count(self.probe.every) for rows in self.parts]
        scales = self.limit.scales(parts)
        for index, scale, *leaf in zip(self.leaves, scales, *parts, strict=True):
            mixed = sum((s * x for s, x in zip(shares, leaf, strict=True) if s > 0), np.zeros(()))
            if not relative(mixed, self.probe.whole[index], scale) <= tolerance:
                return False
        return True

    def reweighs(self) -> bool:
        """Whether A weighs more or less for each B at other parameters: then no count is what
        the loss divides by.
        """
        moved = self.probe.moved()
        if moved is None:
            return False
        kind = respond(moved, self.a, self.b, self.leaves, self.limit)
        if kind.name != self.kind.name:
            return kind.name in ("statistics", "coupled", "two means")
        tolerance = max(1e-5, 100 * self.limit.relative)
        return any(
            abs(x - y) > tolerance * (x + y)
            for x, y in zip(self.kind.ratios, kind.ratios, strict=True)
        )


def _case(
    probe: Probe, leaves: Sequence[int], pair: tuple[Rows, Rows], splits: Splits, limit: Limit
) -> Case:
    return Case(probe, leaves, *pair, respond(probe, *pair, leaves, limit), splits.parts, limit)


def causes_of(case: Case) -> list[Cause]:
    """What is wrong with these leaves; nothing if the fold is exact for what they have shown."""
    kind = case.kind.name
    if kind in ("nothing", "unknown"):
        return []
    if kind in ("statistics", "coupled"):
        return [_of_coupled(case)]
    if kind == "power":
        return [_of_power(case)]
    # Two counts, unless what weighs the rows is made of the parameters.
    if kind in ("two means", "sum and mean"):
        if case.reweighs():
            return [_of_parameters(case)]
        return [_of_several(case)]
    if case.fold.normalizer.divides_by == "steps":
        return [case.cause("by steps")]
    if kind == "mean":
        return _of_mean(case)
    weight = (
        ""
        if case.probe.program.weight
        else " (and weight=..., if it is to be divided by tokens and not by rows)"
    )
    causes = [case.cause("sum under mean", weight=weight)] if case.linear else _not_additive(case)
    return causes + ([case.cause("regulariser")] if kind == "sum and constant" else [])


def _of_several(case: Case) -> Cause:
    """Terms with different denominators: the counts that fit name the totals to write."""
    mixtures = [Mixture(case.a, case.b, case.kind.ratios)]
    rest = tuple(row for row in case.probe.every if row not in {*case.a, *case.b})[: len(case.a)]
    if len(rest) == len(case.a):
        kind = respond(case.probe, case.a, rest, case.leaves, case.limit)
        if kind.name == case.kind.name:
            mixtures.append(Mixture(case.a, rest, kind.ratios))
    words = lines(case.probe, mixtures, has_sum=case.kind.name == "sum and mean")
    return case.cause(f"other normaliser: {case.kind.name}", other=case.kind.ratios[-1], **words)


def of_totals(probe: Probe, parts: tuple[Rows, Rows]) -> list[Cause]:
    """What is wrong with the totals of a step: they do not add up, divide beside the fold, or
    spoil the loss at 0.
    """
    if probe.program.totals is None:
        return []
    apart, where, twice = (
        not_additive(probe, parts),
        spoilt_by_zero(probe, parts),
        divided_twice(probe),
    )
    causes = [] if apart is None else [cause("totals not additive", **apart._asdict())]
    causes += [] if twice is None else [cause("divided twice", where=twice)]
    return causes + (
        []
        if where is None
        else [cause("total of zero", path=where, line=at_least_one(probe, where))]
    )


def _of_coupled(case: Case) -> Cause:
    probe = case.probe
    if _grows(probe, case.a):
        return case.cause("in-batch negatives", line=coupled_line(probe, "embeddings"))
    if case.kind.name == "coupled":
        return _of_sums(case, "")
    layers = probe.framework.batch_normalisers(probe.program.grad_fn)
    if layers:
        return case.cause("batch statistics: layers", layers=", ".join(layers[:3]))
    return case.cause("batch statistics", line=coupled_line(probe, "means", "funcga.mean()"))


def _of_sums(case: Case, growth: str) -> Cause:
    return case.cause(
        "coupled rows", line=coupled_line(case.probe, "sums", "funcga.sum()"), growth=growth
    )


def _of_parameters(case: Case) -> Cause:
    line = coupled_line(case.probe, "means", "funcga.mean()")
    return case.cause("batch statistics: parameters", line=line)


def _grows(probe: Probe, rows: Rows) -> bool:
    """Whether the loss, or the loss a row, grows as the logarithm of how often the rows are
    repeated.

    Each time that their number is doubled a logarithm grows by the same; where a row is no
    candidate of its own, by less and less more than that. What grows as a power of it, as a norm
    does, grows by the same factor each time.
    """
    times = (2, 4, 8, 16)
    values = np.array([probe.loss(rows * k) for k in times])
    for each in (values, values / times):
        steps = np.diff(each)
        # It stays as it is, or is unknown.
        if not np.abs(steps).min() > 1e-6 * max(abs(each[0]), 1e-9):
            continue
        first, second = np.abs(steps[1:] / steps[:-1] - 1)
        if first < 0.4 and second < max(0.7 * first, 1e-3):
            return True
    return False


def _of_power(case: Case) -> Cause:
    growth = case.kind.power
    if case.reweighs():
        return _of_sums(case, f": of all rows twice it is 2 ** {growth:.4g} times as large")
    return case.cause("other normaliser: power", power=1 - growth, growth=growth)


def _of_mean(case: Case) -> list[Cause]:
    """What is wrong with the fold for a mean: its weights, or that it takes sums."""
    # Only where no count explains the weights is it worth asking whether they are counts at all.
    if not case.agrees and case.divisor is None:
        causes = _without_count(case)
        if causes:
            return causes
    causes = _not_additive(case)
    if causes or case.agrees:
        return causes
    return [_reweighted(case) if case.linear else _summed(case)]


def _reweighted(case: Case) -> Cause:
    """A mean under a fold that takes means, with weights that are not those of the loss."""
    divisor, (weight_a, weight_b, _) = case.divisor, case.weights
    if case.probe.program.weight is None:
        line = (divisor or form(case.probe)).line
        return case.cause(f"uneven tokens{'' if divisor else ': unknown'}", line=line)
    if divisor is ROWS:
        return case.cause("wrong weight: rows")
    line = divisor.line if divisor else "weight= a count of what the mean is over"
    return case.cause("wrong weight", line=line, weight_a=weight_a, weight_b=weight_b)


def _summed(case: Case) -> Cause:
    """A mean under a fold that takes sums."""
    name = "per_weight" if case.fold.normalizer.divides_by == "weight" else "sum"
    weight = f", {case.divisor.line if case.divisor else 'weight=...'}"
    if case.divisor is ROWS:  # the default
        weight = "" if case.probe.program.weight is None else ", and drop weight="
    return case.cause(f"mean under {name}", weight=weight)


def _without_count(case: Case) -> list[Cause]:
    """Why what weighs A and B in a mean is no count, one that adds up over rows and stays with
    other parameters.
    """
    if case.reweighs():
        return [_of_parameters(case)]
    rest = tuple(row for row in case.probe.every if row not in {*case.a, *case.b})
    if not rest:
        return []
    # Against a third group, A and B together must weigh as much as A and as B do. `rest` is that
    # group.
    ratios: list[float] = []
    for rows in (case.a, case.a + case.b):
        kind = respond(case.probe, rows, rest, case.leaves, case.limit)
        # A and B have hidden a second mean, in which they count as much as each other.
        if kind.name in ("two means", "unknown"):
            return causes_of(replace(case, a=rows, b=rest, kind=kind))
        if kind.name != "mean":
            return [_of_parameters(case)]
        ratios += kind.ratios
    alone, together = ratios
    expected = alone * (1 + 1 / case.ratio)
    adds_up = abs(together - expected) <= max(1e-5, 100 * case.limit.relative) * expected
    return [] if adds_up else [_of_parameters(case)]


def _not_additive(case: Case) -> list[Cause]:
    """A weight that does not add up, where it counts."""
    a, b, both = case.weights
    counts_nothing = (
        case.probe.program.weight is None or case.fold.normalizer.divides_by != "weight"
    )
    if counts_nothing or abs(a + b - both) <= 1e-6 * max(a + b, both):
        return []
    divisor = case.divisor if case.kind.name == "mean" else None
    line = divisor.line if divisor else f"count, do not average: {form(case.probe).line}"
    if divisor is ROWS:
        line = (
            "drop weight=: by default a micro-batch weighs as much as it has rows, which is what "
            "the loss counts"
        )
    return [case.cause("weight not additive", line=line, weight_a=a, weight_b=b, both=both)]


def _unexplained(probe: Probe, splits: Splits, limit: Limit) -> Cause:
    """The Cause of a difference that no kind of loss explains, by what stands out."""
    row = max(splits.rows, key=lambda row: -1 if math.isnan(row.relative) else row.relative)
    if splits.failed:
        difference = (
            f"{probe.paths[splits.failed[0]]} differs by {row.relative:.1e}, limit {row.limit:.0e}"
        )
    else:
        row = next(row for row in splits.rows if row.error)
        difference = str(row.error)
    # What stands out, the most telling first.
    words = {"split": row.split, "difference": difference, "rows": probe.rows}
    keyword = next((name for name, value in probe.kwargs.items() if _has_rows(probe, value)), None)
    if keyword is not None:
        return cause("not decomposable: keyword", keyword=keyword, **words)
    if not splits.failed and not probe.takes_a_row_fewer():  # nothing is wrong but that it raises
        return cause("fixed rows: loss", **words)
    other = next(
        (probe.paths[i] for i in splits.failed if not probe.folds[i].reducer.additive), None
    )
    if other is not None:
        return cause("not decomposable: fold", other=other, **words)
    return cause(f"not decomposable{': 16 bits' if limit.relative > 1e-3 else ''}", **words)


def _has_rows(probe: Probe, value: Tree) -> bool:
    leaves = filter(probe.backend.arrays.is_array, probe.backend.trees.flatten(value)[0])
    return any(leaf.shape[:1] == (probe.rows,) for leaf in leaves)


# A difference of less than this may be a small term of the loss, or rounding where large numbers
# cancel.
_SMALL = 1e-5
_VAGUE = {
    "batch statistics",
    "coupled rows",
    "in-batch negatives",
    "other normaliser",
    "not decomposable",
}


def without_remainder(
    probe: Probe, splits: Splits, causes: list[Cause], limit: Limit
) -> tuple[list[Cause], list[str]]:
    """(causes, notes): these causes, or in their place what explains a very small difference:
    one cause, or a note.
    """
    worst = max((math.inf if row.error else row.relative for row in splits.rows), default=0.0)
    if not limit.relative < worst <= _SMALL or not {each.name for each in causes} <= _VAGUE:
        return causes, []
    failed, loose = probe.additive(splits.failed), limit._replace(relative=10 * worst)
    if failed != splits.failed or not _is_right(probe, splits, failed, loose):
        return causes, []
    where = probe.paths[failed[0]]
    arrays = {i for i, leaf in enumerate(probe.whole) if leaf is not None and leaf.ndim}
    if arrays and arrays.isdisjoint(failed):
        return [], [note("small difference", where=where, difference=worst)]
    return [cause("small remainder", where=where, difference=worst)], []


def _is_right(probe: Probe, splits: Splits, failed: list[int], limit: Limit) -> bool:
    """Whether the fold is exact for all that failed, within a limit above the difference."""
    cases = [
        _case(probe, leaves, splits.parts, splits, limit) for leaves in _grouped(probe, failed)
    ]
    return all(case.kind.name != "unknown" and not causes_of(case) for case in cases)
