"""What keeps one micro-batch after another in a step that torch.compile compiles as a whole.

Only torch has this file: a loop of XLA has one iteration alive.

In one graph of all micro-batches nothing says which comes first. Inductor puts additions off, so
that the activations and the gradients of many micro-batches are alive at once. So the rows of a
micro-batch come out of an operator of our own, which is given the sums as well: before it all
earlier additions have to be done, and after it the forward pass begins. Everything in between is
left to the compiler. It adds each gradient where it is computed, in the multiplication of matrices
if it can, and frees it.
"""

from collections.abc import Sequence

import torch

from funcga._call.arguments import Arguments
from funcga._types import Tree
from torch_backend import trees


@torch.library.custom_op("funcga::after", mutates_args=())
def _after(sums: list[torch.Tensor], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    # An operator must not return what it was given.
    return [row.clone() for row in rows]


@_after.register_fake
def _(sums: list[torch.Tensor], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(row) for row in rows]


def after(
    sums: list[torch.Tensor], arguments: Arguments, args: tuple[Tree, ...]
) -> tuple[Tree, ...]:
    """The arguments of a micro-batch, which nothing can use before all that was added to the
    sums so far is there.
    """
    # A program that is exported is to run where funcga is not.
    if not sums or torch.compiler.is_exporting():
        return args
    split = [index for index, part in enumerate(arguments.parts) if part.axes]
    leaves, structure = trees.flatten([args[index] for index in split])
    rows = iter(_after(sums, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
    copied = trees.unflatten(
        structure, [next(rows) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    )
    ordered = dict(zip(split, copied, strict=True))
    return tuple([ordered.get(index, arg) for index, arg in enumerate(args)])


def added(
    sums: Sequence[torch.Tensor], more: Sequence[torch.Tensor], factor: float
) -> list[torch.Tensor]:
    """`sum + factor * value` for each of these."""
    # Not torch._foreach_add: inductor makes one kernel of that, for which all values have to be
    # there. Nor with `alpha`: it makes an addmm of a product of matrices that is added, and torch
    # 2.13 forgets it there.
    return [
        accumulator + (value if factor == 1 else value * factor)
        for accumulator, value in zip(sums, more, strict=True)
    ]
