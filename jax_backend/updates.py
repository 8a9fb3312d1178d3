"""Updates, applied to parameters."""

from typing import Any

import jax
import jax.numpy as jnp

from funcga._backend.prefixes import leaf_paths
from funcga.errors import FuncgaError
from jax_backend import arrays, trees


def apply_updates(params: Any, updates: Any) -> Any:
    """The parameters with the updates added, in the parameters' dtypes."""
    leaves, structure = trees.flatten(params, _is_none)
    given, found = trees.flatten(updates, _is_none)
    if found != structure:
        raise FuncgaError(
            f"params and updates have different structures: {structure} and {found}. Pass what tx.update returned for "
            f"these params."
        )
    for i, (param, update) in enumerate(zip(leaves, given, strict=True)):
        if update is not None and jnp.shape(param) != jnp.shape(update):
            path = leaf_paths(params, trees)[i] if None not in leaves else f", leaf {i}"
            raise FuncgaError(
                f"`updates{path}` is {arrays.describe(update)}, and `params{path}` is {arrays.describe(param)}. An "
                f"update has its parameter's shape: updates, state = tx.update(grads, state, params), of these params."
            )
    return trees.unflatten(structure, [_applied(p, u) for p, u in zip(leaves, given, strict=True)])


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _applied(param: Any, update: Any) -> Any:
    if param is None or update is None:
        return param
    param, update = jnp.asarray(param), jnp.asarray(update)
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(param.dtype, update.dtype)
    return (param.astype(wide) + update.astype(wide)).astype(param.dtype)
