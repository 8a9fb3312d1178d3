"""Closures: what an optimizer of torch calls to evaluate the loss again, of a pure function of the parameters.

Only torch has this file: optax passes such a function on as an extra argument.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from funcga.errors import FuncgaError
from torch_backend.optim.match import check_gradients, matched


def needs_closure(optimizer: type[Optimizer]) -> bool:
    """Whether the optimizer's step must be given a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def constant(optimizer: Optimizer) -> Callable[[], torch.Tensor]:
    """A closure that leaves the gradients as they are; FuncgaError if the optimizer asks for them more than once."""
    for group in optimizer.param_groups:
        if group.get("max_iter") != 1 or group.get("line_search_fn") is not None:
            name = type(optimizer).__name__
            raise FuncgaError(
                f"{name} evaluates the loss several times in an update, and was given the gradients of one place. Give "
                f"it the function: tx.update(grads, state, params, closure=f), f = lambda params: "
                f"funcga.value_and_grad(loss_fn)(params, batch); or let it take one step without a search: "
                f"from_optimizer({name}, max_iter=1)."
            )
    return lambda: torch.zeros(())


def evaluating(function: Any, params: Any, build: Callable[[list[Any]], Any], copies: list[Any]) -> Callable[[], Any]:
    """A closure that sets the gradients to those of a function where the copies of the parameters are now.

    function: `function(params) -> (loss, grads)`. params, build: the parameters, and what makes such a tree of a list.
    Raises FuncgaError for what is no such function.
    """
    if not callable(function):
        raise FuncgaError(_no_closure(f"closure is {function!r}"))

    def closure() -> Any:
        output = function(build([copy.detach() for copy in copies]))
        if not (isinstance(output, tuple) and len(output) == 2):
            raise FuncgaError(_no_closure(f"closure returned {type(output).__name__}"))
        grads = [grad for grad, leaf in _pairs(output[1], params) if leaf is not None]
        check_gradients(grads, copies, copies)
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = None if grad is None else grad.detach()
        return output[0]

    return closure


def _no_closure(found: str) -> str:
    return (
        f"{found}. It is a function of the parameters that returns (loss, grads): "
        f"closure=lambda params: funcga.value_and_grad(loss_fn)(params, batch)."
    )


def _pairs(grads: Any, params: Any) -> list[tuple[Any, Any]]:
    return list(zip(matched(grads, params, "grads"), matched(params, params, "params"), strict=True))
