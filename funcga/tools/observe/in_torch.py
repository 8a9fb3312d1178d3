"""What observers are told of a window: each gradient is measured on its way to the accumulator."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._grad import GradientFunction
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.tools.finite.in_torch import measured
from funcga.tools.observe.readings import Readings
from torch_backend import _private, arrays, trees
from torch_backend.dtensor import is_dtensor

_SHORT = 2**12  # elements of a gradient that may wait


# Elements whose squares the host adds to float32 sums with an error of less than 1e-6.
_LONG = 2**16


def squared_norms(leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of the squared absolute values of all elements of each array, [arrays], without a
    copy of them.
    """
    return torch.stack(measured(lambda array: squared_norm(array, dtype), leaves))


def squared_norm(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the squared absolute values of all elements, in this dtype."""
    array = arrays.strided(array)
    if array.is_cpu and array.dtype is dtype and array.numel() <= _LONG and array.is_contiguous():
        # The fastest of all.
        row = array.view(-1)
        return torch.dot(row, row)
    wide = None if array.dtype.itemsize >= 4 else torch.float32
    if array.is_cpu and array.numel() > _LONG and array.ndim > 1:
        # Row by row: rounding errors of long sums in float32 add up on the host.
        array = torch.linalg.vector_norm(array, dim=tuple(range(1, array.ndim)), dtype=wide)
    root: torch.Tensor = torch.linalg.vector_norm(array, dtype=wide)
    return root.to(dtype).square_()


class ObservedGradient:
    """A gradient function whose output begins with what is measured of the gradient."""

    def __init__(self, inner: GradientFunction, readings: Readings, before: tuple[Array, ...]):
        """`before`: zeros in the place of what is measured."""
        self.inner, self.readings, self.before = inner, readings, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def compose(self, loss: Array, aux: Tree, grads: Sequence[Tree]) -> Tree:
        """What is measured, zeros in its place, and what the gradient function returns."""
        return self.before, self.inner.compose(loss, aux, grads)

    def watch(self, leaves: Mapping[int, torch.Tensor]) -> "Observing":
        """What measures the gradients that come to these leaves."""
        return Observing(self, leaves)


def observed_gradient(
    program: Program,
    inner: GradientFunction,
    arguments: Arguments,
    value: tuple[torch.Tensor, Tree],
    grads: Sequence[Tree],
) -> ObservedGradient:
    """A gradient function of a program, observed.

    `value` has a first loss and its aux, and `grads` are like the gradients.
    """
    readings = program.watch.readings(program, inner.compose(*value, grads), arguments)
    return ObservedGradient(inner, readings, readings.placeholders(value[0]))


class Observing:
    """Hooks on the leaves of a window, each of which measures the gradient that comes to its leaf.

    A hook on a tensor sees its whole gradient before autograd adds it to anything, times the
    cotangent of the pass.
    """

    def __init__(self, observed: ObservedGradient, leaves: Mapping[int, torch.Tensor]):
        """`leaves` are those that last as long as the window, by their leaf indices in the output.
        The gradients of all others are measured as values.
        """
        readings = self.readings = observed.readings
        self.takes_norms = readings.are_norms and not any(map(is_dtensor, leaves.values()))
        # The measures of a leaf that no gradient comes to.
        zero = observed.before[0][0]
        self.nothing = zero if self.takes_norms else zero.repeat(len(readings.observers.measures))
        hooked = {
            index: leaves[readings.count + index]
            for index in readings.in_value
            if readings.count + index in leaves
        }
        self.not_hooked = [index for index in readings.in_value if index not in hooked]
        # If there are no groups, short gradients, which are many, wait for the end of the pass, to
        # be measured all at once, as one leaf. They only have to be put into a list, and its own
        # method is the cheapest hook.
        self.short = [index for index, leaf in hooked.items() if self._may_wait(leaf)]
        self.measured_leaves = [
            *self.short[:1],
            *(index for index in readings.in_value if index not in self.short),
        ]
        # What each leaf got in the last pass: the measures of its gradient, or the gradient itself.
        self.arrived: dict[int, list[torch.Tensor]] = {index: [] for index in readings.in_value}
        self.hooks = [
            (leaf, leaf.register_hook(self._hook(index, leaf)))  # type: ignore[no-untyped-call]
            for index, leaf in hooked.items()
        ]

    def _may_wait(self, leaf: torch.Tensor) -> bool:
        if not (self.takes_norms and self.readings.is_one_group):
            return False
        is_here = leaf.device == self.nothing.device
        return is_here and leaf.numel() <= _SHORT and leaf.dtype.itemsize >= 4

    def _hook(self, index: int, leaf: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """What is called with each gradient of a leaf. Autograd records nothing there."""
        append, dtype = self.arrived[index].append, self.readings.dtype
        # The usual cases, in as few calls as there can be.
        if index in self.short:
            return append
        if self.takes_norms and leaf.device == self.nothing.device:
            return lambda gradient: append(squared_norm(gradient, dtype))
        return partial(self._measure, index)

    def _measure(self, index: int, gradient: torch.Tensor) -> None:
        readings, gradient = self.readings, arrays.strided(gradient)
        if self.takes_norms:
            row = squared_norm(gradient, readings.dtype)
        else:
            row = readings.measures_of([gradient])[0]
        self.arrived[index].append(row.to(self.nothing.device))

    @torch.no_grad()
    def measures(
        self, values: Mapping[int, Any], weight: Scalar, seed: Scalar
    ) -> dict[int, torch.Tensor]:
        """What the observers are told of the last micro-batch, whose gradients came times `seed`,
        by leaf. `values` are the leaves of the output that autograd has not added.
        """
        for index in self.not_hooked:
            self._measure(index, values[self.readings.count + index])
        if max(map(len, self.arrived.values())) > 1:
            raise FuncgaError(
                "observe= was given, and a parameter gets its gradient in several pieces, of which "
                "none has the norm of the gradient, as reentrant checkpoints make it. Use "
                "use_reentrant=False."
            )
        waiting = [
            arrays.strided(gradient).reshape(-1)
            for index in self.short
            for gradient in self.arrived[index]
        ]
        if waiting:
            whole = squared_norm(torch.cat(waiting), self.readings.dtype)
            self.arrived[self.measured_leaves[0]][:] = [whole]
        measures = torch.stack(
            [next(iter(self.arrived[index]), self.nothing) for index in self.measured_leaves]
        )
        self.forget()
        measures = measures[:, None] if self.takes_norms else measures
        # A pass without a weight measures nothing, and the micro-batch counts for nothing.
        return dict(enumerate(self.readings.leaves_for(measures, weight, seed or 1.0)))

    def forget(self) -> None:
        """Takes back what the last pass has measured."""
        for arrived in self.arrived.values():
            arrived.clear()

    def end(self) -> None:
        """Takes the hooks off: the leaves may be the parameters of a module."""
        hooks, self.hooks = self.hooks, []
        for leaf, hook in hooks:
            _private.remove_hook(leaf, hook)


def unknown(compute: Callable[[], Tree]) -> Tree:
    """The tree of arrays that `compute` returns, with NaN in place of each number."""
    leaves, structure = trees.flatten(compute())
    return trees.unflatten(structure, [torch.full_like(leaf, float("nan")) for leaf in leaves])
