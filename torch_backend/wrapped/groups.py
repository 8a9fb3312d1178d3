"""The groups over which a module's window is merged: those that its wrapper reduces over, or those of across=.

Only torch has this file: in JAX replicas are named by the axes of a mesh.
"""

from typing import Any

import torch.distributed as dist

from funcga.errors import FuncgaError
from torch_backend.replicas import Replicas, replicas_of
from torch_backend.wrapped.ddp import Plain


def groups_of(across: Any, driver: Plain) -> list[Replicas]:
    """The groups, the inner one first. Raises FuncgaError if across= names others than the wrapper reduces over."""
    if not driver.name:
        return [] if across is None else [replicas_of(across)]
    groups = driver.groups()
    if across is not None and _ranks(across) != _all_ranks(groups):
        raise FuncgaError(
            f"across= names the ranks {_ranks(across)}, and the module is wrapped by {driver.name}, which reduces over "
            f"the ranks {_all_ranks(groups)}. Leave across= out: the wrapper knows its replicas."
        )
    return [Replicas(group) for group in groups]


def _ranks(across: Any) -> list[int]:
    mesh = getattr(across, "mesh", None)
    if mesh is not None:
        return sorted(mesh.flatten().tolist())
    return sorted(dist.get_process_group_ranks(replicas_of(across).group))


def _all_ranks(groups: list[Any]) -> list[int]:
    """The ranks of all replicas: those of an inner group, moved along an outer one."""
    inner, *outer = [sorted(dist.get_process_group_ranks(group)) for group in groups]
    own = dist.get_rank()
    return sorted(rank + other - own for rank in inner for other in (outer[0] if outer else [own]))
