"""A gradient function in place of gradients: which there are, and what is the gradient in what they return."""

from typing import Any

from funcga._backend.prefixes import PathError
from funcga._call import owner_of
from funcga._fold import largest
from funcga._fold.accumulator import Accumulation
from funcga._grad import GradientFunction
from funcga._types import GradFn, Tree
from funcga.errors import FuncgaError, check_callable


def check_gradient(gradient: GradFn) -> None:
    """Raises FuncgaError unless this is a gradient function whose first argument is the params."""
    check_callable(gradient, "gradient", "funcga.value_and_grad(loss_fn)")
    if not isinstance(gradient, GradientFunction) and owner_of(gradient) is not None:
        raise FuncgaError(
            "gradient is that of a module's own parameters, and accumulate_from gives a gradient function the params. "
            "Write gradient = funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)); or call it yourself: "
            "loss, grads = gradient(*batch); state = tx.accumulate(grads, state)."
        )


def value_and_grads(gradient: GradFn, output: Tree, window: Accumulation) -> tuple[Tree, Tree]:
    """(value, gradients) of what a gradient function returned; the value is None if there are gradients alone.

    Of other libraries' functions the gradients are what has the structure of the params: all of the output, or either
    part of a pair. Raises FuncgaError if both parts have it.
    """
    if isinstance(gradient, GradientFunction):
        if gradient.with_value:
            value, grads = output
        else:
            grads, value = output if gradient.has_aux else (output, None)
        return value, grads
    if not (type(output) is tuple and len(output) == 2) or _fits(output, window):
        return None, output
    first, second = output
    if not _fits(first, window):
        return first, second
    if _fits(second, window):
        raise FuncgaError(
            "the gradient function returned a pair, and both parts of it have the structure and the shapes of the "
            "params: either may be the gradient. Take funcga.value_and_grad(loss_fn), which says which is which."
        )
    return second, first


def _fits(tree: Tree, window: Accumulation) -> bool:
    """Whether a tree has the structure and the shapes of the gradients that a window is made for."""
    try:
        leaves = window.outputs.in_order(tree, "grads")
    except PathError:
        return False
    return all(map(_is_like, leaves, window.accumulators))


def _is_like(leaf: Any, accumulator: Any) -> bool:
    if leaf is None or accumulator is None:
        return leaf is accumulator
    return bool(getattr(leaf, "shape", ()) == largest(accumulator).shape)
