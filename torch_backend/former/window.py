"""The autograd engine: a window of a gradient that funcga itself made, at the cost of the
hand-written loop.

Only torch has this file: XLA fuses the sum into the loop by itself.

Four things work together. `Inputs` are what is differentiated. `Pass` runs the loss and its
backward pass. `Buffers` hold what has been folded, in the way that a `Layout` says for each leaf of
the output. `LentSums` let autograd add to them.

    Engine.fold                     a micro-batch
        Pass.forward                the loss
        Pass.backwards              sets up the backward pass, and calls
            LentSums.add            the weight becomes the cotangent; then
                run_backward        at once in the common case, else by
                Pass.run            under autocast, with hooks or fused weights
        Buffers.add_value           the loss itself
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist

from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._types import Scalar, Tree
from torch_backend import trees
from torch_backend.dtensor import local
from torch_backend.former.buffers import Buffers, Merge
from torch_backend.former.inputs import (
    OWN,
    Leaves,
    OwnParameters,
    detached,
)
from torch_backend.former.layout import StepCache
from torch_backend.former.lent_sums import LentSums
from torch_backend.former.observing import ObservedGradient, Observing, with_gradients
from torch_backend.former.passes import Pass, check_no_grads
from torch_backend.replicas import Listener

# The accumulators of dense tensors, and of leaves that have none.
_PLAIN = {torch.Tensor, type(None)}


class Engine:
    """One window of a gradient that autograd computes: `fold` each micro-batch, then take the
    `result`.
    """

    records = True
    looks_ahead = False

    def __init__(
        self,
        program: Program,
        passes: Pass,
        cache: StepCache,
        reduction: Merge | None = None,
    ):
        self.program, self.passes, self.cache, self.reduction = program, passes, cache, reduction
        self.inputs = passes.inputs
        self.detached = passes.inputs.detached
        # None before the first loss, which shows what becomes of the output.
        self.sums: LentSums | None = None
        self.unreached = False  # whether a loss reached no leaf, though it should have
        self.observing: Observing | None = None  # what observers are told
        self.listener: Listener | None = None  # hears a loss that calls collectives itself

    def __enter__(self) -> Self:
        if dist.is_available() and dist.is_initialized():
            self.listener = Listener()
        self.passes.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.observing is not None:
            self.observing.end()
        if error[0] is not None and self.reduction is not None:
            self.reduction.give_up()
        self.passes.__exit__(*error)

    # --- a micro-batch

    def fold(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
        last: bool,
    ) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        inputs, passes = self.inputs, self.passes
        if not passes.has_begun:
            # Over replicas the module is as it was between micro-batches.
            passes.begin(arguments, args, stays=self.reduction is None, fuses=True)
        # `moving` are the leaves of arguments that are split: this micro-batch's own.
        leaves, moving = (inputs.leaves, []) if inputs.are_whole else inputs.with_those_of(args)
        called = [leaves[index].tree if index in leaves else arg for index, arg in enumerate(args)]
        with inputs.visit as loss_fn:
            loss, aux, differentiated = passes.forward(loss_fn, called[inputs.first :], kwargs)
            if inputs.gradient.has_aux:
                aux = detached(aux)
            if moving:
                check_no_grads(moving)
            # Accumulators have to be there before the first backward pass.
            if self.sums is None:
                self.sums = self.bind(loss.detach(), aux, leaves, arguments)
            sums, communicates = self.sums, self.listener is not None and self.listener.heard
            share = passes.backwards(
                leaves, partial(sums.add, differentiated, weight, moving, communicates)
            )
        if passes.arrivals is not None:
            alone = self.reduction is None
            self.unreached |= passes.arrivals.are_missed(loss, weight, alone)
        loss, state = loss.detach(), list[Any]()
        if share is not None and loss.dtype == self.lone_dtype and self.observing is None:
            self.buffers.add_value(loss, weight, share)  # as usual
        else:
            state = self.add_beside(loss, aux, leaves, weight, share)
        return state

    def add_beside(
        self,
        loss: torch.Tensor,
        aux: Tree,
        leaves: Mapping[int, Leaves],
        weight: Scalar,
        share: float | None,
    ) -> list[Any]:
        """Folds in what stands beside the gradients that autograd has added, and returns the
        state that is threaded.
        """
        assert self.sums is not None
        buffers, observing = self.buffers, self.observing
        if observing is not None and share is not None and loss.dtype == self.lone_dtype:
            buffers.add_value(loss, weight, share)
            observing.note(weight, self.sums.seed)
            return []
        gradients = [
            () if index in self.inputs.leaves else _gradients(argument)
            for index, argument in leaves.items()
        ]
        value = self.gradient_fn.compose(loss, aux, gradients)
        to_add: list[Any] = [None] * len(buffers.outputs.folds)
        rest = buffers.layout.rest.head.leaves(value, f"micro-batch {buffers.steps + 1}")
        for leaf_index, leaf in zip(buffers.layout.rest.leaf_indices, rest, strict=True):
            to_add[leaf_index] = leaf
        if observing is not None:
            self._add_notes(observing)
            told = observing.measures(to_add, weight, self.sums.seed)
            to_add[: len(told)] = told
        return buffers.add(to_add, weight)

    def _add_notes(self, observing: Observing) -> None:
        """Folds in what observers are told of the micro-batches that are noted."""
        for told, weight in observing.take_notes():
            for leaf_index, leaf in enumerate(told):
                self.buffers.add_leaf(leaf_index, leaf, weight)

    # --- what becomes of the output

    def bind(
        self,
        loss: torch.Tensor,
        aux: Tree,
        leaves: Mapping[int, Leaves],
        arguments: Arguments,
    ) -> LentSums:
        """Decides with the first loss what becomes of every leaf of the output, and makes room
        for it.
        """
        program, trees_of_leaves = self.program, [argument.tree for argument in leaves.values()]
        self.gradient_fn = self.inputs.gradient  # the gradient function whose output is folded
        if program.observers is not None:
            self.gradient_fn = ObservedGradient.of(
                program, self.gradient_fn, (loss, aux), trees_of_leaves, arguments
            )
        layout = self.cache.layout_of(
            program,
            arguments,
            self.gradient_fn,
            (loss, aux),
            leaves,
            self.inputs.leaves,
            lambda _: self.inputs.check_dense(leaves),
        )
        self.buffers = Buffers(layout)
        # The dtype of the loss, if it is all that is added beside the gradients, and None
        # otherwise.
        is_lone = (
            layout.rest.is_loss_alone
            and self.inputs.gradient.with_value
            and type(loss) is torch.Tensor
        )
        self.lone_dtype = layout.outputs.dtypes[layout.outputs.before] if is_lone else None
        if self.reduction is not None:
            self._begin_merge(self.reduction, self.gradient_fn.compose(loss, aux, trees_of_leaves))
        in_backward = dict(zip(layout.backward.present, self.inputs.tensors, strict=True))
        if isinstance(self.gradient_fn, ObservedGradient):
            self.observing = Observing(self.gradient_fn, in_backward)
        return LentSums(self.buffers, in_backward, self.passes)

    # --- replicas

    @property
    def may_be_short(self) -> bool:
        """Whether other replicas may have more micro-batches."""
        return self.reduction is not None

    @property
    def _sharded(self) -> OwnParameters | None:
        """The module's own parameters, if the replicas merge the shards of them that lie on other
        meshes, once the window is over.
        """
        if self.reduction is None or not isinstance(self.inputs, OwnParameters):
            return None
        return self.inputs if self.inputs.are_sharded else None

    def _begin_merge(self, reduction: Merge, value: Tree) -> None:
        """Says what outputs like this value are like."""
        if self.listener is not None and self.listener.heard:
            # Collectives of the loss add cotangents of several replicas, so these must be in one
            # unit.
            self.buffers.unit, self.buffers.unit_is_fixed = 1.0, True
        self.likes: Sequence[Any] = trees.flatten(value)[0]
        if self._sharded is None:
            reduction.begin(self.buffers, self.likes)

    # --- the end of the window

    def result(self, state: list[Any]) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        assert self.sums is not None
        if self.unreached and not self.inputs.gradient.reached:
            raise self.inputs.unreached()
        self.inputs.check_unchanged()
        if self.observing is not None:
            self._add_notes(self.observing)
        # The leaves give the accumulators back: from here on only the buffers hold them.
        self.sums.release()
        if not {*map(type, self.buffers.sums.accumulators)} <= _PLAIN:
            self.buffers.settle(self.sums.leaves)
        if self.reduction is None:
            return self.buffers.result(state)
        if self._sharded is not None:
            self.buffers.sums.accumulators = [*map(local, self.buffers.sums.accumulators)]
            self.reduction.begin(self.buffers, [*map(local, self.likes)])
        return self._merged(self.reduction, self.buffers, state)

    def _merged(self, reduction: Merge, buffers: Buffers, state: list[Any]) -> Tree:
        """The result of all replicas, with the gradients of a module where its parameters lie."""
        result = buffers.result(reduction.finish(state))
        if self._sharded is None:
            return result
        return with_gradients(self.program, result, self._sharded.on_meshes)

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]
    ) -> Tree:
        """The result on a replica that has nothing to fold."""
        assert self.reduction is not None
        bind = lambda value: self.program.bind(value, arguments)[0]
        known: Tree = [part.value for part in arguments.parts]
        if isinstance(self.inputs, OwnParameters):
            self.passes.begin(arguments, (), stays=False)
            # The others say what their shards are like, and here the parameters are.
            own = self.inputs.leaves[OWN].tree
            bind = lambda value: self.program.bind(
                with_gradients(self.program, value, lambda _: own), arguments
            )[0]
            known = own
        buffers = self.reduction.take_part(Buffers, bind, trees.flatten(known)[0])
        return self._merged(self.reduction, buffers, state)


def _gradients(argument: Leaves) -> Tree:
    """The tree of what the last backward pass has left in the leaves; zeros where it did not
    come.
    """
    grads = [
        None if leaf is None else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for leaf in argument.leaves
    ]
    return detached(trees.unflatten(argument.structure, grads))
