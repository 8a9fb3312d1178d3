"""The transforms from a loss to its gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga.errors import FuncgaError
from torch_backend import _private, arrays, trees
from torch_backend.engine.recording import is_constant, is_recorded, switched_off
from torch_backend.modules.checks import check_unfrozen


def value_and_grad(
    loss_fn: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that returns (value, grads), or ((value, aux), grads)."""

    def value_first(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        places = tuple(i % len(args) for i in (argnums if isinstance(argnums, tuple) else (argnums,)))
        for i in places:
            check_unfrozen(trees.flatten(args[i])[0], args[i], loss_fn, i)
        leaves, structure = trees.flatten(tuple(args[i] for i in places))
        present = [leaf is not None for leaf in leaves]

        paths = lambda: _paths(loss_fn, args, places)

        # over the tensors alone: torch.func takes neither None nor numbers among what it differentiates
        def of(tensors: list[torch.Tensor]) -> Any:
            put_hooks(originals, tensors, paths)
            found = dict(zip(places, trees.unflatten(structure, _spread(tensors, present)), strict=True))
            output = loss_fn(*(found.get(i, arg) for i, arg in enumerate(args)), **kwargs)
            loss, aux = output if has_aux else (output, ())
            rest, aux_structure = trees.flatten(aux)
            others.append((aux_structure, [None if arrays.is_array(leaf) else (leaf,) for leaf in rest]))
            return loss, [leaf for leaf in rest if arrays.is_array(leaf)]

        others: list[Any] = []  # what is no tensor in aux, which torch.func does not pass on either
        originals = [leaf for leaf in leaves if leaf is not None]
        recorded = is_recorded() and not torch.compiler.is_compiling()
        transform = _recorded if recorded else torch.func.grad_and_value
        try:
            grads, (loss, aux) = transform(of, has_aux=True)([*map(arrays.as_array, originals)])
        except RuntimeError as error:
            _explain(error, (args, kwargs))
            raise
        grads = trees.unflatten(structure, _spread(grads, present))
        if has_aux:
            aux_structure, fixed = others[0]
            rest = iter(aux)
            loss = loss, trees.unflatten(aux_structure, [next(rest) if kept is None else kept[0] for kept in fixed])
        return loss, grads if isinstance(argnums, tuple) else grads[0]

    return value_first


# What its own errors say, of which there is no type.
_UNKNOWN_TO_FUNC = "functorch transform", "saved tensor hooks", "doesn't have storage"


def _explain(error: RuntimeError, arguments: Any) -> None:
    """Raises FuncgaError where torch says in words of its own what it does not take."""
    if not _private.transforms() and any(words in str(error) for words in _UNKNOWN_TO_FUNC):
        raise FuncgaError(
            "loss_fn does what torch.func does not take, and a gradient function that is called by itself runs on it. "
            "Checkpoints, saved-tensor hooks and the like need autograd: call a step of one micro-batch, "
            "funcga.accumulate(funcga.value_and_grad(loss_fn), n=1), which returns the same."
        ) from error
    if "requires_grad_()" in str(error) or "requires_grad flags" in str(error):
        raise switched_off() from error
    tensors = [leaf for leaf in trees.flatten(arguments)[0] if isinstance(leaf, torch.Tensor)]
    if "strides" in str(error) and any(t.is_nested or t.layout is not torch.strided for t in tensors):
        raise FuncgaError(
            "an argument is a compressed sparse or a nested tensor, which torch.func does not take. Give it dense, as "
            "x.to_sparse_coo(), or with layout=torch.jagged. As a micro-batch funcga.stream(grad_fn, weight=...) takes "
            "it as it is."
        ) from error


def depends(loss: torch.Tensor) -> bool | None:
    """Whether a loss depends on what the innermost transform, one of these, differentiates it by."""
    if _private.transforms() != 1 or is_recorded():  # others, around it, hide the number
        return None
    return True if loss.requires_grad else False if is_constant(loss) else None


def _recorded(of: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """torch.func.grad_and_value by autograd, inside of a loss that it records: checkpoints and hooks work there."""

    def gradient(tensors: list[torch.Tensor]) -> Any:
        # each in its own name, as it may be a part of the graph in other places too
        inputs = [tensor.view_as(tensor) for tensor in tensors]
        inputs = [tensor if tensor.requires_grad else tensor.requires_grad_() for tensor in inputs]
        loss, aux = of(inputs)
        if not (loss.requires_grad and inputs):
            return [torch.zeros_like(tensor, requires_grad=False) for tensor in inputs], (loss, aux)
        try:
            grads = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise FuncgaError(
                "a step inside of a loss has a checkpoint with use_reentrant=True, through which no second derivative "
                "can be taken. Call checkpoint(..., use_reentrant=False)."
            ) from error
        return list(grads), (loss, aux)

    return gradient


def _paths(loss_fn: Callable[..., Any], args: tuple[Any, ...], places: tuple[int, ...]) -> list[str]:
    """The paths of the tensors that are differentiated."""
    names = argument_names(loss_fn, len(args))
    found = [
        (path, leaf)
        for i in places
        for path, leaf in zip(leaf_paths(args[i], trees, names[i]), trees.flatten(args[i])[0], strict=True)
    ]
    return [path for path, leaf in found if leaf is not None]


def _spread(tensors: list[torch.Tensor], present: list[bool]) -> list[torch.Tensor | None]:
    rest = iter(tensors)
    return [next(rest) if there else None for there in present]


def check_params(params: Any) -> None:
    """Raises FuncgaError if some of what is to be differentiated is state, and not trained."""
    # tensors are parameters if they are given as such


# --- Hooks that a user has put on parameters: what is differentiated is not the parameter itself, and takes them over.


def are_plain(leaves: Sequence[Any]) -> bool:
    """Whether these are tensors without hooks, marks or anything else of which a leaf made of them has to know.

    That is a glance at all of them. Where it is False each is looked at.
    """
    if not {*map(type, leaves)} <= {torch.Tensor, torch.nn.Parameter}:
        return False
    return not any(
        _private.hooks_at_a_glance(leaf) != _NO_HOOKS
        or leaf.__dict__  # as of what stands in for a parameter in a module
        or not (leaf.requires_grad or type(leaf) is torch.Tensor)  # a frozen parameter
        for leaf in leaves
    )


_NO_HOOKS = (None, None)


def put_hooks(tensors: Sequence[Any], leaves: Sequence[Any], paths: Callable[[], list[str]]) -> bool:
    """Whether a tensor has hooks for its gradient; they are then its leaf's too, called in every micro-batch.

    Raises FuncgaError, with its path, for a tensor with hooks that act on its `.grad`.
    """
    if any(map(_private.acts_on_grad, tensors)):
        raise _acts_on_grad(tensors, paths())
    found = [*map(_private.hooks_of, tensors)]
    if not any(found):
        return False
    for leaf, hooks in zip(leaves, found, strict=True):
        for hook in [] if hooks is None else hooks.values():
            leaf.register_hook(hook)
    return True


def _acts_on_grad(tensors: Sequence[Any], paths: list[str]) -> FuncgaError:
    path = next(path for path, tensor in zip(paths, tensors, strict=True) if _private.acts_on_grad(tensor))
    return FuncgaError(
        f"`{path}` has a hook of register_post_accumulate_grad_hook, which acts on the .grad that .backward() leaves, "
        f"and here gradients are returned, not left in .grad. Remove it with handle.remove(), and do to the gradients "
        f"that the step returns what it does. A hook of register_hook, on the gradient itself, is called."
    )


def check_hooks_known(given: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Raises FuncgaError if a module's parameter has hooks that what is differentiated in its place has not.

    A transform of torch.func differentiates tensors of its own, and calls no hook of those that they were made of.
    """
    for name, tensor in given.items():
        # what is computed from a parameter, as in meta-learning, has a gradient function, and is no parameter
        differentiated = tensor.requires_grad and tensor.is_leaf
        if differentiated and _private.hooks_of(held[name]) and not _private.hooks_of(tensor):
            raise FuncgaError(
                f"`{name}` has a hook of register_hook, which a transform of torch.func does not call. Take the "
                f"gradient with funcga.grad or funcga.value_and_grad, which do; or remove it with handle.remove()."
            )
