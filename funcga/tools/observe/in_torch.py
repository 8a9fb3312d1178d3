"""Observers in torch: each gradient is measured on its way to the accumulator."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from funcga._backend.prefixes import mapped
from funcga._grad import GradientFunction
from funcga._types import Scalar, Tree
from funcga.errors import FuncgaError
from funcga.observers import squared_norm
from funcga.tools.finite.in_torch import measured, norms
from funcga.tools.observe import Readings
from torch_backend import _private, arrays, trees
from torch_backend.dtensor import is_dtensor

# Elements of gradients that may wait: on the host, what is in its cache.
_WAITING, _WAITING_ON_DEVICE = 2**16, 2**22
# Elements whose squares the host adds to float32 sums with an error of less than 1e-6.
_LONG = 2**16


def rows(readings: Readings, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The measures of arrays, each over all of its shards, on the device of the first."""
    leaves = [*map(arrays.strided, leaves)]
    is_plain = leaves and not arrays.in_transform() and not any(map(is_dtensor, leaves))
    if not is_plain or readings.measures != [squared_norm]:
        return measured(readings.row, leaves)
    real = [_real(leaf, readings.dtype) for leaf in leaves]
    of_leaves = norms(real, 2, readings.dtype)
    squares = torch._foreach_mul(of_leaves, of_leaves)
    return [square.to(leaves[0].device) for square in squares]


def _real(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Real numbers that have the norm of an array, without a copy of it."""
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf.resolve_conj())
    if leaf.is_cpu and leaf.numel() > _LONG and leaf.ndim > 1:
        # Row by row: rounding errors of long sums in float32 add up on the host.
        leaf = torch.linalg.vector_norm(leaf, dim=tuple(range(1, leaf.ndim)), dtype=dtype)
    return leaf


class MeasuredGradient:
    """A gradient function whose output begins with measures of the gradient, for one window.

    Hooks on the leaves of the window measure the gradients that come to them. A hook on a tensor
    sees its whole gradient before autograd adds it to anything, times the cotangent of the pass.
    Gradients wait until they are many, or for the end of the pass, to be measured all at once.
    """

    def __init__(self, readings: Readings, inner: GradientFunction, loss: torch.Tensor):
        """`loss`: its device is that of the measures."""
        self.readings, self.inner, self.before = readings, inner, readings.placeholders(loss)
        self.most = _WAITING if loss.is_cpu else _WAITING_ON_DEVICE  # elements that wait
        self.elements = 0  # of those that wait; set by `_arrived`
        self.nothing = self.before[0][:0]  # in place of a gradient that does not come
        # What has come in this pass, by leaf: gradients that wait, and the measures of others.
        self.waiting = dict[int, torch.Tensor]()
        self.measured = dict[int, torch.Tensor]()
        self.hooks = list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def compose(self, *args: Any) -> Tree:
        """Ones in place of measures, and what the gradient function returns."""
        return self.before, self.inner.compose(*args)

    def begin(self, leaves: Mapping[int, torch.Tensor], is_alone: bool) -> None:
        """Measures what comes to those of these leaves that are observed. They last as long as the
        window; the gradients of all others are measured as values. `is_alone`: whether nothing but
        autograd writes to gradients before the end of the pass.
        """
        self.is_alone = is_alone
        for index in leaves.keys() & self.readings.indices:
            leaf, hook = leaves[index], partial(self._arrived, index)
            self.hooks.append((leaf, leaf.register_hook(hook)))  # type: ignore[no-untyped-call]

    def _arrived(self, index: int, gradient: torch.Tensor) -> None:
        if index in self.waiting or index in self.measured:
            raise FuncgaError(
                "observe= was given, and a parameter gets its gradient in several pieces, of which "
                "none has the norm of the gradient, as reentrant checkpoints make it. Use "
                "use_reentrant=False."
            )
        if gradient.device != self.nothing.device:  # autograd has a thread for each device
            (row,) = rows(self.readings, [gradient])
            self.measured[index] = row.to(self.nothing.device)
            return
        # Of a gradient that nobody else holds autograd makes a `.grad` without a copy.
        self.waiting[index] = gradient.detach() if self.is_alone else gradient
        self.elements += gradient.numel()
        if self.elements > self.most:
            self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Measures what waits, and holds no gradient any more."""
        waiting, self.waiting, self.elements = self.waiting, {}, 0
        if waiting:
            found = rows(self.readings, [*waiting.values()])
            self.measured.update(zip(waiting, found, strict=True))

    @torch.no_grad()
    def measures(
        self, values: Mapping[int, Any], weight: Scalar, seed: Scalar
    ) -> dict[int, torch.Tensor]:
        """The measures of the last micro-batch, whose gradients came times `seed`, by leaf.
        `values` are the leaves of the output that autograd has not added.
        """
        nothing = dict.fromkeys(self.readings.indices, self.nothing)
        self.measure()
        leaves, known, self.measured = {**nothing, **values}, self.measured, {}
        # A pass without a weight measures nothing, and the micro-batch counts for nothing.
        one = self.before[0]
        return dict(enumerate(self.readings.leaves_for(leaves, weight, known, seed or 1.0, one)))

    def end(self) -> None:
        """Takes the hooks off: the leaves may be the parameters of a module."""
        for leaf, hook in self.hooks:
            _private.remove_hook(leaf, hook)


def unknown(compute: Callable[[], Tree]) -> Tree:
    """The tree of arrays that `compute` returns, with NaN in place of each number."""
    return mapped(lambda leaf: leaf * torch.nan, trees, compute())
