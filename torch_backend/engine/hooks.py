"""Hooks that a user has put on parameters: what is differentiated is not the parameter itself, and takes them over.

Only torch has this file: in JAX arrays have no hooks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funcga.errors import FuncgaError
from torch_backend import _private


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
