"""Functions of autograd that are written in Python: they may run backward passes of their own.

A reentrant checkpoint does. A pass that is restricted to the leaves skips such a function silently
if none of its inputs leads to a leaf, and some functions refuse a restricted pass. So the whole pass
is run, as in a loop by hand, and no leaf but the window's has another `.grad` afterwards.
"""

import gc
import types
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from funcga.errors import FuncgaError
from torch_backend.engine import graphs
from torch_backend.engine.guards import recompute
from torch_backend.engine.guards.aside import gradients_aside
from torch_backend.modules.checks import closed_over


def run_unrestricted(
    loss: torch.Tensor,
    cotangent: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    on_host: bool,
    seen: recompute.Seen,
    originals: Sequence[torch.Tensor],
    loss_fn: object,
) -> None:
    """`torch.autograd.backward(loss, cotangent)`, after which other leaves have their own `.grad`s.

    `originals`: the tensors that the leaves are made of. Raises FuncgaError if one of these got a
    gradient instead of its leaf.
    """
    own_ids = {*map(id, leaves)}
    in_graph = graphs.reach(loss, own_ids).foreign
    others = {id(leaf): leaf for leaf in (*in_graph, *originals, *leaves_around(loss_fn))}
    others = {key: leaf for key, leaf in others.items() if key not in own_ids}
    with gradients_aside(others.values()), recompute.watched(loss, seen, leaves, on_host, True):
        graphs.run(loss, cotangent, (), on_host)
        in_graph_ids = {*map(id, in_graph)}
        written = {
            key for key, leaf in others.items() if leaf.grad is not None and key not in in_graph_ids
        }
    if not written.isdisjoint(map(id, originals)):
        raise FuncgaError(
            "loss_fn runs a module again in the backward pass, as a checkpoint with "
            "use_reentrant=True does, and then with the module's own parameters instead of those "
            "that loss_fn is given: functional_call has taken them out by then. Use "
            "torch_backend.pure_loss(module, loss_fn), or use_reentrant=False."
        )


def leaves_around(function: object) -> list[torch.Tensor]:
    """The leaves of autograd that a function leads to: by closures, modules and attributes."""
    return [tensor for tensor in _reachable(function) if tensor.requires_grad and tensor.is_leaf]


_ENOUGH = 20_000  # objects to look at
_CONTAINERS = (list, tuple, dict, set, frozenset)


def _reachable(function: object) -> Iterator[torch.Tensor]:
    # Breadth first: the list grows while it is walked through, and keeps every object alive, so
    # that ids stay unique.
    waiting, seen = [function], {id(function)}
    for value in waiting:
        # By its type, because proxies answer isinstance() for the object that they stand for.
        if issubclass(type(value), torch.Tensor):
            yield value  # type: ignore[misc]
        elif len(waiting) < _ENOUGH:
            parts = [part for part in _parts(value, type(value)) if id(part) not in seen]
            seen.update(map(id, parts))
            waiting += parts


def _parts(value: object, kind: type) -> Iterable[object]:
    if kind is types.FunctionType:
        return closed_over(value)  # type: ignore[arg-type]
    if issubclass(kind, nn.Module):
        return [*value.parameters(), *vars(value).values()]  # type: ignore[attr-defined]
    is_long = issubclass(kind, _CONTAINERS) and len(value) > 1000  # type: ignore[arg-type]
    if is_long or issubclass(kind, type | types.ModuleType):
        return ()
    # The items of containers, the attributes of objects, bound arguments.
    return gc.get_referents(value)
