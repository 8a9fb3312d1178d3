"""The JAX backend of funcga: lax.scan and JAX arrays on any device."""

from funcga.backend import Backend
from jax_backend import arrays, gradients, handover, loop, replicas, transforms, trees
from jax_backend.communication import Collective as Collective
from jax_backend.communication import collectives as collectives
from jax_backend.randomness import example_keys as example_keys
from jax_backend.randomness import sampled as sampled
from jax_backend.replicas import Replicas as Replicas
from jax_backend.replication import replicated as replicated
from jax_backend.stacked import folded_in_place as folded_in_place
from jax_backend.transforms import state_specs as state_specs
from jax_backend.updates import apply_updates as apply_updates

__all__ = [
    "Collective",
    "Replicas",
    "apply_updates",
    "collectives",
    "example_keys",
    "folded_in_place",
    "replicated",
    "sampled",
    "state_specs",
]

BACKEND = Backend("jax", trees, arrays, handover, gradients, loop, replicas, transforms)
