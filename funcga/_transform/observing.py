"""What the observers of `multi_steps` fold in a window, beside its gradients, and what they say at its end."""

from dataclasses import dataclass, field, replace

from funcga._backend import Backend
from funcga._fold.accumulator import Accumulation
from funcga._fold.outputs import Outputs, bind_outputs
from funcga._observe import Observers
from funcga._observe.readings import Readings
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import FoldTree


@dataclass(eq=False)
class ObservingUpdates:
    """The observers of a transform; a window is then one of (what observers fold, gradients)."""

    observers: Observers
    fold: FoldTree
    last: Readings | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if any(fold.reducer.monoid.axis is not None for fold in self.observers.folds):
            raise FuncgaError(
                "an observer collects a value of every micro-batch, as dropped() and gradient_norms() do, and the "
                "state of multi_steps cannot grow. How many were dropped it counts anyway: read state.dropped. Observe "
                "what is summed, as gradient_noise() does; or fold the window in one call, by funcga.accumulate."
            )

    @property
    def folds(self) -> tuple[Tree, FoldTree]:
        """The folds of a whole window."""
        return self.observers.folds, self.fold

    @property
    def readings(self) -> Readings:
        """What observers are told of the gradients that the transform was bound to last."""
        assert self.last is not None
        return self.last

    def with_room(self, params: Tree, backend: Backend) -> Tree:
        """(room for what observers fold, the params): what a window for gradients like these is made for."""
        leaves, structure = backend.trees.flatten(params)
        numbered = backend.trees.unflatten(structure, [*range(len(leaves))])
        self.last = Readings(self.observers, self.fold, params, numbered, backend)
        like = next((leaf for leaf in leaves if backend.arrays.is_array(leaf)), backend.arrays.as_array(0.0))
        return self.last.placeholders(like), params

    def bound(self, grads: Tree, backend: Backend) -> Outputs:
        """The Outputs of a window of such gradients. Raises FuncgaError for folds that do not fit."""
        bind_outputs(self.fold, grads, backend, name="params")  # its errors name the gradients alone
        outputs, _ = bind_outputs(self.folds, self.with_room(grads, backend), backend, name="params")
        return replace(outputs, before=len(self.observers.folds))

    def unobserved(self, empty: Accumulation, params: Tree) -> Tree:
        """What is said before the first update: NaN, in the structure and the types of what is said later."""
        backend, outputs = empty.outputs.backend, empty.outputs
        folds = [fold for fold in outputs.folds[: outputs.before] if fold is not None]
        told = [fold.normalize(empty.accumulators[index], empty.tally) for index, fold in enumerate(folds)]
        leaves, structure = backend.trees.flatten(self.readings.observation(told, params))
        nothing = [backend.arrays.xp.full_like(leaf, float("nan")) for leaf in leaves]
        return backend.trees.unflatten(structure, nothing)

    def said(self, folded: Tree, loss_scale: Scalar) -> Tree:
        """What the observers say of a window that has come to this; the gradients in it have a loss scale."""
        told, grads = folded
        return self.readings.observation(told, grads, loss_scale)


def selected(updated: bool | Array, after: Tree, before: Tree, backend: Backend) -> Tree:
    """What is said of the last window if it was an update, else what was said before."""
    if not backend.arrays.is_array(updated):
        return after if updated else before
    leaves, structure = backend.trees.flatten(after)
    pairs = zip(leaves, backend.trees.flatten(before)[0], strict=True)
    return backend.trees.unflatten(structure, [backend.arrays.xp.where(updated, new, old) for new, old in pairs])
