"""Whether numbers are finite, for tools that look at gradients, and sums over replicas."""

from collections.abc import Sequence
from importlib import import_module

from funcga._backend import Backend
from funcga._tools import load
from funcga._types import Across, Array, Scalar


def summed(number: Scalar, across: Across, backend: Backend) -> Scalar:
    """The sum of a scalar over the replicas that `across=` names."""
    return import_module(f"{backend.name}_backend.replicas").summed(number, across)


def finite(leaves: Sequence[Array | None], backend: Backend) -> Array:
    """Whether all numbers are finite, as a 0-d array; None is skipped."""
    if backend.name == "torch":  # without masks of the size of a leaf, and over all shards
        found: Array = load("finite.in_torch", "finite").finite(leaves)
        return found
    xp = backend.arrays.xp
    return xp.asarray([xp.isfinite(leaf).all() for leaf in leaves if leaf is not None]).all()
