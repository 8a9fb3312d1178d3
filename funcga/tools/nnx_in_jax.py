"""Checks of objects of flax.nnx, which are trees with state, and are copied in each trace.

So a variable that is in two places would become two, and what grad_fn writes to an object would be
lost. The core of JAX loads this where flax.nnx is imported.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from funcga._types import Tree
from funcga.errors import FuncgaError, listed


def _variables(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """(path, variable) of the variables of nnx in a tree; the path begins with the type of the
    module.
    """
    nnx = sys.modules["flax.nnx"]
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

    def values() -> set[tuple[str, int]]:
        return {
            (path, id(leaf))
            for path, variable in _variables(tree)
            for leaf in jax.tree.leaves(variable)
        }

    # The leaves are kept alive, so that no other array gets the id of one.
    before, leaves = values(), jax.tree.leaves(tree)
    yield
    changed = sorted({path for path, _ in before ^ values()})
    del leaves
    if changed:
        raise FuncgaError(
            f"grad_fn wrote to {listed([f'`{path}`' for path in changed])}, which would be lost: "
            "every micro-batch would begin with the same state, and draw the same noise. Thread "
            "it: graph, params, state = nnx.split(module, nnx.Param, ...), in_axes=(None, "
            "funcga.CARRY, 0), a module that is nnx.merge(graph, params, state, copy=True), and "
            "nnx.state(module, nnx.Not(nnx.Param)) returned where the fold is funcga.carry()."
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
