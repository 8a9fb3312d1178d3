"""What is known of a step's calls of one structure: worked out at the first of them, once.

The fields of a plan are set once; a table in it goes on growing, of what modules were seen to have.
It keeps no tensor and no module alive.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from typing import Any

import torch

from funcga._call.arguments import Argument, Arguments
from funcga._grad import GradientFunction
from funcga._types import Tree
from torch_backend import _private, trees
from torch_backend.engine.guards import ON, recompute
from torch_backend.engine.leaves import OWN, Leaves, Own, any_requires_grad
from torch_backend.modules.checks import check_unfrozen
from torch_backend.sums import Folding

_MOST = 64  # plans of a step


@dataclass(frozen=True, eq=False)
class Plan:
    """What is known of calls of one structure.

    `indices`: which arguments are differentiated. `whole` are those that are passed whole, and
    `moving` those that are split, whose leaves are those of a micro-batch. `hooked`: whether a
    parameter has hooks of the user's; `watches`: whether one requires grad itself. `takes_weights`:
    whether the cotangent of a pass may be a weight, outside of autocast. `run` runs a backward
    pass. `seen`: what modules had in forward passes; None where that is not noted. `arguments`,
    without their values, and `cuts` say how the call is split, and `take` how rows are taken.
    `folding`: what becomes of the output, decided with the first loss, for losses of the
    `loss_dtype`; this is None where others may be folded otherwise.
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
    run: Any = None
    arguments: tuple[Argument, ...] | None = None
    cuts: Sequence[tuple[int, int]] = ()
    take: Any = None
    folding: Folding | None = None
    loss_dtype: torch.dtype | None = None
    seen: recompute.Seen | None = None

    def with_cuts(self, arguments: Arguments, cuts: Sequence[tuple[int, int]], take: Any) -> "Plan":
        """The plan that knows how arguments like these are cut; where state is threaded, each call
        is read anew.
        """
        bare = [part._replace(value=None, leaves=[]) for part in arguments.parts]
        known = None if arguments.state else tuple(bare)
        return replace(self, arguments=known, cuts=cuts, take=take)


class Plans(dict[Any, Plan]):
    """The plans of a step, by the structure of the call: at most 64, of which the oldest goes out.
    It is kept by the step, and threads may share it.
    """

    def put(self, key: Any, plan: Plan) -> None:
        """Notes a plan."""
        self[key] = plan
        for oldest in [*self][:-_MOST]:
            self.pop(oldest, None)


# --- the structure of a call

_SHAPE, _DTYPE, _LAYOUT, _IS_CPU, _IS_NESTED, _REQUIRES_GRAD = map(
    operator.attrgetter, ("shape", "dtype", "layout", "is_cpu", "is_nested", "requires_grad")
)


def call_key(
    own: Own | None,
    flat: Sequence[tuple[list[Any], Any]],
    *others: object,
) -> object:
    """The structure of a call with these arguments, and the own parameters of a module, if any."""
    params = {} if own is None else own.params
    leaves = [*params.values(), *chain.from_iterable([leaves for leaves, _ in flat])]
    types, tensors = tuple(map(type, leaves)), leaves
    placements, hooked = tuple[object, ...](), tuple[bool, ...]()
    if not trees.PLAIN.issuperset(types):
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        placements = tuple([getattr(leaf, "placements", None) for leaf in tensors])  # of DTensors
    kinds = [tuple(map(kind, tensors)) for kind in (_DTYPE, _IS_CPU, _LAYOUT, _REQUIRES_GRAD)]
    if True in kinds[-1]:
        hooks = [*map(_private.has_hooks, tensors), *map(_private.has_hooks_on_grad, tensors)]
        hooked = tuple(map(bool, hooks)) if any(hooks) else ()
    if True in map(_IS_NESTED, tensors):  # some have no shape
        shapes = tuple([None if leaf.is_nested else leaf.shape for leaf in tensors])
    else:
        shapes = tuple(map(_SHAPE, tensors))
    is_inference = True in map(torch.is_inference, tensors)
    of_leaves = types, placements, *kinds, hooked, shapes, is_inference
    # What is on around the call, that changes what it computes.
    autocast = autocasting() if _private.is_any_autocast_enabled() else ()
    ambient = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
    return ambient, tuple(params), tuple([structure for _, structure in flat]), of_leaves, others


# --- making one


def is_narrow(leaf: torch.Tensor) -> bool:
    """Whether a gradient times a weight may overflow in this leaf's dtype."""
    return leaf.dtype.itemsize == 1 or leaf.dtype is torch.float16


def plan_of(
    gradient: GradientFunction,
    parts: Sequence[Argument],
    own: Own | None,
    leaves_of: Callable[[Sequence[int], Sequence[Tree]], Leaves],
) -> tuple[Plan, Leaves]:
    """A plan for calls with arguments like these, and their leaves. Raises FuncgaError for
    arguments that cannot be differentiated.
    """
    indices: tuple[int, ...] = (OWN,)
    moving: tuple[int, ...] = ()
    if own is None:
        indices = gradient.arg_indices(len(parts))
        for index in indices:
            check_unfrozen(parts[index].value, gradient, index)
        moving = tuple([index for index in indices if parts[index].axes])
    whole = tuple([index for index in indices if index not in moving])
    leaves = leaves_of(whole, [part.value for part in parts])
    inputs, originals = leaves.inputs, leaves.originals
    hooked = any(_private.hooks_of(each) or _private.acts_on_grad(each) for each in originals)
    may_weigh = not (gradient.scaled or moving)
    plan = Plan(
        indices=indices,
        count=len(parts),
        whole=whole,
        moving=moving,
        hooked=hooked,
        watches=ON and own is None and any_requires_grad(originals),
        autocast=autocasting(),
        takes_weights=may_weigh and not any(map(is_narrow, inputs)),
        on_host=all(map(_IS_CPU, inputs)),
        run=run_of(inputs, hooked),
        seen=recompute.none_seen((gradient, own and own.module)),
    )
    return plan, leaves


def autocasting() -> tuple[str, ...]:
    """The types of devices that autocast is on for: of the CPU, and of the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu", *([] if accelerator is None else [accelerator.type])]
    return tuple(filter(torch.is_autocast_enabled, kinds))


@contextmanager
def without_autocast(devices: Sequence[str]) -> Iterator[None]:
    """A context of a backward pass, outside of the autocast that is on for these devices."""
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def run_backward(
    loss: torch.Tensor, cotangent: torch.Tensor, leaves: tuple[torch.Tensor, ...], on_host: bool
) -> None:
    """`torch.autograd.backward(loss, cotangent, inputs=leaves)`, unrestricted if there are no
    leaves; `on_host` says that no device takes part in it.
    """
    run = _private.ENGINE_ON_HOST if on_host else _private.ENGINE
    how = {"allow_unreachable": True, "accumulate_grad": True}
    run((loss,), (cotangent,), False, False, leaves, **how)


# Elements of a leaf from which on it is asked for the tool for large weights: its own limit.
_LARGE = 2**19


def run_of(leaves: Sequence[torch.Tensor], hooked: bool) -> Callable[..., None]:
    """What runs a backward pass: autograd alone, or a tool."""
    if not hooked and max(map(torch.Tensor.numel, leaves), default=0) >= _LARGE:
        with suppress(ModuleNotFoundError):  # the tool may be missing
            return import_module("funcga.tools.fused.in_torch").run  # type: ignore[no-any-return]
    return run_backward
