"""The step of an optimizer that is not torch's own, which may do what no pure update can follow."""

from typing import Any

import torch
from torch.optim import Optimizer

from funcga.errors import FuncgaError
from torch_backend._private import pytree
from torch_backend.parameters import storages


def checked_step(optimizer: Optimizer, tensors: list[torch.Tensor]) -> None:
    """Takes a step. Raises FuncgaError if it changes anything that is not in the state, or keeps
    the memory of a parameter.
    """
    for tensor in tensors:
        tensor.requires_grad_()  # which it may ask for
    before = _others(optimizer)
    optimizer.step()
    after = _others(optimizer)
    # An attribute that is new is a cache.
    changed = [name for name in before.keys() & after.keys() if after[name] != before[name]]
    problem = "it keeps the memory of the parameter itself, which a pure update cannot follow"
    for name in changed:
        problem = (
            f"a step changes its `{name}`, which belongs to no parameter, so that it is in no "
            "state, and a pure update would lose it"
        )
    for tensor in tensors:
        tensor.requires_grad_(False)
        # The address of what has no elements is 0.
        if changed or storages(tensor) & storages(optimizer.state.get(tensor)) - {0}:
            raise FuncgaError(
                f"{type(optimizer).__name__} is no pure update: {problem}. Keep optimizer.step() "
                "and give it gradients: torch_backend.assign_grads(params, grads)."
            )


def _others(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps that belongs to no parameter, by name: options, state under other
    keys, numbers and tensors.
    """
    kept = {name: x for name, x in vars(optimizer).items() if type(x) in (int, float, torch.Tensor)}
    kept |= {
        "param_groups": [{**group, "params": None} for group in optimizer.param_groups],
        "state": {k for k in optimizer.state if not torch.is_tensor(k)},
    }
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, kept)  # type: ignore[no-any-return]
