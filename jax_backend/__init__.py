"""The JAX backend of funcga: lax.scan and JAX arrays on any device."""

from typing import TYPE_CHECKING

from funcga._backend import Backend
from funcga._tools import later
from jax_backend import (
    arrays,
    loop,
    states,
    transforms,
    trees,
)
from jax_backend.replicas import Replicas as Replicas
from jax_backend.replicated import replicated as replicated
from jax_backend.states import state_specs as state_specs
from jax_backend.transforms import apply_updates as apply_updates

# The tools load when they are first used, and each of these packages can be taken away.
if TYPE_CHECKING:
    from funcga.tools.example_keys.in_jax import example_keys, sampled
    from jax_backend import hlo as hlo
    from jax_backend.hlo import collectives
else:
    __getattr__ = later(
        __name__,
        {
            "jax_backend.hlo": ("hlo", "collectives"),
            "funcga.tools.example_keys.in_jax": ("example_keys", "sampled"),
        },
    )


# For completion in an editor or a shell.
def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Replicas",
    "apply_updates",
    "collectives",
    "example_keys",
    "replicated",
    "sampled",
    "state_specs",
]

BACKEND = Backend("jax", trees, arrays, transforms, loop, states, transforms)
