"""The transforms from a loss to its gradient."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def grad(loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns grads, or (grads, aux)."""
    return torch.func.grad(loss_fn, argnums=argnums, has_aux=has_aux)


def value_and_grad(
    loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns (value, grads), or ((value, aux), grads)."""
    transform = torch.func.grad_and_value(loss_fn, argnums=argnums, has_aux=has_aux)

    @functools.wraps(loss_fn)
    def value_first(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        grads, value = transform(*args, **kwargs)
        return value, grads

    return value_first
