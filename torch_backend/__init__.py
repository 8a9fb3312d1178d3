"""The torch backend of funcga: torch.func and torch tensors on any device."""

import torch

from funcga._backend import Backend
from funcga._fold import Tally
from funcga._fold.accumulator import AccumulatorState
from funcga._observe.noise import GradientNoise
from funcga._transform.loss_scale import LossScaledState
from funcga._transform.window import Dropped, MultiStepsState, Parts, Window
from torch_backend import arrays, coupled, dlpack, gradients, loop, planner, replicas, sums, trees
from torch_backend import multi_steps as transforms
from torch_backend.modules import pure_loss, trainable
from torch_backend.modules.layers import running_buffers
from torch_backend.optim import from_optimizer
from torch_backend.optim.built import last_options
from torch_backend.optim.chain import ClipNormState, chain, clip_grad_norm, clip_grad_value
from torch_backend.optim.optax_adapter import from_optax
from torch_backend.optim.parameters import apply_updates, assign_grads
from torch_backend.optim.state import Number, OptimizerState
from torch_backend.pipeline import pipeline_value_and_grad
from torch_backend.randomness import example_keys, sampled, seeded
from torch_backend.replicas import Replicas
from torch_backend.wrapped import module_value_and_grad

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
    "last_options",
    "module_value_and_grad",
    "pipeline_value_and_grad",
    "pure_loss",
    "running_buffers",
    "sampled",
    "seeded",
    "trainable",
]

BACKEND = Backend(
    "torch", trees, arrays, dlpack, gradients, loop, coupled, replicas, sums, transforms, planner
)

# States hold nothing but tensors and numbers, so torch.load takes them with weights_only=True.
torch.serialization.add_safe_globals(
    [
        AccumulatorState,
        ClipNormState,
        Dropped,
        GradientNoise,
        LossScaledState,
        MultiStepsState,
        Number,
        OptimizerState,
        Parts,
        Tally,
        Window,
    ]
)
