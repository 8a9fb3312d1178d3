"""Trees of JAX: arrays separated from static leaves, and objects of flax.nnx."""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass

import jax
import numpy as np

from funcga._backend.containers import Mapped, container_children, is_container, rebuilt
from funcga._types import Array, Structure, Tree
from funcga.errors import FuncgaError

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


_ARRAYS = (jax.Array, np.ndarray, np.generic)


def split(tree: Tree) -> tuple[Static, list[Array]]:
    """`partition`, checked for a program that is compiled for the static part.

    Raises FuncgaError for a leaf that is neither an array nor hashable.
    """
    static, arrays = partition(tree)
    # One array in two places is allowed; one variable of nnx is not.
    if len({*map(id, arrays)}) < len(arrays):
        check_unshared(tree)
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


# -- flax.nnx: stateful objects, which are trees and are copied in each trace. So shared
# variables would be duplicated, and what grad_fn writes to an object would be lost. flax is not
# imported here.

NNX = "flax.nnx"


def _variables(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """(path, variable) of the variables of nnx in a tree; the path begins with the type of the
    module.
    """
    nnx = sys.modules.get(NNX)
    if nnx is None:
        return
    for module in jax.tree.leaves(
        tree, is_leaf=lambda node: isinstance(node, nnx.Module | nnx.State | nnx.Variable)
    ):
        nodes, _ = jax.tree_util.tree_flatten_with_path(
            module, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        for path, node in nodes:
            if isinstance(node, nnx.Variable):
                yield type(module).__name__ + jax.tree_util.keystr(path), node


def check_unshared(tree: Tree) -> None:
    """Raises FuncgaError if one variable of nnx is in two places of a tree, and would get two
    gradients.
    """
    places: dict[int, str] = {}
    for path, variable in _variables(tree):
        if id(variable) in places:
            raise FuncgaError(
                f"`{places[id(variable)]}` and `{path}` are one variable of nnx: a step makes its "
                "arguments anew, and the two would come apart. Split the module before, graph, "
                "params = nnx.split(module, nnx.Param), and make it inside of the loss: module = "
                "nnx.merge(graph, params)."
            )
        places[id(variable)] = path


@contextmanager
def check_unchanged(tree: Tree) -> Iterator[None]:
    """A context that raises FuncgaError if variables of nnx in the tree have changed in it."""
    before = {path: jax.tree.leaves(variable) for path, variable in _variables(tree)}
    yield
    after = {path: jax.tree.leaves(variable) for path, variable in _variables(tree)}
    changed = [
        path
        for path in {**before, **after}
        if [*map(id, before.get(path, []))] != [*map(id, after.get(path, []))]
    ]
    if changed:
        raise FuncgaError(
            "grad_fn wrote to "
            f"{', '.join(f'`{path}`' for path in changed[:4])}{' ...' if changed[4:] else ''}, "
            "which would be lost: every micro-batch would begin with the same state, and draw the "
            "same noise. Thread it: graph, params, state = nnx.split(module, nnx.Param, ...), "
            "in_axes=(None, funcga.CARRY, 0), a module that is nnx.merge(graph, params, state, "
            "copy=True), and nnx.state(module, nnx.Not(nnx.Param)) returned where the fold is "
            "funcga.carry()."
        )


def check_trained(tree: Tree) -> None:
    """Raises FuncgaError if params have a variable of nnx that is state, such as BatchNorm's
    statistics.
    """
    for path, variable in _variables(tree):
        kinds = {base.__name__ for base in type(variable).__mro__}
        state = kinds & {"BatchStat", "RngState", "Cache", "Intermediate"}
        if state:
            raise FuncgaError(
                f"`{path}` is a {state.pop()} of nnx, which is state and not trained. Write "
                f"nnx.value_and_grad(loss_fn), which differentiates nnx.Param alone, in place of "
                f"funcga.value_and_grad(loss_fn)."
            )
