"""Is it exact: the results of several splits against the whole batch, in one table.

The step over n micro-batches, in order, and over two uneven ones in another order is compared with
the step over the whole batch. A difference larger than rounding has a cause, see `causes/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from funcga._types import Array
from funcga.errors import FuncgaError
from funcga.folds import Fold
from funcga.tools.verify.counted import counts
from funcga.tools.verify.probe import Leaves, Probe, Rows

# --- which differences are rounding


class Limit(NamedTuple):
    """The largest difference between two results that counts as rounding.

    A difference is `relative` to the largest value that was added up to the leaf, so that gradients
    which cancel are not reported. The bias of an attention key has a gradient that is nothing but
    rounding of much larger numbers, so a `share` of the largest of all leaves is added. The `floor`
    is for gradients that are all zero but for rounding.
    """

    relative: float
    share: float
    floor: float

    def scales(self, parts: Sequence[Leaves]) -> list[float]:
        """The scale of each leaf's differences, from its values for several parts of the batch."""
        top = max(map(largest, parts), default=0.0)
        sizes = [largest(leaves) for leaves in zip(*parts, strict=True)]
        return [size + self.share * top + self.floor / self.relative for size in sizes]

    def differences(self, left: Leaves, right: Leaves) -> list[float]:
        """The relative difference of every leaf of two results."""
        return [*map(relative, left, right, self.scales([left, right]))]


def limit_of(eps: float) -> Limit:
    """The Limit for computations with this machine epsilon.

    float64 has room: a mistake is rarely below 1e-6, rounding rarely above 1e-13. In float32 sums
    of some thousand terms are 1e-5 off. In 16 bits a sum over rows that is rounded once differs by
    one or two epsilons.
    """
    # float64, float32, then 16 bits.
    if eps < 1e-12:
        return Limit(1e-9, 1e-3, 8 * eps)
    if eps < 1e-5:
        return Limit(1e-4, 0.1, 8 * eps)
    return Limit(8 * eps, 0.5, 8 * eps)


def relative(left: Array, right: Array, scale: float) -> float:
    """The largest difference over the scale; infinite if the shapes differ, or an element is NaN in
    one of them only.
    """
    if left.shape != right.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        apart = np.where(same, 0.0, np.abs(left - right)).max(initial=0.0)
    return float("inf") if np.isnan(apart) else float(apart) / scale


def largest(leaves: Sequence[Array]) -> float:
    """The largest finite element of all arrays, or of all scalars where there are none."""
    arrays = [leaf for leaf in leaves if leaf.ndim] or leaves
    sizes = [np.abs(leaf[np.isfinite(leaf)]).max(initial=0.0) for leaf in arrays]
    return float(max(sizes, default=0.0))


# --- the table


class Measured(NamedTuple):
    """The result of a split against that of the whole batch.

    Attributes:
        split: Which split it is, in words.
        sizes: The rows of each micro-batch.
        relative: The largest relative difference; infinite where there is an error.
        limit: How large it may be.
        leaf: The path of the leaf that has it.
        error: What the split raised instead of a result, or None.
    """

    split: str
    sizes: tuple[int, ...]
    relative: float
    limit: float
    leaf: str
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the difference is within the limit."""
        return self.relative <= self.limit

    def __str__(self) -> str:
        difference = f"{self.relative:.1e} at {self.leaf}, limit {self.limit:.0e}"
        return f"{self.split}: {self.error or difference}"


class Splits(NamedTuple):
    """The table of the splits, and the leaves that differ, by index."""

    rows: list[Measured]
    failed: list[int]

    @property
    def are_exact(self) -> bool:
        """Whether every split gives the result of the whole batch."""
        return all(row.ok for row in self.rows)

    @property
    def worst(self) -> float:
        """The largest relative difference; infinite if a split raised an error."""
        return max(row.relative for row in self.rows)

    @property
    def first(self) -> str:
        """The first split that differs, in words."""
        return next(str(row) for row in self.rows if not row.ok)


def first_line(error: Exception) -> str:
    """The type of an error and its first line."""
    first, *_ = str(error).splitlines() or [""]
    # Torch asserts on dtypes that meet, and takes that for a bug of its own.
    text = first.rpartition("please report a bug to PyTorch. ")[2]
    return f"{type(error).__name__}: {text[:200]}"


# The rows of a group. JAX compiles for each number of rows, so the smaller of two uneven parts has
# as many.
GROUP = 4
# How many random orders are looked at for one in which each group has something of each count.
_TRIES = 60


def is_compared(fold: Fold) -> bool:
    """Whether the result does not depend on the number of micro-batches by definition, as moments
    and carried state do.
    """
    return not (fold.reducer.over_steps or fold.reducer.carries)


@dataclass(eq=False)
class Case:
    """A function, and how it is compared with the whole batch: the argument of every question.

    Attributes:
        probe: The function. A question may correct its folds for further questions.
        counts: The numbers of micro-batches that were asked for, none by default.
        seed: Of the order of rows, and of the groups that are looked at.
        draws: Whether a call draws random numbers, which `calls.repeatable` finds out.
        limit: Which differences count as rounding, which it finds out as well.
    """

    probe: Probe
    counts: Sequence[int]
    seed: int
    draws: bool = False
    limit: Limit = limit_of(2.0**-52)  # noqa: RUF009 - a frozen value

    @cached_property
    def order(self) -> Rows:
        """The rows in a random order, in which groups of them have something of what few rows have,
        such as positives: a group without any shows nothing of a loss that divides by them.
        """
        rows, size = self.probe.rows, self.group
        every = [(row,) for row in self.probe.all_rows]
        rare = [count.of for count in counts(self.probe) if 0 in map(count.of, every)]

        def lacks(order: Rows) -> int:
            # The three groups, and the smaller of the two uneven parts.
            groups = [order[start : start + size] for start in (0, size, 2 * size, rows - size)]
            return sum(not count_of(group) for count_of in rare for group in groups)

        random = np.random.default_rng(self.seed)
        return min((tuple(random.permutation(rows).tolist()) for _ in range(_TRIES)), key=lacks)

    @property
    def group(self) -> int:
        """The rows of one of three groups."""
        return max(1, min(GROUP, self.probe.rows // 3))

    @property
    def parts(self) -> tuple[Rows, Rows]:
        """Two uneven parts of the rows, in another order."""
        return self.order[: -self.group], self.order[-self.group :]

    @property
    def evaluated(self) -> list[Leaves]:
        """The leaves for the whole batch and for the two parts, unless the loss refuses them."""
        each = map(self.probe.try_values, (self.probe.all_rows, *self.parts))
        return [leaves for leaves in each if leaves is not None]

    @cached_property
    def splits(self) -> Splits:
        """The splits: over n micro-batches, for each n, and over the two parts.

        An error that grad_fn raises for a part of the batch is noted in the table; those of funcga
        are raised.
        """
        probe, every, table = self.probe, self.probe.all_rows, list[Measured]()
        compared = [i for i, fold in enumerate(probe.folds) if is_compared(fold)]
        failed, first = set[int](), probe.rows - self.group
        limit, scales = self.limit.relative, self._scales
        # State goes through the rows in their order only.
        order, name = (every, "uneven") if probe.has_state else (self.order, "uneven, permuted")
        whole, permuted = probe.step_values([every, order], n=1)
        # What each split is called, its rows and what they are to give, and how they are cut.
        splits: list[tuple[str, Rows, Leaves, dict[str, int]]] = [
            (f"n = {n}", every, whole, {"n": n}) for n in self.counts or [min(3, probe.rows)]
        ]
        splits.append((name, order, permuted, {"microbatch_size": first}))
        for split, rows, expected, cut in splits:
            sizes = tuple(map(len, np.array_split(rows, cut.get("n", [first]))))
            try:
                (result,) = probe.step_values([rows], **cut)
            except FuncgaError:
                raise
            except Exception as error:
                text = f"it raised {first_line(error)}"
                table.append(Measured(split, sizes, np.inf, limit, "", text))
                continue
            apart = {i: relative(result[i], expected[i], scales[i]) for i in compared}
            worst = max(compared, key=lambda i: apart[i])
            table.append(Measured(split, sizes, apart[worst], limit, probe.paths[worst]))
            failed |= {i for i in compared if apart[i] > limit}
        return Splits(table, sorted(failed))

    def differ(self, left: Leaves, right: Leaves) -> bool:
        """Whether two results differ by more than rounding."""
        return max(self.limit.differences(left, right), default=0.0) > self.limit.relative

    @property
    def failed(self) -> list[int]:
        """The leaves that differ, of those whose fold adds up values."""
        return [i for i in self.splits.failed if i in self.probe.additive()]

    @cached_property
    def _scales(self) -> list[float]:
        """The scale of each leaf's differences after the fold."""
        probe, scales = self.probe, list[float]()
        # per_weight() divides a sum, so that its result is smaller than what was added up.
        total = max(probe.weigh(probe.all_rows), 1e-300)
        for fold, scale in zip(probe.folds, self.limit.scales(self.evaluated), strict=True):
            is_sum = fold.reducer.additive and not fold.reducer.linear
            is_divided = is_sum and fold.normalizer.divides_by == "weight"
            scales.append(scale / total if is_divided else scale)
        return scales
