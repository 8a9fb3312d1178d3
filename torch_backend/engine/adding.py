"""One micro-batch on autograd, whose gradient is added to sums that a state has from earlier calls.

Only torch has this file: XLA fuses the gradient and the sum where both are in one program.
"""

import operator
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold.accumulator import Accumulation
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction
from funcga._replicas import Memory
from funcga._types import Reduced, Scalar, Tree
from torch_backend import _private, arrays, trees
from torch_backend.engine.backward import Backward, autocasting
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.layout import Kept, Layout, Leaves, kind_in_place
from torch_backend.engine.others import GradsWatch, applied
from torch_backend.engine.window import Engine, are_plain, changed_in_place, detached
from torch_backend.modules.visits import Visit

_ADDRESS, _STRIDES = torch.Tensor.data_ptr, torch.Tensor.stride
_GRAD, _REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")


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
    if not (is_alike and in_place and accumulator.dtype == fold.accumulator_dtype):
        return False
    # To a sum in other strides autograd adds as well, and warns that it takes longer.
    return leaf.layout is not torch.strided or leaf.stride() == accumulator.stride()


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


class _Sums(Buffers):
    """The sums of a state, in units of 1. They are not divided in the end; the result has one for each leaf."""

    def __init__(self, window: Accumulation, layout: Layout, donate: bool):
        super().__init__(layout)
        self.unit, self.unit_is_fixed = 1.0, True
        # The memory that is the state's own, and how often it has been written to.
        self.given: list[torch.Tensor] = []
        self.writes = 0
        # The first gradients of an empty window become its sums, as in every window.
        steps = arrays.scalar(window.tally.steps)
        if donate or arrays.is_array(steps) or steps:
            self.reduced = [window.accumulators[leaf_index] for leaf_index in self.outputs.reduced]
            if donate:
                self.given = [*self.reduced]
                self.note_writes()
            else:
                self.reduced = [accumulator.clone() for accumulator in self.reduced]

    def note_writes(self) -> None:
        """Notes how often the state's own memory has been written to so far."""
        self.writes = sum(map(_private.version, self.given))

    @property
    def is_changed(self) -> bool:
        """Whether it has been written to since."""
        return sum(map(_private.version, self.given)) != self.writes

    def result(self, state: list[Any]) -> list[Reduced]:
        accumulators: list[Reduced] = [None] * len(self.outputs.folds)
        for leaf_index, accumulator in zip(self.outputs.reduced, self.reduced, strict=True):
            accumulators[leaf_index] = accumulator
        return accumulators


@dataclass(frozen=True, eq=False)
class _Bound(Program):
    """A program whose folds are bound already: those of a window's sums."""

    outputs: Outputs | None = None

    def bind(self, value: Tree, arguments: Arguments) -> tuple[Outputs, list[Any]]:
        assert self.outputs is not None
        return self.outputs, trees.flatten(value)[0]


class _Fixed(Kept):
    """The layout of a window that goes on."""

    def layout_of(self, *_: Any) -> Layout:
        assert self.layout is not None
        return self.layout


class Adding(Engine):
    """A window of one micro-batch whose sums are those of a state; what the loss returns besides is handed through.

    It may go on with the next micro-batch of the same parameters, on the same leaves.
    """

    buffers: _Sums
    donates = False

    def __init__(self, of: OfGradient, backend: Backend, outputs: Outputs):
        super().__init__(_Bound(of.gradient, (), memory=of.memory, outputs=outputs), of.gradient, backend, None)
        self.folded, self.outputs = of.alone, outputs
        if self.kept.layout is not None and self.kept.layout.outputs is not outputs:
            self.kept.key = None

    def add(
        self, window: Accumulation, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar, donate: bool
    ) -> tuple[tuple[torch.Tensor, Tree], list[Reduced]]:
        """((loss, aux), the sums of the window) with one more micro-batch."""
        if self.backward is not None:
            self._go_on_with(window, self.backward, donate)
        self.buffers_of, self.donates = partial(_Sums, window, donate=donate), donate
        with self:
            args, kwargs = self.detached(args), detached(kwargs, recorded=True) if kwargs else kwargs
            sums: list[Reduced] = self.result(self.fold(self.whole(args), args, kwargs, weight, last=True))
        if self.backward is None:
            del self.buffers  # from here on only the caller has the sums
        return self.value, sums

    def result(self, state: list[Any]) -> list[Reduced]:
        """The sums. Those that are donated stay where autograd adds to them: the next micro-batch may find them there.

        Raises FuncgaError as every window does.
        """
        backward = self.backward
        if backward is None or self.unreached or self.seen is None or not (self.donates and backward.accumulators):
            sums: list[Reduced] = super().result(state)
            self.backward = None
            return sums
        if sum(map(_private.version, backward.inputs)) != self.versions:
            raise changed_in_place()
        if any(map(operator.is_not, map(_GRAD, backward.inputs), backward.accumulators)):
            backward.check_grads()
        if self.watch is not None:
            self.watch.check()
        return self.buffers.result(state)

    def _go_on_with(self, window: Accumulation, backward: Backward, donate: bool) -> None:
        """Prepares the leaves, which have the sums of the last micro-batch, for those of this window."""
        sums = map(window.accumulators.__getitem__, self.outputs.reduced)
        if donate and all(map(operator.is_, sums, self.buffers.reduced)):
            self._refresh()
            self.versions, backward.since = sum(map(_private.version, backward.inputs)), self.since
            backward.settle()
            is_any = _private.is_any_autocast_enabled()
            backward.autocast = autocasting({leaf.device.type for leaf in backward.inputs}) if is_any else []
            self.buffers.writes = backward.writes  # of the same memory
            return
        for leaf in backward.inputs:
            leaf.grad = None
        self.backward = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is not None and self.backward is not None and self.buffers.is_changed:
            error[1].add_note(
                "The backward pass has added a part of this micro-batch to the state, whose memory is donated. Begin "
                "the window again, from a state that was saved or from tx.init(params), or leave it as it is."
            )

    def _leaves_to_add(self, loss: torch.Tensor, aux: Tree, leaves: dict[int, Leaves]) -> list[Any]:
        # Nothing but the gradients is folded.
        self.value = loss, aux
        return [None] * len(self.outputs.folds)

    # --- the next micro-batch

    seen: tuple[object, ...] | None = None  # once the window may go on

    def may_go_on(self) -> bool:
        """Prepares for another micro-batch; False if each needs a window of its own."""
        if self.seen is None:
            # Hooks and marks are looked at anew in every window.
            if not are_plain(self.leaves[0].originals):
                return False
            self.seen, self.kept = self._look(), _Fixed(layout=self.layout)
        return True

    def goes_on(self, window: Accumulation, gradient: GradientFunction, args: tuple[Tree, ...]) -> bool:
        """Whether this is the window for these arguments: for the same parameters, and a module that is as before."""
        if self.gradient is not gradient or window.outputs is not self.outputs or self.arity != len(args):
            return False
        leaves, structure = trees.flatten(args[0])
        first = self.leaves[0]
        if structure != first.structure or not all(map(operator.is_, leaves, first.originals)):
            return False
        is_same = are_plain(leaves) and self.seen == self._look()
        return is_same and (not isinstance(self.visit, Visit) or self.visit.fits_still())

    def _look(self) -> tuple[object, ...]:
        """What must stay as it is for a window to go on: the thread, where its parameters lie, which require grad."""
        present = [original for original in self.leaves[0].originals if original is not None]
        return threading.get_ident(), *([*map(look, present)] for look in (_ADDRESS, _STRIDES, _REQUIRES_GRAD))

    def _begin(self, arguments: Arguments, args: tuple[Tree, ...]) -> None:
        if self.seen is None:
            super()._begin(arguments, args)
        else:
            self._refresh()

    def _refresh(self) -> None:
        """Notes what may change from one micro-batch to the next."""
        self.since = applied.last if applied.is_noted else None
        if self.watched:
            self.watch = GradsWatch(self.watched)
