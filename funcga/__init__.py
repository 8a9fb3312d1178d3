"""funcga: gradient accumulation as a pure fold over micro-batches, for PyTorch and JAX.

>>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)
>>> loss, grads = step(params, batch)

Importing it imports neither framework; the arrays of a call decide which one runs.
"""

from funcga import monoids as monoids
from funcga import normalizers as normalizers
from funcga import reducers as reducers
from funcga import rules as rules
from funcga.accumulation import accumulate as accumulate
from funcga.accumulator import Accumulator as Accumulator
from funcga.accumulator import AccumulatorState as AccumulatorState
from funcga.arguments import CARRY as CARRY
from funcga.comparing import compare as compare
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
from funcga.gradients import grad as grad
from funcga.gradients import value_and_grad as value_and_grad
from funcga.interop import shares_memory as shares_memory
from funcga.interop import to_jax as to_jax
from funcga.interop import to_numpy as to_numpy
from funcga.interop import to_torch as to_torch
from funcga.learning_rates import linear_scaling as linear_scaling
from funcga.learning_rates import sqrt_scaling as sqrt_scaling
from funcga.loss_scaling import LossScaledState as LossScaledState
from funcga.loss_scaling import loss_scaled as loss_scaled
from funcga.matching import match as match
from funcga.monoids import Monoid as Monoid
from funcga.normalizers import Moments as Moments
from funcga.normalizers import Normalizer as Normalizer
from funcga.normalizers import Pooled as Pooled
from funcga.problem import Problem as Problem
from funcga.reducers import Reducer as Reducer
from funcga.replicas import check_replicas as check_replicas
from funcga.rules import Rule as Rule
from funcga.state_dicts import from_state_dict as from_state_dict
from funcga.state_dicts import to_state_dict as to_state_dict
from funcga.statistics import batch_moments as batch_moments
from funcga.statistics import running_statistics as running_statistics
from funcga.stepping import multi_steps as multi_steps
from funcga.streaming import stream as stream
from funcga.streaming import windows as windows
from funcga.tally import Tally as Tally
from funcga.targets import TargetWeight as TargetWeight
from funcga.transforms import MultiSteps as MultiSteps
from funcga.transforms import Transform as Transform
from funcga.verifying import verify as verify
from funcga.window import MultiStepsState as MultiStepsState

__version__ = "0.1.0"
