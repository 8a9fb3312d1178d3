"""A compiled micro-step: the forward and backward pass of a compiled loss, and the sums, in one
graph.

Only torch has this file: XLA compiles the loop as a whole.

Autograd over a compiled loss runs two graphs, and adds every gradient outside of both. Here one
graph computes the loss and its gradients, and adds these to accumulators that are its inputs, in
place. The accumulators are zeros at first, and no gradient becomes one. The weight of a micro-batch
is an input, too, so one graph serves for every micro-batch of a shape, whatever n.

It is taken where nothing else has to see a gradient: `against_in_step` and `against_in_window` say
what would, and `sums_kind_of` what the sums have to be. If torch.compile refuses the micro-step as
a whole, the loss is compiled alone, as it was given, and autograd adds its gradients.
"""

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold.outputs import bind_outputs
from funcga._grad import GradientFunction
from funcga._types import GradFn, LossFn, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold
from torch_backend import _private, trees
from torch_backend.former.buffers import Buffers
from torch_backend.former.inputs import Inputs, Leaves
from torch_backend.former.layout import Layout
from torch_backend.former.window import Engine
from torch_backend.modules import PureLoss
from torch_backend.modules.visits import Visit

_NUMBERS = itertools.count()

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class MicroStep:
    """What one compiled loss is compiled to, for every step that accumulates its gradients."""

    def __init__(self, compiled: _private.Compiled):
        self.is_refused = False  # whether torch.compile has refused it once
        self.replays = compiled.replays
        self.run = compiled.compile_whole(_body(compiled.function))
        self.static_sums: list[list[torch.Tensor]] = []

    def static_zeros(
        self, leaves: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        """Zeros like the leaves, where those of an earlier window were: a CUDA graph writes to
        fixed addresses.
        """
        likes = [
            (leaf.shape, leaf.stride(), leaf.device, dtype)
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
        for index, totals in enumerate(self.static_sums):
            if likes == [
                (total.shape, total.stride(), total.device, total.dtype) for total in totals
            ]:
                # Another thread finds others, so that no two windows have the same.
                del self.static_sums[index]
                torch._foreach_zero_(totals)
                return totals
        totals = zeros(leaves, dtypes)
        for total in totals:
            torch._dynamo.mark_static_address(total)
        return totals


def _body(loss_fn: LossFn) -> Callable[..., torch.Tensor]:
    """`micro_step(sums, params, inside, buffers, argnums, args, kwargs, factor, selects)`, which
    returns the loss.

    It adds the gradients by `params`, trees of the arguments `argnums`, to the sums: times
    `factor`, a 0-d tensor, if there is one, and with `selects` nothing if that is 0. `inside` is
    the module of a PureLoss, else None, and `buffers` are those of that module.
    """

    def micro_step(
        sums: Sequence[torch.Tensor],
        params: tuple[Tree, ...],
        inside: Any,
        buffers: Mapping[str, torch.Tensor],
        argnums: tuple[int, ...],
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        factor: torch.Tensor | None,
        selects: bool,
    ) -> torch.Tensor:
        def loss_of(params: tuple[Tree, ...]) -> torch.Tensor:
            if inside is not None:
                loss: torch.Tensor = inside.functional(
                    loss_fn, params[0], buffers, args, kwargs, False
                )[0]
                return loss
            replaced = dict(zip(argnums, params, strict=True))
            args_here = [replaced.get(argnum, arg) for argnum, arg in enumerate(args)]
            return loss_fn(*args_here, **kwargs)  # type: ignore[no-any-return]

        grads, loss = torch.func.grad_and_value(loss_of)(params)
        for total, gradient in zip(sums, trees.flatten(grads)[0], strict=True):
            # In the accumulator's dtype, in which neither the gradient times its weight nor the sum
            # overflows early.
            more = gradient.to(total.dtype)
            if factor is not None:
                more = more * factor.to(total.dtype)
                if selects:
                    more = torch.where(factor != 0, more, 0)
            total.add_(more)
        return loss  # type: ignore[no-any-return]

    # torch.compile keeps what it has compiled with the code object of a function, up to a limit,
    # and what it knows of shapes by its name. So each has a code object and a name of its own.
    assert isinstance(micro_step, types.FunctionType)
    micro_step.__code__ = micro_step.__code__.replace(co_name=f"micro_step_{next(_NUMBERS)}")
    return micro_step


_MICRO_STEPS: WeakKeyDictionary[LossFn, MicroStep | None] = WeakKeyDictionary()


def compiled_steps_of(program: Program, gradient: GradientFunction) -> "CompiledSteps | None":
    """What folds the micro-batches of a program whose loss is compiled; None where autograd has
    to.
    """
    loss_fn = gradient.loss_fn
    loss_fn = loss_fn.loss_fn if isinstance(loss_fn, PureLoss) else loss_fn
    if not isinstance(loss_fn, types.FunctionType):
        return None
    # One for all steps, so that another n compiles nothing anew.
    if loss_fn not in _MICRO_STEPS:
        compiled = _private.compiled_of(loss_fn)
        _MICRO_STEPS[loss_fn] = None if compiled is None else MicroStep(compiled)
    step = _MICRO_STEPS[loss_fn]
    if step is None or any(against_in_step(program, gradient).values()):
        return None
    return CompiledSteps(step, program)


_GRADIENTS: WeakKeyDictionary[GradFn, GradientFunction | None] = WeakKeyDictionary()


def of_compiled_loss(grad_fn: GradFn) -> GradientFunction | None:
    """The gradient function that `torch.compile` was given to make grad_fn of, with its loss
    compiled likewise.

    None if grad_fn is anything else.
    """
    if not isinstance(grad_fn, types.FunctionType):
        return None
    if grad_fn not in _GRADIENTS:
        compiled = _private.compiled_of(grad_fn)
        # torch.compile wraps a function around an object.
        gradient = None if compiled is None else vars(compiled.function).get("__wrapped__")
        if compiled is not None and isinstance(gradient, GradientFunction):
            loss_fn = _compiled_likewise(gradient.loss_fn, compiled.compile)
            _GRADIENTS[grad_fn] = replace(gradient, loss_fn=loss_fn)
        else:
            _GRADIENTS[grad_fn] = None
    return _GRADIENTS[grad_fn]


def _compiled_likewise(loss_fn: LossFn, compile: Callable[[LossFn], LossFn]) -> LossFn:
    if isinstance(loss_fn, PureLoss) and not loss_fn.statistics:
        return replace(loss_fn, loss_fn=compile(loss_fn.loss_fn))
    return compile(loss_fn)


class SumsKind(NamedTuple):
    """What the sums of a window are like: the dtype of each, and whether they are weighted."""

    dtypes: list[torch.dtype]
    weighted: bool


def sums_kind_of(
    fold: Any, gradient: GradientFunction, arguments: Sequence[Leaves], backend: Backend
) -> SumsKind | None:
    """The SumsKind of gradients by these arguments; None if they are no sums, or sums of two
    kinds.
    """
    if not all(_is_plain(leaf) for argument in arguments for leaf in argument.leaves):
        return None
    if gradient.with_value and not isinstance(fold, Fold):
        # The fold of the loss, and that of the gradients.
        fold = fold[1] if isinstance(fold, tuple | list) and len(fold) == 2 else None
    grads = tuple([argument.tree for argument in arguments])
    try:
        outputs, _ = bind_outputs(
            fold, grads if isinstance(gradient.argnums, tuple) else grads[0], backend
        )
    except FuncgaError:
        return None  # it is raised where the output of the first micro-batch is bound
    folds = outputs.reduced_folds
    kinds, dtypes = (
        {leaf_fold.adds for leaf_fold in folds},
        [leaf_fold.accumulator_dtype for leaf_fold in folds],
    )
    is_one_sum = kinds in ({"weighted"}, {"plain"}) and {*dtypes} <= {*_FLOATS}
    return SumsKind(dtypes, kinds == {"weighted"}) if is_one_sum else None


def _is_plain(leaf: torch.Tensor | None) -> bool:
    """Whether it is a dense tensor of floats, or a parameter that is one."""
    return (
        leaf is not None
        and type(leaf) in (torch.Tensor, nn.Parameter)
        and leaf.layout is torch.strided
        and leaf.dtype in _FLOATS
    )


class CompiledSums:
    """The sums of one window, which a MicroStep adds to.

    `argnums` are the arguments that are differentiated. `visit` is that of a PureLoss, whose
    parameters are the only one of these. `weighs`: whether the user gives weights.
    """

    def __init__(
        self,
        step: MicroStep,
        kind: SumsKind,
        leaves_of: Mapping[int, Leaves],
        visit: Visit | None,
        weighs: bool,
    ):
        self.step, self.kind, self.argnums = step, kind, (*leaves_of,)
        self.visit, self.weighs = visit, weighs
        loss = None if visit is None else visit.loss
        self.inside = loss.calling if isinstance(loss, PureLoss) else None
        self.buffers: Mapping[str, torch.Tensor] = {}
        if visit is not None and visit.with_buffers:
            self.buffers = dict(visit.loss.module.named_buffers())
        # None of them is None, as `sums_kind_of` has seen.
        leaves = [
            leaf.detach()
            for argument in leaves_of.values()
            for leaf in argument.leaves
            if leaf is not None
        ]
        rest = iter(leaves)
        self.params = tuple(
            [
                trees.unflatten(argument.structure, [*itertools.islice(rest, len(argument.leaves))])
                for argument in leaves_of.values()
            ]
        )
        self.is_static = step.replays and all(leaf.is_cuda for leaf in leaves)
        if self.is_static:
            _keep_where_they_are(
                leaves,
                [original for argument in leaves_of.values() for original in argument.originals],
            )
        self.totals = (
            step.static_zeros(leaves, kind.dtypes) if self.is_static else zeros(leaves, kind.dtypes)
        )
        self.factors: dict[float, torch.Tensor] = {}  # shares of the weight, as 0-d tensors

    def add(
        self,
        args: Sequence[Tree],
        kwargs: Mapping[str, Tree],
        weight: Scalar,
        share: float | None,
        unit: float,
    ) -> torch.Tensor | None:
        """Adds the gradients of a micro-batch with this share of the weight, and returns the loss.

        The share is None for a weight that only a device knows, and then that is divided by the
        unit. The result is None, and nothing is added, if torch.compile refuses the micro-step.
        """
        # Without a factor inductor frees each gradient sooner. The user's own weights may be 1 now
        # and another number next, so these have one in every micro-batch, and one graph.
        has_factor = self.kind.weighted and (share != 1 or self.weighs)
        factor = self._factor(weight, share, unit) if has_factor else None
        # What is differentiated is passed apart. A PureLoss has it in its module.
        args = [None if argnum in self.argnums else arg for argnum, arg in enumerate(args)]
        if self.inside is not None:
            args = args[1:]
        if self.visit is not None:
            self.visit.reserve()
        try:
            with torch.no_grad():
                loss: torch.Tensor = self.step.run(
                    self.totals,
                    self.params,
                    self.inside,
                    self.buffers,
                    self.argnums,
                    args,
                    kwargs,
                    factor,
                    share is None,
                )
        except _private.refusals_to_compile():
            self.step.is_refused = True
            return None
        finally:
            if self.visit is not None:
                self.visit.give_back()
        return loss

    def _factor(self, weight: Scalar, share: float | None, unit: float) -> torch.Tensor:
        like = self.totals[0]
        if share is None:
            return torch.as_tensor(weight, dtype=like.dtype, device=like.device) / unit
        if share not in self.factors:
            self.factors[share] = torch.full((), share, dtype=like.dtype, device=like.device)
        return self.factors[share]

    @property
    def are_zeros(self) -> bool:
        """Whether nothing but zeros has been added."""
        return not any(bool(total.any()) for total in self.totals)

    def copies(self) -> list[torch.Tensor]:
        """The sums that last, in memory that no later window writes to."""
        copies = [total.clone() for total in self.totals]
        self.step.static_sums.append(self.totals)
        return copies


def zeros(leaves: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Zeros like the leaves, in these dtypes."""
    return [torch.zeros_like(leaf, dtype=dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]


def _keep_where_they_are(leaves: Sequence[torch.Tensor], originals: Sequence[Any]) -> None:
    """Lets a CUDA graph read leaves made of parameters from where these stay; it would copy them
    first.
    """
    for original, leaf in zip(originals, leaves, strict=True):
        if isinstance(original, nn.Parameter):
            torch._dynamo.mark_static_address(leaf, guard=False)


# --- the window


@dataclass(eq=False)
class _LastSumsKind:
    """What the sums of the last window were like, for leaves of a `key`."""

    key: object = None
    kind: SumsKind | None = None


class _CompiledBuffers(Buffers):
    """Buffers whose sums of gradients are those that a compiled micro-step adds to."""

    def __init__(self, sums: CompiledSums, layout: Layout):
        super().__init__(layout)
        self.compiled = sums
        self._hold(sums.totals)

    def _hold(self, totals: list[torch.Tensor]) -> None:
        for added, total in zip(self.layout.backward.added, totals, strict=True):
            self.sums.accumulators[added.leaf_index] = total

    def result(self, state: list[Any]) -> Tree:
        """The normalised result, out of the reach of a next window, for which sums may stay."""
        if self.compiled.is_static:
            self._hold(self.compiled.copies())
        return super().result(state)


# --- where autograd adds the gradients of a compiled loss after all: why, and whether it is so


def against_in_step(program: Program, gradient: GradientFunction) -> dict[str, object]:
    """What stands against compiled micro-steps in all windows of a step."""
    loss = gradient.loss_fn
    returns_state = isinstance(loss, PureLoss) and (loss.buffers or loss.statistics)
    return {
        "replicas merge the sums": program.across is not None,
        "observers measure each gradient": program.observers is not None,
        "the loss has aux": gradient.has_aux,
        "the loss is scaled": gradient.scaled,
        "the loss returns buffers or statistics": returns_state,
    }


def against_in_window(engine: Engine, arguments: Arguments) -> dict[str, object]:
    """What stands against compiled micro-steps in a window."""
    return {
        "a hook on a parameter is to see each gradient": engine.inputs.hooked,
        "leaves are made for each micro-batch": not engine.inputs.are_whole,
        "the loss may call collectives": engine.listener is not None,
        "state is threaded": arguments.state,
        "autocast casts what the loss computes": _private.is_any_autocast_enabled(),
        "hooks see the tensors that autograd saves": _private.saves_by_hooks(),
        "a mode sees each operator": _private.dispatch_modes(),
        "anomalies are detected": torch.is_anomaly_enabled(),
    }


class CompiledSteps:
    """What folds the micro-batches of a window whose loss is compiled, as far as it can: `step` is
    what the loss is compiled to. The engine folds the others.
    """

    def __init__(self, step: MicroStep, program: Program):
        self.step, self.program = step, program
        self.sums: CompiledSums | None = None  # None where autograd adds the gradients

    def buffers_of(self, layout: Layout) -> Buffers:
        """What outputs of this layout are folded into."""
        return Buffers(layout) if self.sums is None else _CompiledBuffers(self.sums, layout)

    def fold(
        self,
        engine: Engine,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
    ) -> bool:
        """Folds one micro-batch in by a compiled micro-step; False if autograd has to."""
        if self.sums is None and engine.sums is None:
            self._begin(engine, arguments)
        sums, gradient, share, unit = self.sums, engine.inputs.gradient, None, 1.0
        if sums is None:
            return False
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
        if loss is None or (is_first and not gradient.reached and sums.are_zeros):
            self._leave_to_autograd(engine)
            return False
        if is_first:
            gradient.reached.add(True)
            engine.sums = engine.bind(loss, None, engine.inputs.leaves, arguments)
            engine.buffers.share(weight)
        engine.add_beside(loss, None, engine.inputs.leaves, weight, share)
        return True

    def _begin(self, engine: Engine, arguments: Arguments) -> None:
        """Makes the sums, if nothing else is to see the gradients of a micro-batch, or takes part
        in computing them.
        """
        inputs = engine.inputs
        if self.step.is_refused or any(against_in_window(engine, arguments).values()):
            return
        visit = inputs.visit if isinstance(inputs.visit, Visit) else None
        if visit is not None:
            visit.reserve()  # the module and its parameters are checked
            visit.give_back()
        kind, weighs = self._kind(inputs), self.program.weight is not None
        if kind is not None:
            self.sums = CompiledSums(self.step, kind, inputs.leaves, visit, weighs)

    def _kind(self, inputs: Inputs) -> SumsKind | None:
        """What the sums of this window are like."""
        last, leaves_of = self.program.memory.keep(_LastSumsKind), [*inputs.leaves.values()]
        key = [
            (
                argument.structure,
                [type(leaf) if leaf is None else leaf.dtype for leaf in argument.leaves],
            )
            for argument in leaves_of
        ]
        if last.key != key:
            last.key = key
            last.kind = sums_kind_of(self.program.fold, inputs.gradient, leaves_of, inputs.backend)
        return last.kind

    def _leave_to_autograd(self, engine: Engine) -> None:
        if self.step.is_refused:
            self.sums = None
        if engine.sums is not None:
            # What was added so far is no backward pass of loss_fn.
            engine.sums.writes = engine.sums.count_writes()
