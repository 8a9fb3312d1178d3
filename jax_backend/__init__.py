"""The JAX backend of funcga: lax.scan and JAX arrays on any device."""

from importlib import import_module
from typing import TYPE_CHECKING

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
from jax_backend.replicas import Replicas as Replicas
from jax_backend.replicated import replicated as replicated
from jax_backend.states import state_specs as state_specs

# The tool loads when it is first used, and can be taken away.
if TYPE_CHECKING:
    from funcga.tools.example_keys.in_jax import example_keys, sampled
else:

    def __getattr__(name: str) -> object:
        if name not in ("example_keys", "sampled"):
            raise AttributeError(f"module 'jax_backend' has no attribute {name!r}")
        # Kept in the module, so that the next look finds it without this function.
        tool = import_module("funcga.tools.example_keys.in_jax")
        value = globals()[name] = vars(tool)[name]
        return value


__all__ = [
    "Replicas",
    "apply_updates",
    "collectives",
    "example_keys",
    "replicated",
    "sampled",
    "state_specs",
]


# For completion in an editor or a shell: also what has not been loaded yet.
def __dir__() -> list[str]:
    return sorted(__all__)


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
