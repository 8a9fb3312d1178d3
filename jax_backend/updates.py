"""Updates, applied to parameters."""

from typing import Any

import jax
import jax.numpy as jnp

from funcga.errors import FuncgaError
from jax_backend import trees


def apply_updates(params: Any, updates: Any) -> Any:
    """The parameters with the updates added, in the parameters' dtypes."""
    leaves, structure = trees.flatten(params)
    added, found = trees.flatten(updates)
    if found != structure:
        raise FuncgaError(
            f"params and updates have different structures: {structure} and {found}. Pass what tx.update returned for "
            f"these params."
        )
    return trees.unflatten(structure, [_applied(p, u) for p, u in zip(leaves, added, strict=True)])


def _applied(param: Any, update: Any) -> Any:
    param, update = jnp.asarray(param), jnp.asarray(update)
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(param.dtype, update.dtype)
    return (param.astype(wide) + update.astype(wide)).astype(param.dtype)
