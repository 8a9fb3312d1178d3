"""Clipping as transforms: what torch.nn.utils does to `.grad`s in place, as pure functions of gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import utils

from funcga._backend.prefixes import leaf_paths
from funcga._transform import DonatingTransform
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.arrays import without_overlap
from torch_backend.modules.checks import check_not_differentiated

Clip = Callable[[list[torch.Tensor]], object]
"""A function of torch.nn.utils, which writes to the `.grad`s of parameters."""


def clip_grad_norm(max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> DonatingTransform:
    """Makes a transform that scales gradients down, so that their norm, as of one vector, is at most max_norm.

    The bits are those of `torch.nn.utils.clip_grad_norm_`, which runs on copies. The norm stays on the device, unless
    error_if_nonfinite. A gradient that is None stays None. There is no state: it is `()`.

    Args:
        max_norm: The norm that gradients have at most.
        norm_type: The order of the norm, a number or "inf".
        error_if_nonfinite: Whether the host waits for the norm, and torch's RuntimeError says that it is infinite or
            NaN.

    Returns:
        The transform.

    Raises:
        FuncgaError: max_norm is negative, or norm_type is not a number. The functions raise it for anything that is
            not a gradient, and for a sparse one, which torch does not clip either.

    Example:
        >>> tx = torch_backend.clip_grad_norm(1.0)
        >>> updates, state = tx.update({"w": torch.tensor([30.0, 40.0])}, tx.init({"w": torch.ones(2)}))
        >>> updates
        {'w': tensor([0.6000, 0.8000])}
    """
    _check_limit("max_norm", max_norm)
    _check_norm(norm_type)
    clip = partial(utils.clip_grad_norm_, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)
    return _stateless(clip)


def clip_grad_value(clip_value: float) -> DonatingTransform:
    """Makes a transform that cuts each number of the gradients to be between -clip_value and clip_value.

    The bits are those of `torch.nn.utils.clip_grad_value_`, which runs on copies. A gradient that is None stays None.
    There is no state: it is `()`.

    Args:
        clip_value: The largest magnitude of a number.

    Returns:
        The transform.

    Raises:
        FuncgaError: clip_value is negative. The functions raise it for what is no gradient, or a sparse one, which
            torch does not clip either.

    Example:
        >>> tx = torch_backend.clip_grad_value(0.5)
        >>> updates, state = tx.update({"w": torch.tensor([0.1, -3.0])}, tx.init({"w": torch.ones(2)}))
        >>> updates
        {'w': tensor([ 0.1000, -0.5000])}
    """
    _check_limit("clip_value", clip_value)
    return _stateless(partial(utils.clip_grad_value_, clip_value=clip_value))


def _check_limit(name: str, limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise FuncgaError(f"{name} is {limit!r}, and must be a number, at least 0: {name}=1.0.")


def _check_norm(norm_type: object) -> None:
    # "inf" is a number to float() and to torch; NaN is none, as it is not equal to itself.
    try:
        is_number = not isinstance(norm_type, bool) and float(norm_type) == float(norm_type)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise FuncgaError(f'norm_type is {norm_type!r}, and must be a number, or "inf": norm_type=2.0.')


def _stateless(clip: Clip) -> DonatingTransform:
    functions = _Functions(clip)
    return DonatingTransform(functions.init, functions.update, functions.donated)


@dataclass(frozen=True)
class _Functions:
    """The transform that does to copies of the gradients what `clip` does to the `.grad`s of parameters."""

    clip: Clip

    def init(self, params: Tree) -> tuple[()]:
        """No state."""
        return ()

    def update(self, grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        """The gradients clipped, and the state as it is."""
        return self._clipped(grads, owned=False), state

    def donated(self, grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        """The same in the memory of the gradients."""
        return self._clipped(grads, owned=True), state

    def _clipped(self, grads: Tree, owned: bool) -> Tree:
        check_not_differentiated("clipping", grads)  # before graphs are switched off, which would hide a loss around it
        with torch.no_grad():
            return self._clipped_in_place(grads, owned)

    def _clipped_in_place(self, grads: Tree, owned: bool) -> Tree:
        leaves, structure = trees.flatten(grads)
        for index, leaf in enumerate(leaves):
            _check_gradient(leaf, index, grads)
        plain = [None if leaf is None else leaf.detach() for leaf in leaves]
        clipped = without_overlap(plain) if owned else [None if grad is None else grad.clone() for grad in plain]
        # torch clips the `.grad`s of parameters in place, so each copy is the `.grad` of a tensor made for it.
        self.clip([_holder(grad) for grad in clipped if grad is not None])
        return trees.unflatten(structure, clipped)


def _check_gradient(leaf: object, leaf_index: int, grads: Tree) -> None:
    if leaf is None or (isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided):
        return
    path = leaf_paths(grads, trees)[leaf_index]
    if not isinstance(leaf, torch.Tensor):
        raise FuncgaError(f"`grads{path}` is {arrays.describe(leaf)}. Give a tensor, or None where there is none.")
    raise FuncgaError(
        f"`grads{path}` is a sparse tensor {arrays.describe(leaf)}, which torch does not clip. Give a dense one: "
        f"grad.to_dense(), or nn.Embedding(..., sparse=False)."
    )


def _holder(grad: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of a gradient, which has that gradient."""
    holder = grad.detach()
    holder.grad = grad
    return holder
