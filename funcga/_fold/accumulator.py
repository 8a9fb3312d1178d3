"""The accumulator: a fold as pure functions of a state, for code that has a loop of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from funcga._backend import Arrays, Backend
from funcga._backend.dispatch import backend_of
from funcga._fold import Tally, check_narrow, check_weight, largest, parts_of
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._types import Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean


def unit_of(total: Scalar, arrays: Arrays) -> Scalar:
    """The power of 16 at or below a total weight, the unit of weights in sums of means.

    So the sum of a mean is less than 16 times as large as the mean, and overflows only if that
    nearly does. Scaling by a power of 2 is exact; with powers of 16 the unit of a window seldom
    changes.
    """
    if isinstance(total, float):
        return max(16.0 ** ((math.frexp(total)[1] - 1) // 4), LEAST_UNIT)
    # The exponent bits of the float, rounded down to a power of 16. The bias is one below a
    # multiple of 4. For 0 the result is negative, and clipped.
    xp = arrays.xp
    is_double = total.dtype == xp.float64
    integers, mantissa = (xp.int64, 52) if is_double else (xp.int32, 23)
    one = 1 << mantissa
    bits = ((total.view(integers) + one) & (-4 * one)) - one
    unit: Scalar = xp.clip(bits.view(total.dtype), LEAST_UNIT)
    return unit


# For smaller weights: a normal float32 whose reciprocal is normal, too.
LEAST_UNIT = 2.0**-124


class Accumulation(NamedTuple):
    """A window that is open: an accumulator for each leaf, and how much has been folded.

    `Accumulator` and `multi_steps` open their states as one, and pack it again. Accumulators of
    means are sums of w / unit * v. `rejected` counts the micro-batches that were dropped.
    """

    outputs: Outputs
    accumulators: Sequence[Reduced]
    tally: Tally
    unit: Scalar
    rejected: Scalar = 0

    @property
    def total(self) -> Scalar:
        """The total weight: a float where the host sees it."""
        # The sum of two float32 numbers, exact in Python's float64.
        first, *rest = map(self.outputs.backend.arrays.scalar, self.tally.weight)
        return sum(rest, first)

    def counted(self, weight: Scalar, donate: bool = False) -> tuple["Accumulation", list[Scalar]]:
        """The window with one more micro-batch in its tally and in the unit for it; and the weight
        that each of its leaves is to be lifted with. Raises FuncgaError for a weight that cannot be
        counted.
        """
        arrays, before, folds = self.outputs.backend.arrays, self.total, self.outputs.folds
        is_wide = len(self.tally.weight) == 1  # counted in 64 bits
        if type(weight) is not int or weight != 1:
            weight = check_weight(weight, arrays)
            if any(fold is not None and fold.is_narrow for fold in folds):
                check_narrow(weight)
        if isinstance(weight, int | float) and isinstance(before, float):
            # Added on the host if it sees them, as 0-d arrays are slow.
            number, total = weight, before + weight
            tally = Tally(arrays.addends(total, is_wide), self.tally.steps + 1)
        else:
            one = Tally(arrays.addends(weight, is_wide), 1)
            tally = self.tally.merge(one)
            number, total = one.total, tally.total
        unit, known = unit_of(total, arrays), arrays.scalar(self.unit)
        is_same = type(known) is type(unit) is float and known == unit  # the usual case
        window, share = self if is_same else self.in_unit(unit, donate), number / unit
        weights = [share if fold is not None and fold.is_mean else weight for fold in folds]
        return window._replace(tally=tally), weights

    def in_unit(self, unit: Scalar, donate: bool = False) -> "Accumulation":
        """The window in another unit; in place if `donate`."""
        backend, largest_limb = self.outputs.backend, self.tally.weight[0]
        factor, total = backend.arrays.scalar(self.unit) / unit, backend.arrays.scalar(largest_limb)
        if isinstance(factor, float):
            if factor == 1:
                return self
            unit = backend.arrays.addends(unit, len(self.tally.weight) == 1)[0]
        accumulators = [*self.accumulators]
        # A sum of nothing is 0 in every unit.
        if not isinstance(total, float) or total:
            folds = enumerate(self.outputs.folds)
            means = [leaf_index for leaf_index, fold in folds if fold is not None and fold.is_mean]
            sums = [accumulators[leaf_index] for leaf_index in means]
            scaled = backend.states.scaled(sums, factor, donate)
            for leaf_index, accumulator in zip(means, scaled, strict=True):
                accumulators[leaf_index] = accumulator
        return self._replace(accumulators=accumulators, unit=unit)

    def merge(self, other: "Accumulation") -> "Accumulation":
        """The two windows merged; this one first, for folds that keep the order."""
        rejected = self.rejected + other.rejected
        merged = self._replace(tally=self.tally.merge(other.tally), rejected=rejected)
        unit = unit_of(merged.total, self.outputs.backend.arrays)
        first, second = self.in_unit(unit), other.in_unit(unit)
        return merged._replace(accumulators=first.combined(second.accumulators), unit=first.unit)

    def combined(self, others: Sequence[Reduced]) -> list[Reduced]:
        """The accumulators combined with others. Raises FuncgaError if one would be broadcast."""
        combined = list[Reduced]()
        for fold, first, second in zip(self.outputs.folds, self.accumulators, others, strict=True):
            pairs = zip(parts_of(first), parts_of(second), strict=True)
            if fold is not None and fold.axis is None and any(a.shape != b.shape for a, b in pairs):
                describe = self.outputs.backend.arrays.describe
                raise FuncgaError(
                    f"{self.outputs.paths()[len(combined)]} is {describe(largest(second))}, and "
                    f"the state was made for {describe(largest(first))}: the two cannot be "
                    "combined. Make a state for each shape, or, if it has a row for each example, "
                    "fold with funcga.concat()."
                )
            combined.append(None if fold is None else fold.combine(first, second))
        return combined

    def finished(self, donate: bool = False, name: str = "output") -> list[Reduced]:
        """The normalised leaves; in the memory of the sums if `donate`.

        Raises FuncgaError, which names the leaf in a tree of this name, if the host sees that a
        result is lost.
        """
        outputs, total = self.outputs, self.total
        for leaf_index, fold in enumerate(outputs.folds):
            if fold is not None and fold.fold.normalizer.lost is not None:
                path = lambda leaf_index=leaf_index: outputs.paths(name)[leaf_index]
                fold.check_known(self.accumulators[leaf_index], self.tally, path)
        # A mean is divided by the weight in the unit of its sum.
        arrays = outputs.backend.arrays
        steps, share = arrays.scalar(self.tally.steps), total / arrays.scalar(self.unit)
        whole, of_mean = Tally((total,), steps), Tally((share,), steps)
        folds = outputs.folds
        tallies = [of_mean if fold is not None and fold.is_mean else whole for fold in folds]
        return outputs.backend.states.finish(self, tallies, donate)

    def restore(self, finished: Sequence[Reduced]) -> None:
        """Multiplies back, to rounding, the sums that `finished` has divided in place."""
        backend, total = self.outputs.backend, self.total
        share = total / backend.arrays.scalar(self.unit)
        triples = zip(self.outputs.folds, self.accumulators, finished, strict=True)
        for fold, accumulator, result in triples:
            if fold is not None and accumulator is result:
                backend.states.scaled([result], share if fold.is_mean else total, donate=True)


def empty(outputs: Outputs, accumulators: Sequence[Reduced]) -> Accumulation:
    """The empty window of these accumulators."""
    arrays = outputs.backend.arrays
    # Weights are counted in 64 bits only if some sums are.
    is_wide = any(fold is not None and fold.is_wide for fold in outputs.folds)
    # Each number is an array of its own, as one buffer cannot be donated twice.
    zero, unit = arrays.addends(0, is_wide), arrays.addends(1, is_wide)[0]
    steps, rejected = (arrays.cast(0, arrays.xp.int32) for _ in range(2))
    return Accumulation(outputs, accumulators, Tally(zero, steps), unit, rejected)


class AccumulatorState(NamedTuple):
    """What has been folded so far: a tree of arrays that passes through jit, scan, checkpoints and
    torch.save.

    Attributes:
        leaves: For every leaf of the folded value, in order, what its reducer holds: an array or a
            tuple of arrays.
        like: A 0-d array of the leaf's dtype for every leaf, in the structure of the folded value.
        tally: The total weight and the number of updates.
        unit: What the weights in the sums of means are measured in, a power of 16: 1 for total
            weights from 1 to below 16.

    Example:
        >>> accumulator = funcga.Accumulator(funcga.mean())
        >>> state = accumulator.update(accumulator.init(torch.zeros(2)), torch.ones(2), weight=3)
        >>> state.leaves, float(state.tally.weight[0])
        ((tensor([3., 3.]),), 3.0)
    """

    leaves: tuple[Reduced, ...]
    like: Tree
    tally: Tally
    unit: Scalar = 1.0  # as in states that have none, from earlier versions


@dataclass(frozen=True)
class Accumulator:
    """A fold as pure functions of a state: `init`, `update`, `merge` and `finalize`.

    These laws hold: `merge(s, init) = s`; `merge` is associative, and commutative for all folds but
    concat and carry, which keep the order; `update(s, v, w) = merge(s, update(init, v, w))`. So any
    split and any order give the same `finalize`.

    Args:
        fold: A Fold, or a tree prefix of Folds over the values. The default is the weighted mean.

    Example:
        >>> accumulator = funcga.Accumulator(funcga.mean())
        >>> state = accumulator.init({"w": torch.zeros(2)})
        >>> state = accumulator.update(state, {"w": torch.tensor([1.0, 2.0])}, weight=3)
        >>> state = accumulator.update(state, {"w": torch.tensor([5.0, 6.0])}, weight=1)
        >>> accumulator.finalize(state)
        {'w': tensor([2., 3.])}
    """

    fold: FoldTree = field(default_factory=mean)

    def init(self, like: Tree) -> AccumulatorState:
        """The state of nothing folded.

        Args:
            like: A value like those to be folded: arrays, or structs with a shape and a dtype.

        Returns:
            A state for values of this structure.

        Raises:
            FuncgaError: The fold does not fit the values.

        Example:
            >>> state = accumulator.init({"w": torch.zeros(2)})  # gradients are like the parameters
        """
        backend = backend_of([like], lambda: ["like"])
        outputs, leaves = bind_outputs(self.fold, like, backend)
        # Dtypes and structure are kept as 0-d arrays: unlike a dtype, an array passes through
        # jit.
        cast = backend.arrays.cast
        dtype_marks = [None if dtype is None else cast(0, dtype) for dtype in outputs.dtypes]
        window = empty(outputs, outputs.identities(leaves))
        return _state_of(window, outputs.structure_of(dtype_marks))

    def update(self, state: AccumulatorState, value: Tree, weight: Scalar = 1) -> AccumulatorState:
        """The state with one more value.

        What is folded leaves its autograd graph, which would hold every micro-batch until the
        window ends. Inside of torch.func transforms it stays there, so that they can differentiate
        through it.

        Args:
            state: What `init`, `update` or `merge` returned. It is not changed.
            value: Arrays in the structure, shapes and dtypes that the state was made for.
            weight: The weight of the value, a number or a 0-d array >= 0.

        Returns:
            The state of all that has been folded.

        Raises:
            FuncgaError: The value has another structure, shape or dtype, or the weight is negative.

        Example:
            >>> state = accumulator.update(state, {"w": torch.ones(2)}, weight=3)
        """
        window = self._window_of(state, backend_of([state, value], lambda: ["state", "value"]))
        outputs, leaves = window.outputs, window.outputs.leaves(value, "this update")
        window, weights = window.counted(weight)
        # Bit for bit a merge with the window of this value alone.
        leaves = outputs.backend.states.detached(leaves)
        triples = zip(outputs.folds, leaves, weights, strict=True)
        lifted = [None if fold is None else fold.lift(*pair) for fold, *pair in triples]
        return _state_of(window._replace(accumulators=window.combined(lifted)), state.like)

    def merge(self, a: AccumulatorState, b: AccumulatorState) -> AccumulatorState:
        """The state of what two states have folded: two halves of a window, or two replicas.

        Args:
            a: The state that comes first, where the order counts.
            b: The other one.

        Returns:
            The state of both.

        Raises:
            FuncgaError: The states were made for different values.

        Example:
            >>> both = accumulator.merge(state, state)
        """
        window = self._window_of(a, backend_of([a, b], lambda: ["a", "b"]))
        window.outputs.leaves(b.like, "the second state")
        second = window._replace(accumulators=b.leaves, tally=b.tally, unit=b.unit)
        return _state_of(window.merge(second), a.like)

    def finalize(self, state: AccumulatorState) -> Tree:
        """The result of the fold.

        Args:
            state: What has been folded. It is not changed, and shares no memory with the result.

        Returns:
            The values, normalised by the weights and steps in the state, in their structure and
            dtypes.

        Example:
            >>> accumulator.finalize(state)
            {'w': tensor([1., 1.])}
        """
        window = self._window_of(state, backend_of([state], lambda: ["state"]))
        return window.outputs.structure_of(window.finished())

    def _window_of(self, state: AccumulatorState, backend: Backend) -> Accumulation:
        if not isinstance(state, AccumulatorState):
            raise FuncgaError(
                f"the state is of type {type(state).__name__}. Start with state = "
                "accumulator.init(like) and pass on what update and merge return."
            )
        outputs, _ = bind_outputs(self.fold, state.like, backend, shaped=False)
        return Accumulation(outputs, state.leaves, state.tally, state.unit)


def _state_of(window: Accumulation, like: Tree) -> AccumulatorState:
    return AccumulatorState(tuple(window.accumulators), like, window.tally, window.unit)
