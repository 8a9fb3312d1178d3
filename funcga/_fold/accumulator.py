"""`Accumulator`: the fold as a protocol, for whoever writes the loop: init / update / merge / finalize."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcga._backend.dispatch import backend_of
from funcga._backend.protocols import Backend
from funcga._fold import tally
from funcga._fold.leaf import LeafFold
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._fold.tally import Tally
from funcga._fold.weight import check_narrow, check_weight
from funcga.errors import FuncgaError
from funcga.folds import FoldTree, mean


class AccumulatorState(NamedTuple):
    """What has been folded so far: a tree of arrays that passes through jit, scan, checkpoints and torch.save.

    `leaves` has, for every leaf of the folded value in order, what its reducer holds: an array or a tuple of arrays.
    `like` has the structure of the folded value, with a 0-d array of the leaf's dtype in every place.
    """

    leaves: tuple[Any, ...]
    like: Any
    tally: Tally


@dataclass(frozen=True)
class Accumulator:
    """A fold as pure functions of a state.

    Laws: merge(s, init) = s; merge is associative, and commutative for all folds but concat and carry, which keep the
    order; update(s, v, w) = merge(s, update(init, v, w)). So any split and any order give the same `finalize`.

    >>> accumulator = funcga.Accumulator(funcga.mean())
    >>> state = accumulator.init(grads)
    >>> state = accumulator.update(state, grads, weight=tokens)
    >>> average = accumulator.finalize(state)
    """

    fold: FoldTree = field(default_factory=mean)

    def init(self, like: Any) -> AccumulatorState:
        """The state of nothing folded, for values like this: arrays, or structs with a shape and a dtype.

        Raises FuncgaError if the fold does not fit them.
        """
        backend = backend_of([like], lambda: ["like"])
        outputs = bind_outputs(self.fold, like, backend)
        xp, as_array = backend.arrays.xp, backend.arrays.as_array
        arrays = [as_array(leaf) if fold else None for fold, leaf in _bound(outputs, backend.trees.flatten(like)[0])]
        marks = [None if a is None else xp.zeros((), dtype=a.dtype) for a in arrays]
        return AccumulatorState(
            tuple(fold.identity(a) if fold else None for fold, a in _bound(outputs, arrays)),
            outputs.structure_of(marks),
            tally.empty(backend.arrays),
        )

    def update(self, state: AccumulatorState, value: Any, weight: Any = 1) -> AccumulatorState:
        """The state with one more value, of this weight: a number or 0-d array >= 0.

        What is folded leaves its autograd graph, which would hold every micro-batch until the window ends; but not
        inside of torch.func transforms, which differentiate through it. Raises FuncgaError if the value has another
        structure, shape or dtype than the state was made for.
        """
        backend = backend_of([state, value], lambda: ["state", "value"])
        outputs = self._outputs(state, backend)
        weight = check_weight(weight, backend.arrays)
        arrays, is_narrow = backend.arrays, any(fold.is_narrow for fold in outputs.folds if fold)
        if is_narrow:
            check_narrow(weight)
        # of an array two addends, which go to a framework without 64-bit types, unless the state has one already
        is_one = len(state.tally.weight) == 1 and arrays.is_array(state.tally.weight[0])
        in_two = is_narrow and arrays.is_array(weight) and not is_one
        limbs = arrays.addends(weight, wide=False) if in_two else arrays.limbs(weight)
        leaves = outputs.leaves(backend.transforms.detached(value), "this update")
        lifted = [fold.lift(leaf, weight) if fold else None for fold, leaf in _bound(outputs, leaves)]
        more = AccumulatorState(tuple(lifted), state.like, Tally(limbs, arrays.count(1)))
        return _merge(outputs, state, more)

    def merge(self, a: AccumulatorState, b: AccumulatorState) -> AccumulatorState:
        """The state of what both have folded: two halves of a window, or two replicas. `a` comes first.

        Raises FuncgaError if they were made for different values.
        """
        backend = backend_of([a, b], lambda: ["a", "b"])
        outputs = self._outputs(a, backend)
        outputs.leaves(b.like, "the second state")
        return _merge(outputs, a, b)

    def finalize(self, state: AccumulatorState) -> Any:
        """The result: normalised by the weights and steps in the state, in the structure and dtypes of the values."""
        backend = backend_of([state], lambda: ["state"])
        outputs = self._outputs(state, backend)
        return outputs.structure_of(backend.sums.finish(outputs.folds, state.leaves, state.tally, donate=False))

    def _outputs(self, state: AccumulatorState, backend: Backend) -> Outputs:
        if not isinstance(state, AccumulatorState):
            raise FuncgaError(
                f"the state is of type {type(state).__name__}. Start with state = accumulator.init(like) and pass on "
                f"what update and merge return."
            )
        return bind_outputs(self.fold, state.like, backend, shaped=False)


def _bound(outputs: Outputs, leaves: Any) -> list[tuple[LeafFold | None, Any]]:
    return list(zip(outputs.folds, leaves, strict=True))


def _merge(outputs: Outputs, a: AccumulatorState, b: AccumulatorState) -> AccumulatorState:
    merged = []
    for i, fold in enumerate(outputs.folds):
        before, more = a.leaves[i], b.leaves[i]
        if fold is not None and fold.fold.reducer.monoid.axis is None:
            _check_shapes(outputs, i, before, more)
        merged.append(None if fold is None else fold.combine(before, more))
    return AccumulatorState(tuple(merged), a.like, _merge_tallies(a.tally, b.tally, outputs.backend))


def _merge_tallies(a: Tally, b: Tally, backend: Backend) -> Tally:
    """The tally of both, of which one may be a Python number, as in torch, and the other two addends."""
    if len(a.weight) != len(b.weight):
        a, b = (
            Tally(backend.arrays.addends(t.weight[0], wide=False), t.steps)
            if isinstance(t.weight[0], int | float)
            else t
            for t in (a, b)
        )
    return tally.merge(a, b)


def _check_shapes(outputs: Outputs, i: int, before: Any, more: Any) -> None:
    describe = outputs.backend.arrays.describe
    for x, y in zip(*(z if isinstance(z, tuple) else (z,) for z in (before, more)), strict=True):
        if x.shape != y.shape:
            raise FuncgaError(
                f"{outputs.paths[i]} is {describe(y)}, and the state was made for {describe(x)}: the two cannot be "
                f"combined. Make a state for each shape, or, if it has a row for each example, fold with "
                f"funcga.concat()."
            )
