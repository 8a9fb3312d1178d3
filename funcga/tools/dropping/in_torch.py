"""Windows that leave micro-batches out, by a test of their values.

Autograd adds gradients where it computes them, and cannot take them back. So a step that drops
calls its gradient function for each micro-batch alone, looks at the value, and adds all of it or
nothing. One micro-batch's gradients are held at a time. Where only a device knows the answer,
nothing waits for it: what is added is selected.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._fold.accumulator import Accumulation
from funcga._types import Args, GradFn, Kwargs, Scalar, Tree
from funcga.errors import FuncgaError
from funcga.tools.dropping import Dropping, selected
from funcga.tools.finite.in_torch import finite
from torch_backend import _private, arrays, trees
from torch_backend.dtensor import as_dtensor, local, local_tensors
from torch_backend.engine.called import Called
from torch_backend.modules.layers import Buffers, buffers_of, put_back
from torch_backend.replicas import collectives_called
from torch_backend.states import clear_if_zero
from torch_backend.sums import Sums

NAN = float("nan")

# The buffers of a module, which the forward pass may write to, and the threaded state.
Before = tuple[Buffers, list[Any]]


def snapshot(module: nn.Module | None, state: Sequence[Any]) -> Before:
    """Copies of what a window, or a micro-batch, writes besides its sums."""
    copies = [leaf.clone() if arrays.is_array(leaf) else leaf for leaf in state]
    return buffers_of(module), copies


def take_back(sums: Sums, keep: bool | torch.Tensor, before: Before) -> None:
    """Gives buffers and threaded state the values from `before`, unless what was written is
    kept.
    """
    choose = partial(selected, keep, backend=sums.folding.outputs.backend)
    buffers, state = before
    put_back(
        [
            (table, name, buffer, values if values is None else choose(table[name], values))
            for table, name, buffer, values in buffers
        ]
    )
    sums.state = choose(sums.state, state)


def unless_dropped(keep: torch.Tensor, number: float = 0.0) -> Callable[[torch.Tensor], Any]:
    """A function of a leaf: the leaf if `keep`, a 0-d array, is true, else this number."""
    known = dict[Any, tuple[torch.Tensor, torch.Tensor]]()

    def chosen(leaf: torch.Tensor) -> Any:
        shard = local(leaf)
        kind = shard.device, shard.dtype
        if kind not in known:
            known[kind] = keep.to(shard.device), shard.new_full((), number)
        is_kept, otherwise = known[kind]
        return as_dtensor(torch.where(is_kept, shard, otherwise), leaf)

    return chosen


def result_of(sums: Sums, before: Before) -> Tree:
    """The normalised result; zeros, and all else as `before`, if the window is dropped."""
    outputs, keep = sums.folding.outputs, sums.rejected == 0
    if keep is True:
        return sums.result()
    take_back(sums, keep, before)
    of_sums, of_rows = (unless_dropped(arrays.as_array(keep), number) for number in (0.0, NAN))

    def fill(leaves: dict[int, Any]) -> None:
        for index in outputs.reduced:
            leaves[index] = _private.pytree.tree_map(of_sums, leaves[index])
        for index in outputs.collected:  # by observers
            leaves[index] = of_rows(leaves[index])

    return sums.result(fill)


def rejected(sums: Sums, dropping: Dropping) -> Scalar:
    """Whether one of the sums that have to be finite is not, as a count: for gradients that are in
    the sums of a wrapper before anybody can look at them.
    """
    tested = dropping.tested(sums.folding.outputs)
    leaves, _ = trees.flatten([sums.of[index] for index in tested])
    return arrays.scalar((~finite(local_tensors(leaves))).to(torch.int64))


def added(
    keep: torch.Tensor, window: Accumulation, leaves: Sequence[torch.Tensor], weight: Scalar
) -> Accumulation:
    """The window of a `multi_steps` with one more micro-batch if that is kept, else the same one,
    which counts it as rejected.
    """
    # What weighs 0 adds nothing to weighted sums. To plain ones zeros are added, and all others are
    # selected.
    if isinstance(weight, torch.Tensor):
        weight = torch.where(arrays.as_array(keep, torch.bool, weight), weight, 0)
    else:
        wide = torch.float32 if keep.device.type == "mps" else torch.float64
        weight = keep * arrays.as_array(weight, wide)
    outputs, leaves, selects = window.outputs, [*leaves], list[int]()
    alike: dict[Any, list[int]] = defaultdict(list)
    for index, fold in enumerate(outputs.folds):
        leaf = leaves[index]
        if fold is None:
            continue
        if fold.adds == "plain" and type(leaf) is torch.Tensor and not arrays.in_transform():
            alike[leaf.device, leaf.dtype].append(index)
        elif fold.adds != "weighted":
            selects.append(index)
    for group in alike.values():
        values = torch._foreach_mul([arrays.strided(leaves[index]) for index in group], 1)
        clear_if_zero(keep, values)
        for index, value in zip(group, values, strict=True):
            leaves[index] = value
    after = window.add(leaves, weight)
    sums = [*after.accumulators]
    for index in selects:
        sums[index] = selected(keep, sums[index], window.accumulators[index], outputs.backend)
    tally = after.tally._replace(steps=window.tally.steps + keep)
    return after._replace(accumulators=sums, tally=tally, rejected=window.rejected + ~keep)


class SkippingCalls(Called):
    """One window of grad_fn, of whose micro-batches some are left out.

    `module`: the one whose own parameters are differentiated.
    """

    keeps: Any = None  # the test of a micro-batch; set by `add` for the first one

    def __init__(
        self,
        module: nn.Module | None,
        program: Program,
        function: GradFn,
        arguments: Arguments,
        *others: Any,
    ):
        super().__init__(program, function, arguments, *others)
        self.module, self.dropping = module, program.skip
        # Of the window; where micro-batches are dropped, `fold` sets it before each of the others.
        with self.quiet:
            self.before = snapshot(module, arguments.state)
        # Collectives of the loss over the groups that gradients travel over.
        self.groups = [merge.replicas.group for merge in self.merges]
        self.called = collectives_called(self.groups)

    def fold(self, args: Args, kwargs: Kwargs, weight: Scalar, last: bool = False) -> None:
        """Folds the value of one micro-batch in, or leaves it out."""
        if self.sums is not None and self.dropping.scope == "microbatch":
            with self.quiet:
                self.before = snapshot(self.module, self.sums.state)
        super().fold(args, kwargs, weight, last)

    def add(self, sums: Sums, leaves: list[Any], weight: Scalar) -> None:
        """Folds the leaves of one micro-batch in, or what changes no sum in their place."""
        if collectives_called(self.groups) != self.called:
            raise FuncgaError(
                f"drop={self.dropping.scope!r} was given together with across=, and the "
                "loss itself calls collectives of that group, as a SyncBatchNorm layer does: what "
                "one replica drops is a part of what the others have computed. Leave drop out; or "
                "compute the loss of each replica's own rows."
            )
        folding, outputs = sums.folding, sums.folding.outputs
        self.keeps = self.keeps or self.dropping.test_of(outputs)
        keep = self.keeps(leaves, weight)
        if keep is True:
            super().add(sums, leaves, weight)
            return
        is_kept = arrays.as_array(keep)
        chosen, chosen_row = unless_dropped(is_kept), unless_dropped(is_kept, NAN)
        added = dict[int, Any]()
        for index, fold in folding.folds.items():
            # The identity of its monoid in its place: zeros of what is added. Each leaf is freed
            # before the next one is copied.
            value, before = arrays.strided(leaves[index]), sums.of[index]
            if folding.adds[index] is not None:
                added[index] = leaves[index] = chosen(value)
                continue
            nothing = fold.identity(value)
            lifted = selected(keep, fold.lift(value, weight), nothing, outputs.backend)
            sums.of[index] = fold.combine(nothing if before is None else before, lifted)
        sums.add_reduced(added, weight)
        for index in outputs.collected:  # by observers
            sums.collected[index].append(chosen_row(leaves[index]))
        sums.state = [leaves[index] for index in outputs.threads]
        count = arrays.counted(keep.float()) if arrays.is_array(keep) else keep
        sums.steps, sums.total = sums.steps + keep, sums.total + count * weight
        if self.dropping.scope == "window":
            sums.rejected = sums.rejected + (keep == 0)
        else:
            take_back(sums, keep, self.before)

    def finished(self, sums: Sums) -> Tree:
        """The normalised result of merged sums."""
        return result_of(sums, self.before)
