"""Compilation outside of jit: arrays are traced, every other argument is static.

Only JAX has this file: torch runs a loop as it is.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from funcga.errors import FuncgaError
from jax_backend import trees
from jax_backend.arrays import describe
from jax_backend.nnx import check_unshared


class Static:
    """Of some arguments, all that is no array: the structure and the other leaves. It is part of a compiled program.

    Two are equal if their leaves are equal and of the same type: 1, 1.0 and True make three programs.
    """

    def __init__(self, tree: Any):
        leaves, self.structure = trees.flatten(tree)
        self.arrays = [leaf for leaf in leaves if _is_array(leaf)]
        if len({*map(id, self.arrays)}) < len(self.arrays):
            check_unshared(tree)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise _without_numbers(tree)
        fixed = [(None, leaf) if _is_array(leaf) else (type(leaf), leaf) for leaf in leaves]
        self.fixed = tuple((kind, None if kind is None else leaf) for kind, leaf in fixed)
        try:
            self._hash = hash((self.structure, self.fixed))
        except TypeError:
            raise _unhashable([leaf for kind, leaf in fixed if kind is not None]) from None

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and (self.structure, self.fixed) == (other.structure, other.fixed)

    def taken(self) -> "tuple[Static, list[Any]]":
        """Itself without the arrays, for a cache that outlives them; and the arrays."""
        arrays, self.arrays = self.arrays, []
        return self, arrays

    def tree(self, arrays: list[Any]) -> Any:
        """The arguments again, with these arrays."""
        found = iter(arrays)
        return trees.unflatten(self.structure, [next(found) if kind is None else leaf for kind, leaf in self.fixed])


def _without_numbers(tree: Any) -> FuncgaError:
    struct = next(leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct))
    return FuncgaError(
        f"an argument is {describe(struct)} of type ShapeDtypeStruct, a shape without numbers, and the call would "
        f"compute some. For the shapes and dtypes that it returns, write jax.eval_shape(step, params, batch)."
    )


def _unhashable(leaves: list[Any]) -> FuncgaError:
    def hashable(leaf: Any) -> bool:
        try:
            hash(leaf)
        except TypeError:
            return False
        return True

    kinds = sorted({type(leaf).__name__ for leaf in leaves if not hashable(leaf)})
    return FuncgaError(
        f"an argument of type {' and '.join(kinds)} is neither an array nor hashable. Outside of jit this call is "
        f"compiled, and what is no array becomes part of the program, which could not tell when it changes. If it "
        f"holds arrays, make it a tree, such as dict(batch); if it is a setting, make it hashable, such as a dataclass "
        f"with frozen=True; or call the step inside jax.jit."
    )


def compiled(function: Callable[..., Any], inline: bool = False, keep_unused: bool = False) -> Callable[..., Any]:
    """The function, jitted for calls outside of any trace.

    Inside jit, vmap, grad or shard_map it is called as it is, or with `inline` traced once for all such calls. What is
    traced once may close over values of the running trace, so make it anew in each trace.
    Raises FuncgaError for an argument that is neither an array nor hashable.
    """

    def run(static: Static, arrays: list[Any]) -> Any:
        return function(*static.tree(arrays))

    jitted = jax.jit(run, static_argnums=0, inline=inline, keep_unused=keep_unused)

    def call(*args: Any) -> Any:
        if not inline and is_tracing():
            return function(*args)
        return jitted(*Static(args).taken())

    return call


def is_tracing() -> bool:
    """Whether a trace is running, of jit, vmap, grad or shard_map: a function may close over its tracers."""
    return bool(_trace() != _OUTSIDE)


_trace: Callable[[], Any] = get_opaque_trace_state
with jax.ensure_compile_time_eval():
    _OUTSIDE = _trace()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
