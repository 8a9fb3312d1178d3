"""The transforms from a loss to its gradient."""

from collections.abc import Callable
from typing import Any

import jax

from jax_backend import nnx


def grad(loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns grads, or (grads, aux)."""
    return jax.grad(loss_fn, argnums=argnums, has_aux=has_aux)


def value_and_grad(
    loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns (value, grads), or ((value, aux), grads)."""
    return jax.value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)


def check_params(params: Any) -> None:
    """Raises FuncgaError if some of what is to be differentiated is state, and not trained."""
    nnx.check_trained(params)
