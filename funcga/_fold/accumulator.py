"""The window: what has been folded so far, for a loop that is not one call. `Accumulator` folds
values into it; `multi_steps` is one, with a gate that ends the window.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

from funcga._backend import Arrays, Backend
from funcga._backend.dispatch import backend_of
from funcga._backend.prefixes import PathError, leaf_paths, leaves_in_order
from funcga._fold import (
    Tally,
    addends,
    check_narrow,
    check_weight,
    describe,
    kind,
    largest,
    parts_of,
)
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._types import Across, Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean


class Parts(NamedTuple):
    """What a reducer holds of one leaf, where that is several arrays."""

    parts: tuple[Array, ...]


class AccumulatorState(NamedTuple):
    """What has been folded so far, a window: a tree of arrays that passes through jit, scan,
    checkpoints and torch.save.

    Attributes:
        accumulated: What the reducers hold, in the structure of the folded value: for every leaf an
            array of at least 32 bits, or the Parts of its reducer. With leaves that a tool folds
            beside these it is (those leaves, that tree).
        tally: The total weight and the number of updates. Its `weight` is two float32 scalars whose
            sum is exact to 48 bits, or one float64 if a leaf is.
        rejected: In `multi_steps`, how many micro-batches were left out.
        part: In `multi_steps(across=)` of torch, whose part of the window it is: int32[2], the
            replica and how many there are, or zeros for the window of all replicas. Elsewhere it is
            empty.
        unit: What the weights in the sums of means are measured in, a power of 16: 1 for total
            weights from 1 to below 16.
        like: In `Accumulator`, a 0-d array of the dtype of every leaf of the folded value.

    Example:
        >>> accumulator = funcga.Accumulator(funcga.mean())
        >>> state = accumulator.update(accumulator.init(torch.zeros(2)), torch.ones(2), weight=3)
        >>> state.accumulated, float(state.tally.weight[0])
        (tensor([3., 3.]), 3.0)
    """

    accumulated: Tree
    tally: Tally
    rejected: Scalar
    part: Array | tuple[()] = ()
    unit: Scalar = 1.0  # as in states that have none, from earlier versions
    like: Tree = ()


# -- a window that is open


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


def counted(window: "Accumulation", weight: Scalar) -> tuple[Tally, Scalar, Scalar]:
    """(the tally with one more value, its weight as one scalar, the unit of the sums), where the
    host does not see the weights.
    """
    arrays = window.outputs.backend.arrays
    one = Tally(addends(weight, len(window.tally.weight) == 1, arrays), 1)
    tally = window.tally.merge(one)
    return tally, one.total, unit_of(tally.total, arrays)


class Accumulation(NamedTuple):
    """A window that is open: the fold of each leaf, its accumulator, and all else of the state.

    Accumulators of means are sums of w / unit * v. `across`: of whose window it is a part.
    """

    outputs: Outputs
    accumulators: Sequence[Reduced]
    tally: Tally
    unit: Scalar
    rejected: Scalar
    like: Tree = ()
    across: Across = None

    @property
    def total(self) -> Scalar:
        """The total weight: a float where the host sees it."""
        # The sum of two float32 numbers, exact in Python's float64.
        first, *rest = map(self.outputs.backend.arrays.scalar, self.tally.weight)
        return sum(rest, first)

    def packed(self, is_empty: bool = False) -> AccumulatorState:
        """The window as a state; `is_empty`: nothing is folded."""
        leaves = [Parts(leaf) if isinstance(leaf, tuple) else leaf for leaf in self.accumulators]
        backend = self.outputs.backend
        tree = backend.trees.unflatten(self.outputs.structure, leaves)
        whole = AccumulatorState(tree, self.tally, self.rejected, (), self.unit, self.like)
        if not self.across:
            return whole
        return backend.states.as_part([whole], self.across, is_empty)  # type: ignore[no-any-return]

    def add(
        self, leaves: Sequence[Array], weight: Scalar = 1, donate: bool = False
    ) -> "Accumulation":
        """The window with the leaves of one more value; in its memory if that is donated.

        Raises FuncgaError for a weight that cannot be counted.
        """
        backend, folds = self.outputs.backend, self.outputs.folds
        arrays, is_wide = backend.arrays, len(self.tally.weight) == 1  # counted in 64 bits
        limbs = [*map(arrays.scalar, self.tally.weight)]
        if type(weight) is not int or weight != 1:
            weight = check_weight(weight, arrays)
            if not is_wide:
                check_narrow(weight)
        if {*map(type, [*limbs, weight])} <= {int, float}:
            # Added on the host if it sees them, as 0-d arrays are slow: exactly, in float64.
            number, total = weight, sum([*limbs, weight])
            tally = Tally(addends(total, is_wide, arrays), self.tally.steps + 1)
            unit = unit_of(total, arrays)
        else:
            tally, number, unit = backend.states.counted(self, weight)
        # The sums of an empty window may have no memory yet.
        steps = arrays.scalar(self.tally.steps)
        donate = donate and isinstance(steps, int) and steps > 0
        window, known = self, arrays.scalar(self.unit)
        if not (type(known) is type(unit) is float and known == unit):  # seldom
            window = self.in_unit(unit, donate)
            # Sums that were rescaled have memory of their own.
            donate = donate or not window.shares_sums(self)
        share = number if type(unit) is float and unit == 1 else number / unit
        weights = [share if fold is not None and fold.is_mean else weight for fold in folds]
        added = backend.states.add(window, leaves, weights, donate)
        return window._replace(accumulators=added, tally=tally)

    def shares_sums(self, other: "Accumulation") -> bool:
        """Whether some accumulators are those of another window."""
        pairs = zip(self.accumulators, other.accumulators, strict=True)
        return any(own is others is not None for own, others in pairs)

    def in_unit(self, unit: Scalar, donate: bool = False) -> "Accumulation":
        """The window in another unit; in place if `donate`."""
        arrays, states = self.outputs.backend.arrays, self.outputs.backend.states
        if unit is self.unit:
            return self
        factor = arrays.scalar(self.unit) / unit
        if isinstance(factor, float):
            if factor == 1:  # the usual case
                return self
            unit = addends(unit, len(self.tally.weight) == 1, arrays)[0]
        weight = self.total
        if isinstance(weight, float) and not weight:  # a sum of nothing is 0 in every unit
            return self._replace(unit=unit)
        folds, sums = enumerate(self.outputs.folds), [*self.accumulators]
        means = [leaf_index for leaf_index, fold in folds if fold is not None and fold.is_mean]
        if means:
            scaled = states.scaled([sums[each] for each in means], factor, donate)
            for leaf_index, total in zip(means, scaled, strict=True):
                sums[leaf_index] = total
        return self._replace(accumulators=sums, unit=unit)

    def combined(self, leaf_index: int, other: Reduced) -> Reduced:
        """The accumulator of a leaf combined with another one. Raises FuncgaError if one would be
        broadcast.
        """
        fold, mine = self.outputs.folds[leaf_index], self.accumulators[leaf_index]
        if fold is None:
            return None
        pairs = zip(parts_of(mine), parts_of(other), strict=True)
        if fold.axis is None and any(a.shape != b.shape for a, b in pairs):
            raise self._unfit(leaf_index, largest(other), "output")
        return fold.combine(mine, other)

    def merge(self, other: "Accumulation") -> "Accumulation":
        """The two windows merged; this one first, for folds that keep the order."""
        rejected = self.rejected + other.rejected
        merged = self._replace(tally=self.tally.merge(other.tally), rejected=rejected)
        unit = unit_of(merged.total, self.outputs.backend.arrays)
        first, second = self.in_unit(unit), other.in_unit(unit)
        if other.outputs.structure != self.outputs.structure:
            raise FuncgaError(
                "the two states were made for values of other structures: state = "
                "accumulator.init(value), of one value for both."
            )
        combined = [*map(first.combined, count(), second.accumulators)]
        return merged._replace(accumulators=combined, unit=first.unit)

    def finished(self, donate: bool = False, name: str = "output") -> list[Reduced]:
        """The normalised leaves; in the memory of the sums if that is donated.

        Raises FuncgaError, which names the leaf in a tree of this name, if the host sees that a
        result is lost.
        """
        outputs = self.outputs
        for leaf_index, fold in enumerate(outputs.folds):
            if fold is not None and fold.fold.normalizer.lost:
                path = lambda leaf_index=leaf_index: outputs.paths(name)[leaf_index]
                fold.check_known(self.accumulators[leaf_index], self.tally, path)
        # A mean is divided by the weight in the unit of its sum.
        arrays, total = outputs.backend.arrays, self.total
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

    # What is given at a call.

    def matched(self, tree: Tree, name: str = "output") -> tuple[Tree, list[Array]]:
        """An "output", "grads" or "params", and its leaves in the order of their accumulators. In a
        larger tree of params, such as a whole module, None takes the place of every other leaf.

        Raises FuncgaError, which names the leaf, if the structure, a shape or a kind of dtype is
        not that of what the state was made for.
        """
        outputs, arrays = self.outputs, self.outputs.backend.arrays
        leaves, structure = outputs.backend.trees.flatten(tree)
        if structure != outputs.of_value.structure:
            tree, leaves = self._in_order(tree, name)
        pairs = zip(leaves, self.accumulators[outputs.before :], strict=True)
        for leaf_index, (leaf, accumulator) in enumerate(pairs, outputs.before):
            # The usual case: an array of the same type.
            if type(leaf) is type(accumulator) and (
                leaf is None or (leaf.shape, leaf.dtype) == (accumulator.shape, accumulator.dtype)
            ):
                continue
            if isinstance(leaf, int | float | complex):
                leaf = leaves[leaf_index - outputs.before] = arrays.as_array(leaf)
            fold, is_param = outputs.folds[leaf_index], name == "params"
            fits = is_param and fold is None
            if fold is not None and arrays.is_array(leaf):
                kind_of, own = kind(leaf.dtype), kind(outputs.dtypes[leaf_index])
                fits = any(part.shape == leaf.shape for part in parts_of(accumulator))
                # Where a value is not added as it is, what becomes of it is compared.
                fits = fits if is_param else kind_of == own and (fits or not fold.adds)
            if not fits:
                raise self._unfit(leaf_index, leaf, name)
        return tree, leaves

    def _in_order(self, tree: Tree, name: str) -> tuple[Tree, list[Any]]:
        """A tree and its leaves in the order of their accumulators."""
        trees, paths = self.outputs.backend.trees, self.outputs.paths(name)[self.outputs.before :]
        if name == "params":
            leaves, structure = trees.flatten(tree)
            pairs, trained = zip(leaf_paths(tree, trees, name), leaves, strict=True), {*paths}
            kept = [leaf if path in trained else None for path, leaf in pairs]
            tree = trees.unflatten(structure, kept)
        try:
            return tree, leaves_in_order(tree, paths, trees, name)
        except PathError as error:
            raise FuncgaError(
                f"the {name} have another structure than the state was made for: {error}. Give all "
                "of these at every call, zeros where there is nothing to add; or make a state for "
                "what there is, with init."
            ) from None

    def _unfit(self, leaf_index: int, leaf: Any, name: str) -> FuncgaError:
        accumulator = self.accumulators[leaf_index]
        return FuncgaError(
            f"{self.outputs.paths(name)[leaf_index]} is {describe(leaf)}, and the state was made "
            f"for {describe(largest(accumulator))}: the two cannot be combined. Make a state for "
            "each shape, with init; or, of a row for each example, fold with funcga.concat()."
        )


def empty(outputs: Outputs, accumulators: Sequence[Reduced], across: Across = None) -> Accumulation:
    """The empty window of these accumulators."""
    arrays = outputs.backend.arrays
    # Weights are counted in 64 bits only if some sums are.
    is_wide = any(fold is not None and fold.bits == 64 for fold in outputs.folds)
    # Each number is an array of its own, as one buffer cannot be donated twice.
    dtype = arrays.xp.float64 if is_wide else arrays.xp.float32
    weight = tuple([arrays.as_array(0, dtype) for _ in range(1 if is_wide else 2)])
    unit = arrays.as_array(1, dtype)
    steps, rejected = (arrays.as_array(0, arrays.xp.int32) for _ in range(2))
    tally = Tally(weight, steps)
    return Accumulation(outputs, accumulators, tally, unit, rejected, across=across)


class StateFolding:
    """A fold of values, or of gradients, which are named by their "params"."""

    # A tool that folds more beside gradients says how many leaves stand before theirs. It also has
    # `folded`, which makes these leaves, and `updating(run, ...)`, which runs the function of an
    # update on (the inner state, what a state says of these leaves).
    before = 0
    folded: Callable[..., list[Array]]
    updating: Callable[..., Any]

    def __init__(self, fold: FoldTree, name: str = "output"):
        self.fold, self.name = fold, name
        # Set by `opened`, for the next call: the types of the accumulators, and their Outputs.
        self.last: tuple[list[object], Outputs] | None = None

    def __reduce__(self) -> Any:
        """Pickled without what was cached."""
        return type(self), (self.fold, self.name)

    def empty(self, like: Tree, backend: Backend) -> tuple[Accumulation, Tree]:
        """The empty window for values like this one, and what a state of `multi_steps` says of the
        leaves of a tool before the first update.
        """
        outputs, leaves = self.bind(like, backend)
        pairs = zip(outputs.folds, leaves, strict=True)
        sums = [None if fold is None else fold.identity(leaf) for fold, leaf in pairs]
        return empty(outputs, sums), ()

    def opened(self, state: AccumulatorState, backend: Backend) -> Accumulation:
        """The window of a state."""
        tree, tally, rejected, _, unit, like = state
        leaves, structure = backend.trees.flatten(tree, lambda node: type(node) is Parts)
        accumulators = [leaf.parts if type(leaf) is Parts else leaf for leaf in leaves]
        likes: list[Array] = [
            largest(leaf) if type(leaf) is tuple else leaf for leaf in accumulators
        ]
        marked = type(like) is not tuple or len(like) > 0
        if marked:
            likes = backend.trees.flatten(like)[0]
        types = [None if each is None else (each.dtype, each.shape) for each in likes]
        key, last = [backend, structure, *types], self.last
        if last is None or last[0] != key:
            last = key, self.bind(backend.trees.unflatten(structure, likes), backend, not marked)[0]
            self.last = last
        return Accumulation(last[1], accumulators, tally, unit, rejected, like)

    def bind(
        self, value: Tree, backend: Backend, shaped: bool = True
    ) -> tuple[Outputs, list[Array]]:
        """The Outputs for values like this one, and its leaves. FuncgaError for folds that do not
        fit.
        """
        outputs, leaves = bind_outputs(self.fold, value, backend, shaped=shaped, name=self.name)
        return replace(outputs, before=self.before), leaves


# -- the accumulator


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

    @cached_property
    def _folding(self) -> StateFolding:
        return StateFolding(self.fold)

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
        window, _ = self._folding.empty(like, backend)
        # Dtypes are kept as 0-d arrays: unlike a dtype, an array passes through jit.
        as_array, dtypes = backend.arrays.as_array, window.outputs.dtypes
        dtype_marks = [None if dtype is None else as_array(0, dtype) for dtype in dtypes]
        return window._replace(like=window.outputs.structure_of(dtype_marks)).packed()

    def update(self, state: AccumulatorState, value: Tree, weight: Scalar = 1) -> AccumulatorState:
        """The state with one more value.

        What is folded leaves its autograd graph, which would hold every micro-batch until the
        window ends. Inside of torch.func transforms it stays there, so that they can differentiate
        through it.

        Args:
            state: What `init`, `update` or `merge` returned. It is not changed.
            value: Arrays in the structure and shapes that the state was made for, and of the same
                kind of dtype.
            weight: The weight of the value, a number or a 0-d array >= 0.

        Returns:
            The state of all that has been folded.

        Raises:
            FuncgaError: The value has another structure, shape or kind of dtype, or the weight is
                negative.

        Example:
            >>> state = accumulator.update(state, {"w": torch.ones(2)}, weight=3)
        """
        window = self._opened(state)
        return window.add(window.matched(value)[1], weight).packed()

    def merge(self, a: AccumulatorState, b: AccumulatorState) -> AccumulatorState:
        """The state of what two states have folded: two halves of a window, or two replicas.

        Args:
            a: The state that comes first, where the order counts.
            b: The other one.

        Returns:
            The state of both.

        Raises:
            FuncgaError: The states were made for values of other structures or shapes.

        Example:
            >>> both = accumulator.merge(state, state)
        """
        return self._opened(a).merge(self._opened(b)).packed()

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
        window = self._opened(state)
        return window.outputs.structure_of(window.finished())

    def _opened(self, state: AccumulatorState) -> Accumulation:
        return self._folding.opened(state, backend_of([state.tally.steps], lambda: ["state"]))
