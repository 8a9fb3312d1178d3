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
from torch_backend.engine.plan import OWN, Plan, plan_of
from torch_backend.modules import PureLoss
from torch_backend.modules.checks import check_initialised, check_unfrozen
from torch_backend.modules.layers import Walk, call_loss
from torch_backend.modules.visits import Visit

LossContext = AbstractContextManager[Callable[..., Any]]
_NOTHING = nullcontext()


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
    passes. `unwritten`: the leaves that nobody may write to, and the `versions` that they had.
    """

    leaves: Leaves
    visit: LossContext
    first: int
    outside: AbstractContextManager[object]
    noted: AbstractContextManager[object]
    watch: recompute.Watch
    unwritten: Sequence[torch.Tensor]
    versions: int
    hooked: bool  # whether a leaf has hooks of the user's
    own: Own | None
    visits: Visit | None  # of a pure_loss

    def check_unchanged(self) -> None:
        """Raises FuncgaError if the window has changed a parameter, or the module."""
        if unchanged.versions_of(self.unwritten) != self.versions:
            raise unchanged.written()
        if any(map(_private.has_hooks, self.leaves.inputs)) != self.hooked:
            raise unchanged.other_hooks()
        own, visits = self.own, self.visits
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
    if torch.is_inference_mode_enabled():
        # No tensor that is made in it can ever have a gradient.
        stack.enter_context(torch.inference_mode(False))
    if not torch.is_grad_enabled():
        stack.enter_context(torch.enable_grad())
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
        visit, first, visits = _visit(program, gradient, parts, leaves.trees, stack)
    passes = _contexts_of_passes(plan, inputs, known is None, stack)
    unwritten = [p for p in inputs if id(p) not in plan.shortens_rows]
    versions, hooked = unchanged.versions_of(unwritten), any(map(_private.has_hooks, inputs))
    return Opened(leaves, visit, first, *passes, unwritten, versions, hooked, own, visits), plan


def _contexts_of_passes(
    plan: Plan, inputs: Sequence[torch.Tensor], is_new: bool, stack: ExitStack
) -> tuple[AbstractContextManager[object], AbstractContextManager[object], recompute.Watch]:
    """(the context of backward passes, that of forward passes, what runs backward passes)."""
    outside: AbstractContextManager[object] = _NOTHING
    noted: AbstractContextManager[object] = _NOTHING
    if plan.autocast:
        stack.callback(torch.clear_autocast_cache)
        outside = Again(partial(_outside_of_autocast, plan.autocast))
    if plan.noted and (is_new or EVERY):
        noted = Again(partial(recompute.noted, plan.seen, inputs))
    watch = recompute.Watch(plan.seen if plan.noted else None, inputs, plan.on_host)
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
    program: Program | None,
    gradient: GradientFunction,
    parts: Sequence[Argument],
    of_leaves: dict[int, Tree],
    stack: ExitStack,
) -> tuple[LossContext, int, Visit | None]:
    """The context that the loss is called in, and the first argument that it is given.

    A pure_loss is called in its module, which has the parameters meanwhile: for the window, as no
    code of the user's runs between two micro-batches of a batch; not of a stream.
    """
    loss = gradient.loss_fn
    if not isinstance(loss, PureLoss) or parts[0].axes:
        return nullcontext(loss), 0, None
    params: Tree = of_leaves.get(0, parts[0].value)
    visit = loss.entered(params, recorded=True)
    is_batch = program is not None and bool(program.n or program.microbatch_size)
    if not is_batch or loss.buffers or loss.statistics:
        return visit, 1, visit
    return nullcontext(stack.enter_context(visit)), 1, visit


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
