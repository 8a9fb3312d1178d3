"""Trees of JAX, their arrays apart from static leaves, and calls that are compiled for these."""

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Any

import jax
import numpy as np

from funcga._backend.containers import Mapped, container_children, is_container, rebuilt
from funcga._types import Array, Structure, Tree
from funcga.errors import FuncgaError
from jax_backend._private import is_tracing
from jax_backend.arrays import scalar

jax.tree_util.register_pytree_node(Mapped, lambda node: (node.values, node.kind), rebuilt)


def flatten(
    tree: Tree, is_leaf: Callable[[Tree], bool] | None = None
) -> tuple[list[Tree], Structure]:
    """The leaves, in the framework's order, and the structure that puts them back."""
    leaves, structure = jax.tree.flatten(tree, is_leaf)
    if not any(issubclass(kind, Mapping) or is_dataclass(kind) for kind in {*map(type, leaves)}):
        return leaves, structure

    # Mappings and dataclasses that are not registered in JAX become nodes, recursively.
    def walked(node: Tree) -> Tree:
        return jax.tree.map(as_node, node, is_leaf=is_leaf)

    def as_node(leaf: Tree) -> Tree:
        whole = not is_container(leaf) or (is_leaf is not None and is_leaf(leaf))
        return leaf if whole else Mapped(leaf, walked)

    return jax.tree.flatten(walked(tree), is_leaf)


def unflatten(structure: Structure, leaves: Sequence[Tree]) -> Tree:
    """The tree of this structure with these leaves."""
    return jax.tree.unflatten(structure, leaves)


def children(tree: Tree) -> list[tuple[str, Tree]] | None:
    """The (key, subtree) pairs one level down, keys written as in code; None for a leaf."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if [path for path, _ in pairs] == [()]:
        return container_children(tree)
    return [(str(path[0]), subtree) for path, subtree in pairs]


# -- the arrays of a tree, and its static rest


@dataclass(frozen=True)
class Static:
    """The static part of some arguments: the structure, and leaves other than arrays with their
    indices and types.

    Two are equal if their leaves are equal and of the same type, and numbers have the same digits:
    1, 1.0 and True make three programs, and so do 0.0 and -0.0.
    """

    structure: Structure
    others: tuple[tuple[int, object, Hashable], ...]

    def tree(self, arrays: Sequence[Array]) -> Tree:
        """The arguments again, with these arrays."""
        leaves = list(arrays)
        for leaf_index, _, leaf in self.others:  # in order, so that each index is valid
            leaves.insert(leaf_index, leaf)
        return jax.tree.unflatten(self.structure, leaves)


def partition(tree: Tree) -> tuple[Static, list[Array]]:
    """(the static part of a tree, its arrays)."""
    leaves, structure = flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]
    others = [
        (index, _kind(leaf), leaf)
        for index, leaf in enumerate(leaves)
        if not isinstance(leaf, _ARRAYS)
    ]
    return Static(structure, tuple(others)), arrays


def _kind(leaf: object) -> object:
    return (type(leaf), repr(leaf)) if isinstance(leaf, float | complex) else type(leaf)


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def split(tree: Tree) -> tuple[Static, list[Array]]:
    """`partition`, checked for a program that is compiled for the static part.

    Raises FuncgaError for a leaf that is neither an array nor hashable.
    """
    static, arrays = partition(tree)
    # One array in two places is allowed; one variable of nnx is not.
    if len({*map(id, arrays)}) < len(arrays) and (checks := nnx()):
        checks.check_unshared(tree)
    try:
        hash(static)
    except TypeError as error:
        raise FuncgaError(
            f"an argument is neither an array nor hashable ({error}). Outside of jit this call is "
            "compiled, and anything that is not an array becomes part of the program, which could "
            "not tell when it changes. If it holds arrays, make it a tree, such as dict(batch); if "
            "it is a setting, make it hashable, such as a dataclass with frozen=True; or call the "
            "step inside jax.jit."
        ) from error
    return static, arrays


def nnx() -> Any:
    """The tool that checks objects of flax.nnx; None where nobody has imported flax.nnx."""
    if "flax.nnx" in sys.modules:
        with suppress(ModuleNotFoundError):
            return import_module("funcga.tools.nnx_in_jax")
    return None


# -- calls outside of jit are compiled: arrays are traced, and all else is part of the program


class Compiled:
    """`f(settings, *args)`: `function(*settings, *args)`, jitted for calls outside of any trace,
    and unchanged inside of jit, vmap, grad or shard_map.

    Settings are static. In args, arrays are traced and all else is static. If it `is_checked`,
    `function` returns (result, conditions for it to be lost). Raises FuncgaError for an argument
    that is neither an array nor hashable, and if the host sees that a result is lost.
    """

    def __init__(
        self, function: Callable[..., Tree], is_checked: bool = False, keep_unused: bool = False
    ):
        def run(
            settings: tuple[Hashable, ...], static: Static, arrays: Sequence[jax.Array]
        ) -> Tree:
            return function(*settings, *static.tree(arrays))

        self.function, self.is_checked = function, is_checked
        self.of_arrays = jax.jit(run, static_argnums=(0, 1), keep_unused=keep_unused)

    def __call__(self, settings: tuple[Hashable, ...], *args: Tree) -> Tree:
        """The result of the function."""
        if is_tracing():
            if checks := nnx():
                checks.check_unshared(args)  # as `split` does
            result = self.function(*settings, *args)
            return result[0] if self.is_checked else result
        static, leaves = split(args)
        result = self.of_arrays(settings, static, leaves)
        if not self.is_checked:
            return result
        result, lost = result
        # The host does not wait for an accelerator. The same call without jit raises, with the
        # path of the leaf.
        if any(scalar(is_lost) is True for is_lost in lost):
            self.function(*settings, *args)
        return result


def inlined(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """The function, jitted as `compiled` is, of which no call remains in a program: it is traced
    once for all programs that it is in.
    """

    def run(static: Static, arrays: Sequence[jax.Array]) -> Tree:
        return function(*static.tree(arrays))

    of_arrays = jax.jit(run, static_argnums=0, inline=True)
    return lambda *args: of_arrays(*split(args))
