"""The window of a compiled loss: compiled micro-steps fold its micro-batches, or autograd where
they cannot.

Only torch has this file: XLA compiles the loop as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._grad import GradientFunction
from funcga._types import Scalar, Tree
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.compiled import Kind, MicroStep, Sums, is_watched, kind_of
from torch_backend.engine.inputs import DifferentiatedArguments
from torch_backend.engine.layout import Kept, Layout
from torch_backend.engine.passes import Pass
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
        for added, total in zip(self.layout.backward.added, totals, strict=True):
            self.reduced[added.sum_index] = total

    def settle(self, likes: Mapping[int, torch.Tensor]) -> None:
        """Takes sums that stay for the next window out of its reach."""
        super().settle(likes)
        if self.sums.lasts:
            self._hold(self.sums.released())


class CompiledWindow:
    """One window of a gradient whose loss is compiled. `step` is what the loss is compiled to.

    The engine has the buffers, begins, ends, and folds what no compiled micro-step can.
    """

    records = True
    looks_ahead = may_be_short = False

    def __init__(
        self, program: Program, gradient: GradientFunction, backend: Backend, step: MicroStep
    ):
        self.program, self.gradient, self.step = program, gradient, step
        # A compiled micro-step visits the module by itself.
        kept = program.memory.keep(Kept)
        inputs = DifferentiatedArguments(gradient, backend, kept.indices_of)
        self.engine = Engine(program, Pass(inputs), kept, None)
        self.detached, self.has_begun = self.engine.detached, False
        self.sums: Sums | None = None  # None where autograd adds the gradients

    def __enter__(self) -> Self:
        self.engine.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.engine.__exit__(*error)

    def _begin(self, arguments: Arguments, args: tuple[Tree, ...]) -> None:
        self.has_begun = True
        self.engine.passes.begin(arguments, args, stays=False)
        if self._may_be_compiled(arguments):
            kind = self._kind()
            if kind is not None:
                inputs, weighs = self.engine.inputs, self.program.weight is not None
                visit = inputs.visit if isinstance(inputs.visit, Visit) else None
                self.sums = Sums(
                    self.step, kind, inputs.leaves, self.gradient.loss_fn, visit, weighs
                )
                self.engine.buffers_of = partial(_CompiledBuffers, self.sums)

    def _may_be_compiled(self, arguments: Arguments) -> bool:
        """Whether nothing else is to see the gradients of a micro-batch, or takes part in
        computing them.
        """
        inputs = self.engine.inputs
        if self.step.is_refused or inputs.hooked or not inputs.are_whole:
            return False
        if self.engine.listener is not None or arguments.state or is_watched():
            return False
        if isinstance(inputs.visit, Visit):
            inputs.visit.reserve()  # the module and its parameters are checked
            inputs.visit.give_back()
        return True

    def _kind(self) -> Kind | None:
        """What the sums of this window are like."""
        last, leaves_of = self.program.memory.keep(_LastKind), self.engine.inputs.leaves
        key = [
            (
                argument.structure,
                [type(leaf) if leaf is None else leaf.dtype for leaf in argument.leaves],
            )
            for argument in leaves_of.values()
        ]
        if last.key != key:
            last.key = key
            last.kind = kind_of(
                self.program.fold,
                self.gradient,
                [*leaves_of.values()],
                self.engine.inputs.backend,
            )
        return last.kind

    def fold(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
        last: bool,
    ) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        if not self.has_begun:
            self._begin(arguments, args)
        if self.sums is None or not self._run(self.sums, arguments, args, kwargs, weight):
            return self.engine.fold(arguments, args, kwargs, weight, last)
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
        engine, share, unit = self.engine, None, 1.0
        is_first = engine.sums is None
        if not is_first:
            share, unit = engine.buffers.share(weight), engine.buffers.unit or 1.0
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
            engine.sums = engine.bind(loss, None, engine.inputs.leaves, arguments)
            engine.buffers.share(weight)
        engine.add_beside(loss, None, engine.inputs.leaves, weight, share)
        return True

    def _leave_to_autograd(self) -> None:
        if self.step.is_refused:
            self.sums = None
        if self.engine.sums is not None:
            self.engine.sums.settle()

    def result(self, state: list[Any]) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        return self.engine.result(state)

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]
    ) -> Tree:
        """The result on a replica that has nothing to fold."""
        return self.engine.result_without_microbatches(arguments, kwargs, state)
