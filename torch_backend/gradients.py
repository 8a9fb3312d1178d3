"""The transforms from a loss to its gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._types import GradFn, Tree
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.arrays import is_recorded
from torch_backend.modules.checks import check_unfrozen

as_function_of_params = (
    "torch_backend.pure_loss(module, lambda module, x, y: F.mse_loss(module(x), y))"
)


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
            check_unfrozen(trees.flatten(args[arg_index])[0], args[arg_index], loss_fn, arg_index)
        leaves, structure = trees.flatten(tuple(args[arg_index] for arg_index in arg_indices))
        is_present = [leaf is not None for leaf in leaves]

        paths = lambda: _paths(loss_fn, args, arg_indices)

        # The loss as a function of its tensors alone: torch.func takes neither None nor numbers as
        # inputs, and returns nothing but tensors as aux. Everything else passes it by, in
        # `is_present` and `aux_skeletons`.
        def loss_of_tensors(tensors: list[torch.Tensor]) -> Any:
            put_hooks(originals, tensors, paths)
            replaced = dict(
                zip(
                    arg_indices,
                    trees.unflatten(structure, _spread(tensors, is_present)),
                    strict=True,
                )
            )
            loss, aux = loss_fn(
                *(replaced.get(arg_index, arg) for arg_index, arg in enumerate(args)), **kwargs
            )
            aux_leaves, aux_structure = trees.flatten(aux)
            aux_skeletons.append(
                (aux_structure, [None if arrays.is_array(leaf) else (leaf,) for leaf in aux_leaves])
            )
            return loss, [leaf for leaf in aux_leaves if arrays.is_array(leaf)]

        aux_skeletons: list[Any] = []
        originals = [leaf for leaf in leaves if leaf is not None]
        # torch.func differentiates without autograd's checkpoints and hooks. Inside of a loss that
        # autograd records, autograd takes this gradient too.
        recorded = is_recorded() and not torch.compiler.is_compiling()
        transform = _recorded if recorded else torch.func.grad_and_value
        try:
            grads, (loss, aux) = transform(loss_of_tensors, has_aux=True)(
                [*map(arrays.as_array, originals)]
            )
        except RuntimeError as error:
            _explain(error, (args, kwargs))
            raise
        aux_structure, objects = aux_skeletons[0]
        tensors = iter(aux)
        aux_leaves = [next(tensors) if wrapped is None else wrapped[0] for wrapped in objects]
        grads = trees.unflatten(structure, _spread(grads, is_present))
        return (loss, trees.unflatten(aux_structure, aux_leaves)), grads

    return value_first


# torch.func raises plain RuntimeErrors. These words tell which of them mean that it does not
# support something.
_UNKNOWN_TO_FUNC = "functorch transform", "saved tensor hooks", "doesn't have storage"


def _explain(error: RuntimeError, arguments: Any) -> None:
    """Raises FuncgaError for errors of torch that say what it does not support; returns for all
    others.
    """
    if not _private.transforms() and any(words in str(error) for words in _UNKNOWN_TO_FUNC):
        raise needs_autograd() from error
    if "requires_grad_()" in str(error) or "requires_grad flags" in str(error):
        raise switched_off() from error
    tensors = [leaf for leaf in trees.flatten(arguments)[0] if isinstance(leaf, torch.Tensor)]
    if "strides" in str(error) and any(
        t.is_nested or t.layout is not torch.strided for t in tensors
    ):
        raise FuncgaError(
            "an argument is a compressed sparse or a nested tensor, which torch.func does not "
            "take. Give it dense, as x.to_sparse_coo(), or with layout=torch.jagged. As a "
            "micro-batch funcga.stream(grad_fn, weight=...) takes it as it is."
        ) from error


def needs_autograd() -> FuncgaError:
    """The error for a loss that autograd takes and torch.func does not."""
    return FuncgaError(
        "loss_fn does what torch.func does not take, which a gradient function runs on where an "
        "argument requires grad, so that what it returns has a graph. Without one it runs on "
        "autograd, which takes checkpoints, saved-tensor hooks and the like: call it under "
        "torch.no_grad(), or give it {name: p.detach() for name, p in params.items()}."
    )


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
        return recorded_gradients(loss, inputs), (loss, aux)

    return gradient


def recorded_gradients(loss: torch.Tensor, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a loss, with graphs, so that they can be differentiated."""
    if not (loss.requires_grad and inputs):
        return [torch.zeros_like(tensor, requires_grad=False) for tensor in inputs]
    try:
        return [
            *torch.autograd.grad(
                loss, inputs, create_graph=True, allow_unused=True, materialize_grads=True
            )
        ]
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise FuncgaError(
            "a step inside of a loss has a checkpoint with use_reentrant=True, through which no "
            "second derivative can be taken. Call checkpoint(..., use_reentrant=False)."
        ) from error


def _paths(
    loss_fn: Callable[..., Any], args: tuple[Any, ...], indices: tuple[int, ...]
) -> list[str]:
    """The paths of the tensors that are differentiated, in the arguments of these indices."""
    names = argument_names(loss_fn, len(args))
    paths = []
    for arg_index in indices:
        leaves = trees.flatten(args[arg_index])[0]
        paths_of_arg = leaf_paths(args[arg_index], trees, names[arg_index])
        paths += [path for path, leaf in zip(paths_of_arg, leaves, strict=True) if leaf is not None]
    return paths


def _spread(tensors: list[torch.Tensor], is_present: list[bool]) -> list[torch.Tensor | None]:
    """The tensors in order, with None where a leaf is not present."""
    remaining = iter(tensors)
    return [next(remaining) if present else None for present in is_present]


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


def put_hooks(
    tensors: Sequence[Any], leaves: Sequence[Any], paths: Callable[[], list[str]]
) -> bool:
    """Puts the gradient hooks of the tensors on their leaves, to be called in every micro-batch;
    whether there are any.

    A tensor may be its own leaf. Raises FuncgaError, with its path, for one with hooks that act on
    its `.grad`.
    """
    acts = [*map(_private.acts_on_grad, tensors)]
    if any(acts):
        raise FuncgaError(
            f"`{paths()[acts.index(True)]}` has a hook of register_post_accumulate_grad_hook, "
            "which acts on the .grad that .backward() leaves, and here gradients are returned, not "
            "left in .grad. Remove it with handle.remove(), and do to the gradients that the step "
            "returns what it does. A hook of register_hook, on the gradient itself, is called."
        )
    hooks_of_tensors = [*map(_private.hooks_of, tensors)]
    if not any(hooks_of_tensors):
        return False
    for tensor, leaf, hooks in zip(tensors, leaves, hooks_of_tensors, strict=True):
        for hook in [] if hooks is None or leaf is tensor else hooks.values():
            leaf.register_hook(hook)
    return True
