"""Compilation outside of jit: arrays are traced, every other argument is static.

Only JAX has this file: torch runs a loop as it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Static:
    """A value that is part of the compiled program: equal if it has the same type and is equal, or is the same."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        try:
            return hash((type(self.value), self.value))
        except TypeError:
            return id(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        if self.value is other.value:
            return True
        try:
            hash(self.value)
        except TypeError:
            return False
        return bool(self.value == other.value)


def compiled(function: Callable[..., Any], donate: bool = False, inline: bool = False) -> Callable[..., Any]:
    """The function, jitted for calls outside of any trace; its first argument donated if asked.

    Inside jit, vmap, grad or shard_map it is called as it is, or with `inline` traced once for all such calls.
    """

    def run(static: tuple[Static, ...], donated: list[Any], traced: list[Any]) -> Any:
        structure, *fixed = (s.value for s in static)
        arrays = iter([*donated, *traced])
        leaves = [next(arrays) if leaf is _ARRAY else leaf for leaf in fixed]
        return function(*jax.tree.unflatten(structure, leaves))

    jitted = jax.jit(run, static_argnums=0, donate_argnums=1 if donate else (), inline=inline)

    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if not inline and any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return function(*args)
        static = (Static(structure), *(Static(_ARRAY if _is_array(leaf) else leaf) for leaf in leaves))
        split = sum(map(_is_array, jax.tree.leaves(args[0]))) if donate else 0
        found = [leaf for leaf in leaves if _is_array(leaf)]
        return jitted(static, found[:split], found[split:])

    return call


def signature(tree: Any) -> Any:
    """What of the arguments a compiled program depends on: structure, shapes, dtypes and all that is no array."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(
        (leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)) if _is_array(leaf) else Static(leaf)
        for leaf in leaves
    )


_ARRAY = type("_Array", (), {"__repr__": lambda self: "array"})()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
