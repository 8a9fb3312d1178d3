"""Sums that leave micro-batches out, by a test of their values.

Only torch has this file: in JAX a loop selects what it carries.

Autograd adds gradients where it computes them, and cannot take them back. So a step that drops
calls its gradient function for each micro-batch alone, looks at the value, and adds all of it or
nothing. One micro-batch's gradients are held at a time. Where only a device knows the answer,
nothing waits for it: what is added is selected.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from funcga._call import Program
from funcga._call.dropping import DroppingStep
from funcga._types import Scalar, Tree
from torch_backend import arrays, trees
from torch_backend.dtensor import local
from torch_backend.former.buffers import Buffers
from torch_backend.former.layout import Layout
from torch_backend.modules.checks import check_initialised

NAN = float("nan")


class DroppingBuffers(Buffers):
    """Buffers that a micro-batch is added to if it passes a test; `rejected` counts those that
    do not.
    """

    def __init__(self, dropping: DroppingStep, layout: Layout):
        super().__init__(layout)
        self.dropping, self.tested = dropping, dropping.tested(layout.outputs)
        self.kept: bool | torch.Tensor = True  # whether the last micro-batch was
        self.state_before: list[Any] = []  # what is threaded, before the first one

    def add(self, leaves: Sequence[Any], weight: Scalar) -> list[Any]:
        """Folds the leaves of one micro-batch in, or none of them, and returns those that are
        threaded.
        """
        keep = self.kept = self.keeps(leaves, weight)
        if keep is True:
            return super().add(leaves, weight)
        for index in self.layout.rest.indices:
            # It may be the first, and every other may be dropped, too.
            if self.sums.accumulators[index] is None:
                self.sums.accumulators[index] = self.folds[index].identity(leaves[index])
        for leaf_index in self.layout.rest.collected:
            # Only observers collect anything here: of what is dropped, NaN.
            self.collected[leaf_index].append(
                selected(keep, leaves[leaf_index], leaves[leaf_index] * NAN)
            )
        if not isinstance(keep, torch.Tensor):
            self.rejected += 1
            return [leaves[leaf_index] for leaf_index in self.outputs.threads]
        self.rejected = self.rejected + (~keep).to(torch.int64)
        return self._add_where(keep, leaves, weight)

    def keeps(self, leaves: Sequence[Any], weight: Scalar) -> bool | torch.Tensor:
        """True if a micro-batch of these leaves is folded. Leaves that are None, which DDP or FSDP
        sum, are not tested.
        """
        present = [
            leaf_index for leaf_index in self.tested.leaf_indices if leaves[leaf_index] is not None
        ]
        return self.dropping.keeps(
            self.outputs, self.tested._replace(leaf_indices=present), leaves, weight
        )

    def look_at(self, sums: Sequence[torch.Tensor]) -> None:
        """Drops the window if what a wrapper has summed is not finite."""
        finite = self.outputs.backend.arrays.finite(sums)
        self.rejected = self.rejected + arrays.scalar((~finite).to(torch.int64))

    def _add_where(self, keep: torch.Tensor, leaves: Sequence[Any], weight: Scalar) -> list[Any]:
        """`add`, where only a device knows whether to keep the micro-batch."""
        # Not to be kept is to be of weight 0: of that not even a NaN is added to weighted sums. All
        # other folds keep what they had. One leaf at a time, so that one copy is alive.
        kept_weight, layout = _where(keep, weight, 0), self.layout
        values = {index: leaves[index] for index in layout.rest.indices}
        self.share(kept_weight)
        self.sums.add_masked(layout.rest.weighted, values, kept_weight, self.unit or 1.0)
        for index in layout.rest.plain:
            self.sums.add([index], {index: _where(keep, values[index], 0)}, 1)
        for index in layout.rest.others:
            before = self.sums.accumulators[index]  # which some folds overwrite
            before = (
                tuple([part.clone() for part in before])
                if isinstance(before, tuple)
                else before.clone()
            )
            self.sums.combine(index, values[index], weight)
            self.sums.accumulators[index] = selected(keep, self.sums.accumulators[index], before)
        self._count_on_device(arrays.tally(kept_weight)._replace(steps=keep.to(torch.int64)))
        return [leaves[leaf_index] for leaf_index in self.outputs.threads]

    def result(self, state: list[Any]) -> Tree:
        """The normalised result; zeros, and the state that came in, if the window is dropped."""
        keep = self.rejected == 0
        if self.dropping.scope == "microbatch" or keep is True:
            return super().result(state)
        state = [
            selected(keep, *pair) for pair in zip(state, self.state_before or state, strict=True)
        ]
        result = super().result(state)
        # What observers fold stands before the value. What they collect is NaN for every
        # micro-batch.
        rows = (
            [result[0][leaf_index] for leaf_index in self.outputs.collected]
            if self.outputs.before
            else []
        )
        threaded, collected = {*map(id, state)}, {*map(id, rows)}

        def dropped(leaf: Any) -> Any:
            if id(leaf) in threaded or not isinstance(leaf, torch.Tensor):
                return leaf
            return (
                selected(keep, leaf, leaf * NAN)
                if id(leaf) in collected
                else _or_zeros(keep, leaf, self.pure)
            )

        leaves, structure = trees.flatten(result)
        return trees.unflatten(structure, [*map(dropped, leaves)])


def _or_zeros(keep: bool | torch.Tensor, leaf: torch.Tensor, pure: bool) -> torch.Tensor:
    """A leaf of a result, or zeros in its place; in the same memory, unless it is `pure`."""
    if pure:
        return _where(torch.as_tensor(keep, device=leaf.device), leaf, 0)
    shard = local(leaf)
    shard.masked_fill_(~torch.as_tensor(keep, device=shard.device), 0)
    return leaf


def _where(keep: torch.Tensor, value: Any, otherwise: Any) -> torch.Tensor:
    """The value, or another one, on the devices of the value; a number where the answer is, in
    64 bits.
    """
    if isinstance(value, torch.Tensor):
        return torch.where(keep.to(value.device), value, otherwise)
    wide = torch.float32 if keep.device.type == "mps" else torch.float64
    number = torch.full(
        (), value, dtype=torch.int64 if isinstance(value, int) else wide, device=keep.device
    )
    return torch.where(keep, number, otherwise)


def selected(keep: bool | torch.Tensor, after: Any, before: Any) -> Any:
    """What is left of a value `after` a micro-batch: itself if that is kept, else what it was
    `before`.
    """
    if isinstance(after, tuple):
        return tuple([selected(keep, *pair) for pair in zip(after, before, strict=True)])
    if not isinstance(keep, torch.Tensor):
        return after if keep else before
    return _where(keep, after, before) if isinstance(after, torch.Tensor) else after


def fold_or_drop(window: Any, state: list[Any], *microbatch: Any, last: bool) -> list[Any]:
    """Folds a micro-batch into a window, and returns the state after it: as it was, if the
    micro-batch is dropped.
    """
    # grad_fn may write to the state, and what a dropped micro-batch has written there does not
    # count.
    before = [leaf.clone() if arrays.is_array(leaf) else leaf for leaf in state]
    after = window.fold(*microbatch, last=last)
    if not before:
        return after  # type: ignore[no-any-return]
    buffers: DroppingBuffers = window.buffers
    buffers.state_before = buffers.state_before or before
    return [selected(buffers.kept, *pair) for pair in zip(after, before, strict=True)]


def buffers_of(program: Program) -> Any:
    """What makes the buffers of a program: those that leave out what it drops, or plain ones."""
    return Buffers if program.dropping is None else partial(DroppingBuffers, program.dropping)


def statistics_of(module: nn.Module | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The buffers of a module, such as running statistics, and copies of them."""
    if module is None:
        return []
    check_initialised(module)
    return [(buffer, buffer.detach().clone()) for buffer in module.buffers()]


def put_back(
    before: Iterable[tuple[torch.Tensor, torch.Tensor]], keep: bool | torch.Tensor
) -> None:
    """Gives tensors the values that they had before what is not kept; `before` has each tensor
    and these.
    """
    if keep is not True:
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(selected(keep, tensor, values))
