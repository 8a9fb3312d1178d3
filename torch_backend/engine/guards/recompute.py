"""A module that runs again in the backward pass, as under a checkpoint, has the parameters of the
forward pass.

torch.func.functional_call takes its tensors out of the module when the forward pass ends. What a
checkpoint runs again then has the module's own: the same where they share memory, and silently
wrong gradients where not, in plain torch too. torch's own hooks show which tensors a module has.
"""

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.engine.guards import ON
from torch_backend.modules.closures import reachable

# Where each module's parameters lay that are no leaves of the window, in forward passes.
Seen = weakref.WeakKeyDictionary[nn.Module, set[int]]


def memory_of(tensor: torch.Tensor) -> int:
    """Where a tensor lies, or which one it is where that cannot be told, as in a transform."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


def none_seen(loss_fn: object) -> Seen | None:
    """A table for forward passes of a loss; None where these may not be noted: compiled modules and
    functions would be compiled again where there are such hooks.
    """
    if not ON:
        return None
    # Without torch._dynamo nothing is compiled.
    for value in reachable(loss_fn) if "torch._dynamo" in sys.modules else ():
        if "_torchdynamo_orig_callable" in getattr(value, "__dict__", ()):
            return None
    return weakref.WeakKeyDictionary()


@contextmanager
def noted(seen: Seen, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context of forward passes, in which it is noted which other parameters modules have."""
    own = {*map(memory_of, leaves)}

    def note(module: nn.Module, args: object) -> None:
        others = {*map(memory_of, module.parameters(recurse=False))} - own
        if others:
            seen.setdefault(module, set()).update(others)

    _private.FORWARD_PRE_HOOKS[note] = note
    try:
        yield
    finally:
        del _private.FORWARD_PRE_HOOKS[note]


@dataclass(eq=False)
class Watch:
    """Watches the backward passes of a window: `check` is a hook before the forward passes of
    modules, which raises FuncgaError if one runs there with other tensors than in the forward pass.

    `seen`: None where forward passes were not noted. `keeps_parameters`: whether modules have their
    parameters in the backward pass too, so that one that was not noted has the right ones.
    """

    seen: Seen | None
    leaves: Sequence[torch.Tensor]
    on_host: bool
    keeps_parameters: bool = False
    thread: int = field(default_factory=threading.get_ident)
    tasks: set[int] = field(default_factory=set)

    @cached_property
    def own(self) -> tuple[set[int], set[int]]:
        """(the ids of the leaves, where they lie)."""
        return {*map(id, self.leaves)}, {*map(memory_of, self.leaves)}

    def task_of(self, loss: torch.Tensor) -> Any:
        """The handle of a hook that notes the number of the backward pass of a loss.

        On the host a pass runs in this thread; elsewhere it is known by its number.
        """
        root: Any = loss.grad_fn
        return root.register_prehook(lambda _: self.tasks.add(_private.graph_task()))

    def check(self, module: nn.Module, args: object) -> None:
        """The hook."""
        task = _private.graph_task()
        is_here = threading.get_ident() == self.thread if self.on_host else task in self.tasks
        if task == -1 or not is_here:
            return
        in_function = isinstance(_private.current_node(), BackwardCFunction)
        others = None if self.seen is None else self.seen.get(module)
        is_trusted = others is None and (self.seen is None or self.keeps_parameters)
        ids, places = self.own
        for tensor in module.parameters(recurse=False):
            where = memory_of(tensor)
            is_right = is_trusted or where in (others or ())
            if where in places:
                # A reentrant checkpoint leaves the gradient in the module's own parameter.
                is_right = id(tensor) in ids or not in_function
            if not is_right:
                raise recomputed()


def recomputed() -> FuncgaError:
    """The error for a module that runs again with other parameters."""
    return FuncgaError(
        "loss_fn runs a module again in the backward pass, as a checkpoint does, and then with the "
        "module's own parameters instead of those that loss_fn is given: functional_call has taken "
        "them out by then. Use torch_backend.pure_loss(module, loss_fn); or, for a checkpoint with "
        "use_reentrant=True, use_reentrant=False."
    )
