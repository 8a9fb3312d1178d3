"""Gradients given to parameters, for those who keep `optimizer.step()`.

Only torch has this file: a parameter of torch has a place for its gradient.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from funcga._backend.prefixes import leaf_paths
from funcga.errors import FuncgaError, similar
from torch_backend import arrays, trees
from torch_backend.dtensor import is_placed
from torch_backend.optim.match import matched
from torch_backend.strides import apart, laid_as


def assign_grads(params: Any, grads: Any) -> None:
    """Sets `.grad` of every parameter to its gradient, for optimizer.step() to find; None for none.

    params: a module, whose gradients are `{name: gradient}`, without those of frozen parameters; or a tree of
        parameters, such as `torch_backend.trainable(module)` or `list(module.parameters())`, whose gradients have its
        structure, with None for frozen ones.
    grads: in the parameters' shapes and dtypes, where these lie; DTensors for DTensors.

    What was there before is replaced, not added to. The gradients are the parameters' from then on, and clip_grad_norm_
    writes to them. Copied are those in other strides than their parameters, expanded ones among them, and those in the
    memory of another gradient: torch.func.grad may return one tensor for two parameters. The others are not copied.

    Raises FuncgaError, and has set nothing then, where the two do not match, for a gradient of a frozen parameter, with
    which an optimizer would move it, and for one of what no optimizer steps: a tensor that does not require a gradient,
    as those of state_dict().

    >>> loss, grads = step(dict(module.named_parameters()), x, y)
    >>> torch_backend.assign_grads(module, grads)
    >>> optimizer.step()
    >>> scheduler.step()
    """
    pairs = _of_module(params, grads) if isinstance(params, nn.Module) else _of_tree(params, grads)
    for path, parameter, grad in pairs:
        _check(path, parameter, grad)
    laid = [None if grad is None else laid_as(grad.detach(), parameter) for _, parameter, grad in pairs]
    for (_, parameter, _), grad in zip(pairs, apart(laid), strict=True):
        if parameter is not None:
            parameter.grad = grad


Pairs = list[tuple[str, Any, Any]]


def _of_module(module: nn.Module, grads: Any) -> Pairs:
    held = dict(module.named_parameters())
    if not isinstance(grads, Mapping):
        raise FuncgaError(
            f"grads are {arrays.describe(grads)}, and those of a module are {{name: gradient}}, as they come from "
            f"step(dict(module.named_parameters()), ...). Give params in the structure of grads instead of a module."
        )
    unknown = [name for name in grads if name not in held]
    if unknown:
        raise FuncgaError(
            f"`grads[{unknown[0]!r}]` is of no parameter of the module{similar(unknown[0], held)}. Their "
            f"names are those of dict(module.named_parameters())."
        )
    missing = [name for name, parameter in held.items() if name not in grads and parameter.requires_grad]
    if missing:
        raise FuncgaError(
            f"`grads[{missing[0]!r}]` is missing{_more(missing)}, and the module trains it: its .grad would be that of "
            f"an earlier step. Give None where there is no gradient, or freeze it: parameter.requires_grad_(False)."
        )
    return [(f"[{name!r}]", parameter, grads.get(name)) for name, parameter in held.items()]


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _of_tree(params: Any, grads: Any) -> Pairs:
    params = list(params) if isinstance(params, Iterator) else params
    grads = list(grads) if isinstance(params, list) and isinstance(grads, tuple) else grads
    leaves = trees.flatten(params)[0]
    return list(zip(leaf_paths(params, trees), leaves, matched(grads, params, "grads"), strict=True))


def _check(path: str, parameter: Any, grad: Any) -> None:
    if parameter is None and grad is None:
        return
    if not isinstance(parameter, torch.Tensor) or not parameter.is_leaf:
        raise FuncgaError(
            f"`params{path}` is {_kind(parameter)}, which has no .grad that an optimizer would look at. Give the "
            f"module, or the parameters that the optimizer was given: dict(module.named_parameters())."
        )
    if grad is None:
        return
    if not parameter.requires_grad and isinstance(parameter, nn.Parameter):
        raise FuncgaError(
            f"`params{path}` is frozen, requires_grad=False, and `grads{path}` is a gradient, with which an optimizer "
            f"would move it. Take the gradients of the parameters that are trained: "
            f"assign_grads(module, grads) of step(torch_backend.trainable(module), ...). Or unfreeze it: "
            f"parameter.requires_grad_(True)."
        )
    if not parameter.requires_grad:
        raise FuncgaError(
            f"`params{path}` is {_kind(parameter)} that does not require a gradient, so that no optimizer steps it: it "
            f"is a gradient, or a detached copy, such as state_dict() has. The parameters come first, and are those "
            f"that the optimizer was given: assign_grads(dict(module.named_parameters()), grads)."
        )
    says = f"`grads{path}` is {_kind(grad)}, and `params{path}` is {_kind(parameter)}. "
    if not isinstance(grad, torch.Tensor):
        raise FuncgaError(f"{says}Give a tensor, or None where there is no gradient.")
    if grad.shape != parameter.shape:
        raise FuncgaError(f"{says}A gradient has its parameter's shape: give those that it was computed for.")
    if grad.device != parameter.device:
        raise FuncgaError(f"{says}Move it: grad.to({str(parameter.device)!r}).")
    if is_placed(grad) != is_placed(parameter):
        raise FuncgaError(f"{says}{_PLACED if is_placed(parameter) else _UNPLACED}")
    _check_dtype(says, parameter, grad)


_PLACED = (
    "The gradient of a DTensor is one: distribute_tensor(grad, parameter.device_mesh, parameter.placements), or take "
    "those of torch_backend.module_value_and_grad(module, loss_fn), which are."
)
_UNPLACED = "The parameter lies on one device: grad.full_tensor()."


def _check_dtype(says: str, parameter: Any, grad: Any) -> None:
    wanted = parameter.grad_dtype if parameter.requires_grad else parameter.dtype
    if wanted not in (None, grad.dtype):
        raise FuncgaError(
            f"{says}Fold to the parameter's dtype: funcga.mean(out_dtype={wanted}); or, for an optimizer that computes "
            f"in both, let the parameter have such a gradient: parameter.grad_dtype = {grad.dtype}."
        )


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return arrays.describe(leaf)
    found = f"{'a DTensor ' if is_placed(leaf) else ''}{arrays.describe(leaf)}"
    found += "" if leaf.device.type == "cpu" else f" on {leaf.device}"
    return found if leaf.is_leaf else f"{found} with a grad_fn"
