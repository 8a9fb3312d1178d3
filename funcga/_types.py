"""The names that signatures use for what belongs to the frameworks, which this package does not
import.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

# An array of torch, JAX or NumPy. A scalar is a Python number or a 0-d array.
Array = Any
Scalar = Any
Dtype = Any
# What is accumulated of one leaf: an array, or a tuple of arrays.
Reduced = Any
# What `across=` names: a process group or a device mesh of torch, names of a JAX mesh's axes.
Across = Any
# Nested containers of arrays, and what a framework has to describe one without its leaves.
Tree = Any
Structure = Any
# The array namespace that the mathematics is written against: `torch` or `jax.numpy`.
Namespace = Any

# The arguments of a call, by position and by keyword.
Args = tuple[Tree, ...]
Kwargs = dict[str, Tree]

# A function that returns a tree, such as a step.
TreeFn = Callable[..., Tree]
GradFn = TreeFn
WeightFn = Callable[..., Scalar]
LossFn = Callable[..., Any]

P = ParamSpec("P")
R = TypeVar("R")
# What is differentiated, and so its gradient.
A = TypeVar("A")
