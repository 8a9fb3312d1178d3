"""An addition that a compiler leaves where it is: one micro-batch after another, in a step that is compiled as a whole.

Only torch has this file: a loop of XLA has one iteration alive.

In one graph of all micro-batches, additions are ordinary operations. Inductor fuses them and puts them off, so that the
activations and the gradients of many micro-batches are alive at once. An operator of our own is opaque to it, and what
it writes to is read by the next one: so the gradients of a micro-batch are added, and freed, before those of the next
are.
"""

import torch


@torch.library.custom_op("funcga::add_", mutates_args=("sums",))
def _add(sums: list[torch.Tensor], more: list[torch.Tensor], factor: float) -> None:
    # Sums of integers take no factor that is a float.
    torch._foreach_add_(sums, more, alpha=int(factor) if factor.is_integer() else factor)


@_add.register_fake
def _(sums: list[torch.Tensor], more: list[torch.Tensor], factor: float) -> None:
    pass


def add(sums: list[torch.Tensor], more: list[torch.Tensor], factor: float) -> None:
    """`torch._foreach_add_(sums, more, alpha=factor)`, as an operator that torch.compile does not look into.

    A program that is exported is to run where funcga is not, so it has the addition itself.
    """
    if torch.compiler.is_exporting():
        torch._foreach_add_(sums, more, alpha=factor)
    else:
        _add(sums, more, factor)
