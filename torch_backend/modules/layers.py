"""The tables of a module and of the layers inside: which parameters are trained, and what its
buffers were.

Only torch has this file: in JAX the arrays of a model are arguments.
"""

import operator
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from funcga.errors import FuncgaError
from torch_backend._private import BUFFERS, PARAMETERS, PARTS

Table = dict[str, torch.Tensor | None]

# Modules of TorchScript have tables that are no dicts.
_KEYS, _VALUES = map(operator.methodcaller, ("keys", "values"))
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


def _entries(tables: Sequence[dict[str, Any]]) -> tuple[list[str], list[int], list[int]]:
    """The names in these tables, the ids of what they name, and how many each table has."""
    filled = [*filter(len, tables)]  # most have none
    names = [*chain.from_iterable(map(_KEYS, filled))]
    ids = [*map(id, chain.from_iterable(map(_VALUES, filled)))]
    return names, ids, [*map(len, tables)]


def _space_of(layer: nn.Module) -> dict[str, Any]:
    """The `__dict__` of a module, where its tables are; one of TorchScript has them elsewhere."""
    space = vars(layer)
    if PARTS in space:
        return space
    return {kind: getattr(layer, kind) for kind in (PARTS, PARAMETERS, BUFFERS)}


class Parts:
    """A module and those inside, as they were when it was walked through.

    `spaces` are the `__dict__`s of these modules, and `prefixes` stand before the names of their
    parameters. One that is used in two places is there twice. `ids`: of those that have parameters or buffers. Others,
    such as an activation, may be in any number of modules.
    """

    def __init__(self, module: nn.Module):
        named = [*module.named_modules(remove_duplicate=False)]
        self.module = module
        self.prefixes = [f"{name}." if name else "" for name, _ in named]
        self.spaces = [_space_of(layer) for _, layer in named]
        self.inside = _entries(self.tables(PARTS))
        states = zip(named, self.tables(PARAMETERS), self.tables(BUFFERS), strict=True)
        self.ids = [id(part) for (_, part), parameters, buffers in states if parameters or buffers]

    def tables(self, *kinds: str) -> list[dict[str, Any]]:
        """The tables of these kinds that the parts have now."""
        return [*chain(*[map(operator.itemgetter(kind), self.spaces) for kind in kinds])]

    def named(self, tables: Sequence[Table]) -> dict[str, torch.Tensor]:
        """The tensors in these tables, one for each part, by their names in the module."""
        return {
            prefix + name: tensor
            for prefix, table in zip(self.prefixes, tables, strict=True)
            for name, tensor in table.items()
            if tensor is not None
        }


class Walk:
    """What was found in a module when it was walked through, for as long as it stays so.

    Each field is replaced as a whole, as threads may share it.
    """

    parts: Any = None  # set by `through`
    trained: Any = None  # set by `trainable`: what it has looked at, and what it has found

    def __reduce__(self) -> tuple[type["Walk"], tuple[()]]:
        return Walk, ()  # a copy of the module has other parts

    def through(self, module: nn.Module) -> Parts:
        """The parts: the same object until one is put in, taken out or renamed."""
        parts: Parts | None = self.parts
        if (
            parts is None
            or parts.module is not module
            or parts.inside != _entries(parts.tables(PARTS))
        ):
            parts = self.parts = Parts(module)
        return parts

    def trainable(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """`{name: parameter}` of those that require grad; the same dict for as long as they stay
        the same.
        """
        if self.trained is not None:
            parts, entries, params, require_grad, found = self.trained
            # One look at both kinds of tables finds most modules as they were.
            is_same = parts.module is module and entries == _entries(
                parts.tables(PARTS, PARAMETERS)
            )
            if is_same and require_grad == [*map(_REQUIRES_GRAD, params)]:
                return found  # type: ignore[no-any-return]
        parts = self.through(module)
        entries = _entries(parts.tables(PARTS, PARAMETERS))
        params = [*parts.named(parts.tables(PARAMETERS)).values()]
        require_grad, found = [*map(_REQUIRES_GRAD, params)], trainable(module)
        self.trained = parts, entries, params, require_grad, found
        return found


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """`{name: parameter}` of the module's parameters that require grad, as
    `module.named_parameters()` names them.

    What a `pure_loss`, or `torch.func.functional_call`, takes as params where some are frozen, as
    in LoRA: the others are the module's own there. They cost no gradient and no memory, and no
    optimizer moves them.

    Args:
        module: any module. A parameter that it uses under several names, tied, is named once.

    Returns:
        A new dict of the module's own parameters, in the module's order.

    Raises:
        FuncgaError: if no parameter requires grad.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        >>> model[0] = model[0].requires_grad_(False)
        >>> list(torch_backend.trainable(model))
        ['1.weight', '1.bias']
        >>> loss_fn = lambda model, x, y: F.mse_loss(model(x), y)
        >>> loss = torch_backend.pure_loss(model, loss_fn)
        >>> step = funcga.accumulate(funcga.value_and_grad(loss), n=4)
        >>> x, y = torch.randn(10, 3), torch.randn(10, 1)
        >>> value, grads = step(torch_backend.trainable(model), x, y)
        >>> torch_backend.assign_grads(model, grads)
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise FuncgaError(
            f"no parameter of the {type(module).__name__} requires grad, so there is nothing to "
            "train. Unfreeze what is to be trained: module.requires_grad_(True), or "
            "parameter.requires_grad_(True)."
        )
    return trained


# Of each buffer of a module: the table that it stands in, its name there, it itself, and values.
Buffers = list[tuple[dict[str, Any], str, Any, Any]]


def buffers_of(module: nn.Module | None) -> Buffers:
    """The buffers of a module, such as running statistics, and copies of them."""
    return [
        (vars(part)[BUFFERS], name, buffer, None if buffer is None else buffer.detach().clone())
        for part in (() if module is None else module.modules())
        for name, buffer in vars(part)[BUFFERS].items()
    ]


def put_back(before: Buffers) -> None:
    """Gives a module the buffers that it had before, and these the values."""
    for table, name, buffer, values in before:
        table[name] = buffer
        if buffer is not values:
            buffer.detach().copy_(values)
