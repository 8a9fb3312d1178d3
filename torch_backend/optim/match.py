"""Trees that belong to one another, leaf by leaf, matched by key: gradients, states and updates to the parameters."""

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from funcga._backend.prefixes import leaf_paths, outline
from funcga._grad import uninitialised
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import is_placed


def is_flat(tree: Any) -> bool:
    """Whether this is a dict of tensors, as mostly: walked much faster than a tree."""
    return type(tree) is dict and all(isinstance(leaf, torch.Tensor) for leaf in tree.values())


def matched(tree: Any, like: Any, name: str, of: str = "params") -> list[Any]:
    """What a tree has at each leaf of another one, in the order of that one's leaves.

    Children are matched by key, so the order of a dict does not matter. Raises FuncgaError, with the paths, for a key
    that only one of the two has.
    """
    if is_flat(like) and type(tree) is dict and tree.keys() == like.keys():
        return [tree[key] for key in like]
    found: list[Any] = []
    _match(tree, like, (name, of), "", found)
    return found


def _match(tree: Any, like: Any, names: tuple[str, str], path: str, found: list[Any]) -> None:
    children = trees.children(like)
    if children is None:
        found.append(tree)
        return
    own = dict(trees.children(tree) or ())
    if own.keys() != {key for key, _ in children}:
        raise FuncgaError(_mismatch(own, dict(children), tree, like, names, path))
    for key, child in children:
        _match(own[key], child, names, path + key, found)


def _mismatch(
    own: dict[str, Any], wanted: dict[str, Any], tree: Any, like: Any, names: tuple[str, str], path: str
) -> str:
    name, of = names
    missing = [f"`{name}{path}{key}` is missing" for key in wanted if key not in own]
    unexpected = [f"`{name}{path}{key}` is not expected" for key in own if key not in wanted]
    found = missing + unexpected if trees.children(tree) is not None else [f"`{name}{path}` is {arrays.describe(tree)}"]
    return (
        f"{name} and {of} differ in structure: {', '.join(found[:4])}{', ...' if len(found) > 4 else ''}. `{of}{path}` "
        f"is {outline(like, trees, arrays.describe)}; give {name} the same structure"
        f"{', with None where there is no gradient.' if name == 'grads' else '.'}"
    )


def check_gradients(grads: list[Any], leaves: list[Any], params: Any) -> None:
    """Raises FuncgaError for a gradient that is not its parameter's."""
    for place, (grad, leaf) in enumerate(zip(grads, leaves, strict=True)):
        if grad is None or (
            isinstance(grad, torch.Tensor)
            and leaf is not None
            and grad.shape == leaf.shape
            and grad.dtype == leaf.dtype
            and grad.device == leaf.device
            and is_placed(grad) == is_placed(leaf)
        ):
            continue
        raise FuncgaError(_misfit(grad, leaf, leaf_paths(params, trees)[place]))


def _misfit(grad: Any, leaf: Any, path: str) -> str:
    says = f"`grads{path}` is {_describe(grad)}, and `params{path}` is {_describe(leaf)}. "
    if not isinstance(grad, torch.Tensor):
        return says + "Give a tensor, or None where there is no gradient."
    if leaf is None or grad.shape != leaf.shape:
        return says + "A gradient has its parameter's shape: give the parameters that it was computed for."
    if grad.device != leaf.device:
        return says + f"Move it: grad.to({str(leaf.device)!r})."
    if is_placed(grad) != is_placed(leaf):
        return says + "A DTensor goes with a DTensor: distribute_tensor(grad, parameter.device_mesh, placements)."
    return says + (
        f"An optimizer of torch computes in one dtype. Give it the parameters in that of the gradients, "
        f"parameter.to(torch.{_dtype(grad)}), and let torch_backend.apply_updates round the sum, as "
        f"funcga.multi_steps does; or fold to that of the parameters: funcga.mean(out_dtype=torch.{_dtype(leaf)})."
    )


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return arrays.describe(leaf)
    kind = "a DTensor " if is_placed(leaf) else ""
    return f"{kind}{arrays.describe(leaf)}{'' if leaf.device.type == 'cpu' else f' on {leaf.device}'}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check_parameters(leaves: list[Any], params: Any) -> None:
    """Raises FuncgaError for what no optimizer can change: anything but tensors of floating point numbers, or None."""
    for place, leaf in enumerate(leaves):
        if is_lazy(leaf):
            raise uninitialised(leaf_paths(params, trees, "params")[place])
        if leaf is None or (isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())):
            continue
        path = leaf_paths(params, trees)[place]
        raise FuncgaError(
            f"`params{path}` is {arrays.describe(leaf)}: parameters are tensors of floating point or complex numbers. "
            f"Leave it out, or put None there; a module's are dict(module.named_parameters())."
        )
