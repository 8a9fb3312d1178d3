"""Replicas: what `across=` merges over. They start from the same parameters, which can be asked for."""

from typing import Any

from funcga._backend.protocols import backend_of


def check_replicas(params: Any, across: Any) -> None:
    """Raises FuncgaError, which names the leaf and the replicas, if params are not bit by bit the same on all of them.

    params: a tree of arrays. across: as in `accumulate`; every replica has to call it. In torch each array is hashed on
    the host, and its 16 bytes are sent, after those of the structure. In JAX it is called outside of jit, on arrays
    that lie on the devices of a mesh; the copies of a leaf along the axis are compared.

    >>> funcga.check_replicas(params, dist.group.WORLD)
    """
    backend_of([params], lambda: ["params"]).replicas.check_replicas(params, across)
