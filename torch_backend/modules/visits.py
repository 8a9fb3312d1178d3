"""Pure losses: a thread puts tensors into a module and takes them out again, while other threads
may not.

Only torch has this file: in JAX the arrays of a model are arguments.
"""

import copy
import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from funcga._types import LossFn
from funcga.errors import FuncgaError, similar
from torch_backend import _private, arrays
from torch_backend._private import BUFFERS, PARAMETERS
from torch_backend.modules.checks import check_not_wrapped, frozen, signature_with
from torch_backend.modules.layers import Table, Walk

Tensors = Mapping[str, torch.Tensor]
# What loss_fn returns: a scalar, or (scalar, aux).
Output = object


@dataclass(frozen=True, eq=False)
class PureLoss:
    """A pure function of a module's parameters. Made by `pure_loss`, which says what the fields
    mean.
    """

    module: nn.Module
    loss_fn: LossFn
    buffers: bool
    walk: Walk = field(default_factory=Walk, repr=False)

    @property
    def __signature__(self) -> inspect.Signature | None:
        """That of loss_fn, with the parameters in the place of the module."""
        return signature_with(self.loss_fn, ["params", "buffers"] if self.buffers else ["params"])

    def __call__(self, params: Tensors, *args: Any, **kwargs: object) -> Output:
        """The loss of a batch with these parameters; with the buffers, if they are threaded."""
        if not torch.compiler.is_compiling():
            with Visit(self, params) as loss:
                return loss(*args, **kwargs)
        # The same as torch.compile knows it, also in a loop.
        module = self.module
        threaded: dict[str, Any] = {}  # annotated: torch.compile cannot trace dict[...]()
        replaced(params, dict(module.named_parameters(remove_duplicate=False)), "parameters")
        if self.buffers:
            threaded, *args = args  # type: ignore[assignment]
            replaced(threaded, dict(module.named_buffers(remove_duplicate=False)), "buffers")
        buffers = {**dict(module.named_buffers()), **threaded}
        output, after = self.functional(params, buffers, args, kwargs)
        return with_state(output, {n: after[n] for n in threaded}) if self.buffers else output

    def functional(
        self, params: Tensors, buffers: Tensors, args: Sequence[object], kwargs: dict[str, object]
    ) -> tuple[Output, dict[str, torch.Tensor]]:
        """(what loss_fn returns for the module with these tensors, its buffers afterwards), as
        functional_call computes it.
        """
        # The buffers are copied, because the module writes to the tensors that it gets.
        tensors = {**params, **{name: tensor.clone() for name, tensor in buffers.items()}}
        with _private.with_tensors(self.module, tensors, tie_weights=True):
            output = self.loss_fn(self.module, *args, **kwargs)
        # What the module sets in the place of a buffer is in this dict afterwards.
        return output, {name: tensors[name].detach() for name in buffers}


class Visit:
    """A context in which the module of a loss has other parameters, and copies of its buffers, and
    whose value is called as `loss(*batch)`.

    Its own tables are never written to: they are exchanged, in the `__dict__` of each part. It may
    be entered again and again: in between the module has its own parameters, and other threads may
    enter. While it is entered, those that want to put parameters into the module, or into one that
    overlaps with it, are refused.

    Parameters that are not among `params` stay, detached from any graph, except in a transform: a
    tensor of a loss around this one keeps its graph. `recorded`: one that stays is a leaf if it
    requires grad, as functions that recompute in the backward pass may be recorded for its sake
    alone.
    """

    tables: list[Table] | None = None  # of the parameters, set when this is first entered
    # The parts' `__dict__`s and own tables of parameters and buffers, while this is entered.
    own: list[tuple[dict[str, Any], Table, Table]]

    def __init__(self, loss: PureLoss, params: Tensors, recorded: bool = False):
        check_not_wrapped(loss.module)
        self.loss, self.params, self.recorded = loss, params, recorded
        self.parts = loss.walk.through(loss.module)
        self.use = InUse(self.parts.ids)

    def __enter__(self) -> Callable[..., Output]:
        loss = self.loss
        self.use.__enter__()
        try:
            if self.tables is None:
                self.tables = self._tables()
        except BaseException:
            self.use.__exit__()
            raise
        # A part that is used in two places is here twice, so all tables are read before one is
        # exchanged. The module may have new tensors since the last time, and gets those back.
        self.own = [(each, each[PARAMETERS], each[BUFFERS]) for each in self.parts.spaces]
        for (space, _, buffers), parameters in zip(self.own, self.tables, strict=True):
            space[PARAMETERS], space[BUFFERS] = parameters.copy(), buffers.copy()
        # Without buffers there is nothing to do around a micro-batch.
        has_buffers = loss.buffers or any(buffers for _, _, buffers in self.own)
        return self if has_buffers else partial(loss.loss_fn, loss.module)

    def __exit__(self, *error: object) -> None:
        for space, parameters, buffers in self.own:
            space[PARAMETERS], space[BUFFERS] = parameters, buffers
        self.use.__exit__()

    def _tables(self) -> list[Table]:
        """The tables of parameters that the parts have meanwhile, checked."""
        own = self.parts.tables(PARAMETERS)
        tensors = replaced(self.params, self.parts.params, "parameters")
        for tensor in chain.from_iterable(map(dict.values, own)):
            if tensor is not None and id(tensor) not in tensors:
                tensors[id(tensor)] = self._left_out(tensor)
        return [{name: tensors.get(id(each)) for name, each in table.items()} for table in own]

    def _left_out(self, own: torch.Tensor) -> torch.Tensor:
        """A parameter that is not given, without its graph."""
        if arrays.in_transform() and not isinstance(own, nn.Parameter):
            return own
        stays = own.detach()
        return stays.requires_grad_() if self.recorded and own.requires_grad else stays

    def __call__(self, *args: Any, **kwargs: object) -> Output:
        """The loss of a batch, on copies of the module's own buffers, or of those that are
        threaded.
        """
        loss, threaded = self.loss, dict[str, Any]()
        own = self.parts.named([buffers for *_, buffers in self.own])
        if loss.buffers:
            threaded, *args = args  # type: ignore[assignment]
        # Each micro-batch gets new ones: writes through `.data` or a NumPy array cannot be seen, so
        # none can be reused.
        given = replaced(threaded, own, "buffers")
        copies = _copies({id(buffer): buffer for buffer in own.values()}, given)
        for space, _, table in self.own:
            space[BUFFERS] = {name: copies.get(id(buffer)) for name, buffer in table.items()}
        output = loss.loss_fn(loss.module, *args, **kwargs)
        if not loss.buffers:
            return output
        # They are copied: a checkpoint runs the forward pass again later, and writes to the buffers
        # once more.
        after = self.parts.named(self.parts.tables(BUFFERS))
        return with_state(output, {name: after[name].detach().clone() for name in threaded})


def with_state(output: Output, state: dict[str, torch.Tensor]) -> tuple[Output, Output]:
    """What loss_fn returned, with a state beside its aux."""
    if isinstance(output, tuple | list) and len(output) == 2:
        return output[0], (output[1], state)
    return output, state


def replaced(given: Tensors, own: Tensors, what: str) -> dict[int, torch.Tensor]:
    """The given tensors by the ids of the module's `own` that they stand in for. Raises FuncgaError
    for names and shapes that the module does not have, for gradients of frozen parameters, and
    where hooks would not be called. `what`: "parameters" or "buffers".
    """
    by_id: dict[int, torch.Tensor] = {}
    # If none is trained, the module is a mere frame for parameters from elsewhere.
    is_frame = not any(tensor.requires_grad for tensor in own.values())
    transformed = _private.transforms() > 0
    for name, tensor in given.items():
        original = own.get(name)
        if original is None or tensor.shape != original.shape:
            hint = similar(name, own) if original is None else ""
            raise FuncgaError(
                f"`{name}` is {arrays.describe(tensor)}, and among the {what} of the module it is "
                f"{arrays.describe(original)}{hint}. Give each by the name and in the shape that "
                f"it has there: dict(module.named_{what}())."
            )
        if id(original) in by_id:
            raise FuncgaError(
                f"`{name}` and another of the {what} that were given are one tensor in the module, "
                f"tied: give one of the two names, as dict(module.named_{what}()) does."
            )
        by_id[id(original)] = tensor
        if not tensor.requires_grad:
            continue
        if isinstance(original, nn.Parameter) and not (original.requires_grad or is_frame):
            raise frozen(name)
        has_hooks = transformed and _private.hooks_of(original) and not _private.hooks_of(tensor)
        # What was computed from a parameter, as in meta-learning, has no use for its hooks.
        if has_hooks and tensor.is_leaf:
            raise FuncgaError(
                f"`{name}` has a hook of register_hook, which a transform of torch.func does not "
                "call. Take the gradient with funcga.grad or funcga.value_and_grad, which do; or "
                "remove it with handle.remove()."
            )
    return by_id


def _copies(
    buffers: dict[int, torch.Tensor], given: dict[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Copies of the given tensors, or of the buffers themselves, by the ids of these. Buffers that
    share memory have copies that share memory likewise.
    """
    if len({*map(_private.storage_key, buffers.values())}) == len(buffers):
        return {key: given.get(key, buffer).detach().clone() for key, buffer in buffers.items()}
    copies = copy.deepcopy(buffers)
    for key, tensor in given.items():
        copies[key].detach().copy_(tensor)
    return copies


# The thread of each use, and the ids of what it uses. A process has each module once, so all of its
# threads have one list.
_USES: list[tuple[int, Collection[int]]] = []
_LOCK = threading.Lock()


class InUse(AbstractContextManager[None]):
    """A context in which this thread alone uses what has these ids: parts of modules that have
    other parameters meanwhile, and parameters whose `.grad`s hold its sums.

    Raises FuncgaError if another thread uses one of them.
    """

    def __init__(self, ids: Collection[int]):
        self.ids = ids

    def __enter__(self) -> None:
        self.use = threading.get_ident(), self.ids
        with _LOCK:
            for thread, used in _USES:
                if thread != self.use[0] and not {*used}.isdisjoint(self.ids):
                    raise FuncgaError(
                        "two threads use one module at the same time, and would find parameters or "
                        "gradients of each other in it. Give each thread a module of its own: "
                        "copy.deepcopy(module)."
                    )
            _USES.append(self.use)

    def __exit__(self, *error: object) -> None:
        with _LOCK:
            _USES.remove(self.use)
