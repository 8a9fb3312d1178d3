"""`check_replicas`: whether replicas have the same parameters."""

from funcga._backend.dispatch import backend_of
from funcga._tools import load
from funcga._types import Across, Tree


def check_replicas(params: Tree, across: Across) -> None:
    """Checks that params are bitwise identical on all replicas.

    In torch each array is hashed on the host, and its hash is sent. In JAX it is called outside of
    jit, on arrays that lie on the devices of a mesh; the copies of a leaf along the axis are
    compared.

    Args:
        params: A tree of arrays.
        across: As in `accumulate`. Every replica has to call it.

    Raises:
        FuncgaError: An array differs. The text names the leaf and the replicas.

    Example:
        >>> funcga.check_replicas({"w": torch.ones(3)}, dist.group.WORLD)
    """
    name = backend_of([params], lambda: ["params"]).name
    load(f"check_replicas.in_{name}", "check_replicas").check_replicas(params, across)
