"""The JAX backend of funcga: lax.scan and JAX arrays on any device."""

from funcga.backend import Backend
from jax_backend import arrays, gradients, loop, replicas, trees
from jax_backend.communication import Collective as Collective
from jax_backend.communication import collectives as collectives
from jax_backend.replicas import Replicas as Replicas
from jax_backend.replication import replicated as replicated

__all__ = ["Collective", "Replicas", "collectives", "replicated"]

BACKEND = Backend("jax", trees, arrays, gradients, loop, replicas)
