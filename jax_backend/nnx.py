"""Objects of flax.nnx, which hold their state in themselves: as arguments they are trees, made anew in each trace.

An object of nnx belongs to the trace that made it, variables that two objects share come apart in a tree, and what
grad_fn writes to an object that was made anew is lost. flax is not imported here: nobody has such an object before.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax

from funcga.errors import FuncgaError


def fresh(tree: Any) -> Any:
    """The tree with its containers made anew, in the running trace."""
    return jax.tree.map(lambda leaf: leaf, tree)


def check_unshared(tree: Any) -> None:
    """Raises FuncgaError if two places in a tree have one variable of nnx, which would get a gradient for each."""
    places: dict[int, str] = {}
    for path, variable in _variables(tree):
        if id(variable) in places:
            raise FuncgaError(
                f"`{places[id(variable)]}` and `{path}` are one variable of nnx: a step makes its arguments anew, and "
                f"the two would come apart. Split the module before, graph, params = nnx.split(module, nnx.Param), "
                f"and make it inside of the loss: module = nnx.merge(graph, params)."
            )
        places[id(variable)] = path


def _variables(tree: Any) -> list[tuple[str, Any]]:
    """(path, variable) of the variables of nnx in a tree; the path begins with the type of the module."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    found = []
    for module in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Module | nnx.State | nnx.Variable)):
        nodes, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda node: isinstance(node, nnx.Variable))
        pairs = [(type(module).__name__ + jax.tree_util.keystr(path), node) for path, node in nodes]
        found += [(path, node) for path, node in pairs if isinstance(node, nnx.Variable)]
    return found


def watched(tree: Any) -> Callable[[], None]:
    """A function that raises FuncgaError if variables of nnx in the tree have changed since."""
    before = {path: jax.tree.leaves(variable) for path, variable in _variables(tree)}

    def check() -> None:
        after = {path: jax.tree.leaves(variable) for path, variable in _variables(tree)}
        kept = [path for path, leaves in before.items() if list(map(id, leaves)) == list(map(id, after.get(path, [])))]
        changed = [path for path in {**before, **after} if path not in kept]
        if changed:
            raise FuncgaError(
                f"grad_fn wrote to {', '.join(f'`{path}`' for path in changed[:4])}{' ...' if changed[4:] else ''}, "
                f"which would be lost: every micro-batch would begin with the same state, and draw the same noise. "
                f"Thread it: graph, params, state = nnx.split(module, nnx.Param, ...), in_axes=(None, funcga.CARRY, "
                f"0), a module that is nnx.merge(graph, params, state, copy=True), and nnx.state(module, "
                f"nnx.Not(nnx.Param)) returned where the fold is funcga.carry()."
            )

    return check


def check_trained(tree: Any) -> None:
    """Raises FuncgaError if a variable of nnx in a tree of parameters is state, such as BatchNorm's statistics."""
    for path, variable in _variables(tree):
        kinds = {base.__name__ for base in type(variable).__mro__}
        state = kinds & {"BatchStat", "RngState", "Cache", "Intermediate"}
        if state:
            raise FuncgaError(
                f"`{path}` is a {state.pop()} of nnx, which is state and not trained. Write "
                f"nnx.value_and_grad(loss_fn), which differentiates nnx.Param alone, in place of "
                f"funcga.value_and_grad(loss_fn)."
            )
