"""The transforms from a loss to its gradient."""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jax_backend import nnx


def grad(loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns grads, or (grads, aux)."""
    return jax.grad(loss_fn, argnums=argnums, has_aux=has_aux)


def value_and_grad(
    loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns (value, grads), or ((value, aux), grads)."""
    return jax.value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)


def depends(loss: jax.Array) -> bool | None:
    """Whether a loss depends on what the innermost transform, one of these, differentiates it by."""
    found = []

    @jax.custom_jvp
    def seen(x: Any) -> Any:
        return x

    def rule(primals: Any, tangents: Any) -> Any:
        found.append(not isinstance(tangents[0], SymbolicZero))
        return primals[0], tangents[0]

    seen.defjvp(rule, symbolic_zeros=True)
    seen(loss)
    if any(found):
        return True
    return False if isinstance(loss, jax.core.Tracer) or abs(float(loss)) > 0 else None


def check_params(params: Any) -> None:
    """Raises FuncgaError if some of what is to be differentiated is state, and not trained."""
    nnx.check_trained(params)
