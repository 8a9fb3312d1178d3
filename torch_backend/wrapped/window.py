"""One window of a wrapped module: the `.backward()` loop that its wrapper needs, weighed over all
replicas.

Only torch has this file: in JAX parameters are arguments, and nothing is reduced but by the
program.

The weight of a micro-batch is its cotangent, and wrappers divide the sum over the replicas by the
number of replicas. So their sums are the weighted sums in units of that number. Dividing by the
weight that all replicas have folded together gives the weighted mean, however uneven the replicas
are.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import Program, telling
from funcga._call.arguments import Arguments
from funcga._types import Args, Array, Kwargs, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import mean
from torch_backend import _private, arrays, trees
from torch_backend.engine.guards import ON
from torch_backend.engine.guards.grads import gradients_aside
from torch_backend.engine.guards.unchanged import check_parameters
from torch_backend.engine.leaves import OWN
from torch_backend.engine.window import Window
from torch_backend.modules.layers import buffers_of, put_back
from torch_backend.reduce import Reduction, reductions_of
from torch_backend.reduce.absent import zero_rows
from torch_backend.reduce.header import nothing_to_fold
from torch_backend.sums import Sums
from torch_backend.wrapped.ddp import Wrapper, assign
from torch_backend.wrapped.gradient import ModuleGradient, rows_in


@dataclass(frozen=True, eq=False, kw_only=True)
class WrappedGradient(ModuleGradient):
    """The gradient function of the parameters of a module that is wrapped to reduce them."""

    wrapper: Wrapper

    @property
    def kind(self) -> str:
        """Its row of the table of what is supported."""
        return self.wrapper.kind

    def prepare(self) -> None:
        """Lets the module have the parameters that get gradients."""
        self.wrapper.reshard()

    def _alone(self, backend: Backend, args: Args, kwargs: Kwargs) -> Tree:
        # It weighs its rows. Here are no in_axes, so the first tensor tells how many there are.
        rows, whole = rows_in(args) or [1], (None,) * len(args)
        program = Program(self, mean(), lambda: rows[0], whole, memory=self.memory)
        with telling(program):
            return backend.loop.stream(program, backend)((), iter([args]), kwargs)

    def window(self, program: Program, *others: Any) -> Window:
        """One window of a program with this gradient function, as a Window is made of it."""
        return WrappedWindow(self, program, *others)

    def reductions(self, program: Program) -> list[Reduction]:
        """What merges a window over the replicas, one after the other."""
        return reductions_of(self.wrapper.replicas(program.across), program.memory)


class WrappedWindow(Window):
    """One window of a WrappedGradient: `fold` each micro-batch, and say which is the last; then
    take the `result`.

    Gradients are summed where they are: in the `.grad`s of the module's own parameters, by autograd
    and by what wraps the module. That divides them by its `scale`, the unit of weighted sums.

    A micro-batch is one pass, and a replica that has no more runs passes that add nothing while
    others have. The wrapper reduces in the last pass of all, or in each:

        meet        before a forward pass that communicates
        forward     the loss, which joins the sums
        meet        before a backward pass that communicates: is it the last of all?
        backward    its cotangent is the weight

    A replica that raises an error must not leave the others in a collective of the wrapper's: hence
    the meetings. None is needed if nothing of the user's has run since the one before.
    """

    may_communicate = True
    is_last = False  # whether no replica has another pass; set before a backward pass

    def __init__(self, owner: WrappedGradient, program: Program, *others: Any):
        # First, as other replicas are told of any error from here on.
        self.merges = owner.reductions(program)
        super().__init__(program, owner, *others)
        self.program: Program = program
        self.owner, self.wrapper, self.module = owner, owner.wrapper, owner.module
        # Whether the loss joins the sums after the backward pass, which tells what else does.
        self.adds_late = program.skip is not None or program.readings is not None
        self.is_stream = not any(program.split)
        # Whether every pass reduces; otherwise the last one of all does. In such a pass the wrapper
        # has to see each gradient.
        self.meets = self.wrapper.meets_in_every_pass
        self.may_fuse = not self.meets  # also False from the last pass on

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.own = self.own or self.owner.own_in(self.program.memory)
            stack.enter_context(self.wrapper.window())
            super().__enter__()
            self.watch = None  # FSDP has other parameters in a module than the leaves
            stack.enter_context(gradients_aside(self.wrapper.leaves().values()))
            if self.program.skip is not None:
                tool = self.program.skip.in_torch
                self.before = tool.snapshot(self.module, self.arguments.state)
            self.push(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> bool | None:
        if error[0] is not None:
            # Also where nothing has begun here: what the wrapper does next has to be the same on
            # all replicas. It needs the window's `.grad`s and flags.
            self.wrapper.recover()
        return super().__exit__(*error)

    @property
    def arriving(self) -> Sequence[torch.Tensor]:
        """The leaves that gradients come to, in the order of the inputs."""
        computed_with = self.wrapper.leaves()
        return [computed_with.get(id(p), p) for p in self.inputs]

    def _bind(self, loss: torch.Tensor, aux: Tree) -> Sums:
        """Makes room for the output, with the first loss. Raises FuncgaError for what cannot be
        folded.
        """
        known, sums = self.plan.folding, super()._bind(loss, aux)
        folding = sums.folding
        if folding is not known:
            self._check([folding.outputs.folds[index] for index in folding.grads])
        self.sums, sums.unit, sums.unit_is_fixed = sums, self.wrapper.scale, True
        if self.wrapper.wrapped:
            # Gradients are where autograd adds them.
            beside = self._rest(loss, aux, ())
            for merge in self.merges:
                merge.propose(sums, beside)
        return sums

    def _check(self, folds: Sequence[Any]) -> None:
        """Raises FuncgaError if the folds of the gradients are not sums as they are added here."""
        kinds = {fold.adds for fold in folds}
        if None in kinds or len(kinds) > 1:
            raise FuncgaError(
                "the gradients' fold is no sum, or some are weighed, as by funcga.mean(), and "
                "others are not, as by funcga.sum(): a module's own gradients are only added, in "
                "one backward pass with one weight. Fold all of them with funcga.mean(), "
                "per_weight() or sum(), and only the value otherwise: fold=(funcga.max(), "
                "funcga.mean()). For any other fold of gradients use "
                "funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), with the module "
                "not wrapped."
            )
        # A gradient function that is called by itself has one micro-batch: nothing is summed.
        is_alone = self.program.memory is self.owner.memory
        for (name, p), fold in zip(self.leaves.trees[OWN].items(), folds, strict=True):
            promised, dtype = fold.accumulator_dtype, self.wrapper.sums_in(p)
            if torch.promote_types(dtype, promised) != dtype and not is_alone:
                narrow, wide = [str(each).removeprefix("torch.") for each in (dtype, promised)]
                raise FuncgaError(
                    f"`{name}` has gradients that {self.wrapper.name} sums in {narrow} over the "
                    f"micro-batches, and the fold promises {wide}. {self.wrapper.remedy} Or "
                    f"say that {narrow} is meant: funcga.mean(dtype={narrow!r})."
                )

    # --- micro-batches

    def fold(self, args: Args, kwargs: Kwargs, weight: Scalar, last: bool = False) -> None:
        """Folds one micro-batch in: the loss forwards, and backwards into the sums."""
        self._run_pass(args, kwargs, weight, last)
        if last:
            self._fill_up(args, kwargs)

    def _run_pass(self, args: Args, kwargs: Kwargs, weight: Scalar | None, last: bool) -> None:
        """Runs a micro-batch, the `last` of this replica or not; one of weight None only lets the
        others run theirs.
        """
        # Code of the user's has run before the first pass, and before each of a stream.
        if self.sums is None:
            communicates = self.meets or self.wrapper.begins_with_buffers
        else:
            communicates = self.meets and self.is_stream
        if communicates:
            self._meet(False)
        if last and not self.meets:  # then it is the last of all
            assign(self.wrapper.flags(True))
        # A cotangent of 0 times a NaN is NaN, so a micro-batch that weighs nothing is masked.
        with nullcontext() if weight else self.masked():
            loss, aux, objective = self.forward(args, kwargs)
            if self.sums is None:
                self.sums = self._bind(loss, aux)
            self.seed = 0.0 if weight is None else self.seed_of(weight)
            if not arrays.represents_exactly(objective.dtype, self.seed):
                raise FuncgaError(
                    f"the loss is {arrays.describe(loss)}, which may not hold the weight "
                    f"{self.seed:g}. Return a loss in float32, computed from outputs in float32: "
                    "F.cross_entropy(module(x).float(), y)."
                )
            # Usually the loss joins the sums first: before the last backward pass the replicas tell
            # each other what they have folded.
            if self.adds_late:
                self._backward(objective, last)
            if weight is not None:
                self._add(loss, aux, weight)
            if not self.adds_late:
                self._backward(objective, last)

    def _meet(self, last: bool, is_known: bool = False) -> bool:
        """Waits for the other replicas; whether the pass that comes is the last of all.
        FuncgaError if one has failed. `is_known`: whether what this replica folds is in the sums.
        """
        first, *others = self.merges
        # One group after the other: what the last of them says holds for all.
        for merge in others:
            last = merge.meet(last)
        return first.agree(last) if is_known else first.meet(last)

    def seed_of(self, weight: Scalar) -> float:
        """The cotangent of a loss. Sums that have no unit are to be sums over the replicas."""
        sums: Any = self.sums
        folding = sums.folding
        weighs = folding.folds[folding.grads[0]].adds == "weighted"
        seed = float(weight) if weighs else 1.0
        return seed if folding.are_weighted else seed * self.wrapper.scale

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        """The backward pass of a loss, the `last` of this replica or not. Others' `.grad`s stay.

        The replicas meet before one that communicates, and before the last of all tell each other
        what is folded, as far as it is known. From there on a replica that has failed could not be
        told from one that is slow.
        """
        if not loss.requires_grad:
            raise FuncgaError(
                "the loss does not depend on any parameter, so there is no backward pass for "
                f"{self.wrapper.name} to synchronise in. Return a loss that is computed from "
                "module(x), 0 times that if need be."
            )
        if last or self.meets:
            self.is_last = self._meet(last, not self.adds_late)
        if self.is_last:
            assign(self.wrapper.flags(True))
            self.may_fuse = False  # what is reduced in this pass is to see each gradient
        # The graph ends in these, and no pass is restricted to them: FSDP has hooks elsewhere.
        unsharded = [leaf for leaf in self.wrapper.leaves().values() if leaf.requires_grad]
        self.runs_whole = bool(unsharded)
        with self.wrapper.synchronising() if self.is_last else nullcontext():
            self.backward(loss, self.seed, unsharded)

    @contextmanager
    def masked(self) -> Iterator[None]:
        """A context of passes in which gradients are zeros if the cotangent is 0: of what modules
        return, and of the leaves.

        The backward pass still runs, because the wrapper communicates in it. Outputs are masked
        because a layer may send their gradients to other replicas. Leaves are masked because a NaN
        among what a layer has saved, times a gradient of 0, is NaN.
        """
        stack, hooked = ExitStack(), dict[int, torch.Tensor]()

        def mask(gradient: torch.Tensor | None) -> torch.Tensor | None:
            # DDP passes None on, where the loss does not use an output.
            return gradient if gradient is None or self.seed else torch.zeros_like(gradient)

        def watch(module: nn.Module, args: Args, output: Tree) -> None:
            # FSDP2 makes the leaves in its first forward pass.
            leaves = [*self.wrapper.leaves().values()] or self.inputs
            for tensor in filter(torch.is_tensor, (*trees.flatten(output)[0], *leaves)):
                if tensor.requires_grad and id(tensor) not in hooked:
                    hooked[id(tensor)] = tensor
                    stack.callback(_private.remove_hook, tensor, tensor.register_hook(mask))

        with stack:
            watch(self.module, (), ())  # those that are there already
            for module in self.wrapper.wrapped or self.module.children():
                stack.callback(module.register_forward_hook(watch).remove)
            yield

    # --- replicas with fewer micro-batches than others

    def _fill_up(self, args: Args, kwargs: Kwargs) -> None:
        """Runs passes that add nothing while other replicas have micro-batches and this one has
        none left. The module's buffers are as before.
        """
        while not self.is_last:
            layers = self.module.modules()
            if any(isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in layers):
                raise FuncgaError(
                    "this replica has fewer micro-batches than others, and the module has a "
                    "SyncBatchNorm layer: rows that stand in for the missing ones would count in "
                    "the statistics of all replicas. Give every replica equally many micro-batches."
                )
            # The rows only stand in for others: running statistics, for instance, must not see
            # them.
            before = buffers_of(self.module)
            self._run_pass(args, kwargs, None, True)
            put_back(before)

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: Kwargs, state: list[Array]
    ) -> Tree:
        """The result on a replica that has no micro-batch in this window.

        It runs the passes that the others wait for, over a row of zeros: many modules cannot run on
        an empty batch.
        """
        if self.is_stream:  # there are no arguments to make a row of zeros of
            raise FuncgaError(
                "there is no micro-batch on this replica, and grad_fn is that of a wrapped module "
                "or of a pipeline, which the processes run together: without a micro-batch there "
                "is nothing to run it on. Give every replica a micro-batch, one of weight 0 if "
                "need be, or let funcga reduce, for which a replica may have none: "
                "stream(funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), "
                "across=group), with the module that was wrapped."
            )
        with self.passes():
            self._fill_up(arguments.cut(0, 1, state, zero_rows), kwargs)
        if self.sums is not None:
            self.sums.state = state
        return self.result()

    # --- the result

    def take_gradients(self) -> None:
        """Puts the gradients into the sums, in memory that nobody else holds; zeros where the loss
        depends on none.
        """
        assert self.sums is not None
        grads = [
            torch.zeros_like(p) if p.grad is None else arrays.strided(p.grad) for p in self.inputs
        ]
        if not self.wrapper.fresh:
            grads = arrays.in_own_memory(grads)
        self.sums.of.update(zip(self.sums.folding.grads, grads, strict=True))

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output, the same on every
        replica.
        """
        sums, skip = self.sums, self.program.skip
        assert sums is not None
        if ON:
            check_parameters(self)
        with torch.no_grad():
            self.take_gradients()
            if skip is not None:
                sums.rejected = skip.in_torch.rejected(sums, skip)
            # The wrapper has merged the gradients already.
            for merge in self.merges:
                merge.merge()
            if not sums.steps:
                raise nothing_to_fold()
            if skip is not None:
                return skip.in_torch.result_of(sums, self.before)
            return sums.result()
