"""Binding: the fold of gradients bound to their leaves, once for all windows that are alike."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcga._backend.protocols import Backend
from funcga._fold.outputs import Outputs, bind_outputs
from funcga.errors import FuncgaError
from funcga.folds import sum


class Binding(NamedTuple):
    """What is the same for all windows of gradients in a structure, with dtypes and shapes, their `kinds`.

    `outputs` has the gradients and, last, the number of micro-batches that were rejected. `wide`: whether a leaf is
    accumulated in 64 bits, and so the weights.
    """

    kinds: list[Any]
    structure: Any
    backend: Backend
    outputs: Outputs
    wide: bool


@dataclass(frozen=True)
class Bindings:
    """The Binding of a fold to gradients, of which the last is remembered."""

    fold: Any
    last: list[Binding] = field(default_factory=list, repr=False)

    def of(self, leaves: list[Any], structure: Any, backend: Backend) -> Binding:
        """The Binding to gradients with such leaves. Raises FuncgaError for folds that do not fit."""
        kinds = [(getattr(leaf, "dtype", None), getattr(leaf, "shape", None)) for leaf in leaves]
        for last in self.last:
            if last.kinds == kinds and last.structure == structure and last.backend is backend:
                return last
        tree, count = backend.trees.unflatten(structure, leaves), backend.arrays.integer(0)
        outputs = _outputs((self.fold, sum()), (tree, count), backend)
        _check_folds(outputs)
        dtypes: set[Any] = {fold.accumulator_dtype for fold in outputs.folds if fold is not None}
        bits = {"float": 8, "complex": 16}
        wide = any(bits.get(backend.arrays.kind(dtype)) == dtype.itemsize for dtype in dtypes)
        found = Binding(kinds, structure, backend, outputs, wide)
        self.last[:] = [found]
        return found


def _outputs(folds: Any, values: Any, backend: Backend) -> Outputs:
    """The Outputs. Raises FuncgaError, in the words of a transform, for folds that do not fit."""
    try:
        return bind_outputs(folds, values, backend)
    except FuncgaError as error:
        text = str(error).replace("output[0]", "params").replace("what grad_fn returns", "the params")
        if " are not averaged silently" in text:
            path, kind = text.split(", and ")[0].split(" is ")
            text = (
                f"{path} is {kind}, and its gradients are to be averaged, as only floats are. Leave it out of the "
                f"params that init and update get (None in its place, or optax.masked around); or give it a fold of "
                f'its own, as in fold={{"w": funcga.mean(), "count": funcga.sum()}}.'
            )
        raise FuncgaError(text.replace("and grad_fn returned", "and they are")) from error


def _check_folds(outputs: Outputs) -> None:
    """Raises FuncgaError if what a fold holds grows with every call."""
    for fold, path in zip(outputs.folds, outputs.paths, strict=True):
        if fold is not None and fold.fold.reducer.monoid.axis is not None:
            raise FuncgaError(
                f"the fold of {path.replace('output[0]', 'params', 1)} collects rows, and gradients are to become one "
                f"gradient. Fold them with funcga.mean(), funcga.per_weight() or funcga.sum()."
            )
