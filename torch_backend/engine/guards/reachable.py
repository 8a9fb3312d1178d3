"""What a loss leads to: by closures, modules, and the attributes of objects."""

import gc
import types
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from torch_backend.modules.checks import closed_over

_ENOUGH = 20_000  # objects to look at
_CONTAINERS = (list, tuple, dict, set, frozenset)


def reachable(function: object) -> Iterator[object]:
    """The objects that can be found from a function, the nearest first."""
    # Breadth first: the list grows while it is walked through, and keeps every object alive, so
    # that ids stay unique.
    waiting, seen = [function], {id(function)}
    for value in waiting:
        yield value
        # By its type, because proxies answer isinstance() for the object that they stand for.
        if not issubclass(type(value), torch.Tensor) and len(waiting) < _ENOUGH:
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
