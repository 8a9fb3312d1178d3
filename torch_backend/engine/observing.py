"""What observers are told of a window: each gradient is measured on its way to the accumulator.

Only torch has this file: in JAX a measure is one more value of the program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from funcga._grad import GradientFunction
from funcga._observe.readings import Readings
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import is_dtensor

_SHORT = 2**12  # elements of a gradient that may wait


class Observing:
    """Hooks on the leaves of a window, each of which measures the gradient that comes to its leaf.

    A hook on a tensor sees its whole gradient before autograd adds it to anything, times the cotangent of the pass.
    """

    def __init__(self, readings: Readings, leaves: Mapping[int, torch.Tensor], nothing: torch.Tensor):
        """`leaves` are those of backward passes, by their leaf indices in the output; `nothing` is a 0."""
        self.readings, self.measured = readings, dict[int, torch.Tensor]()
        # The measures of a leaf that no gradient comes to.
        self.short = list[int]()
        # Norms are squared together, when all are there.
        self.takes_norms = readings.are_norms and not any(map(is_dtensor, leaves.values()))
        self.nothing = nothing if self.takes_norms else nothing.repeat(len(readings.observers.measures))
        in_value = {readings.count + in_value: in_value for in_value in readings.in_value}
        self.handles = [
            leaf.register_hook(partial(self._measure, in_value.pop(leaf_index)))  # type: ignore[no-untyped-call]
            for leaf_index, leaf in leaves.items()
            if leaf_index in in_value
        ]
        # These are no leaves of the window: a micro-batch leaves their gradients to be added.
        self.left = [*in_value.values()]

    def _measure(self, in_value: int, gradient: torch.Tensor) -> None:
        if in_value in self.measured:
            raise FuncgaError(
                "observe= was given, and a parameter gets its gradient in several pieces, as where two reentrant "
                "checkpoints use it: the norm of the whole cannot be told from them. Checkpoint with "
                "use_reentrant=False."
            )
        # Autograd records nothing here. The usual case is one operation a leaf.
        if self.takes_norms:
            is_short = gradient.numel() <= _SHORT and gradient.dtype.itemsize >= 4
            # Short ones, which are many, wait for the end of the pass: one operation takes all of their norms.
            if is_short:
                self.short.append(in_value)
            self.measured[in_value] = gradient if is_short else arrays.norm(gradient)
        else:
            self.measured[in_value] = self.readings.measures_of([gradient])[0]

    def told(self, to_add: Sequence[Any], weight: Scalar, seed: Scalar | None) -> list[Array]:
        """What the observers are told of the last micro-batch, whose gradients came times `seed`.

        `to_add` are the leaves of the output that autograd has not added.
        """
        with torch.no_grad():
            for in_value in self.left:
                self._measure(in_value, to_add[self.readings.count + in_value])
            if self.short:
                norms = torch._foreach_norm([self.measured[in_value] for in_value in self.short])
                self.measured.update(zip(self.short, norms, strict=True))
                self.short.clear()
            measured, self.measured = self.measured, {}
            if not isinstance(seed, torch.Tensor) and not seed:
                # A pass without a weight measures nothing, and the micro-batch counts for nothing.
                measured, seed = {}, 1.0
            rows = [measured.get(in_value, self.nothing) for in_value in self.readings.in_value]
            dtype = self.readings.dtype
            measures = arrays.squares(rows, dtype)[:, None] if self.takes_norms else torch.stack(rows)
            return self.readings.leaves_for(measures, weight, seed)

    def forget(self) -> None:
        """Takes back what the last pass has measured: it was none of a micro-batch."""
        self.measured.clear()
        self.short.clear()

    def end(self) -> None:
        """Takes the hooks off: the leaves may be the parameters of a module."""
        for handle in self.handles:
            handle.remove()


@dataclass(frozen=True, eq=False)
class ObservedGradient(GradientFunction):
    """A gradient function whose output begins with what is measured of the gradient."""

    inner: GradientFunction | None = None
    before: tuple[Array, ...] = ()

    @staticmethod
    def of(inner: GradientFunction, readings: Readings, like: torch.Tensor) -> "ObservedGradient":
        """That of a gradient function; `like` is on the device of the gradient."""
        values = {each.name: getattr(inner, each.name) for each in fields(GradientFunction)}
        return ObservedGradient(**values, inner=inner, before=readings.placeholders(like))

    @property
    def leaves_before(self) -> int:
        """How many leaves stand before the value and the gradient."""
        return len(self.before)

    def compose(self, loss: Array, aux: Tree, grads: Sequence[Tree]) -> Tree:
        """What is measured, zeros in its place, and what the gradient function returns."""
        assert self.inner is not None
        return self.before, self.inner.compose(loss, aux, grads)
