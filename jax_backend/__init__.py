"""The JAX backend of funcga: lax.scan and JAX arrays on any device."""

from funcga.backend import Backend
from jax_backend import arrays, gradients, loop, replicas, trees

BACKEND = Backend("jax", trees, arrays, gradients, loop, replicas)
