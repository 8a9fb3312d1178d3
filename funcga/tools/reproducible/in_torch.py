"""What can be read of tensors for exact sums."""

import torch

from funcga.errors import FuncgaError
from funcga.tools.reproducible.exact import no_derivative
from torch_backend.arrays import describe
from torch_backend.dtensor import is_dtensor


def readable(array: torch.Tensor) -> torch.Tensor:
    """The array, for a fold that reads its bits; FuncgaError if they are not available."""
    if array.requires_grad:
        raise no_derivative()
    if is_dtensor(array):
        raise FuncgaError(
            f"reproducible() was given the DTensor {describe(array)}, whose gradients a mesh has "
            "added up in floats already, in an order of its own. Fold DTensors with "
            "funcga.mean(), funcga.per_weight() or funcga.sum()."
        )
    return array
