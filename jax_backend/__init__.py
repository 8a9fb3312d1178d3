"""The JAX backend of funcga: lax.scan and JAX arrays on any device."""

from importlib import import_module
from typing import TYPE_CHECKING

from funcga._backend import Backend
from jax_backend import (
    arrays,
    gradients,
    loop,
    replicas,
    sums,
    transforms,
    trees,
)
from jax_backend.gradients import apply_updates as apply_updates
from jax_backend.randomness import example_keys as example_keys
from jax_backend.randomness import sampled as sampled
from jax_backend.replicas import Replicas as Replicas
from jax_backend.replicated import replicated as replicated
from jax_backend.transforms import state_specs as state_specs

# The instruments load when they are first used, as they are tools, which can be taken away.
if TYPE_CHECKING:
    from jax_backend import hlo as hlo
    from jax_backend.hlo import collectives as collectives
else:

    def __getattr__(name: str) -> object:
        if name not in ("hlo", "collectives"):
            raise AttributeError(f"module 'jax_backend' has no attribute {name!r}")
        hlo = import_module("jax_backend.hlo")
        return hlo if name == "hlo" else hlo.collectives


__all__ = [
    "Replicas",
    "apply_updates",
    "collectives",
    "example_keys",
    "replicated",
    "sampled",
    "state_specs",
]

BACKEND = Backend(
    "jax",
    trees,
    arrays,
    gradients,
    loop,
    replicas,
    sums,
    transforms,
    optimizers=gradients,
)
