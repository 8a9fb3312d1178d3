"""The window of a compiled loss: compiled micro-steps fold its micro-batches, or autograd where
they cannot.

Only torch has this file: XLA compiles the loop as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._grad import GradientFunction
from funcga._types import Scalar, Tree
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.compiled import Kind, MicroStep, Sums, is_watched, kind_of
from torch_backend.engine.layout import Layout
from torch_backend.engine.window import Engine
from torch_backend.modules.visits import Visit


@dataclass(eq=False)
class _LastKind:
    """What the sums of the last window were like, for leaves of a `key`."""

    key: object = None
    kind: Kind | None = None


class _CompiledBuffers(Buffers):
    """Buffers whose sums of gradients are those that a compiled micro-step adds to."""

    def __init__(self, sums: Sums, layout: Layout):
        super().__init__(layout)
        self.sums = sums
        self._hold(sums.totals)

    def _hold(self, totals: list[torch.Tensor]) -> None:
        for added, total in zip(self.layout.added, totals, strict=True):
            self.reduced[added.sum_index] = total

    def settle(self, likes: Mapping[int, torch.Tensor]) -> None:
        """Takes sums that stay for the next window out of its reach."""
        super().settle(likes)
        if self.sums.lasts:
            self._hold(self.sums.released())


class CompiledWindow(Engine):
    """One window of a gradient whose loss is compiled. `step` is what the loss is compiled to."""

    def __init__(
        self, program: Program, gradient: GradientFunction, backend: Backend, step: MicroStep
    ):
        super().__init__(program, gradient, backend, None)
        self.step, self.last = step, program.memory.keep(_LastKind)
        self.has_begun = self.is_uninterrupted = (
            False  # a compiled micro-step visits the module by itself
        )
        self.sums: Sums | None = None  # None where autograd adds the gradients

    def _begin(self, arguments: Arguments, args: tuple[Tree, ...]) -> None:
        if self.has_begun:
            return
        super()._begin(arguments, args)
        self.has_begun = True
        if self._may_be_compiled(arguments):
            kind = self._kind()
            if kind is not None:
                visit = self.visit if isinstance(self.visit, Visit) else None
                weighs = self.program.weight is not None
                self.sums = Sums(self.step, kind, self.leaves, self.gradient.loss_fn, visit, weighs)
                self.buffers_of = partial(_CompiledBuffers, self.sums)

    def _may_be_compiled(self, arguments: Arguments) -> bool:
        """Whether nothing else is to see the gradients of a micro-batch, or takes part in
        computing them.
        """
        if self.step.is_refused or self.hooked or not self.is_whole:
            return False
        if self.listener is not None or arguments.state or is_watched():
            return False
        if isinstance(self.visit, Visit):
            self.visit.reserve()  # the module and its parameters are checked
            self.visit.give_back()
        return True

    def _kind(self) -> Kind | None:
        """What the sums of this window are like."""
        key = [
            (
                argument.structure,
                [type(leaf) if leaf is None else leaf.dtype for leaf in argument.leaves],
            )
            for argument in self.leaves.values()
        ]
        if self.last.key != key:
            self.last.key = key
            self.last.kind = kind_of(
                self.program.fold, self.gradient, [*self.leaves.values()], self.backend
            )
        return self.last.kind

    def fold(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
        last: bool,
    ) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        if self.backward is None:
            self._begin(arguments, args)
        if self.sums is None or not self._run(self.sums, arguments, args, kwargs, weight):
            return super().fold(arguments, args, kwargs, weight, last)
        return []

    def _run(
        self,
        sums: Sums,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
    ) -> bool:
        """Folds one micro-batch in by a compiled micro-step; False if autograd has to."""
        is_first, share, unit = self.backward is None, None, 1.0
        if not is_first:
            share, unit = self.buffers.share(weight), self.buffers.unit or 1.0
        elif not isinstance(weight, torch.Tensor):
            share = float(bool(weight))  # the first weight is the unit
        # A weight of 0 adds nothing, not even a NaN.
        loss = (
            None
            if share == 0 and sums.kind.weighted
            else sums.add(args, kwargs, weight, share, unit)
        )
        # Autograd finds out whether a loss that depends on nothing is an error.
        if loss is None or (is_first and not self.gradient.reached and sums.are_zeros):
            self._leave_to_autograd()
            return False
        if is_first:
            self.gradient.reached.add(True)
            self.backward = self._bind(loss, None, self.leaves, (), arguments)
            self.buffers.share(weight)
        if share is not None and loss.dtype == self.lone_dtype:
            self.buffers.add_value(loss, weight, share)
        else:
            self.buffers.add(self._leaves_to_add(loss, None, self.leaves), weight)
        return True

    def _leave_to_autograd(self) -> None:
        if self.step.is_refused:
            self.sums = None
        if self.backward is not None:
            self.backward.settle()
