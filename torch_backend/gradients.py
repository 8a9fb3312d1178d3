"""The transforms from a loss to its gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcga._types import GradFn, Structure, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.arrays import is_recorded
from torch_backend.modules.checks import check_unfrozen


def value_and_grad(
    loss_fn: Callable[..., tuple[torch.Tensor, Tree]], arg_indices: tuple[int, ...]
) -> GradFn:
    """A function that returns ((value, aux), grads) of one that returns (value, aux); grads has
    a tree an index.
    """

    def value_first(
        *args: Any, **kwargs: Any
    ) -> tuple[tuple[torch.Tensor, Tree], tuple[Tree, ...]]:
        for arg_index in arg_indices:
            check_unfrozen(args[arg_index], loss_fn, arg_index)
        leaves, structure = trees.flatten(tuple(args[arg_index] for arg_index in arg_indices))
        originals = [leaf for leaf in leaves if leaf is not None]
        aux_seen: list[Any] = []  # the leaves of the aux, and its structure

        # The loss as a function of its tensors alone: torch.func takes neither None nor numbers as
        # inputs, and returns nothing but tensors as aux.
        def loss_of_tensors(tensors: list[torch.Tensor]) -> Any:
            put_hooks(originals, tensors)
            instead = dict(zip(arg_indices, in_place_of(leaves, tensors, structure), strict=True))
            given = [instead.get(arg_index, arg) for arg_index, arg in enumerate(args)]
            loss, aux = loss_fn(*given, **kwargs)
            aux_seen[:] = trees.flatten(aux)
            return loss, [leaf for leaf in aux_seen[0] if arrays.is_array(leaf)]

        # torch.func differentiates without autograd's checkpoints and hooks. Inside of a loss that
        # autograd records, autograd takes this gradient too.
        recorded = is_recorded() and not torch.compiler.is_compiling()
        transform = _recorded if recorded else torch.func.grad_and_value
        try:
            grads, (loss, aux) = transform(loss_of_tensors, has_aux=True)(
                [*map(arrays.as_array, originals)]
            )
        except RuntimeError as error:
            # It raises plain RuntimeErrors, whose words tell what it does not support.
            if _private.transforms() or not any(words in str(error) for words in _UNKNOWN_TO_FUNC):
                raise
            raise FuncgaError(
                "loss_fn, or an argument, is what torch.func does not take, which a gradient "
                "function runs on where an argument requires grad, so that what it returns has a "
                "graph. Without one it runs on autograd, which takes checkpoints, saved-tensor "
                "hooks, sparse and nested tensors: call it under torch.no_grad(), or give it "
                "{name: p.detach() for name, p in params.items()}."
            ) from error
        tensors = iter(aux)
        aux_leaves = [next(tensors) if arrays.is_array(leaf) else leaf for leaf in aux_seen[0]]
        return (loss, trees.unflatten(aux_seen[1], aux_leaves)), in_place_of(
            leaves, grads, structure
        )

    return value_first


_UNKNOWN_TO_FUNC = "functorch transform", "saved tensor hooks", "doesn't have storage", "strides"


def in_place_of(leaves: list[Any], tensors: Sequence[torch.Tensor], structure: Structure) -> Tree:
    """The tree with these tensors in the place of its leaves, with None where a leaf is None."""
    remaining = iter(tensors)
    spread = [None if leaf is None else next(remaining) for leaf in leaves]
    return trees.unflatten(structure, spread)


def depends(loss: torch.Tensor) -> bool | None:
    """Whether a loss depends on the inputs of the innermost of these transforms."""
    # A transform around the innermost one hides the number, and another gradient records the loss
    # anyway.
    if _private.transforms() != 1 or is_recorded():
        return None
    return True if loss.requires_grad else False if is_constant(loss) else None


def _recorded(of: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """`torch.func.grad_and_value` by autograd, for use inside of a loss that autograd records."""

    def gradient(tensors: list[torch.Tensor]) -> Any:
        # Each input is a new node of the graph: the tensor itself may be used elsewhere in the
        # loss, outside of this gradient.
        inputs = [tensor.view_as(tensor) for tensor in tensors]
        inputs = [tensor if tensor.requires_grad else tensor.requires_grad_() for tensor in inputs]
        loss, aux = of(inputs)
        if not (loss.requires_grad and inputs):
            nothing = [torch.zeros_like(tensor, requires_grad=False) for tensor in inputs]
            return nothing, (loss, aux)
        grads = torch.autograd.grad(
            loss, inputs, create_graph=True, allow_unused=True, materialize_grads=True
        )
        return [*grads], (loss, aux)

    return gradient


def is_constant(loss: torch.Tensor) -> bool:
    """Whether a loss without a graph is a number other than 0. A batch that is masked completely
    has a loss of 0.
    """
    return abs(loss.detach().item()) > 0


def switched_off() -> FuncgaError:
    """The error for a loss that changes what its own gradient is taken with respect to."""
    return FuncgaError(
        "loss_fn calls requires_grad_() on a parameter that it is given, whose gradient is being "
        "taken. Leave what is frozen out of the parameters, as a pure_loss allows; or use "
        "p.detach() in loss_fn."
    )


# --- Hooks that a user has put on parameters. A leaf in the place of a parameter has its hooks.


def put_hooks(tensors: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Puts the gradient hooks of the tensors on their leaves, to be called in every micro-batch.

    A tensor may be its own leaf. Raises FuncgaError for one with hooks that act on its `.grad`.
    """
    for tensor, leaf in zip(tensors, leaves, strict=True):
        if _private.acts_on_grad(tensor):
            raise FuncgaError(
                f"a parameter, {arrays.describe(leaf)}, has a hook of "
                "register_post_accumulate_grad_hook, which acts on the .grad that .backward() "
                "leaves, and here gradients are returned, not left in .grad. Remove it with "
                "handle.remove(), and do to the gradients that the step returns what it does. A "
                "hook of register_hook, on the gradient itself, is called."
            )
        hooks = _private.hooks_of(tensor)
        for hook in hooks.values() if hooks and leaf is not tensor else ():
            leaf.register_hook(hook)
