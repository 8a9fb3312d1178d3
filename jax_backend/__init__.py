"""The JAX backend of funcga: lax.scan and JAX arrays on any device."""

from funcga._backend import Backend
from jax_backend import (
    arrays,
    gradients,
    loop,
    replicas,
    states,
    transforms,
    trees,
)
from jax_backend.gradients import apply_updates as apply_updates
from jax_backend.hlo import collectives as collectives
from jax_backend.randomness import example_keys as example_keys
from jax_backend.randomness import sampled as sampled
from jax_backend.replicas import Replicas as Replicas
from jax_backend.replicated import replicated as replicated
from jax_backend.states import state_specs as state_specs

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
    states,
    transforms,
    optimizers=gradients,
)
