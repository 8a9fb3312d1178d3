"""The accumulator: a fold as pure functions of a state, for code that has a loop of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from funcga._backend import Backend
from funcga._backend.dispatch import backend_of
from funcga._fold import Tally, check_narrow, check_weight, parts_of
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean


class Accumulation(NamedTuple):
    """A window as it is worked on: an accumulator for each leaf, and how much has been folded.

    `Accumulator` and `multi_steps` open their states as one. `rejected` counts the micro-batches
    that were not folded. `owned` says that nobody else has the memory of the accumulators.
    """

    outputs: Outputs
    accumulators: Sequence[Reduced]
    tally: Tally
    rejected: Scalar = 0
    owned: bool = False

    def add(self, leaves: Sequence[Array], weight: Scalar, donate: bool = False) -> "Accumulation":
        """The window with one more micro-batch of this weight; in the same memory if that is
        donated.
        """
        backend = self.outputs.backend
        accumulators, owned = backend.sums.add(
            self.outputs.folds, self.accumulators, leaves, weight, donate
        )
        return self._replace(accumulators=accumulators, tally=self.tally_after(weight), owned=owned)

    def emptied(self, donate: bool = False, taken: Tree = None) -> "Accumulation":
        """The window when nothing is folded; in the same memory if that is donated, and not
        taken by other arrays.
        """
        backend = self.outputs.backend
        accumulators = backend.sums.emptied(self.outputs.folds, self.accumulators, donate, taken)
        zero = Tally(
            backend.arrays.addends(0, wide=len(self.tally.weight) == 1), backend.arrays.integer(0)
        )
        return Accumulation(self.outputs, accumulators, zero, backend.arrays.integer(0))

    def of_value(self) -> "Accumulation":
        """The part of it that accumulates what grad_fn returns, without what observers have
        folded.
        """
        return self._replace(
            outputs=self.outputs.of_value, accumulators=self.accumulators[self.outputs.before :]
        )

    def tally_after(self, weight: Scalar) -> Tally:
        """The tally with one more micro-batch of this weight."""
        counted, arrays = self.tally.weight, self.outputs.backend.arrays
        if len(counted) == 2 and isinstance(weight, int | float):
            high, low = arrays.scalar(counted[0]), arrays.scalar(counted[1])
            # Where the host sees all of them, it adds them in 64 bits: arrays of one number are
            # slow.
            if isinstance(high, float) and isinstance(low, float):
                return Tally(
                    arrays.addends(high + (low + weight), wide=False), self.tally.steps + 1
                )
        return self.tally.merge(self.tally_of(weight))

    def tally_of(self, weight: Scalar) -> Tally:
        """The tally of one micro-batch of this weight, in as many bits as the window has."""
        arrays = self.outputs.backend.arrays
        return Tally(arrays.addends(weight, wide=len(self.tally.weight) == 1), 1)

    @property
    def is_narrow(self) -> bool:
        """Whether a leaf is accumulated in float32, whose range is smaller than that of the
        weights.
        """
        return any(fold.is_narrow for fold in self.outputs.folds if fold is not None)

    def check_known(self, name: str = "output") -> None:
        """Raises FuncgaError, which names the leaf of a tree of this name, if the host sees that
        a result is lost.
        """
        for leaf_index, (fold, accumulator) in enumerate(
            zip(self.outputs.folds, self.accumulators, strict=True)
        ):
            if fold is not None and fold.fold.normalizer.lost is not None:
                fold.check_known(accumulator, self.tally, partial(self._path, name, leaf_index))

    def _path(self, name: str, leaf_index: int) -> str:
        return self.outputs.paths(name)[leaf_index]

    def merge(self, other: "Accumulation") -> "Accumulation":
        """What both have folded; this one comes first, for folds that keep the order."""
        tally, rejected = self.tally.merge(other.tally), self.rejected + other.rejected
        return Accumulation(self.outputs, self._combined(other.accumulators), tally, rejected)

    def _combined(self, others: Sequence[Reduced]) -> list[Reduced]:
        return [
            None if fold is None else fold.combine(first, second)
            for fold, first, second in zip(
                self.outputs.folds, self.accumulators, others, strict=True
            )
        ]

    def updated(self, lifted: Sequence[Reduced], weight: Scalar) -> "Accumulation":
        """The window with one more micro-batch of this weight, whose leaves are lifted."""
        return self._replace(accumulators=self._combined(lifted), tally=self.tally_after(weight))

    def where(self, condition: Array, other: "Accumulation") -> "Accumulation":
        """Itself where the condition is true, else the other window. The host need not see the
        condition.
        """
        arrays = self.outputs.backend.arrays

        # `where`, not a product with 0 or 1: 0 * NaN is NaN, and what is not chosen may be NaN.
        def select(chosen: Reduced, otherwise: Reduced) -> Reduced:
            if isinstance(chosen, tuple):
                return tuple(select(*parts) for parts in zip(chosen, otherwise, strict=True))
            if chosen is None:
                return None
            is_true = (
                arrays.cast(condition, condition.dtype, chosen)
                if arrays.is_array(chosen)
                else condition
            )
            return arrays.xp.where(is_true, chosen, otherwise)

        both = [
            (tuple(window.accumulators), tuple(window.tally), window.rejected)
            for window in (self, other)
        ]
        accumulators, counted, rejected = select(*both)
        return Accumulation(self.outputs, accumulators, Tally(*counted), rejected, owned=True)


def nothing(outputs: Outputs) -> Tally:
    """The tally of a window that is empty, in arrays that both frameworks have: 64 bits only
    beside such sums.
    """
    in_64_bits = any(fold.is_wide for fold in outputs.folds if fold is not None)
    arrays = outputs.backend.arrays
    return Tally(arrays.addends(0, in_64_bits), arrays.integer(0))


class AccumulatorState(NamedTuple):
    """What has been folded so far: a tree of arrays that passes through jit, scan, checkpoints and
    torch.save.

    Attributes:
        leaves: For every leaf of the folded value, in order, what its reducer holds: an array or a
            tuple of arrays.
        like: A 0-d array of the leaf's dtype for every leaf, in the structure of the folded value.
        tally: The total weight and the number of updates.

    Example:
        >>> accumulator = funcga.Accumulator(funcga.mean())
        >>> state = accumulator.update(accumulator.init(torch.zeros(2)), torch.ones(2), weight=3)
        >>> state.leaves, float(state.tally.weight[0])
        ((tensor([3., 3.]),), 3.0)
    """

    leaves: tuple[Reduced, ...]
    like: Tree
    tally: Tally


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
        empty = Accumulation(outputs, outputs.identities(leaves), nothing(outputs))
        return self._closed(empty, outputs.structure_of(dtype_marks))

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
        if window.is_narrow:
            check_narrow(weight)
        leaves = window.outputs.leaves(value, "this update")
        # `like` in the state has no shapes, so these are compared here, before broadcasting could
        # hide a difference.
        for leaf_index, leaf in enumerate(leaves):
            fold, accumulator = window.outputs.folds[leaf_index], window.accumulators[leaf_index]
            if fold is not None and not fold.takes(leaf, accumulator):
                _check_shapes(window, leaf_index, fold.lift(leaf, weight))
        # `add` would give the same sums to rounding: it may multiply and add in one operation,
        # which rounds once.
        lifted = window.outputs.backend.sums.lifted(window.outputs.folds, leaves, weight)
        return self._closed(window.updated(lifted, weight), state.like)

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
        return self._closed(window.merge(Accumulation(window.outputs, b.leaves, b.tally)), a.like)

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
        leaves = window.outputs.backend.sums.finish(
            window.outputs.folds, window.accumulators, window.tally, donate=False
        )
        return window.outputs.structure_of(leaves)

    def _opened(self, state: AccumulatorState, backend: Backend) -> Accumulation:
        if not isinstance(state, AccumulatorState):
            raise FuncgaError(
                f"the state is of type {type(state).__name__}. Start with state = "
                "accumulator.init(like) and pass on what update and merge return."
            )
        outputs, _ = bind_outputs(self.fold, state.like, backend, shaped=False)
        return Accumulation(outputs, state.leaves, state.tally)

    def _closed(self, window: Accumulation, like: Tree) -> AccumulatorState:
        return AccumulatorState(tuple(window.accumulators), like, window.tally)


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
