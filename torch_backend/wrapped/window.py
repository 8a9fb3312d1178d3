"""One window of a module's own gradients: the `.backward()` loop that its wrapper wants, weighed over all replicas.

Only torch has this file: in JAX parameters are arguments, and nothing is reduced but by the program.

The weight of a micro-batch is its cotangent, and wrappers divide the sum over the replicas by their number. So the sums
that they leave are in units of that number, and dividing them by the weight that all replicas have folded is exact,
however uneven they are.
"""

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from funcga._backend.protocols import Backend
from funcga._call.arguments import CARRY, Arguments
from funcga._call.program import Program
from funcga._call.scales import scaled_loss
from funcga._fold.leaf import LeafFold
from funcga._fold.outputs import Outputs
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.engine.backward import autocasting, holds, is_alone
from torch_backend.engine.buffers import Buffers, Layout
from torch_backend.engine.others import reach
from torch_backend.engine.recording import is_constant, recording_loss
from torch_backend.engine.window import detached
from torch_backend.modules.layers import called
from torch_backend.reduce.agreement import Progress
from torch_backend.reduce.channel import COULD_NOT_MERGE, is_of_a_collective, nothing_to_fold
from torch_backend.reduce.reduction import Reduction
from torch_backend.wrapped.groups import groups_of

if TYPE_CHECKING:
    from torch_backend.wrapped.gradient import ModuleGradient


class Driven:
    """One window of a ModuleGradient: `fold` each micro-batch, and say which is the last; then take the `result`.

    A context, in which the parameters' `.grad`s are the window's.
    """

    records = True
    looks_ahead = True

    def __init__(self, program: Program, gradient: "ModuleGradient", backend: Backend, alone: bool = False):
        if torch.compiler.is_compiling() or arrays.in_transform() or callable(_compiling()):
            raise FuncgaError(
                "module_value_and_grad runs .backward() on the module's own parameters, which can be neither compiled "
                "nor transformed by torch.func. Compile the module, or loss_fn; inside of a transform use "
                "funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn))."
            )
        self.program, self.gradient, self.backend, self.alone = program, gradient, backend, alone
        self.driver, self.parts = gradient.driver, gradient.parts
        self.stack, self.waiting, self.last = ExitStack(), ExitStack(), False
        groups, progress = groups_of(program.across, gradient.driver), program.keep(Progress, program.step)
        self.reductions = [Reduction(progress, replicas) for replicas in groups]
        self.graphs = program.keep(Graphs)
        # the one that a replica without any micro-batch can take part in too
        self.reduction = None if self.driver.name or not groups else self.reductions[0]
        self.may_be_short = bool(self.driver.name) or self.reduction is not None
        self.begun = False  # whether there was a pass, of which something may be left
        self.buffers: Buffers | None = None
        self.unreached = False  # whether a loss may have come to no parameter though it should have

    def detached(self, args: tuple[Any, ...], leading: bool = False) -> tuple[Any, ...]:
        """The arguments without graphs."""
        return tuple([detached(arg, recorded=True) for arg in args])

    def __enter__(self) -> "Driven":
        with ExitStack() as stack:  # undone if something is refused
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(self.driver.steering())
            self.params = self.driver.params()
            stack.enter_context(self.driver.aside())
            self.aside = stack.enter_context(_Aside())
            self.aside.put([*self.params.values(), *self.driver.holders()], self.driver.views)
            self.aside.put(self.gradient.others())
            self.aside.put([leaf for known in self.graphs.others if (leaf := known()) is not None])
            self.stack = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        with self.stack:  # the last to be left
            self.waiting.close()
            if kind is not None:
                if self.begun:
                    self.driver.recover()
                if self.driver.name and is_of_a_collective(error):
                    error.add_note(COULD_NOT_MERGE)
                if self.reduction is not None:
                    self.reduction.give_up()
        if autocasting(("cuda",)):
            torch.clear_autocast_cache()

    def fold(
        self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any, last: bool
    ) -> list[Any]:
        """Folds one micro-batch in, and returns the state that is threaded to the next."""
        self.begun = True
        scale, kwargs = self.parts.read_scale(kwargs, self.backend)
        missing = self._missing() if last else 0
        if self.buffers is None and (missing or not last):
            self.waiting.enter_context(self.driver.waiting(self.gradient.sync))
        for _ in range(missing):
            self._keep_step(args, kwargs)
        if last:
            self.waiting.close()
            self.last = True
        loss, aux, differentiated = self._forward(args, kwargs, weight, scale)
        if self.buffers is None:
            self.plan = self._planned(loss.detach(), aux, arguments)
            self.buffers = Buffers(self.plan.layout)
        with recording_loss():
            self._run(differentiated, self._cotangent(differentiated, weight))
        return self.buffers.add(self._leaves(loss.detach(), aux), weight)

    def _forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any, scale: Any
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """The loss, its aux, and what is differentiated. `weight` is None for a micro-batch that is not folded."""
        masks = isinstance(weight, torch.Tensor) or not weight
        nodes = _nodes_so_far()
        with recording_loss(), _NOTHING if torch.is_grad_enabled() else torch.enable_grad():
            with _masked(self.gradient.module, weight, self) if masks else _NOTHING:
                output = called(self.gradient.loss_fn, self.gradient.module, *args, **kwargs)
            loss, aux = self.parts.split(output, self.backend)
            differentiated = scaled_loss(loss, scale, arrays)
        if loss.grad_fn is not None:
            self._put_others_aside(loss, loss.grad_fn._sequence_nr() - nodes)
        return loss, detached(aux) if self.parts.has_aux else aux, differentiated

    def _put_others_aside(self, loss: torch.Tensor, nodes: float) -> None:
        """Gives leaves of the loss's graph their `.grad` back afterwards that are not the module's.

        To walk through a graph is dear: one with as many `nodes` as another is taken for the same.
        """
        if nodes in self.graphs.sizes:
            return
        self.graphs.sizes.add(nodes)
        own = {*map(id, self.driver.graph_leaves())}
        others = self.aside.put(reach(loss, own)[0])
        # weakly, as a loss may make a new leaf in every call
        self.graphs.others.extend(map(weakref.ref, others))

    def _missing(self) -> int:
        """How many micro-batches fewer this replica has than others, where all have to call the module as often."""
        if self.program.n is None or not self.driver.name or not (self.driver.in_step or self.gradient.sync != "last"):
            return 0
        return self.program.n - 1 - (0 if self.buffers is None else self.buffers.steps)

    def _keep_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """Forward and backward passes that add nothing, while other replicas have micro-batches and this one has none.

        Returns the loss and its aux, which mean nothing. The module's buffers are as before.
        """
        module = self.gradient.module
        if any(isinstance(layer, nn.SyncBatchNorm) and layer.training for layer in module.modules()):
            raise FuncgaError(
                "this replica has fewer micro-batches than others, and the module has a SyncBatchNorm layer: rows that "
                "stand in for the missing ones would count in the statistics of all replicas. Give every replica "
                "equally many micro-batches."
            )
        before = [(buffer, buffer.clone()) for buffer in module.buffers()]
        loss, aux, _ = self._forward(args, kwargs, None, None)
        with recording_loss():
            self._run(loss, torch.zeros_like(loss, requires_grad=False))
        for buffer, values in before:
            buffer.copy_(values)
        return loss.detach(), aux

    def result_without_microbatches(self, arguments: Arguments, kwargs: dict[str, Any], state: list[Any]) -> Any:
        """The result on a replica that has no micro-batch in this window."""
        self.begun = True
        if self.driver.name:
            return self._result_without_rows(arguments, kwargs, state)
        return self._result_of_others(arguments, state)

    def _result_without_rows(self, arguments: Arguments, kwargs: dict[str, Any], state: list[Any]) -> Any:
        """The result on a replica whose batch is empty: its passes, over a row of zeros, add nothing.

        A row of zeros, as many modules cannot run without any.
        """
        if self.program.n is None and (self.driver.in_step or self.gradient.sync != "last"):
            self.gradient.check_stream()  # nobody knows how often the others call the module
        kwargs = self.parts.read_scale(kwargs, self.backend)[1]
        arguments = _with_a_blank_row(arguments)
        args = arguments.cut(0, 1, state)
        with self.driver.waiting(self.gradient.sync):
            for _ in range(self._missing()):
                self._keep_step(args, kwargs)
        self.last = True
        loss, aux = self._keep_step(args, kwargs)
        self.plan = self._planned(loss, aux, arguments)
        self.buffers = Buffers(self.plan.layout)
        return self.result(state)

    def _result_of_others(self, arguments: Arguments, state: list[Any]) -> Any:
        """The result on a replica that takes part in the reduction alone."""
        assert self.reduction is not None
        bound = lambda value: self.program.bind((value[0], self.params), arguments)[0]
        device = next((p.device for p in self.params.values()), torch.device("cpu"))
        outputs = self.reduction.take_part(bound, device)
        head = [None] * (len(outputs.folds) - len(self.params))
        self.plan = self._plan(None, outputs, head)
        self.buffers = Buffers(self.plan.layout)
        return self.result(state)

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output, the same on every replica."""
        buffers = self.buffers
        assert buffers is not None
        self._check_reached()
        with torch.no_grad():
            gradients = {name: _taken(p, self.driver.fresh) for name, p in self.params.items()}
            # without what makes a DTensor of it: it is the shard that is divided
            own = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients.values()]
            scale = _alike(own, self.driver.scales(self.params.values()))
            buffers.hold_in(1.0)
            if not self.driver.name:
                self._place(own)
            likes = [k if k is None else torch.empty(k[0], dtype=k[1], device=k[2]) for k in self.plan.kinds]
            leaves = likes + (self.plan.nothing if self.driver.name else own)
            for reduction in self.reductions:
                reduction.begin(buffers, leaves)
                state = reduction.finish(state)
            if not buffers.steps:
                raise nothing_to_fold()
            if self.driver.name:
                buffers.hold_in(scale)
                self._place(own)
            value, folded = buffers.result(state)
            return value, {name: _like(folded[name], gradient) for name, gradient in gradients.items()}

    def _check_reached(self) -> None:
        """Raises FuncgaError if no parameter has a gradient, here and in every window before, and the loss is why."""
        if self.parts.reached or self.driver.name:  # wrappers find it out in the backward pass
            return
        if any(p.grad is not None for p in self.params.values()):
            self.parts.reached.add(True)
        elif self.unreached and self.params:
            raise FuncgaError(
                "the loss does not depend on any parameter of the module: nothing would be trained. loss_fn uses "
                "another module, that it closes over, or it detaches what it computes. Call the module that it is "
                "given: lambda module, x, y: F.mse_loss(module(x), y)."
            )

    def _place(self, gradients: list[torch.Tensor]) -> None:
        """Puts the sums that the wrapper has left into the buffers."""
        assert self.buffers is not None
        layout, unit = self.buffers.layout, self.buffers.unit or 1.0
        places = [layout.places[i] for i in self.plan.given]
        whole = [g for k, g in zip(places, gradients, strict=True) if layout.kinds[k] != "weighted"]
        # what the buffers divide is in units only where it is a weighted sum in the leaf's dtype
        if whole and unit != 1:
            torch._foreach_mul_(whole, unit)
        for k, gradient in zip(places, gradients, strict=True):
            cast = gradient if layout.kinds[k] else gradient.to(layout.folds[k].accumulator_dtype)
            self.buffers.reduced[k] = cast

    def _planned(self, loss: Any, aux: Any, arguments: Arguments) -> "_Plan":
        """What becomes of every leaf of the output. Raises FuncgaError for what a wrapper cannot fold."""
        trees = self.backend.trees
        key = loss.dtype, [(name, p.shape, p.dtype) for name, p in self.params.items()]
        known = not self.parts.has_aux and not arguments.carried()
        plan = self.graphs.plan if known else None
        if plan is not None and plan.key == key:
            return plan
        outputs, leaves = self.program.bind(self.parts.compose(loss, aux, [self.params]), arguments)
        own = [*range(len(leaves) - len(self.params))]
        head = outputs.part(own, trees.flatten(self.parts.compose(loss, aux, [()]))[1])
        plan = self.graphs.plan = self._plan(key, outputs, [leaves[i] for i in own], head)
        return plan

    def _plan(self, key: Any, outputs: Outputs, others: list[Any], head: Any = None) -> "_Plan":
        """The plan for outputs of which these are the leaves beside the gradients."""
        given = [*range(len(others), len(outputs.folds))]
        scaled = self._check_folds([outputs.folds[i] for i in given])
        kinds = [leaf if leaf is None else (leaf.shape, leaf.dtype, leaf.device) for leaf in others]
        return _Plan(key, Layout(outputs, given), given, head, scaled, [None] * len(given), kinds)

    def _check_folds(self, folds: list[LeafFold | None]) -> bool:
        """Whether the gradients are weighed. Raises FuncgaError if their folds are not what a wrapper can do."""
        weighted = set()
        for fold, (name, p) in zip(folds, self.params.items(), strict=True):
            reducer = None if fold is None else fold.fold.reducer
            if fold is None or reducer is None or not reducer.additive:
                raise FuncgaError(
                    "the gradients' fold is no sum, and what drives a module's own gradients only adds them, in the "
                    "backward pass. Fold them with funcga.mean(), per_weight() or sum(), and only the value otherwise: "
                    "fold=(funcga.max(), funcga.mean()). For any other fold of gradients use "
                    "funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), with the module not wrapped."
                )
            weighted.add(reducer.linear)
            dtype = self.driver.sums_in(p, self.gradient.sync)
            if not self.alone and torch.promote_types(dtype, fold.accumulator_dtype) != dtype:
                raise self._narrow(name, dtype, fold.accumulator_dtype)
        if len(weighted) > 1:
            raise FuncgaError(
                "some gradients are weighed, as by funcga.mean(), and others are not, as by funcga.sum(): a module's "
                "own gradients come from one backward pass with one weight. Give all of them one of the two."
            )
        return True in weighted

    def _narrow(self, name: str, dtype: torch.dtype, promised: torch.dtype) -> FuncgaError:
        found, wanted = (str(d).removeprefix("torch.") for d in (dtype, promised))
        who = self.driver.name or "autograd"
        return FuncgaError(
            f"`{name}` has gradients that {who} sums in {found} over the micro-batches, and the fold promises "
            f"{wanted}. {self.driver.remedy} Or say that {found} is meant: funcga.mean(dtype={found!r})."
        )

    def _cotangent(self, loss: torch.Tensor, weight: Any) -> torch.Tensor:
        """The weight, or 1 for plain sums, in the loss's dtype."""
        if not self.plan.scaled:
            return torch.ones_like(loss, requires_grad=False)
        seen = not isinstance(weight, torch.Tensor)
        if loss.dtype.itemsize < 4 and not (seen and holds(loss.dtype, weight)):
            which = f"the weight {weight}" if seen else "a weight that is on the device"
            raise FuncgaError(
                f"the loss is {arrays.describe(loss.detach())}, which may not hold {which}. Return a loss in float32, "
                f"computed from outputs in float32: F.cross_entropy(module(x).float(), y)."
            )
        if seen:
            return torch.full_like(loss, float(weight), requires_grad=False)
        return weight.to(loss.device, loss.dtype).expand_as(loss)  # type: ignore[no-any-return]

    def _run(self, loss: torch.Tensor, cotangent: torch.Tensor) -> None:
        """loss.backward(cotangent), outside of autocast: that is for the forward pass."""
        if not loss.requires_grad:
            if self.driver.name:
                raise FuncgaError(
                    f"the loss does not depend on any parameter, so there is no backward pass for "
                    f"{self.driver.name} to synchronise in. Return a loss that is computed from module(x), 0 times "
                    f"that if need be."
                )
            self.unreached |= is_constant(loss)
            return
        self.unreached = True
        devices = autocasting((loss.device.type,))
        if not (devices or self.last):
            torch.autograd.backward(loss, cotangent)
            return
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(torch.autocast(device, enabled=False))
            if self.last:
                stack.enter_context(self.driver.synchronising(self.gradient.sync, self.params))
            torch.autograd.backward(loss, cotangent)

    def _leaves(self, loss: torch.Tensor, aux: Any) -> list[Any]:
        """The leaves of what grad_fn returns, None for the gradients, which are where the wrapper sums them."""
        assert self.buffers is not None
        if not self.parts.has_aux and loss.dtype == self.plan.head.dtypes[0]:
            return [loss, *self.plan.nothing]  # nothing else, as usual
        rest = self.parts.compose(loss, aux, [()])
        which = f"micro-batch {self.buffers.steps + 1}"
        return [*self.plan.head.leaves(rest, which), *self.plan.nothing]


class _Plan(NamedTuple):
    """What becomes of each leaf of an output: gradients are `given`, and `head` has the others."""

    key: Any
    layout: Layout
    given: list[int]
    head: Outputs
    scaled: bool
    nothing: list[None]  # in the places of the gradients
    kinds: list[Any]  # shape, dtype and device of the leaves in the other places


@dataclass(eq=False)
class Graphs:
    """What a step keeps of the graphs of its losses from one window to the next.

    `sizes`: how many nodes those had that were looked at. `others`: their leaves that are not the module's.
    """

    plan: _Plan | None = None
    sizes: set[float] = field(default_factory=set)
    others: "list[weakref.ref[torch.Tensor]]" = field(default_factory=list)


# What compiles the functions that are called now: also where a function that is compiled runs this as it is.
_compiling = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
# How many nodes of graphs this thread has made; where torch does not tell, no graph is like another.
_nodes_so_far = getattr(torch.autograd, "_get_sequence_nr", lambda: math.nan)
_NOTHING = nullcontext()


class _Aside:
    """A context in which some tensors have no `.grad`. Afterwards each has its own again."""

    def __init__(self) -> None:
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def put(self, tensors: Iterable[torch.Tensor], copied: bool = True) -> list[torch.Tensor]:
        """Puts the `.grad`s of these aside, and returns those that were not there already.

        `copied`: it may be in memory that a wrapper writes to.
        """
        new = {id(tensor): tensor for tensor in tensors if id(tensor) not in self.before}
        for key, tensor in new.items():
            grad = tensor.grad
            if grad is not None and copied and not is_alone(grad):
                grad = grad.clone()
            self.before[key] = tensor, grad
            tensor.grad = None
        return [*new.values()]

    def __enter__(self) -> "_Aside":
        return self

    def __exit__(self, *error: Any) -> None:
        for tensor, gradient in self.before.values():
            tensor.grad = gradient


@contextmanager
def _masked(module: torch.nn.Module, weight: Any, window: Driven) -> Iterator[None]:
    """In a micro-batch that may weigh nothing, the module's outputs get gradients of 0 then, though the loss be NaN.

    `weight` is None for one that is not folded.

    Its backward pass is run all the same, as the wrapper communicates in it.
    """

    def mask(gradient: torch.Tensor) -> torch.Tensor:
        if weight is not None and not window.plan.scaled:
            return gradient
        counts = (
            weight.to(gradient.device) != 0
            if isinstance(weight, torch.Tensor)
            else gradient.new_zeros((), dtype=torch.bool)
        )
        return torch.where(counts, gradient, 0)

    def watch(module: torch.nn.Module, args: Any, output: Any) -> None:
        for leaf in window.backend.trees.flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(mask)  # type: ignore[no-untyped-call]

    handle = module.register_forward_hook(watch)
    try:
        yield
    finally:
        handle.remove()


def _with_a_blank_row(arguments: Arguments) -> Arguments:
    """The arguments of an empty batch, with one row of zeros in it."""

    def blank(leaf: Any, axis: Any) -> Any:
        if leaf is None or axis is None or axis is CARRY:
            return leaf
        shape = [*leaf.shape]
        shape[axis] = 1
        return leaf.new_zeros(shape)

    parts = [
        part._replace(leaves=[blank(leaf, axis) for leaf, axis in zip(part.leaves, part.axes, strict=True)])
        if part.axes
        else part
        for part in arguments.parts
    ]
    return replace(arguments, parts=tuple(parts))


def _taken(p: torch.Tensor, fresh: bool) -> torch.Tensor:
    """The gradient of a parameter, in memory that nobody else holds; zeros if it has none."""
    gradient = p.grad
    if gradient is None:
        return torch.zeros_like(p, requires_grad=False)
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    return gradient if fresh or is_alone(gradient) else gradient.clone()


def _alike(sums: list[torch.Tensor], scales: list[float]) -> float:
    """What all sums have been divided by, once those are multiplied that were divided by something else."""
    scale = scales[0] if scales else 1.0
    for other in {*scales} - {scale}:
        chosen = [held for held, own in zip(sums, scales, strict=True) if own == other]
        torch._foreach_mul_(chosen, other / scale)
    return scale


def _like(folded: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The result as the DTensor that it is a shard of, if it is."""
    if type(gradient) is torch.Tensor:
        return folded
    own: Any = gradient
    if own._local_tensor is folded:
        return gradient
    return type(own).from_local(  # type: ignore[no-any-return]
        folded, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
