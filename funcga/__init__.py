"""funcga: gradient accumulation as a pure fold over micro-batches, for PyTorch and JAX.

>>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)
>>> loss, grads = step(params, batch)

Importing it imports neither framework; the arrays of a call decide which one runs.
"""

from typing import TYPE_CHECKING

# What every call of `accumulate` needs is imported here.
from funcga import monoids, normalizers, reducers
from funcga._accumulate import accumulate, stream
from funcga._call.arguments import CARRY
from funcga._grad import grad, value_and_grad
from funcga._tools import later
from funcga._transform.window_size import windows
from funcga.errors import FuncgaError
from funcga.folds import Fold, carry, concat, logsumexp, mean, moments, per_weight, pooled, ratio
from funcga.folds import max as max
from funcga.folds import min as min
from funcga.folds import sum as sum
from funcga.monoids import Monoid
from funcga.reducers import Reducer

# These load when they are first used, so that `import funcga` is quick; type checkers see them at
# once.
if TYPE_CHECKING:
    from funcga import checks, observers, statistics, transforms, trees
    from funcga._fold.accumulator import Accumulator
    from funcga._transform.multi_steps import multi_steps
    from funcga.observers import dropped, gradient_noise, gradient_norms
    from funcga.tools.check_replicas import check_replicas
    from funcga.tools.compare import compare
    from funcga.tools.coupled import coupled
    from funcga.tools.doctor import watch
    from funcga.tools.pack import pack
    from funcga.tools.plan import plan
    from funcga.tools.reproducible import reproducible
    from funcga.tools.trees import to_jax, to_numpy, to_torch
    from funcga.tools.verify import verify
else:
    __getattr__ = later(
        __name__,
        {
            "funcga.checks": ("checks",),
            "funcga.observers": ("observers", "dropped", "gradient_noise", "gradient_norms"),
            "funcga.statistics": ("statistics",),
            "funcga.transforms": ("transforms",),
            "funcga.trees": ("trees",),
            "funcga.tools.check_replicas": ("check_replicas",),
            "funcga.tools.compare": ("compare",),
            "funcga.tools.coupled": ("coupled",),
            "funcga.tools.doctor": ("watch",),
            "funcga._fold.accumulator": ("Accumulator",),
            "funcga.tools.pack": ("pack",),
            "funcga.tools.plan": ("plan",),
            "funcga.tools.reproducible": ("reproducible",),
            "funcga._transform.multi_steps": ("multi_steps",),
            "funcga.tools.trees": ("to_jax", "to_numpy", "to_torch"),
            "funcga.tools.verify": ("verify",),
        },
    )


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
    "pack",
    "plan",
    "Accumulator",
    "multi_steps",
    "transforms",
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
    "Monoid",
    "Reducer",
    "monoids",
    "normalizers",
    "reducers",
    "statistics",
    # what a window says of its gradients
    "dropped",
    "gradient_noise",
    "gradient_norms",
    "observers",
    # trees of two frameworks
    "to_jax",
    "to_numpy",
    "to_torch",
    "trees",
    # proofs
    "FuncgaError",
    "checks",
    "compare",
    "verify",
    "watch",
]

__version__ = "0.1.0"


# For completion in an editor or a shell: also what has not been loaded yet.
def __dir__() -> list[str]:
    return sorted([*__all__, "max", "min", "sum"])
