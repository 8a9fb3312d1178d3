"""Sums that leave micro-batches out, by a test of their values.

Autograd adds gradients where it computes them, and cannot take them back. So a step that drops
calls its gradient function for each micro-batch alone, looks at the value, and adds all of it or
nothing. One micro-batch's gradients are held at a time. Where only a device knows the answer,
nothing waits for it: what is added is selected.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from funcga._call import Program
from funcga._fold.outputs import Outputs
from funcga._types import Scalar, Tree
from funcga.errors import FuncgaError
from funcga.tools.dropping import DroppingStep
from funcga.tools.example_keys.in_torch import (
    devices_of,
    generator_states,
    put_generator_states,
)
from funcga.tools.finite.in_torch import finite
from torch_backend import _private, arrays, trees
from torch_backend.dtensor import local
from torch_backend.engine.called import Called
from torch_backend.modules import trainable
from torch_backend.modules.layers import Buffers, buffers_of, put_back
from torch_backend.replicas import Listener
from torch_backend.sums import Folding, Sums

NAN = float("nan")


class SkippingSums(Sums):
    """Sums that a micro-batch is added to if it passes a test; `rejected` counts those that do
    not. Of a dropped micro-batch, observers collect NaN: nothing else is collected here.
    """

    def __init__(self, dropping: DroppingStep, folding: Folding):
        super().__init__(folding)
        self.dropping, self.keeps = dropping, dropping.test_of(folding.outputs)
        self.kept: bool | torch.Tensor = True  # whether the last micro-batch was; set by `add`
        self.tried = 0  # micro-batches; set by `add`
        self.zeros: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        # What is threaded, before the first micro-batch; set by `keep_state`.
        self.state_before: list[Any] = []

    @property
    def number(self) -> int:
        """The number of the next micro-batch, from 1 on."""
        return self.tried + 1

    def add_loss(self, loss: torch.Tensor, index: int, weight: Scalar, share: float) -> None:
        """`add` of the loss, which is tested as well."""
        self.add({index: loss}, weight)

    def add(self, values: Mapping[int, Any], weight: Scalar) -> None:
        """Folds the leaves of one micro-batch in, or none of them."""
        outputs, self.tried = self.folding.outputs, self.tried + 1
        # Leaves that DDP or FSDP sum are None, and are not tested.
        leaves = [values.get(index) for index in range(len(outputs.folds))]
        keep = self.kept = self.keeps(leaves, weight)
        if keep is True:
            super().add(values, weight)
            return
        for index in values.keys() & self.folding.folds.keys():
            self._add_if_kept(index, arrays.strided(values[index]), weight)
        for index in outputs.collected:
            self.collected[index].append(selected(keep, values[index], values[index] * NAN))
        self.state = [values[index] for index in outputs.threads]
        if not isinstance(keep, torch.Tensor):
            self.rejected += 1
            return
        self.rejected = self.rejected + (~keep).to(torch.int64)
        self.steps = self.steps + keep.to(torch.int64)
        self.total = self.total + arrays.tally(_where(keep, weight, 0)).weight[0]

    def _add_if_kept(self, index: int, value: torch.Tensor, weight: Scalar) -> None:
        """Folds a leaf in, or what changes no sum in its place."""
        fold, keep = self.folding.folds[index], self.kept
        if self.of[index] is None:  # it may be the first, and every other may be dropped, too
            self.of[index] = fold.identity(value)
        if not isinstance(keep, torch.Tensor):
            return
        kind = self.folding.kinds[index]
        if kind is None:
            before: Any = self.of[index]
            # Some folds write to what there was before.
            copies = _private.pytree.tree_map(torch.clone, before)
            self.of[index] = selected(keep, fold.combine(before, fold.lift(value, weight)), copies)
            return
        share = self.share(weight) if kind == "weighted" else 1.0
        if share:  # a weight of 0 adds nothing, not even a NaN
            more = local(value).to(fold.accumulator_dtype)
            place = more.device, more.dtype
            if place not in self.zeros:  # a number would become a tensor for each leaf
                self.zeros[place] = more.new_zeros(())
            kept = torch.where(keep.to(more.device), more, self.zeros[place])
            local(self.of[index]).add_(kept, alpha=share)

    def keep_state(self, before: list[Any]) -> None:
        """Threads on what there was `before` the last micro-batch, if that was dropped."""
        self.state_before = self.state_before or before
        pairs = zip(self.state, before, strict=True)
        self.state = [selected(self.kept, *pair) for pair in pairs]

    def put_back_if_rejected(self, before: Buffers) -> None:
        """Gives buffers the values that they had `before`, if the window is dropped."""
        put_back(_selected_in(before, self.rejected == 0))

    def look_at(self, sums: Sequence[torch.Tensor]) -> None:
        """Drops the window if what a wrapper has summed is not finite."""
        self.rejected = self.rejected + arrays.scalar((~finite(sums)).to(torch.int64))

    def result(self) -> Tree:
        """The normalised result; zeros, and the state that came in, if the window is dropped."""
        keep, outputs = self.rejected == 0, self.folding.outputs
        if self.dropping.scope == "microbatch" or keep is True:
            return super().result()
        pairs = zip(self.state, self.state_before or self.state, strict=True)
        self.state = [selected(keep, *pair) for pair in pairs]
        result = super().result()
        stays = {*map(id, self.state)}
        # What observers fold stands before the value.
        collected = {id(result[0][index]) for index in outputs.collected}
        leaves, structure = trees.flatten(result)
        filled = [
            leaf
            if id(leaf) in stays or not isinstance(leaf, torch.Tensor)
            else _filled(leaf, keep, NAN if id(leaf) in collected else 0, self.folding.pure)
            for leaf in leaves
        ]
        return trees.unflatten(structure, filled)


class SkippingCalls(Called):
    """One window of grad_fn, of whose micro-batches some are left out.

    `module`: the one whose own parameters are differentiated. What it writes in the forward pass of
    a micro-batch that is dropped is taken back.
    """

    def __init__(self, module: nn.Module | None, program: Program, *args: Any):
        super().__init__(program, *args)
        assert program.skip is not None
        self.module, self.dropping = module, program.skip
        self.statistics_before = buffers_of(self.module)
        # What hears collectives of the loss over the groups that gradients travel over.
        self.own_groups = [Listener(merge.replicas.group) for merge in self.merges]

    def empty(self, folding: Folding) -> Sums:
        """Sums that nothing is added to yet."""
        return SkippingSums(self.dropping, folding)

    def counts(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar
    ) -> torch.Tensor | None:
        """Whether a micro-batch is a part of the result, where only a device knows; else None.

        It is evaluated to be looked at, and then once more, with the same random numbers.
        """
        arguments, counts = self.arguments, super().counts(args, kwargs, weight)
        assert arguments is not None
        devices = devices_of(trees.flatten((args, kwargs))[0])
        generators = generator_states(devices)
        outputs, value = self.program.bind(self.grad_fn(*args, **kwargs), arguments)
        put_generator_states(devices, generators)
        keep: torch.Tensor = arrays.as_array(self.dropping.test_of(outputs)(value, weight))
        return keep if counts is None else keep & counts

    def fold(
        self, args: tuple[Tree, ...], kwargs: dict[str, Tree], weight: Scalar, last: bool = False
    ) -> None:
        """Folds the value of one micro-batch in, or leaves it out."""
        # What is dropped may have written to the buffers of the module, and to threaded state.
        statistics, is_first = buffers_of(self.module), self.sums is None
        assert self.arguments is not None
        before = self.arguments.state if self.sums is None else self.sums.state
        with self.quiet:
            state = [leaf.clone() if arrays.is_array(leaf) else leaf for leaf in before]
        super().fold(args, kwargs, weight, last)
        if any(listener.heard for listener in self.own_groups):
            raise FuncgaError(
                f"drop={self.dropping.scope!r} was given together with across=, and the "
                "loss itself calls collectives of that group, as a SyncBatchNorm layer does: what "
                "one replica drops is a part of what the others have computed. Leave drop out; or "
                "compute the loss of each replica's own rows."
            )
        assert isinstance(self.sums, SkippingSums)
        put_back(_selected_in(statistics, self.sums.kept))
        if state:
            self.sums.keep_state(state)
        if is_first and self.records:
            self.likes = self._parameters_by_leaf(self.sums.folding.outputs, args)

    def _parameters_by_leaf(
        self, outputs: Outputs, args: tuple[Tree, ...]
    ) -> dict[int, torch.Tensor]:
        """The parameters, by the leaf indices of their gradients in the output."""
        gradient = self.gradient
        assert gradient is not None
        indices = gradient.gradient_in(outputs.value_of(range(len(outputs.folds))))
        params: Tree = [args[index] for index in gradient.arg_indices(len(args))]
        if self.module is not None:
            params = trainable(self.module)
        return dict(zip(trees.flatten(indices)[0], trees.flatten(params)[0], strict=True))

    def result(self) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        result, sums = super().result(), self.sums
        assert sums is not None
        if self.dropping.scope == "window":
            assert isinstance(sums, SkippingSums)
            sums.put_back_if_rejected(self.statistics_before)
        return result


def _filled(leaf: torch.Tensor, keep: bool | torch.Tensor, by: float, pure: bool) -> torch.Tensor:
    """The leaf, in which this number stands in place of each of its own unless it is kept."""
    shard: torch.Tensor = local(leaf)
    is_dropped = ~torch.as_tensor(keep, device=shard.device)
    if pure:
        return shard.masked_fill(is_dropped, by)
    shard.masked_fill_(is_dropped, by)
    return leaf


def _where(keep: torch.Tensor, value: Any, otherwise: Any) -> torch.Tensor:
    """The value, or another one, on the devices of the value; a number where the answer is, in
    64 bits.
    """
    if isinstance(value, torch.Tensor):
        return torch.where(keep.to(value.device), value, otherwise)
    wide = torch.float32 if keep.device.type == "mps" else torch.float64
    dtype = torch.int64 if isinstance(value, int) else wide
    return torch.where(keep, torch.full((), value, dtype=dtype, device=keep.device), otherwise)


def selected(keep: bool | torch.Tensor, after: Any, before: Any) -> Any:
    """What is left of a value `after` a micro-batch: itself if that is kept, else what it was
    `before`.
    """
    if isinstance(after, tuple):
        return tuple([selected(keep, *pair) for pair in zip(after, before, strict=True)])
    if not isinstance(keep, torch.Tensor):
        return after if keep else before
    return _where(keep, after, before) if isinstance(after, torch.Tensor) else after


def _selected_in(before: Buffers, keep: bool | torch.Tensor) -> Buffers:
    """What buffers are to have that had these values `before`."""
    return [
        (table, name, buffer, buffer if buffer is None else selected(keep, table[name], values))
        for table, name, buffer, values in before
    ]
