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


class Parts:
    """A module, those inside and their parameters, as they were when it was walked through.

    `spaces` are the `__dict__`s of these modules, and `prefixes` stand before the names of their
    parameters. One that is used in two places is there twice. `params`: each parameter by its names
    in the module. `ids`: of the modules that have parameters or buffers. Others, such as an
    activation, may be in any number of modules.
    """

    def __init__(self, module: nn.Module):
        named = [*module.named_modules(remove_duplicate=False)]
        self.module = module
        self.prefixes = [f"{name}." if name else "" for name, _ in named]
        self.layers = [layer for _, layer in named]  # while these live no other has their ids
        self.spaces = [*map(_space_of, self.layers)]
        states = zip(self.layers, self.tables(PARAMETERS), self.tables(BUFFERS), strict=True)
        self.ids = [id(layer) for layer, parameters, buffers in states if parameters or buffers]
        self.params = self.named(self.tables(PARAMETERS))
        self.seen = self.entries()

    def tables(self, *kinds: str) -> list[dict[str, Any]]:
        """The tables of these kinds that the parts have now."""
        return [*chain(*[map(operator.itemgetter(kind), self.spaces) for kind in kinds])]

    def entries(self) -> tuple[list[str], list[int], list[int]]:
        """The names of the parts and parameters that there are now, their ids, and how many each
        table has.
        """
        tables = self.tables(PARTS, PARAMETERS)
        filled = [*filter(len, tables)]  # most have none
        names = [*chain.from_iterable(map(_KEYS, filled))]
        return names, [*map(id, chain.from_iterable(map(_VALUES, filled)))], [*map(len, tables)]

    def are_same(self) -> bool:
        """Whether no part and no parameter was put in, taken out or renamed."""
        return self.seen == self.entries()

    def named(self, tables: Sequence[Table]) -> dict[str, torch.Tensor]:
        """The tensors in these tables, one for each part, by their names in the module."""
        return {
            prefix + name: tensor
            for prefix, table in zip(self.prefixes, tables, strict=True)
            for name, tensor in table.items()
            if tensor is not None
        }


def _space_of(layer: nn.Module) -> dict[str, Any]:
    """The `__dict__` of a module, where its tables are; one of TorchScript has them elsewhere."""
    space = vars(layer)
    if PARTS in space:
        return space
    return {kind: getattr(layer, kind) for kind in (PARTS, PARAMETERS, BUFFERS)}


class Walk:
    """What was found in a module when it was walked through, for as long as it stays so.

    Each field is replaced as a whole, as threads may share it.
    """

    parts: Parts | None = None  # set by `through`
    trained: Any = None  # set by `trainable`: what it has looked at, and what it has found

    def __reduce__(self) -> tuple[type["Walk"], tuple[()]]:
        return Walk, ()  # a copy of the module has other parts

    def through(self, module: nn.Module) -> Parts:
        """The parts: the same object until a part or a parameter is put in, taken out or
        renamed.
        """
        parts = self.parts
        if parts is None or parts.module is not module or not parts.are_same():
            parts = self.parts = Parts(module)
        return parts

    def trainable(self, module: nn.Module) -> tuple[Parts, dict[str, nn.Parameter]]:
        """(the parts, `{name: parameter}` of those that require grad): the same dict for as long as
        they stay the same.
        """
        parts, trained = self.through(module), self.trained
        seen = parts, [*map(_REQUIRES_GRAD, parts.params.values())]
        if trained is None or trained[0] != seen:
            trained = self.trained = seen, trainable(module)
        return parts, trained[1]


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
