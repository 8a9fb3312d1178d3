"""Trees that go with parameters: gradients and updates, matched by key and checked, then set or
added.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import nn

from funcga._backend.prefixes import leaf_paths, subtrees
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.arrays import with_strides_of, without_overlap
from torch_backend.dtensor import is_dtensor, without_partials


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds what `tx.update` returned to the parameters. Unlike `funcga.transforms.apply`, it runs
    no optimizer.

    The sum is computed in the wider of the two dtypes and rounded once, so that float32 updates of
    bfloat16 parameters lose nothing before. Where the updates are not needed themselves,
    `funcga.transforms.apply` spares both: it returns the parameters after the step.

    Args:
        params: A tree of tensors, such as `torch_backend.trainable(module)`.
        updates: A tree of the same structure and shapes; None leaves a parameter as it is.

    Returns:
        The new parameters, in the structure of `params` and in memory of their own. They are
        detached, unless this is a part of a loss that is differentiated.

    Raises:
        FuncgaError: The two differ in structure or shape; the error names the paths.

    Example:
        >>> params = {"w": torch.ones(2)}
        >>> torch_backend.apply_updates(params, {"w": torch.full((2,), -0.5)})
        {'w': tensor([0.5000, 0.5000])}
    """
    return summed(params, updates)


_DTYPE = operator.attrgetter("dtype")


def summed(params: Tree, updates: Tree, in_place: bool = False) -> Tree:
    """The params plus their updates. Raises FuncgaError for an update that would be broadcast."""
    leaves, structure = trees.flatten(params)
    additions = matched(updates, params, "updates")
    pairs = [*zip(leaves, additions, strict=True)]
    for index, (leaf, update) in enumerate(pairs):
        if update is not None and leaf.shape != update.shape:
            path = leaf_paths(params, trees)[index]
            raise FuncgaError(
                f"`updates{path}` is {described(update)}, and `params{path}` is {described(leaf)}. "
                "An update is a tensor of its parameter's shape, or None: updates, state = "
                "tx.update(grads, state, params), of these params."
            )
    is_plain = {*map(type, leaves), *map(type, additions)} <= trees.PLAIN
    # Inside of a loss that is differentiated, the sum is a part of it.
    with torch.set_grad_enabled(arrays.in_transform() and torch.is_grad_enabled()):
        if leaves and is_plain and [*map(_DTYPE, leaves)] == [*map(_DTYPE, additions)]:
            # One launch, where there are any.
            if in_place:
                torch._foreach_add_(leaves, additions)
            else:
                leaves = [*torch._foreach_add(leaves, additions)]
            return trees.unflatten(structure, leaves)
        for index, (leaf, update) in enumerate(pairs):
            if update is not None:
                more = without_partials(update, leaf)
                leaves[index] = leaf.add_(more) if in_place else (leaf + more).to(leaf.dtype)
            elif leaf is not None and not in_place:
                leaves[index] = leaf.clone()
    return trees.unflatten(structure, leaves)


@overload
def assign_grads(params: nn.Module, grads: Mapping[str, torch.Tensor | None]) -> None: ...
@overload
def assign_grads(
    params: Mapping[Any, Any] | Sequence[Any] | Iterator[Any] | torch.Tensor, grads: Tree
) -> None: ...
def assign_grads(params: Tree, grads: Tree) -> None:
    """Sets `.grad` of every parameter to its gradient, for `optimizer.step()` to find. Unlike
    `apply_updates` and `funcga.transforms.apply`, it changes no parameter.

    What was there before is replaced, not added to. The gradients are the parameters' from then on,
    and `clip_grad_norm_` writes to them. Copied are those in other strides than their parameters,
    expanded ones among them, and those in the memory of another gradient: torch.func.grad may
    return one tensor for two parameters. The others are not copied.

    Args:
        params: A module, whose gradients are `{name: gradient}`, without those of frozen
            parameters. Or a tree of parameters, such as `torch_backend.trainable(module)` or
            `list(module.parameters())`, whose gradients have its structure, with None for frozen
            ones.
        grads: The gradients, in the parameters' shapes and dtypes, where these lie; DTensors for
            DTensors.

    Raises:
        FuncgaError: The two do not match; a gradient is of a frozen parameter, which an optimizer
            would move with it; or of a tensor that no optimizer steps, as those of state_dict().
            Nothing is set then.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loss_fn = lambda model, x, y: F.mse_loss(model(x), y)
        >>> gradient = torch_backend.module_value_and_grad(model, loss_fn)
        >>> loss, grads = funcga.accumulate(gradient, n=4)(torch.randn(10, 3), torch.randn(10, 1))
        >>> torch_backend.assign_grads(model, grads)
        >>> optimizer.step()
    """
    if isinstance(params, nn.Module):
        params = dict(params.named_parameters())
        if isinstance(grads, Mapping):  # frozen parameters need no gradient
            frozen = [name for name, parameter in params.items() if not parameter.requires_grad]
            grads = {**dict.fromkeys(frozen), **grads}
    if isinstance(params, Iterator):
        params = list(params)
    if isinstance(params, list) and isinstance(grads, tuple):  # as torch.autograd.grad returns them
        grads = list(grads)
    parameters, gradients = trees.flatten(params)[0], matched(grads, params, "grads")
    pairs = [*zip(parameters, gradients, strict=True)]
    # All is checked before the first gradient is set.
    for index, (parameter, grad) in enumerate(pairs):
        if grad is not None and not _has_grad(parameter, grad):
            path = leaf_paths(params, trees)[index]
            raise FuncgaError(
                f"`grads{path}` is {described(grad)}, and `params{path}` is "
                f"{described(parameter)}. A gradient has its parameter's shape, dtype and device, "
                "and is a DTensor for a DTensor; and a parameter is what an optimizer steps: it "
                "requires grad, and is not computed from others. What is frozen does not, nor does "
                "a detached copy, such as state_dict() has. The parameters come first: "
                "assign_grads(module, grads) of step(torch_backend.trainable(module), ...), under "
                "funcga.mean(out_dtype=...) for another dtype; or let the parameter have such a "
                "gradient, parameter.grad_dtype = None."
            )
    laid = [grad if grad is None else with_strides_of(grad.detach(), p) for p, grad in pairs]
    for parameter, grad in zip(parameters, without_overlap(laid), strict=True):
        if parameter is not None:
            parameter.grad = grad


def _has_grad(parameter: Any, grad: Any) -> bool:
    """Whether an optimizer steps the parameter, and it can have this gradient."""
    if not isinstance(parameter, torch.Tensor) or not isinstance(grad, torch.Tensor):
        return False
    is_stepped = parameter.is_leaf and parameter.requires_grad
    place, wanted = [(x.shape, x.device, is_dtensor(x)) for x in (grad, parameter)]
    return is_stepped and place == wanted and parameter.grad_dtype in (None, grad.dtype)


def matched(tree: Tree, like: Tree, name: str) -> list[Tree]:
    """What a tree of this name has at each leaf of another one, in the order of that one's leaves.

    Children are matched by key, so the order of a dict does not matter. Raises FuncgaError, with
    the paths, for a key that only one of the two has.
    """
    # Parameters are usually a dict of tensors, which is matched much faster than a tree.
    is_flat = type(like) is type(tree) is dict and {*map(type, like.values())} <= trees.PLAIN
    if is_flat and like.keys() == tree.keys():
        return [tree[key] for key in like]
    return subtrees(tree, like, trees, name)


def described(leaf: object) -> str:
    """A leaf, as errors call it: `float32[8, 3]`, whether it is a DTensor, and where it lies if
    not on the CPU.
    """
    if not isinstance(leaf, torch.Tensor):
        return arrays.describe(leaf)
    device = "" if leaf.device.type == "cpu" else f" on {leaf.device}"
    return f"{'a DTensor ' if is_dtensor(leaf) else ''}{arrays.describe(leaf)}{device}"
