"""What is known of a step's calls of one structure: worked out at the first of them, once.

A plan is immutable once it is kept. It holds no tensor and no module. What the graphs of its losses
were seen to need stands in a table beside it.
"""

import operator
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from funcga._backend.prefixes import is_uninitialised
from funcga._call.arguments import Argument, Arguments
from funcga._grad import GradientFunction
from torch_backend import _private
from torch_backend.engine import graphs
from torch_backend.engine.guards import recompute
from torch_backend.engine.sums import Folding

OWN = -1  # in place of the index of an argument: a module's own parameters
_MOST = 64  # plans of a step, and graphs of a plan


class Graph(NamedTuple):
    """What graphs of the same numbers were seen to need.

    `custom`: whether functions written in Python are in them, so that the pass is unrestricted.
    `leads_elsewhere`: whether they lead to leaves of somebody else.
    """

    custom: bool
    leads_elsewhere: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """What is known of calls of one structure.

    `indices`: which arguments are differentiated. `whole` are those that are passed whole, and
    `moving` those that are split, whose leaves are those of a micro-batch. `hooked`: whether a
    parameter has hooks of the user's; `watches`: whether one requires grad itself. `takes_weights`:
    whether the cotangent of a pass may be a weight, outside of autocast. `run` is how a backward
    pass is run, by autograd alone or by a tool. `noted`: whether `seen` has what modules had in
    forward passes.
    `parts` and `cuts` say how the arguments are split, without the arguments, over rows of so
    many `devices` at once.
    `folding` and `loss_dtype`: what becomes of the output, decided with the first loss.
    """

    indices: tuple[int, ...] = ()
    count: int = 0  # of the arguments
    whole: tuple[int, ...] = ()
    moving: tuple[int, ...] = ()
    hooked: bool = False
    watches: bool = False
    autocast: tuple[str, ...] = ()  # the types of devices that it is on for
    takes_weights: bool = False
    on_host: bool = False
    run: Callable[..., None] = graphs.run
    parts: tuple[Argument, ...] | None = None
    cuts: Sequence[tuple[int, int]] = ()
    devices: int = 1
    folding: Folding | None = None
    loss_dtype: torch.dtype | None = None
    graphs: "Table" = field(default_factory=lambda: Table())
    noted: bool = True
    seen: recompute.Seen = field(default_factory=recompute.none_seen)

    def with_cuts(
        self, arguments: Arguments, cuts: Sequence[tuple[int, int]], devices: int
    ) -> "Plan":
        """The plan that knows how arguments like these are cut; where state is threaded, each call
        is read anew.
        """
        bare = [part._replace(value=None, leaves=[]) for part in arguments.parts]
        parts = None if arguments.state else tuple(bare)
        return replace(self, parts=parts, cuts=cuts, devices=devices)


class Table(dict[Any, Any]):
    """A table of at most 64 entries, of which the oldest goes out. Threads may share it."""

    def put(self, key: Any, value: Any) -> None:
        """Notes a value."""
        self[key] = value
        if len(self) > _MOST:
            for oldest in [*self][: len(self) - _MOST]:
                self.pop(oldest, None)


class Plans(Table):
    """The plans of a step, by the structure of the call. It is kept by the step."""

    def __reduce__(self) -> tuple[type["Plans"], tuple[()]]:
        return Plans, ()  # a copy of the step makes its own


# --- the structure of a call

_SHAPE, _DTYPE, _LAYOUT, _IS_CPU, _IS_NESTED, _REQUIRES_GRAD = map(
    operator.attrgetter, ("shape", "dtype", "layout", "is_cpu", "is_nested", "requires_grad")
)
_DENSE = {torch.Tensor, nn.Parameter}


def ambient() -> tuple[object, ...]:
    """What is on around the call, that changes what it computes."""
    autocast: tuple[bool, ...] = ()
    if _private.is_any_autocast_enabled():
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu", *([] if accelerator is None else [accelerator.type])]
        autocast = tuple(map(torch.is_autocast_enabled, kinds))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def key_of(leaves: Sequence[Any], structure: object, are_fixed: bool = False) -> tuple[object, ...]:
    """What trees of one structure have in common: shapes, dtypes, and what acts on gradients.

    `are_fixed`: of parameters of a module, which are known by identity, so that they have no other
    shapes the next time.
    """
    types = tuple(map(type, leaves))
    if not _DENSE.issuperset(types) or True in map(_IS_NESTED, leaves):
        return structure, *map(_kind, leaves)
    records = tuple(map(_REQUIRES_GRAD, leaves))
    hooks: tuple[bool, ...] = ()
    if True in records:
        hooks = any(map(_private.has_hooks, leaves)), any(map(_private.has_hooks_on_grad, leaves))
    key = structure, types, records, hooks, tuple(map(_DTYPE, leaves)), tuple(map(_IS_CPU, leaves))
    if are_fixed:
        return key
    shapes, layouts = tuple(map(_SHAPE, leaves)), tuple(map(_LAYOUT, leaves))
    return *key, shapes, layouts, True in map(torch.is_inference, leaves)


def _kind(leaf: Any) -> object:
    if not isinstance(leaf, torch.Tensor) or is_uninitialised(leaf):
        return type(leaf)
    shape = None if leaf.is_nested else leaf.shape
    hooks = bool(_private.hooks_of(leaf)), _private.acts_on_grad(leaf)
    return (
        type(leaf),
        getattr(leaf, "placements", None),  # of a DTensor
        shape,
        leaf.dtype,
        leaf.layout,
        leaf.requires_grad,
        leaf.is_inference(),
        hooks,
    )


# --- making one


def is_narrow(leaf: torch.Tensor) -> bool:
    """Whether a gradient times a weight may overflow in this leaf's dtype."""
    return leaf.dtype.itemsize == 1 or leaf.dtype is torch.float16


def plan_of(
    gradient: GradientFunction,
    indices: tuple[int, ...],
    count: int,
    moving: tuple[int, ...],
    leaves: Sequence[torch.Tensor],
    originals: Sequence[Any],
    hooked: bool,
    module: nn.Module | None,
) -> Plan:
    """A plan for these leaves, which are made of the originals."""
    autocast = autocasting({leaf.device.type for leaf in leaves})
    may_weigh = not (hooked or gradient.scaled or moving)
    return Plan(
        indices=indices,
        count=count,
        whole=tuple([index for index in indices if index not in moving]),
        moving=moving,
        hooked=hooked,
        watches=any(isinstance(o, torch.Tensor) and o.requires_grad for o in originals),
        autocast=autocast,
        takes_weights=may_weigh and not any(map(is_narrow, leaves)),
        on_host=all(map(_IS_CPU, leaves)),
        run=run_of(leaves, hooked),
        noted=recompute.may_note((gradient, module)),
    )


def autocasting(devices: Collection[str]) -> tuple[str, ...]:
    """The types of devices that autocast is on for, of the CPU and these."""
    if not _private.is_any_autocast_enabled():
        return ()
    kinds = filter(torch.amp.is_autocast_available, sorted({"cpu", *devices}))
    return tuple(filter(torch.is_autocast_enabled, kinds))


# Elements of a leaf from which on it is asked for the tool for large weights: its own limit.
_LARGE = 2**19


def run_of(leaves: Sequence[torch.Tensor], hooked: bool) -> Callable[..., None]:
    """How a backward pass is run."""
    if not hooked and max(map(torch.Tensor.numel, leaves), default=0) >= _LARGE:
        with suppress(ModuleNotFoundError):  # the tool may be missing
            return import_module("funcga.tools.fused.in_torch").run  # type: ignore[no-any-return]
    return graphs.run
