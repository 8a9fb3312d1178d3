"""One window of a wrapped module: the `.backward()` loop that its wrapper needs, weighed over all
replicas.

Only torch has this file: in JAX parameters are arguments, and nothing is reduced but by the
program.

The weight of a micro-batch is its cotangent, and wrappers divide the sum over the replicas by the
number of replicas. So their sums are the weighted sums in units of that number. Dividing by the
weight that all replicas have folded together gives the weighted mean, however uneven the replicas
are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction
from funcga._types import Across, Array, GradFn, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.dtensor import as_dtensor, local, local_tensors
from torch_backend.engine import graphs
from torch_backend.engine.plan import run_of
from torch_backend.former.buffers import Buffers
from torch_backend.former.dropping import DroppingBuffers, buffers_of, put_back, statistics_of
from torch_backend.former.foreign_leaves import gradients_aside
from torch_backend.former.inputs import OWN, Leaves, OwnParameters, detached, with_a_blank_row
from torch_backend.former.layout import StepCache
from torch_backend.former.observing import ObservedGradient, Observing, with_gradients
from torch_backend.former.passes import Pass, autocasting
from torch_backend.modules import trainable
from torch_backend.modules.checks import modules_in
from torch_backend.modules.layers import Walk, call_loss
from torch_backend.modules.visits import IN_USE
from torch_backend.reduce import Reduction, reductions_of
from torch_backend.reduce.header import nothing_to_fold
from torch_backend.replicas import COULD_NOT_MERGE, is_of_a_collective
from torch_backend.wrapped.ddp import Wrapper
from torch_backend.wrapped.gradient import ModuleGradient


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

    def window(self, program: Program, backend: Backend, alone: bool = False) -> "ModuleWindow":
        """One window of a program with this gradient function; one that is `alone` has a single
        micro-batch.
        """
        self.check_not_traced()
        return ModuleWindow(program, self, backend, alone)

    def merged_over(self, across: Across) -> Across:
        """The wrapper's own replicas: its process groups, one after the other."""
        return self.wrapper.replicas(across)

    def check_counted(self, grad_fn: GradFn) -> None:
        """Raises FuncgaError for a function around it, which is called for each micro-batch
        alone.
        """
        if grad_fn is not self:
            raise FuncgaError(
                "totals= was given, and grad_fn is a function around module_value_and_grad: called "
                "by itself, that averages every micro-batch over the replicas of "
                f"{self.wrapper.name}, where a sum is asked for. Write "
                "accumulate(module_value_and_grad(module, loss_fn), n, totals=totals), and pass "
                "keyword arguments to the step."
            )


class ModuleWindow:
    """One window of a WrappedGradient: `fold` each micro-batch, and say which is the last; then
    take the `result`.

    A context, in which the parameters' `.grad`s are the window's. One that is `alone` has a single
    micro-batch.

    Of its `passes` it uses the forward pass and the context of the backward pass. What a wrapper
    has put on parameters stays there, so it makes no leaves, and begins by itself.
    """

    records = looks_ahead = may_be_short = True

    def __init__(self, program: Program, gradient: WrappedGradient, backend: Backend, alone: bool):
        self.program, self.gradient, self.wrapper = program, gradient, gradient.wrapper
        # First, as other replicas are told of any error from here on.
        across = gradient.merged_over(program.across)
        self.reductions = reductions_of(replace(program, across=across), backend)
        walk = program.memory.keep(Walk)
        self.passes = Pass(OwnParameters(gradient.parts, backend, gradient.module, walk))
        self.detached = self.passes.inputs.detached
        self.grads = OwnGrads(
            program,
            self.passes,
            self.wrapper,
            self.reductions,
            None if alone else self.wrapper.sums_in,
            self.wrapper.name,
            self.wrapper.remedy,
        )
        self.waiting, self.is_last = ExitStack(), False
        # Whether what is beside the gradients is added after the backward pass, which tells what
        # that is.
        self.adds_late = program.dropping is not None or program.observers is not None

    def __enter__(self) -> Self:
        self.grads.__enter__()
        # Until the last micro-batch is known to be the last, no pass synchronises.
        self.passes.stack.enter_context(self.waiting)
        if self.wrapper.sync != "every":
            self.waiting.enter_context(self.wrapper.waiting())
        if self.program.dropping is not None:
            self.statistics_before = statistics_of(self.gradient.module)
        return self

    def __exit__(self, *error: object) -> None:
        self.grads.__exit__(*error)

    @property
    def buffers(self) -> Buffers | None:
        """What has been folded; None before the first loss."""
        return self.grads.buffers

    # --- micro-batches

    def fold(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
        last: bool,
    ) -> list[Array]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        state = self._run(arguments, args, kwargs, weight, last)
        if last:
            self._fill_up(arguments, args, kwargs)
        return state

    def _run(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar | None,
        last: bool,
    ) -> list[Array]:
        """Runs one micro-batch forward and backward, and folds it in, unless its weight is None.
        Returns the state that is threaded to the next.
        """
        self._begin_pass(last)
        # A cotangent of 0 times a NaN is NaN, so a micro-batch that may weigh nothing is masked.
        # The host cannot see whether a weight on a device is 0.
        masks = isinstance(weight, torch.Tensor) or not weight
        with self._masked(weight) if masks else nullcontext():
            loss_fn = partial(call_loss, self.gradient.loss_fn, self.gradient.module)
            loss, aux, differentiated = self.passes.forward(loss_fn, [*args], kwargs)
            if self.gradient.has_aux:
                aux = detached(aux)
            # The first loss tells what becomes of every leaf. The cotangent depends on that.
            self.grads.bind(loss.detach(), aux, arguments)
            seed, state = self._seed(differentiated, weight), list[Array]()
            # Usually the loss is added first: before the last backward pass the replicas tell each
            # other what they have folded.
            if weight is not None and not self.adds_late:
                state = self._add(loss.detach(), aux, weight)
            self._backward(differentiated, seed)
        if weight is not None and self.adds_late:
            state = self._add(loss.detach(), aux, weight)
        return state

    def _begin_pass(self, last: bool) -> None:
        """Meets the other replicas if the next pass communicates, and ends the waiting if it is the
        last of all.

        `last`: whether it is the last that this replica needs.
        """
        if self.wrapper.meets_in_every_pass:
            last = self._meet(last)
        elif self.grads.buffers is None and self.wrapper.begins_with_buffers:
            self._meet(last)
        if last:
            self.waiting.close()
            self.is_last = True
            self.passes.runner = graphs.run  # what is reduced in this pass is to see each gradient
        elif self.wrapper.sync == "last":
            self.passes.runner = run_of(
                [*self.grads.params.values(), *self.wrapper.leaves()], False
            )

    def _meet(self, last: bool) -> bool:
        """Waits for the other replicas; whether the next pass is the last for all. FuncgaError
        if one has failed.
        """
        for reduction in self.reductions:
            last = reduction.meet(last)
        return last

    def _masked(self, weight: Scalar | None) -> AbstractContextManager[None]:
        """A context in which what a micro-batch adds to the gradients is 0 where its weight is."""

        def mask(gradient: torch.Tensor) -> torch.Tensor:
            counts = weight is not None and not self.grads.is_weighted
            return gradient if counts else where_counted(weight, gradient)

        leaves = lambda: self.wrapper.leaves() or [*self.grads.params.values()]
        return masked([self.gradient.module, *self.wrapper.wrapped], leaves, mask)

    def _seed(self, loss: torch.Tensor, weight: Scalar | None) -> float | torch.Tensor:
        """The cotangent: the weight, or 1 for plain sums; 0 if the weight is None."""
        if weight is None or not self.grads.is_weighted:
            return float(weight is not None)
        on_device = isinstance(weight, torch.Tensor)
        if loss.dtype.itemsize < 4 and (
            on_device or not arrays.represents_exactly(loss.dtype, weight)
        ):
            which = "a weight that is on the device" if on_device else f"the weight {weight}"
            raise FuncgaError(
                f"the loss is {arrays.describe(loss.detach())}, which may not hold {which}. Return "
                "a loss in float32, computed from outputs in float32: "
                "F.cross_entropy(module(x).float(), y)."
            )
        return weight if isinstance(weight, torch.Tensor) else float(weight)

    def _backward(self, loss: torch.Tensor, seed: float | torch.Tensor) -> None:
        """The backward pass of a loss, from this cotangent. Others' `.grad`s stay."""
        if not loss.requires_grad:
            raise FuncgaError(
                "the loss does not depend on any parameter, so there is no backward pass for "
                f"{self.wrapper.name} to synchronise in. Return a loss that is computed from "
                "module(x), 0 times that if need be."
            )
        inputs, others = self._inputs_and_others(loss)
        with ExitStack() as stack:
            if others:
                stack.enter_context(gradients_aside(others))
            if self.is_last:
                # From here on a replica that has failed could not be told from one that is slow.
                if self.adds_late:
                    self._meet(True)
                else:
                    self.reductions[0].announce()
                stack.enter_context(self.wrapper.synchronising(self.grads.params))
            elif self.wrapper.meets_in_every_pass:
                self._meet(False)
            self.passes.autocast = autocasting((loss.device.type,))
            self.passes.backwards({}, partial(self.passes.run, loss, seed, inputs))

    def _inputs_and_others(
        self, loss: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """(the leaves that a pass is restricted to, or none if it runs unrestricted; leaves of
        others that it reaches).

        It runs unrestricted if the graph has functions written in Python, which may run passes of
        their own; or if it does not end in the parameters, because FSDP has put other tensors in
        their place.
        """
        params, replaced = tuple(self.grads.params.values()), self.wrapper.leaves()
        ids = {*map(id, (*params, *replaced))}
        reached = graphs.reach(loss, ids)
        if not (reached.custom or replaced):
            return params, []
        return (), reached.foreign + [
            p
            for module in self.gradient.other_modules
            for p in module.parameters()
            if id(p) not in ids
        ]

    def _add(self, loss: torch.Tensor, aux: Tree, weight: Scalar) -> list[Array]:
        """Folds the loss and its aux in, and returns the state that is threaded to the next
        micro-batch.
        """
        leaves, observing = self.grads.leaves(loss, aux), self.grads.observing
        if observing is not None:
            # It has seen the gradients of this replica times the cotangent.
            measures = observing.measures(leaves, weight, weight if self.grads.is_weighted else 1)
            leaves[: len(measures)] = measures
        return self.grads.bound.add(leaves, weight)

    # --- replicas with fewer micro-batches than others

    def _fill_up(
        self, arguments: Arguments, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> None:
        """Runs passes that add nothing while other replicas have micro-batches and this one has
        none left. The module's buffers are as before.
        """
        while not self.is_last:
            layers = self.gradient.module.modules()
            if any(isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in layers):
                raise FuncgaError(
                    "this replica has fewer micro-batches than others, and the module has a "
                    "SyncBatchNorm layer: rows that stand in for the missing ones would count in "
                    "the statistics of all replicas. Give every replica equally many micro-batches."
                )
            # The rows only stand in for others, so running statistics, for instance, must not see
            # them.
            before = statistics_of(self.gradient.module)
            self._run(arguments, args, kwargs, None, True)
            if self.grads.observing is not None:
                self.grads.observing.forget()
            put_back(before, keep=False)

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Array]
    ) -> Tree:
        """The result on a replica that has no micro-batch in this window.

        It runs the passes that the others wait for, over a row of zeros: many modules cannot run on
        an empty batch.
        """
        check_no_stream(self.program)
        arguments = with_a_blank_row(arguments)
        self._fill_up(arguments, arguments.cut(0, 1, state), kwargs)
        return self.result(state)

    # --- the result

    def result(self, state: list[Array]) -> Tree:
        """The normalised result, in the structure of grad_fn's output, the same on every
        replica.
        """
        buffers, dropping = self.grads.bound, self.program.dropping
        with torch.no_grad():
            self.grads.take()
            if isinstance(buffers, DroppingBuffers):
                buffers.look_at(self.grads.sums)
            # The wrapper has merged the gradients already, so they join the buffers only after the
            # rest is merged.
            for reduction in self.reductions:
                state = reduction.finish(state)
            if not buffers.steps and dropping is None:
                raise nothing_to_fold()
            self.grads.put()
            if dropping is not None:
                put_back(self.statistics_before, buffers.rejected == 0)
            return self.grads.result(state)


class OwnGrads:
    """The `.grad`s of a module's own parameters in a window. Autograd, and what wraps the module,
    sum the gradients there.

    A context, in which the `.grad`s are the window's: the user's are put aside, and come back at
    the end. It also ends an error in all processes.

    With the first loss `bind` makes the `buffers` of all that is folded, and `observing`, if there
    are observers. `params` are by name. `is_weighted`: whether the fold weighs gradients. At the
    end `take` has the gradients and the `sums` in them, which `put` adds to the buffers.
    """

    buffers: Buffers | None = None
    observing: Observing | None = None
    is_weighted = False

    def __init__(
        self,
        program: Program,
        passes: Pass,
        wrapper: Wrapper,
        reductions: list[Reduction],
        sums_in: Callable[[torch.Tensor], torch.dtype] | None,
        adds: str,
        remedy: str,
    ):
        """`adds`: what adds the gradients; `sums_in`: the dtype in which it adds those of a
        parameter, None for one micro-batch; `remedy`: for sums that are narrow.
        """
        self.program, self.passes, self.wrapper = program, passes, wrapper
        self.reductions, self.sums_in = reductions, sums_in
        self.adds, self.remedy = adds, remedy

    def __enter__(self) -> Self:
        inputs = self.passes.inputs
        assert isinstance(inputs, OwnParameters)
        # If something here raises, this stack undoes what was entered before; otherwise `__exit__`
        # does.
        with ExitStack() as undo:
            undo.enter_context(self.passes)
            enter = self.passes.stack.enter_context
            enter(self.wrapper.window())
            enter(IN_USE.using(inputs.walk.ids(inputs.module)))
            self.params: dict[str, torch.Tensor] = {**trainable(inputs.module)}
            enter(gradients_aside([*self.params.values(), *self.wrapper.leaves()]))
            # It needs the window's `.grad`s and flags.
            self.passes.stack.push(self._recover)
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.passes.__exit__(*error)

    def _recover(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for reduction in self.reductions:
                reduction.give_up()
            # Also where nothing has begun here: what the wrapper does next has to be the same on
            # all replicas.
            self.wrapper.recover()
            if is_of_a_collective(error):
                error.add_note(COULD_NOT_MERGE)

    # --- what is folded

    def bind(self, loss: torch.Tensor, aux: Tree, arguments: Arguments) -> None:
        """Decides with the first loss what becomes of an output, and makes room for it. Raises
        FuncgaError for what cannot be folded.
        """
        if self.buffers is not None:
            return
        program, gradient = self.program, self.passes.inputs.gradient
        structure = trees.flatten(self.params)[1]
        leaves = {OWN: Leaves(self.params, [*self.params.values()], structure, [])}
        self.gradient_fn: GradientFunction = gradient  # whose output is folded
        if program.observers is not None:
            self.gradient_fn = ObservedGradient.of(
                program, gradient, (loss, aux), [self.params], arguments
            )
        layout = program.memory.keep(StepCache).layout_of(
            program, arguments, self.gradient_fn, (loss, aux), leaves, leaves, self._check
        )
        self.buffers = buffers_of(program)(layout)
        indices = layout.backward.leaf_indices
        if isinstance(self.gradient_fn, ObservedGradient):
            computed_with = self.wrapper.leaf_of()
            observed = [computed_with.get(id(p), p) for p in self.params.values()]
            self.observing = Observing(self.gradient_fn, dict(zip(indices, observed, strict=True)))
            self.passes.stack.callback(self.observing.end)
        # All of the gradients are weighed, or none.
        folds = [layout.outputs.folds[leaf_index] for leaf_index in indices[:1]]
        self.is_weighted = any(fold is not None and fold.fold.reducer.linear for fold in folds)
        if self.wrapper.wrapped:
            beside = self.leaves(loss, aux)
            for reduction in self.reductions:
                reduction.begin(self.buffers, beside)

    def _check(self, outputs: Outputs) -> None:
        """Raises FuncgaError if the folds of the gradients, which are the last leaves, are not sums
        as they are added here.
        """
        weighted = set()
        folds = outputs.folds[len(outputs.folds) - len(self.params) :]
        for fold, (name, p) in zip(folds, self.params.items(), strict=True):
            if fold is None or not fold.fold.reducer.additive:
                raise FuncgaError(
                    "the gradients' fold is no sum, and a module's own gradients are only added, "
                    "in the backward pass. Fold them with funcga.mean(), per_weight() or sum(), "
                    "and only the value otherwise: fold=(funcga.max(), funcga.mean()). For any "
                    "other fold of gradients use funcga.value_and_grad(torch_backend.pure_loss("
                    "module, loss_fn)), with the module not wrapped."
                )
            weighted.add(fold.fold.reducer.linear)
            dtype = fold.accumulator_dtype if self.sums_in is None else self.sums_in(p)
            if torch.promote_types(dtype, fold.accumulator_dtype) != dtype:
                narrow, promised = (
                    str(d).removeprefix("torch.") for d in (dtype, fold.accumulator_dtype)
                )
                raise FuncgaError(
                    f"`{name}` has gradients that {self.adds} sums in {narrow} over the "
                    f"micro-batches, and the fold promises {promised}. {self.remedy} Or say that "
                    f"{narrow} is meant: funcga.mean(dtype={narrow!r})."
                )
        if len(weighted) > 1:
            raise FuncgaError(
                "some gradients are weighed, as by funcga.mean(), and others are not, as by "
                "funcga.sum(): a module's own gradients come from one backward pass with one "
                "weight. Give all of them one of the two."
            )

    @property
    def bound(self) -> Buffers:
        """The buffers, once there are any."""
        assert self.buffers is not None
        return self.buffers

    def leaves(self, loss: torch.Tensor, aux: Tree) -> list[Array]:
        """The leaves of what grad_fn returns, None for the gradients, which are where autograd
        adds them.
        """
        value, buffers = self.gradient_fn.compose(loss, aux, [()]), self.bound
        head = buffers.layout.rest.head.leaves(value, f"micro-batch {buffers.steps + 1}")
        return [*head, *[None] * len(self.params)]

    # --- the sums

    def take(self) -> None:
        """Takes the gradients, in memory that nobody else holds; of a DTensor only the local
        shard is a sum.
        """
        self.gradients = [_own_grad(p, self.wrapper.fresh) for p in self.params.values()]
        self.sums = local_tensors(self.gradients)

    def put(self) -> None:
        """Puts the sums into the buffers; a wrapper has divided them by its scale."""
        buffers, scale = self.bound, self.wrapper.scale
        layout = buffers.layout
        pairs = [*zip(layout.backward.leaf_indices, self.sums, strict=True)]
        # The scale is the unit of weighted sums. All others are multiplied by it.
        plain = [gradient for index, gradient in pairs if layout.kinds[index] != "weighted"]
        if plain and scale != 1:
            torch._foreach_mul_(plain, scale)
        buffers.hold_in(scale)
        for index, gradient in pairs:
            dtype = gradient.dtype if layout.kinds[index] else layout.folds[index].accumulator_dtype
            buffers.sums.accumulators[index] = gradient.to(dtype)

    def result(self, state: list[Array]) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        return with_gradients(self.program, self.bound.result(state), self._as_dtensors)

    def _as_dtensors(self, folded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # A shard shares the memory of its DTensor, so dividing it in place has divided the DTensor.
        # Only a result in another dtype has memory of its own.
        named = zip(self.params, self.gradients, self.sums, strict=True)
        return {
            name: gradient if folded[name] is shard else as_dtensor(folded[name], gradient)
            for name, gradient, shard in named
        }


def _own_grad(p: torch.Tensor, fresh: bool) -> torch.Tensor:
    """The gradient of a parameter, in memory that nobody else holds; zeros if it has none."""
    gradient = p.grad
    if gradient is None:
        return torch.zeros_like(p, requires_grad=False)  # the loss does not depend on it
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    return gradient if fresh or arrays.are_alone([gradient])[0] else gradient.clone()


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

    def watch_leaves() -> None:
        for leaf in leaves():
            if leaf.requires_grad and id(leaf) not in hooks:
                hooks[id(leaf)] = leaf, leaf.register_hook(mask)  # type: ignore[no-untyped-call]

    def watch(module: nn.Module, args: tuple[Tree, ...], output: Tree) -> None:
        for leaf in trees.flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(mask_if_any)  # type: ignore[no-untyped-call]
        watch_leaves()  # FSDP2 makes them in its first forward pass

    watch_leaves()
    handles = [module.register_forward_hook(watch) for module in dict.fromkeys(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for leaf, hook in hooks.values():
            _private.remove_hook(leaf, hook)


def where_counted(weight: Scalar | None, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient where the weight is not 0, and zeros elsewhere; None is a weight of 0."""
    if not isinstance(weight, torch.Tensor):
        return gradient if weight else torch.zeros_like(gradient)
    counts = weight.to(gradient.device) != 0
    if gradient.layout is torch.sparse_coo:
        values = torch.where(counts, gradient._values(), 0)
        return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape)
    return as_dtensor(torch.where(counts, local(gradient), 0), gradient)  # type: ignore[no-any-return]


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
