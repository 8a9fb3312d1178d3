"""What stays the same until a window ends: the contexts of its passes, and what guards them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from funcga._call.arguments import Argument
from funcga._grad import GradientFunction
from funcga._types import Tree
from torch_backend.engine.guards import recompute
from torch_backend.engine.leaves import OWN, Leaves, Own
from torch_backend.engine.plan import Plan, autocasting
from torch_backend.modules import PureLoss
from torch_backend.modules.layers import call_loss
from torch_backend.modules.visits import Visit

LossContext = AbstractContextManager[Callable[..., Any]]
NOTHING = nullcontext()


@dataclass(eq=False)
class Opened:
    """What stays the same from the begin of a window to its end.

    `mode`: the context of each micro-batch, of its loss and the backward pass; `visit`: the one
    that the loss is called in, and `first` the first argument that it is given. `outside`: the
    context of a backward pass, `noted` that of a forward pass; `watch` looks at modules that run in
    backward passes. `versions`: those of the leaves, which nobody may write to. `hooked`: whether a
    parameter has hooks of the user's. `visits`: those of a pure_loss.
    """

    leaves: Leaves
    visit: LossContext
    mode: AbstractContextManager[object] = NOTHING
    first: int = 0
    outside: AbstractContextManager[object] = NOTHING
    noted: AbstractContextManager[object] = NOTHING
    watch: Any = None
    versions: Sequence[int] = ()
    hooked: bool = False
    own: Own | None = None
    visits: Visit | None = None


def opened_in_place(
    gradient: GradientFunction, module: nn.Module, params: dict[str, torch.Tensor], stack: ExitStack
) -> Opened:
    """What the window of a wrapped module begins with: what its wrapper has put on the parameters
    stays there, and nothing is watched, as wrappers run parts of modules in backward passes.
    """
    inputs = [*params.values()]
    outside = outside_of_autocast(autocasting({leaf.device.type for leaf in inputs}), stack)
    visit = nullcontext(partial(call_loss, gradient.loss_fn, module))
    return Opened(Leaves({OWN: params}, inputs, inputs), visit, Again(recording), outside=outside)


def contexts_of_passes(
    plan: Plan, inputs: Sequence[torch.Tensor], is_noted: bool, stack: ExitStack
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """(the context of backward passes, that of forward passes)."""
    outside, noted = outside_of_autocast(plan.autocast, stack), NOTHING
    if is_noted and plan.seen is not None:
        return outside, Again(partial(recompute.noted, plan.seen, inputs))
    return outside, noted


def outside_of_autocast(devices: Sequence[str], stack: ExitStack) -> AbstractContextManager[object]:
    """The context of backward passes: outside of autocast, where that is on for these devices."""
    if not devices:
        return NOTHING
    torch.clear_autocast_cache()  # parameters may have moved since
    stack.callback(torch.clear_autocast_cache)
    return Again(partial(_outside_of_autocast, devices))


def visit_of(
    loss: PureLoss, parts: Sequence[Argument], leaves: Leaves, stack: ExitStack | None
) -> tuple[LossContext, Visit]:
    """The context that a pure_loss is called in: its module has the parameters meanwhile.

    Until the stack, that of a window, is closed, as no code of the user's runs between two
    micro-batches of a batch.
    """
    params: Tree = leaves.trees.get(0, parts[0].value)
    visit = loss.entered(params, recorded=True)
    if stack is None or loss.buffers:
        return visit, visit
    return nullcontext(stack.enter_context(visit)), visit


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
