"""`multi_steps(observe=)`: a window folds the measures of its gradients beside them."""

from collections.abc import Callable
from typing import Any

from funcga._backend import Backend
from funcga._fold.accumulator import Accumulation, Folding
from funcga._fold.outputs import Outputs
from funcga._tools import load
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree
from funcga.tools.observe.readings import Observers, Readings


class ObservedFolding(Folding):
    """The fold of (the measures of gradients, gradients)."""

    readings: Readings  # set by `bind`, of gradients like those of the last call

    def __init__(self, fold: FoldTree, observe: Tree, scales: bool):
        self.observers, self.of_gradients = Observers(observe), fold
        self.scales = scales  # whether gradients come with the scale of a loss_scaled
        if any(each.reducer.monoid.axis is not None for each in self.observers.folds):
            raise FuncgaError(
                "an observer collects a value of every micro-batch, as dropped() and "
                "gradient_norms() do, and the state of multi_steps cannot grow. How many were "
                "dropped it counts anyway: read state.dropped. Observe what is summed, as "
                "gradient_noise() does; or fold the window in one call, by funcga.accumulate."
            )
        super().__init__((self.observers.folds, fold), "params")
        self.before = len(self.observers.folds)
        self.options = {"observe=": self.observers.name}  # replicas have to observe alike

    def __reduce__(self) -> Any:
        """Pickled without what was cached."""
        return type(self), (self.of_gradients, self.observers.tree, self.scales)

    def empty(self, params: Tree, backend: Backend) -> tuple[Accumulation, Tree]:
        """The empty window for gradients like these params, and what a state has as `observed`
        before the first update: NaN, in the structure and dtypes of later observations.
        """
        arrays, leaves = backend.arrays, backend.trees.flatten(params)[0]
        like = next(filter(arrays.is_array, leaves), arrays.as_array(0.0))
        value = self._readings(params, backend).placeholders(like), params
        window, _ = super().empty(value, backend)
        observe = lambda: self.readings.observation(*window.outputs.structure_of(window.finished()))
        return window, load(f"observe.in_{backend.name}", "observe=").unknown(observe)

    def folded(self, leaves: list[Array], window: Accumulation, weight: Scalar) -> list[Array]:
        """The leaves that are folded of a micro-batch with these leaves of its gradients."""
        value = window.outputs.of_value.structure_of(leaves)
        return [*self.readings.measured(value, weight)[0], *leaves]

    def reported(
        self, measures: Tree, grads: Tree, inner: Tree, outputs: Outputs
    ) -> Callable[[Scalar, Tree], Tree]:
        """A function of whether there was an update, and of what the state had as `observed`, that
        returns what it has then.
        """
        while self.scales and type(inner) is tuple:  # a chain, whose first is a loss_scaled
            inner = inner[0]
        scale = inner.scale if self.scales else 1.0
        after = self.readings.observation(measures, grads, scale)

        def chosen(updated: Scalar, before: Tree) -> Tree:
            if isinstance(updated, bool):
                return after if updated else before
            arrays, trees = outputs.backend.arrays, outputs.backend.trees
            select = lambda new, old: arrays.xp.where(updated, arrays.cast(new, old.dtype), old)
            (news, structure), (olds, _) = trees.flatten(after), trees.flatten(before)
            return trees.unflatten(structure, [*map(select, news, olds)])

        return chosen

    def bind(
        self, value: Tree, backend: Backend, shaped: bool = True
    ) -> tuple[Outputs, list[Array]]:
        """The Outputs for values like this one, and its leaves."""
        self.readings = self._readings(value[1], backend)
        return super().bind(value, backend, shaped)

    def _readings(self, grads: Tree, backend: Backend) -> Readings:
        """How gradients like these are observed."""
        leaves, structure = backend.trees.flatten(grads)
        numbered = backend.trees.unflatten(structure, [*range(len(leaves))])
        return Readings(self.observers, self.of_gradients, grads, numbered, backend)
