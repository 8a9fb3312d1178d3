"""funcga: gradient accumulation as a pure fold over micro-batches, for PyTorch and JAX.

>>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)
>>> loss, grads = step(params, batch)

Importing it imports neither framework; the arrays of a call decide which one runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# What every call of `accumulate` needs is imported here. `as` marks a name as public for type checkers.
from funcga import monoids as monoids
from funcga import normalizers as normalizers
from funcga import reducers as reducers
from funcga._accumulate import accumulate as accumulate
from funcga._call.arguments import CARRY as CARRY
from funcga._fold.tally import Tally as Tally
from funcga._grad import grad as grad
from funcga._grad import value_and_grad as value_and_grad
from funcga._replicas import check_replicas as check_replicas
from funcga._stream import stream as stream
from funcga._stream import windows as windows
from funcga.errors import FuncgaError as FuncgaError
from funcga.folds import Fold as Fold
from funcga.folds import carry as carry
from funcga.folds import concat as concat
from funcga.folds import max as max
from funcga.folds import mean as mean
from funcga.folds import min as min
from funcga.folds import moments as moments
from funcga.folds import per_weight as per_weight
from funcga.folds import pooled as pooled
from funcga.folds import ratio as ratio
from funcga.folds import sum as sum
from funcga.monoids import Monoid as Monoid
from funcga.normalizers import Moments as Moments
from funcga.normalizers import Normalizer as Normalizer
from funcga.normalizers import Pooled as Pooled
from funcga.reducers import Reducer as Reducer

# These load when they are first used, so that `import funcga` is quick; type checkers see them at once.
if TYPE_CHECKING:
    from funcga import rules as rules
    from funcga._compare import compare as compare
    from funcga._fold.accumulator import Accumulator as Accumulator
    from funcga._fold.accumulator import AccumulatorState as AccumulatorState
    from funcga._parity.problem import Problem as Problem
    from funcga._statistics import batch_moments as batch_moments
    from funcga._statistics import running_statistics as running_statistics
    from funcga._transform import Transform as Transform
    from funcga._transform.loss_scale import LossScaledState as LossScaledState
    from funcga._transform.loss_scale import loss_scaled as loss_scaled
    from funcga._transform.multi_steps import MultiSteps as MultiSteps
    from funcga._transform.multi_steps import multi_steps as multi_steps
    from funcga._transform.window import MultiStepsState as MultiStepsState
    from funcga._transform.window_size import TargetWeight as TargetWeight
    from funcga._transform.window_size import linear_scaling as linear_scaling
    from funcga._transform.window_size import sqrt_scaling as sqrt_scaling
    from funcga._trees import shares_memory as shares_memory
    from funcga._trees import to_jax as to_jax
    from funcga._trees import to_numpy as to_numpy
    from funcga._trees import to_torch as to_torch
    from funcga._trees.match import from_state_dict as from_state_dict
    from funcga._trees.match import match as match
    from funcga._trees.match import to_state_dict as to_state_dict
    from funcga._verify.verify import verify as verify
    from funcga.rules import Rule as Rule
else:
    _LATER = {
        "Accumulator": "funcga._fold.accumulator",
        "AccumulatorState": "funcga._fold.accumulator",
        "LossScaledState": "funcga._transform.loss_scale",
        "MultiSteps": "funcga._transform.multi_steps",
        "MultiStepsState": "funcga._transform.window",
        "Problem": "funcga._parity.problem",
        "Rule": "funcga.rules",
        "TargetWeight": "funcga._transform.window_size",
        "Transform": "funcga._transform",
        "batch_moments": "funcga._statistics",
        "compare": "funcga._compare",
        "from_state_dict": "funcga._trees.match",
        "linear_scaling": "funcga._transform.window_size",
        "loss_scaled": "funcga._transform.loss_scale",
        "match": "funcga._trees.match",
        "multi_steps": "funcga._transform.multi_steps",
        "rules": "funcga.rules",
        "running_statistics": "funcga._statistics",
        "shares_memory": "funcga._trees",
        "sqrt_scaling": "funcga._transform.window_size",
        "to_jax": "funcga._trees",
        "to_numpy": "funcga._trees",
        "to_state_dict": "funcga._trees.match",
        "to_torch": "funcga._trees",
        "verify": "funcga._verify.verify",
    }

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module 'funcga' has no attribute {name!r}")
        # Kept in the module, so that the next look finds it without this function.
        module = import_module(_LATER[name])
        value = globals()[name] = module if name == "rules" else getattr(module, name)
        return value


# `from funcga import *` leaves out sum, max and min, so that it shadows no builtin.
__all__ = [
    "CARRY",
    "Accumulator",
    "AccumulatorState",
    "Fold",
    "FuncgaError",
    "LossScaledState",
    "Moments",
    "Monoid",
    "MultiSteps",
    "MultiStepsState",
    "Normalizer",
    "Pooled",
    "Problem",
    "Reducer",
    "Rule",
    "Tally",
    "TargetWeight",
    "Transform",
    "accumulate",
    "batch_moments",
    "carry",
    "check_replicas",
    "compare",
    "concat",
    "from_state_dict",
    "grad",
    "linear_scaling",
    "loss_scaled",
    "match",
    "mean",
    "moments",
    "monoids",
    "multi_steps",
    "normalizers",
    "per_weight",
    "pooled",
    "ratio",
    "reducers",
    "rules",
    "running_statistics",
    "shares_memory",
    "sqrt_scaling",
    "stream",
    "to_jax",
    "to_numpy",
    "to_state_dict",
    "to_torch",
    "value_and_grad",
    "verify",
    "windows",
]

__version__ = "0.1.0"


# For completion in an editor or a shell: also what has not been loaded yet.
def __dir__() -> list[str]:
    return sorted([*__all__, "max", "min", "sum"])
