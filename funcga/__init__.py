"""funcga: gradient accumulation as a pure fold over micro-batches, for PyTorch and JAX.

>>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)
>>> loss, grads = step(params, batch)

Importing it imports neither framework; the arrays of a call decide which one runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# What every call of `accumulate` needs is imported here.
from funcga import monoids, normalizers, reducers
from funcga._accumulate import accumulate
from funcga._call.arguments import CARRY
from funcga._fold import Tally
from funcga._grad import grad, value_and_grad
from funcga._replicas import check_replicas
from funcga._stream import stream, windows
from funcga.errors import FuncgaError
from funcga.folds import Fold, carry, concat, logsumexp, mean, moments, per_weight, pooled, ratio
from funcga.folds import max as max
from funcga.folds import min as min
from funcga.folds import sum as sum
from funcga.monoids import Monoid
from funcga.normalizers import Moments, Normalizer, Pooled
from funcga.reducers import Reducer

# These load when they are first used, so that `import funcga` is quick; type checkers see them at
# once.
if TYPE_CHECKING:
    from funcga import rules
    from funcga._compare import compare
    from funcga._coupled import coupled
    from funcga._fold.accumulator import Accumulator, AccumulatorState
    from funcga._observe import Observed, Observer
    from funcga._observe.microbatches import GradientNorms, dropped, gradient_norms
    from funcga._observe.noise import GradientNoise, NoiseAverage, averaged, gradient_noise
    from funcga._parity import Problem
    from funcga._plan import Plan, plan
    from funcga._reproducible import reproducible
    from funcga._statistics import batch_moments, running_statistics
    from funcga._transform import Transform
    from funcga._transform.apply import apply
    from funcga._transform.loss_scale import LossScaledState, loss_scaled
    from funcga._transform.multi_steps import MultiSteps, multi_steps
    from funcga._transform.window import MultiStepsState
    from funcga._transform.window_size import (
        TargetWeight,
        beta_for_half_life,
        linear_scaling,
        sqrt_scaling,
    )
    from funcga._trees import shares_memory, to_jax, to_numpy, to_torch
    from funcga._trees.match import from_state_dict, match, to_state_dict
    from funcga._verify import verify
    from funcga.rules import Rule
else:
    _LATER = {
        "funcga._compare": ("compare",),
        "funcga._coupled": ("coupled",),
        "funcga._fold.accumulator": ("Accumulator", "AccumulatorState"),
        "funcga._observe": ("Observed", "Observer"),
        "funcga._observe.microbatches": ("GradientNorms", "dropped", "gradient_norms"),
        "funcga._observe.noise": ("GradientNoise", "NoiseAverage", "averaged", "gradient_noise"),
        "funcga._parity": ("Problem",),
        "funcga._plan": ("Plan", "plan"),
        "funcga._reproducible": ("reproducible",),
        "funcga._statistics": ("batch_moments", "running_statistics"),
        "funcga._transform": ("Transform",),
        "funcga._transform.apply": ("apply",),
        "funcga._transform.loss_scale": ("LossScaledState", "loss_scaled"),
        "funcga._transform.multi_steps": ("MultiSteps", "multi_steps"),
        "funcga._transform.window": ("MultiStepsState",),
        "funcga._transform.window_size": (
            "TargetWeight",
            "beta_for_half_life",
            "linear_scaling",
            "sqrt_scaling",
        ),
        "funcga._trees": ("shares_memory", "to_jax", "to_numpy", "to_torch"),
        "funcga._trees.match": ("from_state_dict", "match", "to_state_dict"),
        "funcga._verify": ("verify",),
        "funcga.rules": ("Rule", "rules"),
    }
    _MODULES = {name: module for module, names in _LATER.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'funcga' has no attribute {name!r}")
        # Kept in the module, so that the next look finds it without this function.
        module = import_module(_MODULES[name])
        value = globals()[name] = module if name == "rules" else getattr(module, name)
        return value


# `from funcga import *` leaves out sum, max and min, so that it shadows no builtin.
__all__ = [  # noqa: RUF022 - sorted by topic
    # a window of micro-batches, in one call, from an iterable, or spread over calls
    "accumulate",
    "coupled",
    "grad",
    "value_and_grad",
    "CARRY",
    "stream",
    "windows",
    "Plan",
    "plan",
    "Accumulator",
    "AccumulatorState",
    "MultiSteps",
    "MultiStepsState",
    "TargetWeight",
    "Transform",
    "apply",
    "multi_steps",
    "LossScaledState",
    "loss_scaled",
    "beta_for_half_life",
    "linear_scaling",
    "sqrt_scaling",
    "check_replicas",
    # folds and their parts
    "Fold",
    "carry",
    "concat",
    "logsumexp",
    "mean",
    "moments",
    "per_weight",
    "pooled",
    "ratio",
    "reproducible",
    "Moments",
    "Pooled",
    "Monoid",
    "Normalizer",
    "Reducer",
    "Tally",
    "monoids",
    "normalizers",
    "reducers",
    "batch_moments",
    "running_statistics",
    # what a window says of its gradients
    "GradientNoise",
    "GradientNorms",
    "NoiseAverage",
    "Observed",
    "Observer",
    "averaged",
    "dropped",
    "gradient_noise",
    "gradient_norms",
    # trees of two frameworks
    "Rule",
    "rules",
    "match",
    "from_state_dict",
    "to_state_dict",
    "shares_memory",
    "to_jax",
    "to_numpy",
    "to_torch",
    # proofs
    "FuncgaError",
    "Problem",
    "compare",
    "verify",
]

__version__ = "0.1.0"


# For completion in an editor or a shell: also what has not been loaded yet.
def __dir__() -> list[str]:
    return sorted([*__all__, "max", "min", "sum"])
