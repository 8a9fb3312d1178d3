"""The torch backend of funcga: torch.func and torch tensors on any device."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from funcga._backend import Backend
from funcga._tools import later
from funcga._transform.multi_steps import classes_of_states
from torch_backend import arrays, gradients, loop, states, transforms, trees
from torch_backend.modules import pure_loss, trainable
from torch_backend.parameters import apply_updates, assign_grads
from torch_backend.replicas import Replicas
from torch_backend.wrapped import module_value_and_grad

# The tools load when they are first used, and each of these packages can be taken away.
if TYPE_CHECKING:
    from funcga.tools.example_keys.in_torch import example_keys, sampled, seeded
    from funcga.tools.fused.in_torch import fused_gradients
    from funcga.tools.optax_on_tensors.in_torch import from_optax
    from funcga.tools.optimizers.chain_in_torch import chain
    from funcga.tools.optimizers.in_torch import (
        clip_grad_norm,
        clip_grad_value,
        from_optimizer,
        last_options,
    )
    from funcga.tools.pipelines.in_torch import pipeline_value_and_grad
    from funcga.tools.statistics.in_torch import running_buffers
else:
    __getattr__ = later(
        __name__,
        {
            "funcga.tools.example_keys.in_torch": ("example_keys", "sampled", "seeded"),
            "funcga.tools.fused.in_torch": ("fused_gradients",),
            "funcga.tools.optax_on_tensors.in_torch": ("from_optax",),
            "funcga.tools.optimizers.chain_in_torch": ("chain",),
            "funcga.tools.optimizers.in_torch": (
                "clip_grad_norm",
                "clip_grad_value",
                "from_optimizer",
                "last_options",
            ),
            "funcga.tools.pipelines.in_torch": ("pipeline_value_and_grad",),
            "funcga.tools.statistics.in_torch": ("running_buffers",),
        },
    )


__all__ = [
    "Replicas",
    "apply_updates",
    "assign_grads",
    "chain",
    "clip_grad_norm",
    "clip_grad_value",
    "example_keys",
    "from_optax",
    "from_optimizer",
    "fused_gradients",
    "last_options",
    "module_value_and_grad",
    "pipeline_value_and_grad",
    "pure_loss",
    "running_buffers",
    "sampled",
    "seeded",
    "trainable",
]

BACKEND = Backend("torch", trees, arrays, gradients, loop, states, transforms)

# States hold nothing but tensors and numbers, so torch.load takes them with weights_only=True.
torch.serialization.add_safe_globals([*classes_of_states()])
# Those of optimizers too, before the first of them is made: that tool adds them itself.
if find_spec("funcga.tools.optimizers"):
    import_module("funcga.tools.optimizers.in_torch")


# For completion in an editor or a shell: also what has not been loaded yet.
def __dir__() -> list[str]:
    return sorted(__all__)
