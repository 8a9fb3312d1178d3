"""One window of a wrapped module: the `.backward()` loop that its wrapper needs, weighed over all
replicas.

Only torch has this file: in JAX parameters are arguments, and nothing is reduced but by the
program.

The weight of a micro-batch is its cotangent, and wrappers divide the sum over the replicas by the
number of replicas. So their sums are the weighted sums in units of that number. Dividing by the
weight that all replicas have folded together gives the weighted mean, however uneven the replicas
are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import TracebackType

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import CARRY, Arguments
from funcga._fold.outputs import Outputs
from funcga._grad import GradientFunction
from funcga._types import Across, Array, GradFn, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.dtensor import as_dtensor, local_tensors
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.dropping import DroppingBuffers, buffers_of, put_back, statistics_of
from torch_backend.engine.inputs import Leaves, OwnParameters, detached
from torch_backend.engine.layout import Kept
from torch_backend.engine.lent_sums import holds, is_alone
from torch_backend.engine.observing import ObservedGradient, Observing
from torch_backend.engine.others import left_alone, reach
from torch_backend.engine.passes import Pass, autocasting
from torch_backend.modules import trainable
from torch_backend.modules.checks import modules_in
from torch_backend.modules.layers import Walk, called
from torch_backend.modules.visits import IN_USE
from torch_backend.reduce import reductions_of
from torch_backend.reduce.header import nothing_to_fold
from torch_backend.replicas import COULD_NOT_MERGE, is_of_a_collective
from torch_backend.wrapped.ddp import Wrapper
from torch_backend.wrapped.gradient import ModuleGradient

_NOTHING = nullcontext()


@dataclass(frozen=True, eq=False)
class WrappedGradient(ModuleGradient):
    """The gradient function of the parameters of a module that is wrapped to reduce them."""

    wrapper: Wrapper

    @property
    def kind(self) -> str:
        """Its row of the table of what is supported."""
        return self.wrapper.kind

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
        self.program, self.gradient, self.alone = program, gradient, alone
        self.wrapper, self.parts = gradient.wrapper, gradient.parts
        walk = program.memory.keep(Walk)
        self.passes = Pass(OwnParameters(self.parts, backend, gradient.module, walk))
        self.detached = self.passes.inputs.detached
        self.reductions = reductions_of(
            replace(program, across=gradient.merged_over(program.across)), backend
        )
        self.waiting, self.is_last = ExitStack(), False
        self.buffers: Buffers | None = None
        # Whether what is beside the gradients is added after the backward pass, which tells what
        # that is.
        self.adds_late = program.dropping is not None or program.observers is not None
        self.observing: Observing | None = None
        self.folded: GradientFunction = self.parts  # whose output is folded

    def __enter__(self) -> "ModuleWindow":
        module = self.gradient.module
        # If something here raises, this stack undoes what was entered before; otherwise `__exit__`
        # does.
        with ExitStack() as stack:
            stack.enter_context(self.passes)
            stack.enter_context(self.wrapper.window())
            stack.enter_context(IN_USE.using(self.program.memory.keep(Walk).ids(module)))
            self.params: dict[str, torch.Tensor] = {**trainable(module)}
            # The user's `.grad`s are put aside, and come back when the stack closes.
            stack.enter_context(left_alone([*self.params.values(), *self.wrapper.leaves()]))
            # Until the last micro-batch is known to be the last, no pass synchronises.
            if self.wrapper.sync != "every":
                self.waiting.enter_context(self.wrapper.waiting())
            if self.program.dropping is not None:
                self.statistics_before = statistics_of(module)
            self.stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The stack closes last: `recover` still needs the window's `.grad`s and flags.
        with self.stack:
            if self.observing is not None:
                self.observing.end()
            self.waiting.close()
            if error is not None:
                for reduction in self.reductions:
                    reduction.give_up()
                # Also where nothing has begun here: what the wrapper does next has to be the same
                # on all replicas.
                self.wrapper.recover()
                if is_of_a_collective(error):
                    error.add_note(COULD_NOT_MERGE)

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
        with self.masked(weight) if masks else nullcontext():
            loss_fn = partial(called, self.gradient.loss_fn, self.gradient.module)
            loss, aux, differentiated = self.passes.forward(loss_fn, [*args], kwargs)
        if self.parts.has_aux:
            aux = detached(aux)
        # The first loss tells what becomes of every leaf. The cotangent depends on that.
        if self.buffers is None:
            self._make_room(loss.detach(), aux, arguments)
        cotangent, state = self._cotangent(differentiated, weight), list[Array]()
        # Usually the loss is added first: before the last backward pass the replicas tell each
        # other what they have folded.
        if weight is not None and not self.adds_late:
            state = self._add(loss.detach(), aux, weight)
        self._backward(differentiated, cotangent)
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
        elif self.buffers is None and self.wrapper.begins_with_buffers:
            self._meet(last)
        if last:
            self.waiting.close()
            self.is_last = True

    def _meet(self, last: bool) -> bool:
        """Waits for the other replicas; whether the next pass is the last for all. FuncgaError
        if one has failed.
        """
        for reduction in self.reductions:
            last = reduction.meet(last)
        return last

    @contextmanager
    def masked(self, weight: Scalar | None) -> Iterator[None]:
        """A context in which the gradients of the module's outputs are 0 where the weight is, even
        if the loss is NaN.

        The backward pass still runs, because the wrapper communicates in it.
        """

        def mask(gradient: torch.Tensor | None) -> torch.Tensor | None:
            # DDP passes None on, where the loss does not use an output.
            if gradient is None or (weight is not None and not self.is_weighted):
                return gradient
            counts = torch.as_tensor(0 if weight is None else weight, device=gradient.device) != 0
            return torch.where(counts, gradient, 0)

        def watch(module: nn.Module, args: tuple[Tree, ...], output: Tree) -> None:
            for leaf in trees.flatten(output)[0]:
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(mask)  # type: ignore[no-untyped-call]

        handle = self.gradient.module.register_forward_hook(watch)
        try:
            yield
        finally:
            handle.remove()

    def _cotangent(self, loss: torch.Tensor, weight: Scalar | None) -> torch.Tensor:
        """The weight, or 1 for plain sums, in the loss's dtype; 0 if the weight is None."""
        if weight is None:
            return torch.zeros_like(loss, requires_grad=False)
        if not self.is_weighted:
            return torch.ones_like(loss, requires_grad=False)
        on_device = isinstance(weight, torch.Tensor)
        if loss.dtype.itemsize < 4 and (on_device or not holds(loss.dtype, weight)):
            which = "a weight that is on the device" if on_device else f"the weight {weight}"
            raise FuncgaError(
                f"the loss is {arrays.describe(loss.detach())}, which may not hold {which}. Return "
                "a loss in float32, computed from outputs in float32: "
                "F.cross_entropy(module(x).float(), y)."
            )
        if isinstance(weight, torch.Tensor):
            return weight.to(loss.device, loss.dtype).expand_as(loss)
        return torch.full_like(loss, float(weight), requires_grad=False)

    def _backward(self, loss: torch.Tensor, cotangent: torch.Tensor) -> None:
        """loss.backward(cotangent), outside of autocast: that is for the forward pass. Others'
        `.grad`s stay.
        """
        if not loss.requires_grad:
            raise FuncgaError(
                "the loss does not depend on any parameter, so there is no backward pass for "
                f"{self.wrapper.name} to synchronise in. Return a loss that is computed from "
                "module(x), 0 times that if need be."
            )
        inputs, others = self._inputs_and_others(loss)
        with ExitStack() as stack:
            for device in autocasting((loss.device.type,)):
                stack.enter_context(torch.autocast(device, enabled=False))
            if others:
                stack.enter_context(left_alone(others))
            if self.is_last:
                # From here on a replica that has failed could not be told from one that is slow.
                if self.adds_late:
                    self._meet(True)
                else:
                    self.reductions[0].announce()
                stack.enter_context(self.wrapper.synchronising(self.params))
            elif self.wrapper.meets_in_every_pass:
                self._meet(False)
            run = partial(_private.run_backward, loss, cotangent, inputs, on_host=False)
            self.passes.backwards({}, run)

    def _inputs_and_others(
        self, loss: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """(the leaves that a pass is restricted to, or none if it runs unrestricted; leaves of
        others that it reaches).

        It runs unrestricted if the graph has functions written in Python, which may run passes of
        their own; or if it does not end in the parameters, because FSDP has put other tensors in
        their place.
        """
        params, replaced = tuple(self.params.values()), self.wrapper.leaves()
        if params and not replaced and not self.passes.has_functions:
            return params, []
        ids = {*map(id, (*params, *replaced))}
        others, is_custom = reach(loss, ids)
        if params and not (is_custom or replaced):
            return params, []
        return (), others + [
            p
            for module in self.gradient.other_modules
            for p in module.parameters()
            if id(p) not in ids
        ]

    def _add(self, loss: torch.Tensor, aux: Tree, weight: Scalar) -> list[Array]:
        """Folds the loss and its aux in, and returns the state that is threaded to the next
        micro-batch.
        """
        assert self.buffers is not None
        leaves = self._leaves(self.buffers, loss, aux)
        if self.observing is not None:
            # It has seen the gradients of this replica times the cotangent.
            told = self.observing.told(leaves, weight, weight if self.is_weighted else 1)
            leaves[: len(told)] = told
        return self.buffers.add(leaves, weight)

    def _leaves(self, buffers: Buffers, loss: torch.Tensor, aux: Tree) -> list[Array]:
        """The leaves of what grad_fn returns, None for the gradients, which are where the
        wrapper sums them.
        """
        value, which = self.folded.compose(loss, aux, [()]), f"micro-batch {buffers.steps + 1}"
        leaves = buffers.layout.rest.head.leaves(value, which)
        return [*leaves, *[None] * len(self.params)]

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
            before = [(buffer, buffer.clone()) for buffer in self.gradient.module.buffers()]
            self._run(arguments, args, kwargs, None, True)
            if self.observing is not None:
                self.observing.forget()
            for buffer, values in before:
                buffer.copy_(values)

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
        buffers = self.buffers
        assert buffers is not None
        with torch.no_grad():
            gradients = [taken(p, self.wrapper.fresh) for p in self.params.values()]
            # Of a DTensor only the local shard is divided.
            sums = local_tensors(gradients)
            if isinstance(buffers, DroppingBuffers):
                buffers.look_at(sums)
            # The wrapper has merged the gradients already, so they join the buffers only after the
            # rest is merged.
            for reduction in self.reductions:
                state = reduction.finish(state)
            if not buffers.steps and self.program.dropping is None:
                raise nothing_to_fold()
            put(buffers, sums, self.wrapper.scale)
            result = buffers.result(state)
            before, (value, folded) = ((), result) if self.program.observers is None else result
            if self.program.dropping is not None:
                put_back(self.statistics_before, buffers.rejected == 0)
        # A shard shares the memory of its DTensor, so dividing it in place has divided the DTensor.
        # Only a result in another dtype has memory of its own.
        named = zip(self.params, gradients, sums, strict=True)
        grads = {
            name: gradient if folded[name] is shard else as_dtensor(folded[name], gradient)
            for name, gradient, shard in named
        }
        return (value, grads) if self.program.observers is None else (before, (value, grads))

    # --- what becomes of each leaf

    def _make_room(self, loss: torch.Tensor, aux: Tree, arguments: Arguments) -> None:
        """Makes room for an output with this loss. Raises FuncgaError for what a wrapper cannot
        fold.
        """
        structure = trees.flatten(self.params)[1]
        leaves = {0: Leaves(self.params, [*self.params.values()], structure, [])}
        bind = lambda value: self.program.bind(value, arguments)
        if self.program.observers is not None:
            readings = self.program.readings(
                self.parts.compose(loss, aux, [self.params]), arguments
            )
            self.folded = observed = ObservedGradient.of(self.parts, readings, loss)
        layout = self.program.memory.keep(Kept).layout_of(
            self.folded, (loss, aux), leaves, leaves, bind, self._check_folds, bool(arguments.state)
        )
        self.buffers = buffers_of(self.program)(layout)
        if self.program.observers is not None:
            computed_with = self.wrapper.leaf_of()
            in_backward = zip(layout.backward.leaf_indices, self.params.values(), strict=True)
            self.observing = Observing(
                readings,
                {leaf_index: computed_with.get(id(p), p) for leaf_index, p in in_backward},
                observed.before[0][0],
            )
        leaves_beside = self._leaves(self.buffers, loss, aux)
        for reduction in self.reductions:
            reduction.begin(self.buffers, leaves_beside)
        # All of the gradients are weighed, or none.
        folds = [
            layout.outputs.folds[leaf_index] for leaf_index in layout.backward.leaf_indices[:1]
        ]
        self.is_weighted = any(fold is not None and fold.fold.reducer.linear for fold in folds)

    def _check_folds(self, outputs: Outputs) -> None:
        """Raises FuncgaError if the folds of the gradients are not what a wrapper can do."""
        dtypes = None if self.alone else [self.wrapper.sums_in(p) for p in self.params.values()]
        check_folds(outputs, self.params, dtypes, self.wrapper.name, self.wrapper.remedy)


def check_folds(
    outputs: Outputs,
    params: Mapping[str, torch.Tensor],
    dtypes: Sequence[torch.dtype] | None,
    adds: str,
    remedy: str,
) -> None:
    """Raises FuncgaError if the folds of the gradients, which are the last leaves, are not sums as
    a wrapper adds them.

    `adds`: what adds the gradients; `dtypes`: in what, None for one micro-batch; `remedy`: for
    those that are narrow.
    """
    weighted = set()
    folds = outputs.folds[len(outputs.folds) - len(params) :]
    for position, (fold, name) in enumerate(zip(folds, params, strict=True)):
        if fold is None or not fold.fold.reducer.additive:
            raise FuncgaError(
                "the gradients' fold is no sum, and a module's own gradients are only added, in "
                "the backward pass. Fold them with funcga.mean(), per_weight() or sum(), and only "
                "the value otherwise: fold=(funcga.max(), funcga.mean()). For any other fold of "
                "gradients use funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), "
                "with the module not wrapped."
            )
        weighted.add(fold.fold.reducer.linear)
        dtype = fold.accumulator_dtype if dtypes is None else dtypes[position]
        if torch.promote_types(dtype, fold.accumulator_dtype) != dtype:
            narrow, promised = (
                str(d).removeprefix("torch.") for d in (dtype, fold.accumulator_dtype)
            )
            raise FuncgaError(
                f"`{name}` has gradients that {adds} sums in {narrow} over the micro-batches, and "
                f"the fold promises {promised}. {remedy} Or say that {narrow} is meant: "
                f"funcga.mean(dtype={narrow!r})."
            )
    if len(weighted) > 1:
        raise FuncgaError(
            "some gradients are weighed, as by funcga.mean(), and others are not, as by "
            "funcga.sum(): a module's own gradients come from one backward pass with one weight. "
            "Give all of them one of the two."
        )


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


def with_a_blank_row(arguments: Arguments) -> Arguments:
    """The arguments of an empty batch, with one row of zeros in it."""

    def blank(leaf: Array, axis: object) -> Array:
        if leaf is None or axis is None or axis is CARRY:
            return leaf
        shape = [*leaf.shape]
        shape[axis] = 1  # type: ignore[call-overload]
        return leaf.new_zeros(shape)

    parts = [
        part._replace(
            leaves=[blank(leaf, axis) for leaf, axis in zip(part.leaves, part.axes, strict=True)]
        )
        if part.axes
        else part
        for part in arguments.parts
    ]
    return replace(arguments, parts=tuple(parts))


def taken(p: torch.Tensor, fresh: bool) -> torch.Tensor:
    """The gradient of a parameter, in memory that nobody else holds; zeros if it has none."""
    gradient = p.grad
    if gradient is None:
        return torch.zeros_like(p, requires_grad=False)  # the loss does not depend on it
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    return gradient if fresh or is_alone(gradient) else gradient.clone()


def put(buffers: Buffers, sums: list[torch.Tensor], scale: float) -> None:
    """Puts the sums of the gradients into the buffers; a wrapper has divided them by the scale."""
    layout = buffers.layout
    pairs = [*zip(layout.backward.leaf_indices, sums, strict=True)]
    # The scale is the unit of weighted sums. All others are multiplied by it.
    plain = [gradient for index, gradient in pairs if layout.kinds[index] != "weighted"]
    if plain and scale != 1:
        torch._foreach_mul_(plain, scale)
    buffers.hold_in(scale)
    for index, gradient in pairs:
        dtype = gradient.dtype if layout.kinds[index] else layout.folds[index].accumulator_dtype
        buffers.reduced[index] = gradient.to(dtype)
