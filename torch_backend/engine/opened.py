"""What a window begins with: leaves in place of what is differentiated, the context that the loss
is called in, and the guards that last as long as the window.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from funcga._backend import Backend
from funcga._call import Program
from funcga._call.arguments import Argument
from funcga._grad import GradientFunction
from funcga._types import Tree
from torch_backend import _private, arrays, trees
from torch_backend.engine.guards import EVERY, ON, recompute, unchanged
from torch_backend.engine.guards.aside import gradients_aside
from torch_backend.engine.guards.watched import grads_watched
from torch_backend.engine.leaves import leaves_of, with_hooks
from torch_backend.engine.plan import OWN, Plan, autocasting, plan_of
from torch_backend.modules import PureLoss
from torch_backend.modules.checks import check_initialised, check_unfrozen
from torch_backend.modules.layers import Walk, call_loss
from torch_backend.modules.visits import Visit

LossContext = AbstractContextManager[Callable[..., Any]]
NOTHING = nullcontext()


class Own(NamedTuple):
    """A module, its own parameters that are differentiated, and the walk that has found them."""

    module: nn.Module
    params: dict[str, nn.Parameter]
    walk: Walk


class Leaves(NamedTuple):
    """`trees`: the differentiated arguments as the loss is given them, by index; `inputs` are their
    leaves, and `originals` what these are made of. `hooked`: whether hooks were put on them.
    """

    trees: dict[int, Tree]
    inputs: list[torch.Tensor]
    originals: list[Any]
    hooked: bool


@dataclass(eq=False)
class Opened:
    """What stays the same from the begin of a window to its end.

    `visit`: the context that the loss is called in; `first`: the first argument that it is given.
    `outside`: the context of a backward pass, `noted` that of a forward pass; `watch` runs backward
    passes. `versions`: those of the leaves, which nobody may write to.
    """

    leaves: Leaves
    visit: LossContext
    first: int
    outside: AbstractContextManager[object]
    noted: AbstractContextManager[object]
    watch: recompute.Watch
    versions: Sequence[int]
    hooked: bool  # whether a parameter has hooks of the user's
    own: Own | None
    visits: Visit | None  # of a pure_loss
    is_stream: bool  # whether code of the user's runs between two micro-batches

    def check_unchanged(self) -> None:
        """Raises FuncgaError if the window has changed a parameter, or the module."""
        own, visits, inputs = self.own, self.visits, self.leaves.inputs
        module = None if own is None else own.module
        if unchanged.are_written(inputs, self.versions, module):
            raise unchanged.written()
        if own is not None and any(map(_private.has_hooks, inputs)) != self.hooked:
            raise unchanged.other_hooks()
        if own is not None and not own.walk.still_finds(own.params):
            raise unchanged.other_parameters()
        if visits is not None and not visits.parts.are_those_of(visits.loss.module):
            raise unchanged.other_parameters()


def opened(
    program: Program | None,
    gradient: GradientFunction,
    backend: Backend,
    parts: Sequence[Argument],
    known: Plan | None,
    own: Own | None,
    stack: ExitStack,
) -> tuple[Opened, Plan]:
    """What a window begins with, and its plan; `stack` is closed at its end."""
    is_stream = program is not None and not (program.n or program.microbatch_size)
    if not is_stream:
        stack.enter_context(recording())
    with recording():
        if own is not None:
            leaves = _leaves_of_module(own, gradient, known)
        else:
            leaves = _leaves_of_arguments(parts, gradient, backend, known)
    inputs, visits = leaves.inputs, None
    plan = known or _new_plan(gradient, parts, leaves, own)
    visit: LossContext
    if own is not None:
        stack.enter_context(gradients_aside(inputs, own.walk.ids(own.module)))
        visit, first = nullcontext(partial(call_loss, gradient.loss_fn, own.module)), 0
    else:
        if ON and plan.watches:
            stack.enter_context(grads_watched(leaves.originals))
        lasts = program is not None and not is_stream
        visit, first, visits = _visit(gradient, parts, leaves.trees, stack if lasts else None)
    # A module that has its parameters in the backward pass, too, may run other layers in it than in
    # the first call, and other frozen parameters may be in these.
    keeps_parameters = own is not None or visits is not None
    passes = _contexts_of_passes(plan, inputs, known is None, keeps_parameters, stack)
    versions, hooked = unchanged.versions_of(inputs), any(map(_private.has_hooks, inputs))
    return Opened(leaves, visit, first, *passes, versions, hooked, own, visits, is_stream), plan


def opened_in_place(
    gradient: GradientFunction, module: nn.Module, params: dict[str, torch.Tensor], stack: ExitStack
) -> Opened:
    """What the window of a wrapped module begins with: what its wrapper has put on the parameters
    stays there, and nothing is watched, as wrappers run parts of modules in backward passes.
    """
    inputs = [*params.values()]
    autocast = autocasting({leaf.device.type for leaf in inputs})
    outside: AbstractContextManager[object] = NOTHING
    if autocast:
        stack.callback(torch.clear_autocast_cache)
        outside = Again(partial(_outside_of_autocast, autocast))
    visit = nullcontext(partial(call_loss, gradient.loss_fn, module))
    leaves = Leaves({OWN: params}, inputs, inputs, False)
    watch = recompute.Watch(None, inputs, False)
    return Opened(leaves, visit, 0, outside, NOTHING, watch, (), False, None, None, True)


def _contexts_of_passes(
    plan: Plan,
    inputs: Sequence[torch.Tensor],
    is_new: bool,
    keeps_parameters: bool,
    stack: ExitStack,
) -> tuple[AbstractContextManager[object], AbstractContextManager[object], recompute.Watch]:
    """(the context of backward passes, that of forward passes, what runs backward passes)."""
    outside: AbstractContextManager[object] = NOTHING
    noted: AbstractContextManager[object] = NOTHING
    if plan.autocast:
        torch.clear_autocast_cache()  # parameters may have moved since
        stack.callback(torch.clear_autocast_cache)
        outside = Again(partial(_outside_of_autocast, plan.autocast))
    is_noted = plan.noted and (is_new or EVERY)
    if is_noted:
        noted = Again(partial(recompute.noted, plan.seen, inputs))
    is_compared = is_noted or (plan.noted and not keeps_parameters)
    seen = plan.seen if is_compared else None
    watch = recompute.Watch(seen, inputs, plan.on_host, keeps_parameters)
    return outside, noted, watch


def _leaves_of_module(own: Own, gradient: GradientFunction, known: Plan | None) -> Leaves:
    if known is None and arrays.has_lazy(own.module.parameters()):
        check_initialised(own.module)
    params, hooked = [*own.params.values()], False
    if known is None or known.hooked:
        hooked = with_hooks(params, params, own.params, OWN, gradient)
    return Leaves({OWN: own.params}, [*params], [*params], hooked)


def _leaves_of_arguments(
    parts: Sequence[Argument], gradient: GradientFunction, backend: Backend, known: Plan | None
) -> Leaves:
    """Leaves of the arguments that are passed whole."""
    found, hooked = Leaves({}, [], [], False), False
    for index in gradient.arg_indices(len(parts)) if known is None else known.indices:
        value = parts[index].value
        if known is None:
            check_unfrozen(trees.flatten(value)[0], value, gradient, index)
        if not parts[index].axes:
            tree, leaves, originals = leaves_of(value, index, gradient, backend)
            if known is None or known.hooked:
                hooked |= with_hooks(originals, leaves, tree, index, gradient)
            found.trees[index] = tree
            found.inputs.extend(leaves)
            found.originals.extend(originals)
    return found._replace(hooked=hooked)


def _new_plan(
    gradient: GradientFunction, parts: Sequence[Argument], leaves: Leaves, own: Own | None
) -> Plan:
    _, inputs, originals, hooked = leaves
    if own is not None:
        return plan_of(gradient, (OWN,), len(parts), (), inputs, originals, hooked, own.module)
    indices = gradient.arg_indices(len(parts))
    moving = tuple([index for index in indices if parts[index].axes])
    return plan_of(gradient, indices, len(parts), moving, inputs, originals, hooked, None)


def _visit(
    gradient: GradientFunction,
    parts: Sequence[Argument],
    of_leaves: dict[int, Tree],
    stack: ExitStack | None,
) -> tuple[LossContext, int, Visit | None]:
    """The context that the loss is called in, and the first argument that it is given.

    A pure_loss is called in its module, which has the parameters meanwhile: until the stack, that
    of a window, is closed, as no code of the user's runs between two micro-batches of a batch.
    """
    loss = gradient.loss_fn
    if not isinstance(loss, PureLoss) or parts[0].axes:
        return nullcontext(loss), 0, None
    params: Tree = of_leaves.get(0, parts[0].value)
    visit = loss.entered(params, recorded=True)
    if stack is None or loss.buffers or loss.statistics:
        return visit, 1, visit
    return nullcontext(stack.enter_context(visit)), 1, visit


def recording() -> AbstractContextManager[object]:
    """A context in which autograd records, and tensors are made that can have a gradient."""
    is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return NOTHING if is_on else _recording()


@contextmanager
def _recording() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Again(AbstractContextManager[Any]):
    """A context that can be entered again and again: each time a new one is made."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self.make = make

    def __enter__(self) -> Any:
        self.entered = self.make()
        return self.entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.__exit__(*error)


@contextmanager
def _outside_of_autocast(devices: Sequence[str]) -> Iterator[None]:
    """A context outside of autocast, which is for the forward pass."""
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
