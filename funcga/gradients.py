"""`grad` and `value_and_grad`: one spelling and one order of results for both frameworks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcga.arguments import argument_names
from funcga.backend import Backend, backend_of, load_imported
from funcga.errors import FuncgaError


@dataclass(frozen=True, eq=False)
class GradientFunction:
    """A gradient function that takes the framework of its arguments. Made by `grad` and `value_and_grad`."""

    loss_fn: Callable[..., Any]
    argnums: int | tuple[int, ...]
    has_aux: bool
    with_value: bool

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.loss_fn

    def bound(self, backend: Backend) -> Callable[..., Any]:
        """The framework's own gradient function."""
        transform = backend.gradients.value_and_grad if self.with_value else backend.gradients.grad
        made: Callable[..., Any] = transform(self.loss_fn, self.argnums, self.has_aux)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value and gradient, or the gradient, at these arguments."""
        names = lambda: [*argument_names(self.loss_fn, len(args)), *kwargs]
        backend = backend_of([*args, *kwargs.values()], names)
        return self.bound(backend)(*args, **kwargs)


def grad(loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that returns `grads`, or `(grads, aux)` with has_aux: what loss_fn's gradient is at its arguments.

    loss_fn returns a real scalar, or (scalar, aux) with has_aux. grads has the structure, shapes and dtypes of the
    argument `argnums`; a tuple of them for a tuple of argnums. Works on torch tensors and on JAX arrays, on its own
    and in `accumulate`, where arguments after the first are split: if one of them is in argnums, say in_axes as well.

    >>> gradient = funcga.grad(lambda w, x: ((x @ w) ** 2).mean())
    """
    return _gradient_function(loss_fn, argnums, has_aux, with_value=False)


def value_and_grad(
    loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns `(value, grads)`, or `((value, aux), grads)` with has_aux, in both frameworks.

    The arguments are those of `grad`. Note that torch.func.grad_and_value returns the gradients first.

    >>> step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)
    """
    return _gradient_function(loss_fn, argnums, has_aux, with_value=True)


def _gradient_function(
    loss_fn: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, with_value: bool
) -> Callable[..., Any]:
    if not callable(loss_fn):
        raise FuncgaError(f"loss_fn is {loss_fn!r}, which is no function. Pass loss_fn(params, *batch) -> scalar.")
    entries = argnums if isinstance(argnums, tuple) else (argnums,)
    if not entries or any(type(entry) is not int for entry in entries):
        raise FuncgaError(f"argnums is {argnums!r}: it must be an int or a tuple of ints. Write argnums=0.")
    load_imported()
    return GradientFunction(loss_fn, argnums, has_aux, with_value)
