"""Clipping as transforms: what torch.nn.utils does to `.grad`s in place, as pure functions of gradients.

Only torch has this file: optax has clipping of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import utils

from funcga._backend.prefixes import leaf_paths
from funcga._transform.transform import DonatingTransform
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.modules.checks import check_not_differentiated
from torch_backend.strides import apart


def clip_grad_norm(max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> DonatingTransform:
    """The gradients, scaled down so that their norm, as of one vector, is at most max_norm; no state, which is `()`.

    By torch.nn.utils.clip_grad_norm_ on copies, so it has the bits of that. The norm stays on the device, unless
    error_if_nonfinite: then the host waits for it, and an infinite or NaN one is torch's RuntimeError. A gradient that
    is None stays None. Raises FuncgaError for a negative max_norm, a norm_type that is no number (or its name: "inf"),
    and what is no gradient, or a sparse one, which torch clips neither.

    >>> adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)
    >>> tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw)
    """
    _check_limit("max_norm", max_norm)
    _check_norm(norm_type)
    clip = partial(utils.clip_grad_norm_, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)
    return _stateless(clip)


def clip_grad_value(clip_value: float) -> DonatingTransform:
    """The gradients, each number cut to be between -clip_value and clip_value; no state, which is `()`.

    By torch.nn.utils.clip_grad_value_ on copies, so it has the bits of that. A gradient that is None stays None. Raises
    FuncgaError for a negative clip_value, and what is no gradient, or a sparse one, which torch does not clip either.

    >>> tx = torch_backend.chain(torch_backend.clip_grad_value(0.5), torch_backend.from_optimizer(torch.optim.SGD))
    """
    _check_limit("clip_value", clip_value)
    return _stateless(partial(utils.clip_grad_value_, clip_value=clip_value))


def _check_limit(name: str, limit: Any) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise FuncgaError(f"{name} is {limit!r}, and must be a number, at least 0: {name}=1.0.")


def _check_norm(norm_type: Any) -> None:
    try:
        known = not isinstance(norm_type, bool) and float(norm_type) == float(norm_type)
    except (TypeError, ValueError):
        known = False
    if not known:
        raise FuncgaError(f'norm_type is {norm_type!r}, and must be a number, or "inf": norm_type=2.0.')


def _stateless(clip: Callable[[list[torch.Tensor]], Any]) -> DonatingTransform:
    functions = _Functions(clip)
    return DonatingTransform(functions.init, functions.update, functions.donated)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Functions:
    """The transform that does to copies of the gradients what `clip` does to the `.grad`s of parameters."""

    clip: Callable[[list[torch.Tensor]], Any]

    def init(self, params: Any) -> tuple[()]:
        """No state."""
        return ()

    def update(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """The gradients clipped, and the state as it is."""
        check_not_differentiated("clipping", grads)
        return _clipped(self.clip, grads, owned=False), state

    def donated(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """The same in the memory of the gradients."""
        check_not_differentiated("clipping", grads)
        return _clipped(self.clip, grads, owned=True), state


def _check_gradient(leaf: Any, place: int, grads: Any) -> None:
    if not isinstance(leaf, torch.Tensor):
        path = leaf_paths(grads, trees)[place]
        raise FuncgaError(f"`grads{path}` is {arrays.describe(leaf)}. Give a tensor, or None where there is none.")
    if leaf.layout is not torch.strided:
        raise FuncgaError(
            f"`grads{leaf_paths(grads, trees)[place]}` is a sparse tensor {arrays.describe(leaf)}, which torch does "
            f"not clip. Give a dense one: grad.to_dense(), or nn.Embedding(..., sparse=False)."
        )


@torch.no_grad()
def _clipped(clip: Callable[[list[torch.Tensor]], Any], grads: Any, owned: bool) -> Any:
    leaves, structure = trees.flatten(grads)
    for place, leaf in enumerate(leaves):
        if leaf is not None:
            _check_gradient(leaf, place, grads)
    plain = [None if leaf is None else leaf.detach() for leaf in leaves]
    clipped = apart(plain) if owned else [None if grad is None else grad.clone() for grad in plain]
    clip([_holder(grad) for grad in clipped if grad is not None])
    return trees.unflatten(structure, clipped)


def _holder(grad: torch.Tensor) -> torch.Tensor:
    """A tensor that has this gradient, in its memory."""
    holder = grad.detach()
    holder.grad = grad
    return holder
