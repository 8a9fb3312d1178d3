"""One micro-batch on autograd, whose gradient is added to sums that a state has from earlier calls.

Only torch has this file: XLA fuses the gradient and the sum where both are in one program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Argument, Arguments
from funcga._fold.accumulator import Accumulation
from funcga._grad import GradientFunction
from funcga._replicas import Memory
from funcga._types import Reduced, Scalar, Tree
from torch_backend import _private, arrays, trees
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.layout import Leaves, kind_in_place
from torch_backend.engine.window import Engine, detached


def adds(window: Accumulation, gradient: GradientFunction, args: tuple[Tree, ...]) -> bool:
    """Whether autograd can add the gradient by the first argument to all sums of a window."""
    if gradient.argnums != 0 or not args:
        return False
    leaves, structure = trees.flatten(args[0])
    if structure != window.outputs.structure:
        return False
    triples = zip(leaves, window.outputs.folds, window.accumulators, strict=True)
    return all(fold is leaf is None or _adds(leaf, fold, sum_) for leaf, fold, sum_ in triples)


def _adds(leaf: Any, fold: Any, accumulator: Reduced) -> bool:
    """Whether autograd can add the gradient of a leaf to its accumulator."""
    if type(leaf) not in (torch.Tensor, nn.Parameter) or type(accumulator) is not torch.Tensor or fold is None:
        return False
    is_alike = leaf.shape == accumulator.shape and leaf.device == accumulator.device
    in_place = fold.adds is not None and kind_in_place(fold, leaf.dtype) is not None
    return is_alike and in_place and accumulator.dtype == fold.accumulator_dtype


@dataclass(eq=False)
class OfGradient:
    """What is kept for the gradient function of the last call: `alone` is the one whose output is the gradient only."""

    gradient: GradientFunction
    alone: GradientFunction
    memory: Memory


@dataclass(eq=False)
class _Last:
    of: OfGradient | None = None


def kept_for(gradient: GradientFunction, memory: Memory) -> OfGradient:
    """What a transform keeps for this gradient function."""
    last = memory.keep(_Last)
    if last.of is None or last.of.gradient is not gradient:
        last.of = OfGradient(gradient, replace(gradient, with_value=False, has_aux=False), Memory())
    return last.of


class Adding(Engine):
    """A window of one micro-batch whose sums are those of a state; what the loss returns besides is handed through.

    `donate`: whether they may be written to. They are in units of 1, and are not divided in the end.
    """

    def __init__(self, kept: OfGradient, backend: Backend, window: Accumulation, donate: bool):
        # The folds are those of the window already.
        super().__init__(Program(kept.gradient, (), memory=kept.memory), kept.gradient, backend, None)
        self.alone, self.sums, self.donate = kept.alone, window, donate
        # The window's own memory, and how often it has been written to.
        self.given: list[torch.Tensor] = []
        self.writes = 0

    def add(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar
    ) -> tuple[tuple[torch.Tensor, Tree], Sequence[Reduced]]:
        """((loss, aux), the sums) of this micro-batch."""
        with self:
            args, kwargs = self.detached(args), detached(kwargs, recorded=True) if kwargs else kwargs
            arguments = Arguments(tuple([Argument(arg, [], [], None) for arg in args]), self.gradient, self.backend)
            self.fold(arguments, args, kwargs, weight, last=True)
            self._end()
        accumulators: list[Reduced] = [None] * len(self.sums.accumulators)
        for leaf_index, accumulator in zip(self.layout.outputs.reduced, self.buffers.reduced, strict=True):
            accumulators[leaf_index] = accumulator
        return self.value, accumulators

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None and sum(map(_private.version, self.given)) != self.writes:
            error[1].add_note(
                "The backward pass has added a part of this micro-batch to the state, whose memory is donated. Begin "
                "the window again, from a state that was saved or from tx.init(params), or leave it as it is."
            )

    def _buffers(self, loss: torch.Tensor, aux: Tree, leaves: dict[int, Leaves], arguments: Arguments) -> Buffers:
        outputs, kept = self.sums.outputs, self.kept
        if kept.layout is not None and kept.layout.outputs is not outputs:
            kept.key = None
        bind = lambda _: (outputs, [*leaves[0].leaves])
        layout = kept.layout_of(self.alone, (loss, None), leaves, self.leaves, bind, lambda _: None, False)
        buffers = Buffers(layout)
        buffers.unit, buffers.unit_is_fixed = 1.0, True
        # The first gradients of an empty window become its sums, as in every window.
        steps = arrays.scalar(self.sums.tally.steps)
        if arrays.is_array(steps) or steps:
            accumulators = [self.sums.accumulators[leaf_index] for leaf_index in outputs.reduced]
            buffers.reduced = [*accumulators] if self.donate else [each.clone() for each in accumulators]
            if self.donate:
                self.given, self.writes = accumulators, sum(map(_private.version, accumulators))
        return buffers

    def _leaves_to_add(self, loss: torch.Tensor, aux: Tree, leaves: dict[int, Leaves]) -> list[Any]:
        # Nothing but the gradients is folded.
        self.value = loss, aux
        return [None] * len(self.layout.outputs.folds)
