"""The way of tensors to JAX and back: the same memory, handed over by DLPack.

Only torch has this file, for its `bridge`.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import dlpack

from funcga.errors import FuncgaError
from funcga.prefixes import leaf_paths
from torch_backend import arrays, trees
from torch_backend.placements import is_placed


class Crossing:
    """`crossing(function)`: what a function of JAX arrays returns for a dict of trees of tensors, in tensors.

    The trees keep their containers, which both frameworks must know; what is no tensor stays as it is. JAX has 64 bits
    during the call if a tensor has. Nothing that comes back is in the memory of what was given, or there twice.
    Raises FuncgaError for tensors that JAX cannot have.
    """

    def __init__(self, given: dict[str, Any]):
        leaves, self.structure = trees.flatten(given)
        self.leaves = [_ready(leaf, given, place) for place, leaf in enumerate(leaves)]
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def __call__(self, function: Callable[[Any], Any]) -> Any:
        """What the function returns."""
        import jax

        wide = any(tensor.dtype in _WIDE for tensor in self.tensors)
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            over = [_to_jax(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
            leaves, structure = jax.tree.flatten(function(trees.unflatten(self.structure, over)))
            if any(tensor.device.type == "cpu" for tensor in self.tensors):
                jax.block_until_ready(leaves)  # type: ignore[no-untyped-call]  # the caller may write to the tensors; a device keeps the order itself
            back = [dlpack.from_dlpack(leaf) for leaf in leaves]
        return jax.tree.unflatten(structure, self._apart(back))

    def _apart(self, back: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, cloned if their memory is another's: JAX returns an argument as it is."""
        taken = {tensor.data_ptr() for tensor in self.tensors}
        for place, tensor in enumerate(back):
            if tensor.data_ptr() in taken:
                back[place] = tensor.clone()
            taken.add(back[place].data_ptr())
        return back


_WIDE = (torch.float64, torch.int64, torch.uint64, torch.complex128)


def _ready(leaf: Any, given: Any, place: int) -> Any:
    """The leaf as JAX can have it: without a graph, and contiguous."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if is_placed(leaf) or leaf.layout is not torch.strided:
        path = leaf_paths(given, trees)[place].removeprefix("['").replace("']", "", 1)
        kind = "a DTensor" if is_placed(leaf) else "a sparse tensor"
        raise FuncgaError(
            f"`{path}` is {kind} {arrays.describe(leaf)}, which JAX cannot have in the memory where it lies. Use an "
            f"optimizer of torch for it: torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)."
        )
    return leaf.detach().resolve_conj().resolve_neg().contiguous()


def _to_jax(tensor: torch.Tensor) -> Any:
    import jax

    try:
        return jax.dlpack.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise FuncgaError(
            f"JAX cannot take a tensor of {tensor.dtype} on {tensor.device}: {error}. "
            f"It must be installed for that device, too; jax.devices() says what it has."
        ) from error
