"""Clipping as transforms: what torch.nn.utils does to `.grad`s in place, as pure functions of gradients.

Only torch has this file: optax has clipping of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import utils

from funcga.errors import FuncgaError
from funcga.prefixes import leaf_paths
from funcga.transforms import DonatingTransform
from torch_backend import arrays, trees


def clip_grad_norm(max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> DonatingTransform:
    """The gradients, scaled down so that their norm, as of one vector, is at most max_norm; no state, which is `()`.

    By torch.nn.utils.clip_grad_norm_ on copies, so it has the bits of that. The norm stays on the device, unless
    error_if_nonfinite: then the host waits for it, and an infinite or NaN one is torch's RuntimeError. A gradient that
    is None stays None. Raises FuncgaError for a negative max_norm and what is no gradient.

    >>> adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)
    >>> tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw)
    """
    _check_limit("max_norm", max_norm)
    clip = partial(utils.clip_grad_norm_, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)
    return _stateless(clip)


def clip_grad_value(clip_value: float) -> DonatingTransform:
    """The gradients, each number cut to be between -clip_value and clip_value; no state, which is `()`.

    By torch.nn.utils.clip_grad_value_ on copies, so it has the bits of that. A gradient that is None stays None. Raises
    FuncgaError for a negative clip_value and what is no gradient.

    >>> tx = torch_backend.chain(torch_backend.clip_grad_value(0.5), torch_backend.from_optimizer(torch.optim.SGD))
    """
    _check_limit("clip_value", clip_value)
    return _stateless(partial(utils.clip_grad_value_, clip_value=clip_value))


def _check_limit(name: str, limit: Any) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise FuncgaError(f"{name} is {limit!r}, and must be a number, at least 0: {name}=1.0.")


def _stateless(clip: Callable[[list[torch.Tensor]], Any]) -> DonatingTransform:
    """The transform that does to copies of the gradients what `clip` does to the `.grad`s of parameters."""

    def init(params: Any) -> tuple[()]:
        return ()

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return _clipped(clip, grads, owned=False), state

    def donated(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return _clipped(clip, grads, owned=True), state

    return DonatingTransform(init, update, donated)  # type: ignore[no-any-return]


@torch.no_grad()
def _clipped(clip: Callable[[list[torch.Tensor]], Any], grads: Any, owned: bool) -> Any:
    leaves, structure = trees.flatten(grads)
    for place, leaf in enumerate(leaves):
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            path = leaf_paths(grads, trees)[place]
            raise FuncgaError(f"`grads{path}` is {arrays.describe(leaf)}. Give a tensor, or None where there is none.")
    clipped = [None if leaf is None else leaf.detach() if owned else leaf.detach().clone() for leaf in leaves]
    clip([_holder(grad) for grad in clipped if grad is not None])
    return trees.unflatten(structure, clipped)


def _holder(grad: torch.Tensor) -> torch.Tensor:
    """A tensor that has this gradient, in its memory."""
    holder = grad.detach()
    holder.grad = grad
    return holder
