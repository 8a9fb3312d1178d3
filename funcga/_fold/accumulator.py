"""The accumulator: a fold as pure functions of a state, for code that has a loop of its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from funcga._backend import Arrays, Backend
from funcga._backend.dispatch import backend_of
from funcga._exact import format_of
from funcga._fold import Tally, check_narrow, check_weight, parts_of
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean


def unit_of(total: Scalar, arrays: Arrays) -> Scalar:
    """The power of 16 at or below a total weight: what the weights of means are measured in.

    So the sums of a mean are less than 16 times as large as the mean, and leave the range of their
    floats only where that nearly does. To multiply or to divide by a power of 2 rounds nothing; of
    16, because a window then seldom gets another unit.
    """
    if isinstance(total, float):
        return max(16.0 ** ((math.frexp(total)[1] - 1) // 4), LEAST_UNIT)
    # The exponent of 2, as it stands in the bits of a float, rounded down to one of 16. It counts
    # from one below a multiple of 4. Of 0 comes a number below 0.
    form = format_of(arrays.xp, total.dtype)
    one = 1 << (form.mantissa - 1)
    bits = ((total.view(form.integers) + one) & (-4 * one)) - one
    unit: Scalar = arrays.xp.clip(bits.view(form.floats), LEAST_UNIT)
    return unit


# Of smaller weights: a float32 that has all of its bits, and so has its reciprocal.
LEAST_UNIT = 2.0**-124


class Accumulation(NamedTuple):
    """A window as it is worked on: an accumulator for each leaf, and how much has been folded.

    `Accumulator` and `multi_steps` open their states as one. The weights of means are measured in
    `unit`: their accumulators are sums of w / unit * v. `rejected` counts the micro-batches that
    were not folded. `owned` says that nobody else has the memory of the accumulators.
    """

    outputs: Outputs
    accumulators: Sequence[Reduced]
    tally: Tally
    unit: Scalar
    rejected: Scalar = 0
    owned: bool = False

    @property
    def total(self) -> Scalar:
        """The total weight: a float where the host sees it."""
        # The two addends are exact in float32, and so is their sum in Python's float64.
        first, *rest = map(self.outputs.backend.arrays.scalar, self.tally.weight)
        return sum(rest, first)

    def add(
        self, leaves: Sequence[Array], weight: Scalar, donate: bool = False, fused: bool = True
    ) -> "Accumulation":
        """The window with one more micro-batch of this weight; in the same memory if that is
        donated.

        Unless `fused`, every product is rounded before it is added: then this is, to the bit, the
        merge with a window of that micro-batch alone.
        """
        outputs, sums, arrays = self.outputs, self.outputs.backend.sums, self.outputs.backend.arrays
        before, is_empty, is_wide = self.total, False, len(self.tally.weight) == 1
        if isinstance(weight, int | float) and isinstance(before, float):
            # Where the host sees all of them, it adds them: arrays of one number are slow.
            number, total, is_empty = weight, before + weight, not before
            tally = Tally(arrays.addends(total, is_wide), self.tally.steps + 1)
        else:
            one = Tally(arrays.addends(weight, is_wide), 1)
            tally = self.tally.merge(one)
            number, total = one.total, tally.total
        unit = unit_of(total, arrays)
        window, share = self.in_unit(unit, donate, is_empty), number / unit
        weights = [share if fold is not None and fold.is_mean else weight for fold in outputs.folds]
        if fused:
            accumulators, owned = sums.add(
                outputs.folds, window.accumulators, leaves, weights, donate or window.owned
            )
        else:
            lifted = sums.lifted(outputs.folds, leaves, weights)
            accumulators, owned = window._combined(lifted), False
        return window._replace(accumulators=accumulators, tally=tally, owned=owned)

    def in_unit(self, unit: Scalar, donate: bool = False, is_empty: bool = False) -> "Accumulation":
        """The same in another unit; in the same memory if that is donated. Nothing is rescaled of
        a window that `is_empty`.
        """
        backend, folds = self.outputs.backend, self.outputs.folds
        factor = backend.arrays.scalar(self.unit) / unit
        if isinstance(factor, float):
            if factor == 1:
                return self
            unit = backend.arrays.addends(unit, len(self.tally.weight) == 1)[0]
        accumulators = [*self.accumulators]
        means = [
            leaf_index
            for leaf_index, fold in enumerate(folds)
            if fold is not None and fold.is_mean and not is_empty
        ]
        scaled = backend.sums.scaled([accumulators[i] for i in means], factor, donate)
        for leaf_index, accumulator in zip(means, scaled, strict=True):
            accumulators[leaf_index] = accumulator
        owned = len(means) == len(folds)
        return self._replace(accumulators=accumulators, unit=unit, owned=owned)

    def merge(self, other: "Accumulation") -> "Accumulation":
        """What both have folded; this one comes first, for folds that keep the order."""
        tally = self.tally.merge(other.tally)
        merged = self._replace(tally=tally, rejected=self.rejected + other.rejected)
        unit = unit_of(merged.total, self.outputs.backend.arrays)
        first, second = self.in_unit(unit), other.in_unit(unit)
        return merged._replace(
            accumulators=first._combined(second.accumulators), unit=first.unit, owned=False
        )

    def _combined(self, others: Sequence[Reduced]) -> list[Reduced]:
        triples = zip(self.outputs.folds, self.accumulators, others, strict=True)
        return [
            None if fold is None else fold.combine(first, second) for fold, first, second in triples
        ]

    @property
    def tallies(self) -> list[Tally]:
        """What each leaf is normalised by: numbers where the host sees them, and the weight of a
        mean in the unit of its sum.
        """
        arrays, total = self.outputs.backend.arrays, self.total
        steps, share = arrays.scalar(self.tally.steps), total / arrays.scalar(self.unit)
        whole, of_mean = Tally((total,), steps), Tally((share,), steps)
        return [
            of_mean if fold is not None and fold.is_mean else whole for fold in self.outputs.folds
        ]

    def emptied(self, donate: bool = False, taken: Tree = None) -> "Accumulation":
        """The window when nothing is folded; in the same memory if that is donated, and not
        taken by other arrays.
        """
        backend = self.outputs.backend
        accumulators = backend.sums.emptied(self.outputs.folds, self.accumulators, donate, taken)
        return empty(self.outputs, accumulators)

    def of_value(self) -> "Accumulation":
        """The part of it that accumulates what grad_fn returns, without what observers have
        folded.
        """
        return self._replace(
            outputs=self.outputs.of_value, accumulators=self.accumulators[self.outputs.before :]
        )

    def check_known(self, name: str = "output") -> None:
        """Raises FuncgaError, which names the leaf of a tree of this name, if the host sees that
        a result is lost.
        """
        pairs = zip(self.outputs.folds, self.accumulators, strict=True)
        for leaf_index, (fold, accumulator) in enumerate(pairs):
            if fold is not None:
                path = lambda leaf_index=leaf_index: self.outputs.paths(name)[leaf_index]
                fold.check_known(accumulator, self.tally, path)

    def where(self, condition: Array, other: "Accumulation") -> "Accumulation":
        """Itself where the condition is true, else the other window. The host need not see the
        condition.
        """
        arrays, trees = self.outputs.backend.arrays, self.outputs.backend.trees

        # `where`, not a product with 0 or 1: 0 * NaN is NaN, and what is not chosen may be NaN.
        def select(chosen: Array, otherwise: Array) -> Array:
            if not arrays.is_array(chosen):
                return chosen
            is_true = arrays.cast(condition, condition.dtype, chosen)
            return arrays.xp.where(is_true, chosen, otherwise)

        (chosen, structure), (otherwise, _) = [
            trees.flatten((tuple(window.accumulators), window.tally, window.unit, window.rejected))
            for window in (self, other)
        ]
        accumulators, tally, unit, rejected = trees.unflatten(
            structure, [*map(select, chosen, otherwise)]
        )
        return Accumulation(self.outputs, accumulators, tally, unit, rejected, owned=True)


def empty(outputs: Outputs, accumulators: Sequence[Reduced]) -> Accumulation:
    """The window of these accumulators in which nothing is folded."""
    arrays = outputs.backend.arrays
    # Weights are counted in 64 bits only beside sums of as many.
    is_wide = any(fold is not None and fold.is_wide for fold in outputs.folds)
    # Every number is an array of its own, since one buffer cannot be donated twice.
    zero, unit = arrays.addends(0, is_wide), arrays.addends(1, is_wide)[0]
    tally = Tally(zero, arrays.integer(0))
    return Accumulation(outputs, accumulators, tally, unit, arrays.integer(0))


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
        # The state remembers dtypes and structure as 0-d arrays: unlike a dtype, an array passes
        # through jit.
        zeros = backend.arrays.xp.zeros
        dtype_marks = [
            None if dtype is None else zeros((), dtype=dtype) for dtype in outputs.dtypes
        ]
        window = empty(outputs, outputs.identities(leaves))
        return self._closed(window, outputs.structure_of(dtype_marks))

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
        window = self._opened(state, backend_of([state, value], lambda: ["state", "value"]))
        weight = check_weight(weight, window.outputs.backend.arrays)
        if any(fold is not None and fold.is_narrow for fold in window.outputs.folds):
            check_narrow(weight)
        leaves = window.outputs.leaves(value, "this update")
        # `like` in the state has no shapes, so these are compared here, before broadcasting could
        # hide a difference.
        for leaf_index, leaf in enumerate(leaves):
            fold, accumulator = window.outputs.folds[leaf_index], window.accumulators[leaf_index]
            if fold is not None and not fold.takes(leaf, accumulator):
                _check_shapes(window, leaf_index, fold.lift(leaf, weight))
        return self._closed(window.add(leaves, weight, fused=False), state.like)

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
        window = self._opened(a, backend_of([a, b], lambda: ["a", "b"]))
        window.outputs.leaves(b.like, "the second state")
        for leaf_index, second in enumerate(b.leaves):
            _check_shapes(window, leaf_index, second)
        return self._closed(
            window.merge(window._replace(accumulators=b.leaves, tally=b.tally, unit=b.unit)), a.like
        )

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
        window = self._opened(state, backend_of([state], lambda: ["state"]))
        window.check_known()
        outputs, accumulators = window.outputs, window.accumulators
        sums = outputs.backend.sums
        return outputs.structure_of(
            sums.finish(outputs.folds, accumulators, window.tallies, donate=False)
        )

    def _opened(self, state: AccumulatorState, backend: Backend) -> Accumulation:
        if not isinstance(state, AccumulatorState):
            raise FuncgaError(
                f"the state is of type {type(state).__name__}. Start with state = "
                "accumulator.init(like) and pass on what update and merge return."
            )
        outputs, _ = bind_outputs(self.fold, state.like, backend, shaped=False)
        return Accumulation(outputs, state.leaves, state.tally, state.unit)

    def _closed(self, window: Accumulation, like: Tree) -> AccumulatorState:
        return AccumulatorState(tuple(window.accumulators), like, window.tally, window.unit)


def _check_shapes(window: Accumulation, leaf_index: int, contribution: Reduced) -> None:
    """Raises FuncgaError if what is to be combined with the accumulator of a leaf would be
    broadcast.
    """
    fold, accumulator = window.outputs.folds[leaf_index], window.accumulators[leaf_index]
    if fold is None or fold.fold.reducer.monoid.axis is not None:
        return
    describe = window.outputs.backend.arrays.describe
    for before, added in zip(parts_of(accumulator), parts_of(contribution), strict=True):
        if before.shape != added.shape:
            raise FuncgaError(
                f"{window.outputs.paths()[leaf_index]} is {describe(added)}, and the state was "
                f"made for {describe(before)}: the two cannot be combined. Make a state for each "
                "shape, or, if it has a row for each example, fold with funcga.concat()."
            )
