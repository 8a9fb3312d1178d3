"""No parameter is written to in a window, and no sum but by the window's own backward passes."""

from typing import Any

from torch import nn

from funcga.errors import FuncgaError
from torch_backend import _private


def check_parameters(window: Any) -> None:
    """Raises FuncgaError if a parameter was written to since a Window has begun."""
    own, written_to = window.own, set[int]()
    for leaf, version in zip(window.inputs, window.versions, strict=True):
        if _private.version(leaf) != version:
            written_to.add(id(leaf))
    if written_to and own is not None:
        for layer in own.module.modules():  # which may shorten rows themselves
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
                written_to.discard(id(layer.weight))
    if written_to:
        raise FuncgaError(
            "a parameter was changed in place during the window, by loss_fn or by another thread: "
            "the gradients of its micro-batches were taken at different parameter values. Write to "
            "a copy, `p = p + ...`, and update the parameters when the window is done."
        )


def check_module(window: Any) -> None:
    """Raises FuncgaError if a module is not the one that a Window has begun with."""
    own, visits = window.own, window.visits
    is_same = own is None or own.walk.trainable(own.module)[1] is own.params
    if visits is not None:
        is_same = visits.parts.are_same()
    if not is_same:
        raise FuncgaError(
            "the module got other layers or parameters during the window, or some were frozen: the "
            "gradients of its micro-batches are not those of one model. Change the module between "
            "two calls of the step; where another thread uses it, give each thread a module of its "
            "own: copy.deepcopy(module)."
        )


def other_hooks() -> FuncgaError:
    """The error for hooks that come, or go, in the middle of a window."""
    return FuncgaError(
        "a parameter got a hook of register_hook during the window, or lost one, which saw only a "
        "part of its micro-batches. Put hooks on parameters between two calls of the step."
    )


def grads_changed() -> FuncgaError:
    """The error for a loss that has written to the `.grad`s of its own parameters, or replaced
    one.
    """
    return FuncgaError(
        "loss_fn called .backward(), or cleared or replaced the .grad of a parameter, with "
        "zero_grad() for instance, where the gradients of the window are accumulated. Return the "
        "loss and leave that to funcga; for a gradient inside of the loss use torch.autograd.grad "
        "or torch.func.grad."
    )
