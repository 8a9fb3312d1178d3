"""The tables of a module, of its parts, parameters and buffers; and how a loss of it is called.

Only torch has this file: in JAX the arrays of a model are arguments.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from funcga._types import R
from funcga.errors import FuncgaError, TooFewRowsError, refuses_arguments
from torch_backend._private import BUFFERS, PARAMETERS, PARTS
from torch_backend.modules.checks import called, nothing_to_train

Table = dict[str, torch.Tensor | None]


class Parts:
    """A module and those inside, as they were when it was walked through.

    `spaces` are their `__dict__`s, and `prefixes` stand before the names of their parameters. A
    module of TorchScript has other tables, and is not walked: `is_scripted` says whether there is
    one. `ids`: of the spaces that have parameters or buffers. Others, such as that of an
    activation, may be in any number of modules.
    """

    def __init__(self, module: nn.Module):
        self.module, self.is_scripted = module, False
        self.prefixes, self.spaces = list[str](), list[dict[str, Any]]()
        waiting = [("", module)]
        while waiting:
            prefix, part = waiting.pop()
            if isinstance(part, torch.jit.ScriptModule):
                self.is_scripted = True
                continue
            self.prefixes.append(prefix)
            self.spaces.append(part.__dict__)
            inside = part.__dict__[PARTS].items()
            waiting += [(f"{prefix}{name}.", each) for name, each in inside if each is not None]
        self.inside = [*map(dict.copy, self.tables(PARTS))]
        self.ids = [id(space) for space in self.spaces if space[PARAMETERS] or space[BUFFERS]]

    def tables(self, kind: str) -> list[dict[str, Any]]:
        """The tables of this kind that the parts have now."""
        return [space[kind] for space in self.spaces]

    def named(self, tables: Sequence[Table]) -> dict[str, torch.Tensor]:
        """The tensors in these tables, one for each part, by their names in the module."""
        return {
            prefix + name: tensor
            for prefix, table in zip(self.prefixes, tables, strict=True)
            for name, tensor in table.items()
            if tensor is not None
        }

    def are_those_of(self, module: nn.Module) -> bool:
        """Whether they are this module's still: none was put in, taken out or renamed."""
        return self.module is module and self.inside == self.tables(PARTS)


class Walk:
    """What was found in a module when it was walked through, for as long as it stays so.

    Each field is replaced as a whole, as threads may share it.
    """

    parts: Parts | None = None
    # The parts, the names of their parameters, these, which of them require grad, and those that
    # do, by name.
    trained: tuple[Parts, list[Any], list[Any], list[bool], dict[str, nn.Parameter]] | None = None

    def __reduce__(self) -> tuple[type["Walk"], tuple[()]]:
        return Walk, ()  # a copy of the module has other parts

    def through(self, module: nn.Module) -> Parts:
        """The parts: the same object for as long as they are the same."""
        parts = self.parts
        if parts is None or not parts.are_those_of(module):
            parts = self.parts = Parts(module)
        return parts

    def trainable(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """`{name: parameter}` of those that require grad; the same dict for as long as they stay
        the same.
        """
        parts, trained = self.through(module), self.trained
        tables = parts.tables(PARAMETERS)
        if parts.is_scripted:
            tables = [dict(module.named_parameters())]
        names = [*map(tuple, tables)]
        values = [*chain.from_iterable(map(dict.values, tables))]
        require_grad = [p is not None and p.requires_grad for p in values]
        if (
            trained is None
            or trained[0] is not parts
            or trained[1] != names
            or trained[3] != require_grad
            or not all(map(operator.is_, trained[2], values))
        ):
            trained = self.trained = parts, names, values, require_grad, trainable(module)
        return trained[4]


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
        raise nothing_to_train(module)
    return trained


def call_loss(loss_fn: Callable[..., R], module: nn.Module, *args: object, **kwargs: object) -> R:
    """`loss_fn(module, *args, **kwargs)`. Raises FuncgaError, which says what to do, if loss_fn
    takes other arguments, and for one value per channel of a BatchNorm layer.
    """
    try:
        return loss_fn(module, *args, **kwargs)
    except TypeError as error:
        # The words for `totals` are those of the step.
        is_refused = refuses_arguments(called(loss_fn), 1 + len(args), kwargs, error)
        if "'totals'" in str(error) or not is_refused:
            raise
        raise FuncgaError(
            "loss_fn is called with the module and then each argument of the micro-batch, "
            f"{1 + len(args)} in all: {error}. Write it with the module first, lambda module, x, "
            "y: F.mse_loss(module(x), y) for batches (x, y), or lambda module, batch: ... for "
            "batches in a dict, and call the step with the batch alone. A list of micro-batches, "
            "or a DataLoader, is folded by funcga.stream."
        ) from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TooFewRowsError(
            f"a BatchNorm layer refused the micro-batch: {error}. In training mode it normalises "
            "by the variance of the micro-batch, and one value for each channel has none. Make "
            "micro-batches of 2 rows and more, the last one too: a smaller n, or a microbatch_size "
            "that does not leave one row over; or use its running statistics: module.eval()."
        ) from error


# Of each buffer of a module: the table that it stands in, its name there, it itself, and values.
Buffers = list[tuple[dict[str, Any], str, Any, Any]]


def buffers_of(module: nn.Module | None) -> Buffers:
    """The buffers of a module, such as running statistics, and copies of them."""
    tables = [] if module is None else [part.__dict__[BUFFERS] for part in module.modules()]
    return [
        (table, name, buffer, None if buffer is None else buffer.detach().clone())
        for table in tables
        for name, buffer in table.items()
    ]


def put_back(before: Buffers) -> None:
    """Gives a module the buffers that it had before, and these the values."""
    for table, name, buffer, values in before:
        if table[name] is not buffer:
            table[name] = buffer
        if buffer is not values:
            buffer.detach().copy_(values)
