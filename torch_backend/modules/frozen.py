"""Which parameters are trained, and which are frozen: those that do not require grad."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga.errors import FuncgaError
from torch_backend import trees


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """`{name: parameter}` of the module's parameters that require grad, as `module.named_parameters()` names them.

    What a `pure_loss`, or `torch.func.functional_call`, takes as params where some are frozen, as in LoRA: the others
    are the module's own there. They cost no gradient and no memory, and no optimizer moves them.

    Args:
        module: any module. A parameter that it uses under several names, tied, is named once.

    Returns:
        A new dict of the module's own parameters, in the module's order.

    Raises:
        FuncgaError: if no parameter requires grad, or `module` is not a module.

    Example:
        >>> model.requires_grad_(False)
        >>> model.head.requires_grad_(True)
        >>> step = funcga.accumulate(funcga.value_and_grad(torch_backend.pure_loss(model, loss_fn)), n=8)
        >>> loss, grads = step(torch_backend.trainable(model), x, y)
        >>> torch_backend.assign_grads(model, grads)
    """
    if not isinstance(module, nn.Module):
        raise FuncgaError(
            f"trainable was given {type(module).__name__} as its module. Pass the module whose parameters are trained: "
            f"torch_backend.trainable(model)."
        )
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not found:
        raise FuncgaError(
            f"no parameter of the {type(module).__name__} requires grad, so there is nothing to train. Unfreeze what "
            f"is to be trained: module.requires_grad_(True), or parameter.requires_grad_(True)."
        )
    return found


def check_none_frozen(params: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    """Raises FuncgaError if a gradient is taken with respect to what the module freezes, while it trains others.

    held: what the module has. One that freezes all is a mere frame for parameters from elsewhere.
    """
    trained = [tensor.requires_grad for tensor in held.values()]
    if all(trained) or not any(trained):
        return
    # a loss around this one has put plain tensors in the place of parameters: these are not frozen
    names = [name for name, tensor in params.items() if tensor.requires_grad and _is_frozen(held[name])]
    if names:
        raise _frozen(f"`{names[0]}`", len(names))


def check_unfrozen(leaves: list[Any], tree: Any, function: Any, i: int) -> None:
    """Raises FuncgaError if there are frozen nn.Parameters among these leaves of a function's i-th argument."""
    frozen = [place for place, leaf in enumerate(leaves) if type(leaf) is not torch.Tensor and _is_frozen(leaf)]
    if frozen:
        name = argument_names(function, i + 1)[i]
        raise _frozen(f"`{leaf_paths(tree, trees, name)[frozen[0]]}`", len(frozen))


def _is_frozen(leaf: Any) -> bool:
    return not getattr(leaf, "requires_grad", True) and isinstance(leaf, nn.Parameter)


def _frozen(which: str, count: int) -> FuncgaError:
    more = f", as are {count - 1} more" if count > 1 else ""
    return FuncgaError(
        f"{which} is frozen, requires_grad=False{more}, and a gradient was asked for: an optimizer would move it. Give "
        f"the parameters that are trained: torch_backend.trainable(module). Or unfreeze it: "
        f"parameter.requires_grad_(True)."
    )
