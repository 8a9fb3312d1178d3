"""One window of a wrapped module: the `.backward()` loop that its wrapper needs, weighed over all
replicas.

Only torch has this file: in JAX parameters are arguments, and nothing is reduced but by the
program.

The weight of a micro-batch is its cotangent, and wrappers divide the sum over the replicas by the
number of replicas. So their sums are the weighted sums in units of that number. Dividing by the
weight that all replicas have folded together gives the weighted mean, however uneven the replicas
are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold import LeafFold
from funcga._types import Across, Array, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, graphs, trees
from torch_backend.arrays import recording, recording_loss
from torch_backend.dtensor import local_tensors
from torch_backend.engine import bound
from torch_backend.engine.alone import uncut
from torch_backend.engine.distributed import with_a_blank_row
from torch_backend.engine.guards import EVERY
from torch_backend.engine.guards.aside import gradients_aside
from torch_backend.engine.leaves import OWN, Leaves
from torch_backend.engine.plan import (
    Plan,
    Plans,
    autocasting,
    call_key,
    outside_of_autocast,
    run_of,
)
from torch_backend.engine.window import Window, functions_alive
from torch_backend.modules.checks import modules_in
from torch_backend.modules.layers import Walk, buffers_of, put_back
from torch_backend.reduce import Reduction, reductions_of
from torch_backend.reduce.header import nothing_to_fold
from torch_backend.reduce.telling import telling
from torch_backend.replicas import explained
from torch_backend.sums import Sums
from torch_backend.wrapped.ddp import Wrapper
from torch_backend.wrapped.gradient import ModuleGradient, rows_in


@dataclass(frozen=True, eq=False)
class WrappedGradient(ModuleGradient):
    """The gradient function of the parameters of a module that is wrapped to reduce them."""

    wrapper: Wrapper

    @property
    def kind(self) -> str:
        """Its row of the table of what is supported."""
        return self.wrapper.kind

    @property
    def options(self) -> dict[str, str]:
        """When it reduces."""
        return {"sync=": repr(self.wrapper.sync)}

    @cached_property
    def other_modules(self) -> list[nn.Module]:
        """The other modules that loss_fn is seen to close over, such as a GAN's discriminator."""
        inner = {*self.module.modules()}
        return [module for module in modules_in(self.loss_fn) if module not in inner]

    def _value(
        self, program: Program, backend: Backend, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree:
        arguments = uncut(args, self, backend)
        begin = partial(self.window, program, backend, arguments)
        with telling([(program.memory, begin)]), begin() as window:
            window.alone = True
            arguments, kwargs = window.prepared(arguments, kwargs)
            args = tuple([part.value for part in arguments.parts])
            # It weighs its rows. Here are no in_axes, so the first tensor tells how many there are.
            rows = rows_in(args)
            window.fold(args, kwargs, rows[0] if rows else 1, True)
            return window.result()

    def window(self, program: Program, backend: Backend, arguments: Arguments) -> "OwnGrads":
        """One window of a program with this gradient function."""
        self.check_not_traced()
        return ModuleWindow(program, self, backend, arguments)

    def merged_over(self, across: Across) -> Across:
        """The wrapper's own replicas: its process groups, one after the other."""
        return self.wrapper.replicas(across)


class OwnGrads(Window):
    """A window of the parameters of a module whose gradients are summed where they are: in their
    `.grad`s, by autograd and by what wraps the module.

    In it the `.grad`s are the window's: the user's are put aside, and come back at the end. An
    error in it is told to all processes. `is_weighted`: whether the fold weighs gradients.
    """

    is_weighted = False  # set with the first loss
    alone = False  # set by a gradient function that is called by itself: has one micro-batch

    def __init__(
        self,
        program: Program,
        gradient: WrappedGradient,
        backend: Backend,
        arguments: Arguments,
        merges: Sequence[Reduction],
    ):
        super().__init__(program, gradient.parts, backend, arguments, None)
        self.program: Program = program
        self.module, self.wrapper, self.merges = gradient.module, gradient.wrapper, merges

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(explained())
            stack.enter_context(self.wrapper.window())
            walk = self.program.memory.keep(Walk)
            self.params: dict[str, torch.Tensor] = {**walk.trainable(self.module)}
            self.inputs = [*self.params.values()]
            leaves = [*self.inputs, *self.wrapper.leaves().values()]
            ids = walk.through(self.module).ids
            stack.enter_context(gradients_aside(leaves, ids))
            # It needs the window's `.grad`s and flags.
            stack.push(self._recover)
            self.plans, self.key = self.program.memory.keep(Plans), call_key(self.params, ())
            self.plan = self.plans.get(self.key) or Plan((OWN,), whole=(OWN,))
            self.leaves = Leaves({OWN: self.params}, self.inputs, self.inputs)
            self.loss_fn = partial(self.gradient.loss_fn, self.module)
            devices = autocasting({leaf.device.type for leaf in self.inputs})
            if devices:
                self.outside = outside_of_autocast(devices, stack)
            self.push(stack.pop_all())
        return self

    def _recover(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            # Also where nothing has begun here: what the wrapper does next has to be the same on
            # all replicas.
            self.wrapper.recover()

    # --- what is folded

    @contextmanager
    def passes(self, weights: Sequence[Scalar] = ()) -> Iterator[None]:
        """The context of micro-batches: each has its own, as replicas meet between them."""
        yield

    @property
    def arriving(self) -> Sequence[torch.Tensor]:
        """The leaves that gradients come to, in the order of the inputs."""
        computed_with = self.wrapper.leaves()
        return [computed_with.get(id(p), p) for p in self.inputs]

    def bind(self, loss: torch.Tensor, aux: Tree) -> None:
        """Makes room for the output, with the first loss. Raises FuncgaError for what cannot be
        folded.
        """
        if self.sums is not None:
            return
        known, skip = self.plan.folding, self.program.skip
        folding = bound.folding_of(self, loss, aux)
        reducers = [folding.outputs.folds[index] for index in folding.grads]
        if folding is not known:
            self._check([*zip(self.params, reducers, strict=True)])
        self.is_weighted = reducers[0].fold.reducer.linear  # type: ignore[union-attr]
        self.sums = Sums(folding)
        if skip is not None:
            self.sums = skip.in_torch.SkippingSums(skip, folding)
        if self.wrapper.wrapped:
            beside = self.beside(loss, aux)
            for merge in self.merges:
                merge.propose(self.sums, beside)

    def _check(self, folds: Sequence[tuple[str, LeafFold | None]]) -> None:
        """Raises FuncgaError if the folds of the gradients are not sums as they are added here."""
        if not all(fold is not None and fold.fold.reducer.additive for _, fold in folds):
            raise FuncgaError(
                "the gradients' fold is no sum, and a module's own gradients are only added, in "
                "the backward pass. Fold them with funcga.mean(), per_weight() or sum(), and only "
                "the value otherwise: fold=(funcga.max(), funcga.mean()). For any other fold of "
                "gradients use funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), "
                "with the module not wrapped."
            )
        for name, fold in folds:
            assert fold is not None
            promised = fold.accumulator_dtype
            dtype = promised if self.alone else self.wrapper.sums_in(self.params[name])
            if torch.promote_types(dtype, promised) != dtype:
                narrow, wide = [str(each).removeprefix("torch.") for each in (dtype, promised)]
                raise FuncgaError(
                    f"`{name}` has gradients that {self.wrapper.name} sums in {narrow} over the "
                    f"micro-batches, and the fold promises {wide}. {self.wrapper.remedy} Or "
                    f"say that {narrow} is meant: funcga.mean(dtype={narrow!r})."
                )
        if len({fold.fold.reducer.linear for _, fold in folds if fold is not None}) > 1:
            raise FuncgaError(
                "some gradients are weighed, as by funcga.mean(), and others are not, as by "
                "funcga.sum(): a module's own gradients come from one backward pass with one "
                "weight. Give all of them one of the two."
            )

    def beside(self, loss: torch.Tensor, aux: Tree) -> list[Array]:
        """The leaves of what grad_fn returns, None for the gradients, which are where autograd
        adds them.
        """
        assert self.sums is not None
        values, outputs = self._rest(loss, aux, ()), self.sums.folding.outputs
        return [values.get(index) for index in range(len(outputs.folds))]

    def add(self, loss: torch.Tensor, aux: Tree, weight: Scalar) -> None:
        """Folds in what stands beside the gradients."""
        sums = self.sums
        assert sums is not None
        loss_alone = sums.folding.loss_alone if self.program.skip is None else None
        if loss_alone is not None and loss.dtype is self.plan.loss_dtype:
            sums.add_loss(loss, loss_alone, weight, sums.share(weight) or 0.0)
            return
        values = self._rest(loss, aux, ())
        if self.watching is not None:
            # It has seen the gradients of this replica times the cotangent.
            seed = weight if self.is_weighted else 1.0
            values.update(self.watching.measures(values, weight, seed))
        sums.add(values, weight)

    def reached(self) -> list[torch.Tensor]:
        """What a backward pass adds to, as far as it is there."""
        return [*self.wrapper.leaves().values()] or self.inputs

    # --- the result

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, in memory that nobody else holds; zeros where the loss depends on none."""
        grads = [
            torch.zeros_like(p, requires_grad=False) if p.grad is None else arrays.strided(p.grad)
            for p in self.inputs
        ]
        if self.wrapper.fresh:
            return grads
        pairs = zip(grads, arrays.are_alone(grads), strict=True)
        return [grad if is_alone else grad.clone() for grad, is_alone in pairs]

    def put(self, gradients: Sequence[torch.Tensor]) -> None:
        """Puts the gradients into the sums; a wrapper has divided them by its scale."""
        sums, scale = self.sums, self.wrapper.scale
        assert sums is not None
        kinds, folds = sums.folding.kinds, sums.folding.folds
        pairs = [*zip(sums.folding.grads, gradients, strict=True)]
        # The scale is the unit of weighted sums. All others are multiplied by it.
        plain = [gradient for index, gradient in pairs if kinds[index] != "weighted"]
        if plain and scale != 1:
            torch._foreach_mul_(local_tensors(plain), scale)
        sums.hold_in(scale)
        for index, gradient in pairs:
            dtype = gradient.dtype if kinds[index] else folds[index].accumulator_dtype
            sums.of[index] = gradient.to(dtype)
        self.plans.put(self.key, self.plan)


class ModuleWindow(OwnGrads):
    """One window of a WrappedGradient: `fold` each micro-batch, and say which is the last; then
    take the `result`.

    A replica that raises an error must not leave the others in a collective of the wrapper's. So
    they meet before such, unless nothing of the user's has run since they met.
    """

    def __init__(
        self, program: Program, gradient: WrappedGradient, backend: Backend, arguments: Arguments
    ):
        across = gradient.merged_over(program.across)
        # First, as other replicas are told of any error from here on.
        merges = reductions_of(replace(program, across=across), backend)
        super().__init__(program, gradient, backend, arguments, merges)
        self.other_modules = gradient.other_modules
        # Whether what is beside the gradients is added after the backward pass, which tells what
        # that is.
        self.adds_late = program.skip is not None or program.watch is not None
        self.is_stream = not (program.n or program.microbatch_size)
        self.has_begun = False  # whether a pass has
        self.is_last = False  # whether no replica has another; set before the backward pass

    def __enter__(self) -> Self:
        super().__enter__()
        # Until the last micro-batch is known to be the last, no pass synchronises.
        self.waiting = self.enter_context(ExitStack())
        if self.wrapper.sync != "every":
            self.waiting.enter_context(self.wrapper.waiting())
        if self.program.skip is not None:
            self.statistics_before = buffers_of(self.module)
        return self

    # --- micro-batches

    def fold(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar, last: bool = False
    ) -> None:
        """Folds one micro-batch in: the loss forwards, and backwards into the sums."""
        with recording():
            self._run(args, kwargs, weight, last)
            if last:
                self._fill_up(args, kwargs)

    def _run(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar | None, last: bool
    ) -> None:
        """Runs one micro-batch forward and backward, and folds it in, unless its weight is None.

        `last`: whether it is the last that this replica needs.
        """
        self._begin_pass(last)
        scale, kwargs = self.gradient.read_scale(kwargs, self.backend)
        # A cotangent of 0 times a NaN is NaN, so a micro-batch that weighs nothing is masked.
        masks = nullcontext() if weight else self._masked(weight)
        with masks, recording_loss():
            loss, aux, objective = self.forward(args, kwargs, scale)
            # The first loss tells what becomes of every leaf. The cotangent depends on that.
            self.bind(loss.detach(), aux)
            seed = self._seed(objective, weight)
            # Usually the loss is added first: before the last backward pass the replicas tell each
            # other what they have folded.
            if weight is not None and not self.adds_late:
                self.add(loss.detach(), aux, weight)
            self._backward(objective, seed, last)
        if weight is not None and self.adds_late:
            self.add(loss.detach(), aux, weight)

    def _begin_pass(self, last: bool) -> None:
        wrapper, is_first = self.wrapper, not self.has_begun
        self.has_begun = True
        if wrapper.meets_in_every_pass:
            # Between two micro-batches of a stream code of the user's has run.
            if is_first or self.is_stream:
                self._meet(False)
            return
        if is_first and wrapper.begins_with_buffers:
            self._meet(False)
        if last:
            self.waiting.close()

    def _meet(self, last: bool) -> bool:
        """Waits for the other replicas; whether this is the last pass of all. FuncgaError if one
        has failed.
        """
        for merge in self.merges:
            last = merge.meet(last)
        return last

    def _meet_before_backward(self, last: bool) -> bool:
        """`_meet`, and before the last pass of all tells what is folded, as far as it is known.

        From there on a replica that has failed could not be told from one that is slow.
        """
        if not (last or self.wrapper.meets_in_every_pass):
            return False
        if not (self.adds_late or self.merges[1:]):
            return self.merges[0].agree(last)
        last = self._meet(last)
        if last and not self.adds_late:
            self.merges[0].agree()
        return last

    def _masked(self, weight: Scalar | None) -> AbstractContextManager[None]:
        """A context in which what a micro-batch of no weight adds to weighted gradients is 0."""

        def mask(gradient: torch.Tensor) -> torch.Tensor:
            counts = weight is not None and not self.is_weighted
            return gradient if counts else torch.zeros_like(gradient)

        return masked([self.module, *self.wrapper.wrapped], self.reached, mask)

    def _seed(self, loss: torch.Tensor, weight: Scalar | None) -> float:
        """The cotangent: the weight, or 1 for plain sums; 0 if the weight is None."""
        if weight is None or not self.is_weighted:
            return float(weight is not None)
        if loss.dtype.itemsize < 4 and not arrays.represents_exactly(loss.dtype, weight):
            raise FuncgaError(
                f"the loss is {arrays.describe(loss.detach())}, which may not hold the weight "
                f"{weight}. Return a loss in float32, computed from outputs in float32: "
                "F.cross_entropy(module(x).float(), y)."
            )
        return float(weight)

    def _backward(self, loss: torch.Tensor, seed: float, last: bool) -> None:
        """The backward pass of a loss, from this cotangent. Others' `.grad`s stay."""
        wrapper = self.wrapper
        if not loss.requires_grad:
            raise FuncgaError(
                "the loss does not depend on any parameter, so there is no backward pass for "
                f"{wrapper.name} to synchronise in. Return a loss that is computed from "
                "module(x), 0 times that if need be."
            )
        replaced = [*wrapper.leaves().values()]
        inputs, others = self._inputs_and_others(loss, replaced)
        run: Any = graphs.run  # what is reduced in this pass is to see each gradient
        with ExitStack() as stack:
            if others:
                stack.enter_context(gradients_aside(others))
            self.is_last = self._meet_before_backward(last)
            if self.is_last:
                self.waiting.close()
                stack.enter_context(wrapper.synchronising())
            elif not wrapper.meets_in_every_pass:
                run = run_of([*self.inputs, *replaced], False) or run
            stack.enter_context(self.outside())
            run(loss, torch.full_like(loss, seed, requires_grad=False), inputs, loss.is_cpu)

    def _inputs_and_others(
        self, loss: torch.Tensor, replaced: list[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """(the leaves that a pass is restricted to, or none if it runs unrestricted; leaves of
        others that it reaches).

        It runs unrestricted if the graph has functions written in Python, which may run passes of
        their own; or if it does not end in the parameters, which FSDP has `replaced` by others.
        """
        if not (replaced or EVERY or functions_alive()):
            return (*self.inputs,), []
        ids = {*map(id, (*self.inputs, *replaced))}
        found = graphs.reach(loss, ids)
        if not (found.custom or replaced):
            return (*self.inputs,), []
        closed_over = [p for module in self.other_modules for p in module.parameters()]
        return (), found.foreign + [p for p in closed_over if id(p) not in ids]

    # --- replicas with fewer micro-batches than others

    def _fill_up(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> None:
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
            # The rows only stand in for others, so running statistics, for instance, must not see
            # them.
            before = buffers_of(self.module)
            self._run(args, kwargs, None, True)
            if self.watching is not None:
                self.watching.forget()
            put_back(before)

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Array]
    ) -> Tree:
        """The result on a replica that has no micro-batch in this window.

        It runs the passes that the others wait for, over a row of zeros: many modules cannot run on
        an empty batch.
        """
        check_no_stream(self.program)
        self.arguments = arguments = with_a_blank_row(arguments)
        with recording():
            self._fill_up(arguments.cut(0, 1, state), kwargs)
        assert self.sums is not None
        self.sums.state = state
        return self.result()

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output, the same on every
        replica.
        """
        sums: Any = self.sums
        may_skip = self.program.skip is not None
        with torch.no_grad():
            gradients = self.gradients()
            if may_skip:
                sums.look_at(local_tensors(gradients))
            # The wrapper has merged the gradients already, so they join the sums only after the
            # rest is merged.
            for merge in self.merges:
                merge.merge()
            if not (may_skip or sums.steps):
                raise nothing_to_fold()
            self.put(gradients)
            if may_skip:
                sums.put_back_if_rejected(self.statistics_before)
            return sums.result()


@contextmanager
def masked(
    modules: Sequence[nn.Module],
    leaves: Callable[[], list[torch.Tensor]],
    mask: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """A context in which the gradients of what the modules return, and those of the leaves, are
    masked.

    The backward pass still runs, because the wrapper communicates in it. Outputs are masked because
    a layer may send their gradients to other replicas. Leaves are masked because a NaN among what a
    layer has saved, times a gradient of 0, is NaN.
    """
    hooks: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}

    def mask_if_any(gradient: torch.Tensor | None) -> torch.Tensor | None:
        # DDP passes None on, where the loss does not use an output.
        return None if gradient is None else mask(gradient)

    def watch(module: nn.Module, args: tuple[Tree, ...], output: Tree) -> None:
        # FSDP2 makes the leaves in its first forward pass.
        for tensor in [*trees.flatten(output)[0], *leaves()]:
            is_new = isinstance(tensor, torch.Tensor) and id(tensor) not in hooks
            if is_new and tensor.requires_grad:
                hook = tensor.register_hook(mask_if_any)
                hooks[id(tensor)] = tensor, hook

    watch(modules[0], (), ())  # those that are there already
    handles = [module.register_forward_hook(watch) for module in dict.fromkeys(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for tensor, hook in hooks.values():
            _private.remove_hook(tensor, hook)


def check_no_stream(program: Program) -> None:
    """Raises FuncgaError for a stream without a micro-batch: there are no arguments to make a
    row of zeros of.
    """
    if program.n is None and program.microbatch_size is None:
        raise FuncgaError(
            "there is no micro-batch on this replica, and grad_fn is that of a wrapped module or "
            "of a pipeline, which the processes run together: without a micro-batch there is "
            "nothing to run it on. Give every replica a micro-batch, one of weight 0 if need be, "
            "or let funcga reduce, for which a replica may have none: "
            "stream(funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), "
            "across=group), with the module that was wrapped."
        )
