"""The sums of a window, lent to autograd: gradients are added where they are computed.

Only torch has this file: XLA fuses the sum into the loop by itself.

The accumulator of a parameter stands as the `.grad` of its leaf, and the weight is the cotangent:
autograd adds every gradient in place as soon as it is there and frees it, so that no tree of
gradients ever exists. The first gradient becomes the accumulator itself, unless somebody else may
hold its memory; a float32 accumulator of a 16-bit leaf begins with zeros, and takes each gradient
in one mixed addition. A leaf whose fold is no sum has a hook instead, which folds its gradient in
and frees it at once.

Design note: docs/concepts/inside_torch.md.
"""

import operator
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from funcga._types import Scalar
from funcga.errors import FuncgaError
from torch_backend import _private, arrays
from torch_backend.engine import graphs
from torch_backend.former.buffers import Buffers
from torch_backend.former.passes import Pass, check_no_grads, ran_backward

# Read for all leaves at once, these take a fraction of the time.
_GRAD, _NBYTES, _CDATA, _LAYOUT = (
    operator.attrgetter(name) for name in ("grad", "nbytes", "_cdata", "layout")
)


class LentSums:
    """Folds the gradients of a window's leaves into its buffers; `leaves` are by their leaf indices
    in the output.

    The cotangent is 1 for micro-batches of equal weight. Otherwise it is the weight's share, if
    every leaf is a weighted sum, no user's hook is to see the gradient of the loss alone, the
    loss's dtype holds that number, and nothing is float16, which would overflow. Where it cannot
    be, a hook scales the gradients in the accumulator's dtype.
    """

    def __init__(
        self,
        buffers: Buffers,
        leaves: dict[int, torch.Tensor],
        passes: Pass,
    ):
        self.buffers, self.how = buffers, buffers.layout.backward
        self.leaves, self.inputs = leaves, tuple(leaves.values())
        self.passes = passes
        # The window has run a loss already, and no backward pass.
        check_no_grads(self.inputs)
        # The leaves that autograd adds to sums: as a rule all.
        added = self.how.added
        self.adding = (
            self.inputs
            if len(added) == len(self.inputs)
            else tuple(self.inputs[at.position] for at in added)
        )
        # From here until `release` buffers and leaves share the accumulators: autograd adds to
        # `leaf.grad` in place.
        reduced = buffers.sums.accumulators
        begun = self.how.widens or {*map(type, reduced)} != {type(None)}
        for leaf, (_, index, _, wide) in zip(self.adding if begun else (), added, strict=False):
            if wide is not None:
                # A sum in a wider dtype begins with zeros: autograd could only begin it in the
                # gradient's own dtype.
                leaf.grad_dtype = None  # .grad may have another dtype than the leaf
                if reduced[index] is None:
                    reduced[index] = torch.zeros_like(leaf, dtype=wide, requires_grad=False)
            if reduced[index] is not None:
                leaf.grad = reduced[index]
        self.seed: float | torch.Tensor | None = 1.0  # the cotangent of the last pass
        # Whether autograd adds to the accumulators of weighted sums, and not only of plain ones.
        self.attached = True
        self._survey()
        self.writes = self.count_writes()

    def _survey(self) -> None:
        """Notes how far the sums have come: which accumulators there are, and whether a pass
        needs hooks.
        """
        accumulators = [*map(self.buffers.sums.accumulators.__getitem__, self.how.added_sums)]
        # Whether every sum has an accumulator.
        self.begun = type(None) not in {*map(type, accumulators)}
        hooked = self.how.not_sums or self.how.dtensors
        self.needs_hooks = bool(hooked or not self.attached)
        # All accumulators, where every leaf has one as its `.grad`, and no hook.
        self.accumulators: list[torch.Tensor] = (
            accumulators if self.begun and not self.needs_hooks else []
        )

    def count_writes(self) -> int:
        """A number that changes with everything that is added to a leaf's `.grad`."""
        if self.accumulators:
            return sum(map(_private.version, self.accumulators))
        gradients = [gradient for gradient in map(_GRAD, self.inputs) if gradient is not None]
        return len(gradients) + sum(map(_private.version, gradients))

    def add(
        self,
        loss: torch.Tensor,
        weight: Scalar,
        moving: Sequence[torch.Tensor] = (),
        communicates: bool = False,
    ) -> float | None:
        """Folds the gradients of this loss in, with this weight; to the leaves `moving` it leaves
        them as `.grad`.

        A loss that `communicates` leaves the gradients of other processes' losses here as well,
        whatever its own weight. Returns the share of the weight. Raises FuncgaError if loss_fn ran
        a backward pass of its own before.
        """
        # Nothing was added since the last pass, unless loss_fn itself has called .backward().
        if self.count_writes() != self.writes:
            raise ran_backward()
        share = self.buffers.share(weight)
        # The cotangent, None for no pass at all; and whether it gives the gradients their weight.
        seed, has_weight = (
            (1.0, True)
            if share == 1.0
            else self._seed(loss, weight, share, bool(moving), communicates)
        )
        self.seed = seed
        if seed is not None:
            if has_weight != self.attached:
                self._attach(has_weight)
            inputs = (*self.inputs, *moving)
            if not (loss.requires_grad and inputs):
                self._add_zeros(self.how.not_sums, weight)
            else:
                self._run_with_care(loss, seed, inputs, weight, has_weight)
            if not self.begun:
                self._adopt()
        self.writes = self.count_writes()
        return share

    def _seed(
        self,
        loss: torch.Tensor,
        weight: Scalar,
        share: float | None,
        moves: bool,
        communicates: bool,
    ) -> "tuple[float | torch.Tensor | None, bool]":
        """The cotangent for a share that is not 1, and whether autograd is to add what comes of
        it to weighted sums.
        """
        may_seed = not moves and self._takes_weights(communicates)
        if share is None:
            # A mask keeps the NaN of a weight of 0 out.
            return 1.0, False
        # A weight of 0 needs no pass: it adds nothing, not even a NaN. But the loss may communicate
        # in its backward pass, and other processes wait for that. The gradients that they send here
        # have their weights, so they are added.
        if self.how.only_weighted and not moves and share == 0:
            is_alone = not (dist.is_available() and dist.is_initialized())
            return (None, True) if is_alone else (0.0, communicates)
        if may_seed and arrays.represents_exactly(loss.dtype, share):
            return share, True
        return 1.0, False

    def _takes_weights(self, communicates: bool) -> bool:
        """Whether the cotangent of a pass may be a weight."""
        if not self.how.takes_weights or self.passes.inputs.hooked:
            return False
        return communicates or not self.passes.autocast

    def _attach(self, has_weight: bool) -> None:
        """Lets autograd add to the accumulators, to those of weighted sums only if gradients
        come with the weight.
        """
        self.check_grads()
        for added in self.how.added:
            is_attached = has_weight or added.plain
            self.inputs[added.position].grad = (
                self.buffers.sums.accumulators[added.leaf_index] if is_attached else None
            )
        self.attached = has_weight
        self._survey()

    def _run_with_care(
        self,
        loss: torch.Tensor,
        seed: float | torch.Tensor,
        inputs: tuple[torch.Tensor, ...],
        weight: Scalar,
        has_weight: bool,
    ) -> None:
        """A pass outside of autocast, with hooks or fused weights, or in which functions written
        in Python may run their own.
        """
        # Leaves whose gradients a hook takes out and folds in, as soon as they are there.
        waiting = {*self.how.not_sums, *self.how.dtensors}
        if not has_weight:
            waiting.update(added.leaf_index for added in self.how.added if not added.plain)
        reached = graphs.reach(loss, {*map(id, inputs)})
        # The hooks run after autograd has added the gradient to `.grad`, so they find it whole
        # there. In a custom pass a leaf may get several gradients, so each is taken afterwards.
        handles: list[RemovableHandle] = [
            self.leaves[leaf_index].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._take, leaf_index, weight, waiting)
            )
            for leaf_index in (() if reached.custom else waiting)
        ]
        try:
            if reached.custom:
                self.passes.run_by_hand(loss, seed, inputs, reached.foreign)
            else:
                self.passes.run(loss, seed, inputs)
        finally:
            for handle in handles:
                handle.remove()
        # What no hook has taken, and zeros where no gradient came.
        for leaf_index in [*waiting]:
            if self.leaves[leaf_index].grad is not None:
                self._take(leaf_index, weight, waiting, self.leaves[leaf_index])
        self._add_zeros(waiting.intersection(self.how.not_sums), weight)

    def _take(self, leaf_index: int, weight: Scalar, waiting: set[int], _: torch.Tensor) -> None:
        """Folds in the gradient of a leaf, and frees it."""
        leaf = self.leaves[leaf_index]
        gradient, leaf.grad = leaf.grad, None
        waiting.discard(leaf_index)
        assert gradient is not None
        self.buffers.add_leaf(leaf_index, gradient, weight)

    def _adopt(self) -> None:
        """Makes accumulators of the first gradients that autograd has left in the leaves."""
        reduced, sums, gradients = (
            self.buffers.sums.accumulators,
            self.how.added_sums,
            [*map(_GRAD, self.adding)],
        )
        arrived = [
            at
            for at, index in enumerate(sums)
            if reduced[index] is None and gradients[at] is not None
        ]
        dense = [gradients[at] for at in arrived]
        if {*map(_LAYOUT, dense)} - {torch.strided}:
            dense = [*map(arrays.strided, dense)]
        # Later gradients are added in place, so nobody else may hold this memory.
        for at, begun, alone in zip(arrived, dense, arrays.are_alone(dense), strict=True):
            reduced[sums[at]] = accumulator = begun if alone else begun.clone()
            if accumulator is not gradients[at]:
                self.adding[at].grad = accumulator
        self._survey()

    def _add_zeros(self, leaf_indices: Iterable[int], weight: Scalar) -> None:
        """Folds in zeros for leaves that the loss does not depend on."""
        for leaf_index in leaf_indices:
            zeros = torch.zeros_like(self.leaves[leaf_index], requires_grad=False)
            self.buffers.add_leaf(leaf_index, zeros, weight)

    def release(self) -> None:
        """Takes the accumulators from the leaves, so that the buffers alone hold them.

        Raises FuncgaError if a `.grad` was replaced during the window.
        """
        if not self.accumulators or any(
            map(operator.is_not, map(_GRAD, self.inputs), self.accumulators)
        ):
            self.check_grads()
        for leaf in self.inputs:
            leaf.grad = None
        self.accumulators, layout, reduced = [], self.buffers.layout, self.buffers.sums.accumulators
        # No loss of the window depended on what has no accumulator yet: its sum is 0.
        for leaf_index in self.how.sums if self.how.dtensors or not self.begun else ():
            if reduced[leaf_index] is None:
                dtype = layout.folds[leaf_index].accumulator_dtype
                reduced[leaf_index] = torch.zeros_like(
                    self.leaves[leaf_index], dtype=dtype, requires_grad=False
                )

    def check_grads(self) -> None:
        """Raises FuncgaError if an accumulator no longer stands where autograd adds to it."""
        for added in self.how.added:
            is_attached = self.attached or added.plain
            if self.inputs[added.position].grad is not (
                self.buffers.sums.accumulators[added.leaf_index] if is_attached else None
            ):
                raise FuncgaError(
                    "loss_fn cleared or replaced the .grad of a parameter, with zero_grad() for "
                    "instance, and what was accumulated in it. Leave that line out: gradients are "
                    "returned, not kept in the module."
                )
