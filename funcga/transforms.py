"""Folds spread over calls: transforms, their states, and what goes with another batch size.

`funcga.multi_steps` makes a transform that accumulates, `loss_scaled` one that scales a loss in
float16. `apply` takes any transform, and returns the new parameters. The states are those of
transforms and of `funcga.Accumulator`; their types are for annotations.

Example:
    >>> params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
    >>> tx = funcga.multi_steps(optax.sgd(0.5), 2)
    >>> params, state = funcga.transforms.apply(tx, grads, tx.init(params), params)
    >>> isinstance(state, funcga.transforms.MultiStepsState)
    True
"""

from typing import TYPE_CHECKING

from funcga._fold import Tally
from funcga._fold.accumulator import AccumulatorState
from funcga._tools import later
from funcga._transform import Transform
from funcga._transform.apply import apply
from funcga._transform.multi_steps import MultiSteps, MultiStepsState

# The tools load when they are first used, and can be taken away.
if TYPE_CHECKING:
    from funcga.tools.loss_scale import LossScaledState, loss_scaled
    from funcga.tools.window_size import (
        TargetWeight,
        beta_for_half_life,
        linear_scaling,
        sqrt_scaling,
    )
else:
    __getattr__ = later(
        __name__,
        {
            "funcga.tools.loss_scale": ("LossScaledState", "loss_scaled"),
            "funcga.tools.window_size": (
                "TargetWeight",
                "beta_for_half_life",
                "linear_scaling",
                "sqrt_scaling",
            ),
        },
    )


__all__ = [
    "AccumulatorState",
    "LossScaledState",
    "MultiSteps",
    "MultiStepsState",
    "Tally",
    "TargetWeight",
    "Transform",
    "apply",
    "beta_for_half_life",
    "linear_scaling",
    "loss_scaled",
    "sqrt_scaling",
]
