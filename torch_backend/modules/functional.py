"""torch.func.functional_call in a loss that funcga differentiates: the same swap, by a plan that is
made once.

Only torch has this file: models of JAX are functions of their parameters.

For every call torch looks for tied parameters, and finds the place of each tensor by its name. Both
stay the same as long as the module does. What a plan was made of is compared at every call, by
identity, so that a module that has changed gets a new one. What is unusual is left to torch.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from torch_backend import _private, arrays
from torch_backend._private import BUFFERS, PARAMETERS, PARTS
from torch_backend.arrays import recording_loss

# The `__dict__` of a module, and one of its tables.
Space = dict[str, Any]
Table = dict[str, torch.Tensor | None]
# A table and the key of a tensor in it.
Place = tuple[Table, str]
# The same whichever table the part has now, as a pure_loss exchanges them: its `__dict__` and the
# kind, and the key.
Slot = tuple[tuple[Space, str], str]
# The slots of a call, beside the name for each.
Planned = tuple[list[str], list[Slot]]


class _CallLog(threading.local):
    """What a window of the engine notes of calls.

    `calls` are those of the present loss: the `__dict__` of the module, the places in it, and what
    they have put there; None outside of windows.
    """

    calls: list[tuple[Space, list[Place], list[torch.Tensor]]] | None = None


call_log = _CallLog()


class Plan:
    """Where the tensors of these names belong in a module: also where it uses one under other
    names, if they are tied.

    Raises LookupError for what is left to torch: a name that is no parameter or buffer, or two that
    are tied.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], ties: bool):
        spaces = _spaces(module)
        filled = _filled(spaces)
        tables = [space[kind] for space, kind in filled]
        self.ids = _ids(spaces, filled)
        places = _by_name(module)
        # Where each tensor is, as (index of the table, key): a part that is used twice has its
        # table here twice.
        at: dict[int, dict[tuple[int, str], tuple[int, str]]] = {}
        for index, table in enumerate(tables):
            for key, tensor in table.items():
                if tensor is not None:
                    at.setdefault(id(tensor), {}).setdefault((id(table), key), (index, key))
        index_of = {id(table): index for index, table in enumerate(tables)}
        # The index of the table, and the key in it, for each slot, and the name that is given for
        # it.
        self.indices: list[tuple[int, str]] = []
        self.names: list[str] = []
        for name in names:
            table, key = places[name]
            indices = at[id(table[key])].values() if ties else [(index_of[id(table)], key)]
            self.indices += indices
            self.names += [name] * len(indices)
        if len({*self.indices}) < len(self.indices):
            raise LookupError("two names of one tensor")

    def on(self, module: nn.Module) -> Planned | None:
        """The names and their slots; None if the module is no longer what the plan was made of."""
        spaces = _spaces(module)
        filled = _filled(spaces)
        if _ids(spaces, filled) != self.ids:
            return None
        return self.names, [(filled[index], key) for index, key in self.indices]


def _spaces(module: nn.Module) -> list[Space]:
    """The `__dict__`s of a module and its parts, of each as often as it is used."""
    # Breadth first: the list grows while it is walked through.
    spaces = [module.__dict__]
    for space in spaces:
        for part in space[PARTS].values():
            if part is not None:
                spaces.append(part.__dict__)
    return spaces


def _filled(spaces: list[Space]) -> list[tuple[Space, str]]:
    """The tables that are not empty, by the part that has them and their kind."""
    return [(space, kind) for space in spaces for kind in (PARAMETERS, BUFFERS) if space[kind]]


def _ids(spaces: list[Space], filled: list[tuple[Space, str]]) -> list[int]:
    """Numbers that stay the same for as long as a module has these parts and tensors."""
    return [
        *map(id, spaces),
        *map(id, chain.from_iterable([space[kind].values() for space, kind in filled])),
    ]


def _by_name(module: nn.Module) -> dict[str, Place]:
    """Where each parameter and buffer is, by all of its names."""
    places: dict[str, Place] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for kind in (BUFFERS, PARAMETERS):
            table = part.__dict__[kind]
            places.update(
                {
                    f"{prefix}.{key}" if prefix else key: (table, key)
                    for key in table
                    if table[key] is not None
                }
            )
    return places


# By the module and what is asked for. A plan holds nothing of the module, whose parts may lead back
# to it, as a hook that is its own method does: so a module lives no longer for its plans.
_PLANS: "weakref.WeakKeyDictionary[nn.Module, dict[object, Plan]]" = weakref.WeakKeyDictionary()
_ENOUGH = 8  # plans of one module


def call(
    plain: Callable[..., Any],
    module: nn.Module,
    tensors: dict[str, torch.Tensor],
    args: Any,
    kwargs: Any,
    tie_weights: bool,
    strict: bool,
) -> Any:
    """torch.func.functional_call; `plain` is that of torch."""
    planned = None
    if not (strict or torch.compiler.is_compiling()) and arrays.is_recording():
        planned = _planned(module, tensors, tie_weights)
    if planned is None:
        return plain(module, tensors, args, kwargs, tie_weights=tie_weights, strict=strict)
    names, slots = planned
    places = [(space[kind], key) for (space, kind), key in slots]
    values = [tensors[name] for name in names]
    if call_log.calls is not None and torch.is_grad_enabled():
        call_log.calls.append((module.__dict__, places, values))
    originals = _put(places, values)
    try:
        return module(
            *(() if args is None else args if isinstance(args, tuple) else (args,)),
            **(kwargs or {}),
        )
    finally:
        # As torch does it: what the module itself has put in their place is what the dict holds
        # afterwards.
        for name, after, value in zip(names, _put(places, originals), values, strict=True):
            if after is not value and after is not None:
                tensors[name] = after


def _put(places: list[Place], tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Puts tensors in these places, and returns those that were there."""
    before = [table.get(key) for table, key in places]
    for (table, key), tensor in zip(places, tensors, strict=True):
        table[key] = tensor
    return before


def _planned(module: nn.Module, tensors: dict[str, torch.Tensor], ties: bool) -> Planned | None:
    """The slots of a call, and the name of the tensor for each; None for what is left to torch."""
    if type(tensors) is not dict or not {*map(type, tensors.values())} <= {
        torch.Tensor,
        nn.Parameter,
    }:
        return None
    if not isinstance(module, nn.Module) or isinstance(
        module, torch.jit.ScriptModule | nn.DataParallel
    ):
        return None
    # A plan that fits the module as it is now, made if there is none.
    asked = ties, *tensors
    plans = _PLANS.setdefault(module, {})
    plan = plans.get(asked)
    planned = None if plan is None else plan.on(module)
    if planned is None and (plan := _made(module, tensors, ties)) is not None:
        if len(plans) >= _ENOUGH:
            plans.clear()
        plans[asked] = plan
        planned = plan.on(module)
    return planned


# The methods that torch asks for the parameters of a module: one that has its own is left to torch.
_ASKED = ("named_parameters", "named_buffers", "named_modules", "__getattr__", "__setattr__")


def _made(module: nn.Module, tensors: dict[str, torch.Tensor], ties: bool) -> Plan | None:
    is_usual = all(
        getattr(type(part), name) is getattr(nn.Module, name)
        for part in module.modules()
        for name in _ASKED
    )
    try:
        return Plan(module, [*tensors], ties) if is_usual else None
    except LookupError:
        return None


@contextmanager
def recomputing(puts_back: bool) -> Iterator[None]:
    """`recording_loss`, in which modules have again what functional_call put into them in the
    present loss.

    A checkpoint runs a module again in the backward pass. What was called with two sets of tensors
    keeps its own. `puts_back`: False if functions written in Python were applied. They may run
    backward passes of their own, and that these write to the module's own parameters is to be seen.
    """
    latest: dict[int, tuple[list[Place], list[torch.Tensor]] | None] = {}
    for space, places, tensors in call_log.calls if call_log.calls and puts_back else ():
        earlier = latest.get(id(space), (places, tensors))
        is_same = earlier is not None and (
            earlier[1] is tensors or [*map(id, earlier[1])] == [*map(id, tensors)]
        )
        latest[id(space)] = (places, tensors) if is_same else None
    calls = [call for call in latest.values() if call is not None]
    originals = [_put(*call) for call in calls]
    try:
        with recording_loss():
            yield
    finally:
        for (places, _), before in zip(reversed(calls), reversed(originals), strict=True):
            _put(places, before)


_private.serve_functional_calls(call)
