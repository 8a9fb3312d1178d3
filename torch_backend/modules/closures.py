"""What a function leads to: by closures, modules, and the attributes of objects.

Only torch has this file: in JAX nothing but the arguments of a loss has arrays that it changes.
"""

import functools
import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

_ENOUGH = 20_000  # objects to look at
_CONTAINERS = (list, tuple, dict, set, frozenset)
# The functions of these close over no model.
_LIBRARIES = ("torch.", "jax.", "numpy.", "funcga.", "torch_backend.")


def reachable(function: object, attributes: bool = True) -> Iterator[object]:
    """The objects that can be found from a function, the nearest first.

    `attributes`: also inside of modules and other objects; without them it looks in closures,
    defaults, partial arguments and the globals that the code names, and in functions among these.
    """
    # Breadth first: the list grows while it is walked through, and keeps every object alive, so
    # that ids stay unique.
    waiting, seen = [function], {id(function)}
    for value in waiting:
        yield value
        # By its type, because proxies answer isinstance() for the object that they stand for.
        if not issubclass(type(value), torch.Tensor) and len(waiting) < _ENOUGH:
            parts = _parts(value, type(value), attributes)
            parts = [part for part in parts if id(part) not in seen]
            seen.update(map(id, parts))
            waiting += parts


def modules_in(function: object) -> Iterator[nn.Module]:
    """The modules that a function closes over, as far as they can be seen from outside."""
    for value in reachable(function, attributes=False):
        if isinstance(value, nn.Module):
            yield value


def _parts(value: Any, kind: type, attributes: bool) -> Iterable[object]:
    if kind is types.FunctionType:
        return _closed_over(value)
    is_long = issubclass(kind, _CONTAINERS) and len(value) > 1000
    if is_long or issubclass(kind, type | types.ModuleType):
        return ()
    if attributes and issubclass(kind, nn.Module):
        return [*value.parameters(), *vars(value).values()]
    # The items of containers, bound arguments, and the attributes of objects.
    if attributes or issubclass(kind, (*_CONTAINERS, functools.partial, types.MethodType)):
        return gc.get_referents(value)
    # Of a gradient function, or a pure loss.
    return [value.loss_fn] if hasattr(value, "loss_fn") else ()


def _closed_over(function: types.FunctionType) -> list[object]:
    """What a function can name beside its arguments and builtins; nothing for those of
    libraries.
    """
    if (function.__module__ or "").startswith(_LIBRARIES):
        return []
    # The names in the code are those of globals and of attributes alike: looking up one too many
    # does no harm.
    codes, names = [function.__code__], set[str]()
    for code in codes:  # the list grows by functions inside of this one
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        names.update(code.co_names)
    named = [value for name, value in function.__globals__.items() if name in names]
    # Cells hold the variables of enclosing functions.
    cells = function.__closure__ or ()
    return [*named, *gc.get_referents(*cells, function.__defaults__, function.__kwdefaults__)]
