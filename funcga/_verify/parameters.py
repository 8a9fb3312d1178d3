"""Parameters: the same loss with others. What it counts stays as it is, and what it computes of them does not."""

import copy
from typing import Any

from funcga._grad import GradientFunction
from funcga._verify.probe import Probe
from funcga.errors import FuncgaError


def moved(probe: Probe) -> Probe | None:
    """A Probe with other values of what is differentiated; None where that is split, or takes no other values."""
    places = _trained(probe)
    if any(probe.arguments.parts[i].axes for i in places):
        return None
    made = copy.copy(probe)
    made.args = tuple(shifted(arg, probe) if i in places else arg for i, arg in enumerate(probe.args))
    try:
        made.arguments = probe.program.read(made.args, probe.backend)
    except FuncgaError:
        return None
    made.forget()
    return made


def _trained(probe: Probe) -> tuple[int, ...]:
    """The arguments that are differentiated: the first, if the function does not say."""
    grad_fn = probe.program.grad_fn
    return grad_fn.places(len(probe.args)) if isinstance(grad_fn, GradientFunction) else (0,)


def shifted(tree: Any, probe: Probe) -> Any:
    """The tree with other numbers in its float arrays."""
    leaves, structure = probe.backend.trees.flatten(tree)
    arrays = probe.backend.arrays

    def is_float(leaf: Any) -> bool:
        return arrays.is_array(leaf) and arrays.kind(leaf.dtype) == "float"

    return probe.backend.trees.unflatten(structure, [leaf * 1.25 + 0.1 if is_float(leaf) else leaf for leaf in leaves])
