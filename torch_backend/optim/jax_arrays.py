"""The way of tensors to a function of JAX arrays and back: in the same memory, handed over and taken again.

Only torch has this file, for its `bridge`.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from funcga._backend.dispatch import load
from funcga._backend.prefixes import leaf_paths
from funcga._backend.protocols import Handed, UnfitError
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend import dlpack as handover
from torch_backend.dtensor import is_placed


class Crossing:
    """`crossing(function)`: what a function of JAX arrays returns for a dict of trees of tensors, in tensors.

    The trees keep their containers, which both frameworks must know; what is no tensor stays as it is. JAX has 64 bits
    during the call if a tensor has. Nothing that comes back is in the memory of what was given, or there twice.
    Raises FuncgaError for tensors that JAX cannot have.
    """

    def __init__(self, given: dict[str, Any]):
        leaves, self.structure = trees.flatten(given)
        self.leaves = [_ready(leaf, given, place) for place, leaf in enumerate(leaves)]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[place] for place in self.places]

    def __call__(self, function: Callable[[Any], Any]) -> Any:
        """What the function returns."""
        import jax

        wide = any(tensor.dtype in _WIDE for tensor in self.tensors)
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            leaves, structure = jax.tree.flatten(function(self._over()))
            if any(tensor.device.type == "cpu" for tensor in self.tensors):
                jax.block_until_ready(leaves)  # type: ignore[no-untyped-call]  # the caller may write to the tensors; a device keeps the order itself
            back = handover.taken(list(map(Handed, leaves)), None, copy=False)
        return jax.tree.unflatten(structure, self._apart([handed.array for handed in back]))

    def _over(self) -> Any:
        """What was given, in JAX."""
        over = [*self.leaves]
        taken = load("jax").handover.taken([over[place] for place in self.places], None, copy=False)
        for place, handed in zip(self.places, taken, strict=True):
            over[place] = handed.array
        return trees.unflatten(self.structure, over)

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
    """A tensor as JAX can have it, without a graph; every other leaf as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if is_placed(leaf) or leaf.layout is not torch.strided:
        kind = "a DTensor" if is_placed(leaf) else "a sparse tensor"
        raise FuncgaError(
            f"`{_path(given, place)}` is {kind} {arrays.describe(leaf)}, which JAX cannot have in the memory where it "
            f"lies. Use an optimizer of torch for it: torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)."
        )
    try:
        handed = handover.lent(leaf, {"cpu", *load("jax").handover.platforms()})  # where it lies, in any case
    except UnfitError as unfit:
        raise FuncgaError(f"`{_path(given, place)}` is {unfit}.") from unfit
    if not isinstance(handed.array, torch.Tensor):
        raise FuncgaError(
            f"`{_path(given, place)}` lies on {leaf.device}, a device that JAX does not have. It must be installed for "
            f"it, too; jax.devices() says what it has."
        )
    return handed


def _path(given: Any, place: int) -> str:
    return leaf_paths(given, trees)[place].removeprefix("['").replace("']", "", 1)
