"""One backward pass: the gradients of a micro-batch are added where autograd computes them.

Only torch has this file: XLA fuses the sum into the loop by itself.

The accumulator of a parameter stands as the `.grad` of its leaf, and the weight is the cotangent: autograd adds every
gradient in place as soon as it is there and frees it, so that no tree of gradients ever exists. The first gradient
becomes the accumulator itself, unless somebody else may hold its memory; a float32 accumulator of a 16-bit leaf begins
with zeros, and takes each gradient in one mixed addition. A leaf whose fold is no sum has a hook instead, which folds
its gradient in and frees it at once.

Functions written in Python may run backward passes of their own, as a reentrant checkpoint does. A pass that is
restricted to the leaves skips such a function silently if none of its inputs leads to a leaf, and some functions refuse
a restricted pass. A leaf can also get its gradient in several pieces. So where a graph has such a function, the whole
backward pass is run, as a hand-written loop would run it. Tensors of others get their own `.grad` back afterwards.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from funcga._types import Scalar
from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.dtensor import is_dtensor
from torch_backend.engine.buffers import Buffers, Layout
from torch_backend.engine.others import Surroundings, last_applied, left_alone, reach

_GRAD = operator.attrgetter("grad")


class Routes:
    """How the gradient of each leaf comes to its accumulator: the same for every window with leaves of these kinds.

    `leaves` are by their leaf indices in grad_fn's output. `has_scale`: the loss comes multiplied by a scale. A
    backward pass in float16 can begin with no more than that, so the cotangent is not multiplied by a weight as well.

    `sums`: for each leaf that autograd adds, its position among the leaves, its index in `Buffers.reduced`, and whether
    its sum is plain, so that it is added whatever the weight. `wide`: position, index and dtype of those whose sums
    have another dtype than the gradients. `weighted`, `others` and `dtensors` are leaf indices: of weighted sums that
    autograd adds, of folds that are no sums, and of DTensors. Those are added on their mesh, and not by autograd.
    """

    def __init__(self, layout: Layout, leaves: dict[int, torch.Tensor], has_scale: bool):
        of_sums = [*layout.weighted_in_backward, *layout.plain_in_backward]
        self.dtensors = [leaf_index for leaf_index in of_sums if is_dtensor(leaves.get(leaf_index))]
        self.others = layout.others_in_backward
        self.weighted = [leaf_index for leaf_index in layout.weighted_in_backward if leaf_index not in self.dtensors]
        plain = {*layout.plain_in_backward}
        added = {*of_sums} - {*self.dtensors}
        self.sums: list[tuple[int, int, bool]] = []
        self.wide: list[tuple[int, int, torch.dtype]] = []
        dtypes = set()
        for position, (leaf_index, leaf) in enumerate(leaves.items()):
            if leaf_index in added:
                index = layout.index_of[leaf_index]
                dtype = layout.folds[index].accumulator_dtype
                dtypes.add(leaf.dtype)
                self.sums.append((position, index, leaf_index in plain))
                if dtype != leaf.dtype:
                    self.wide.append((position, index, dtype))
        # The cotangent can be a weight only if every gradient is to be multiplied by that weight. In float16, and in
        # dtypes of 8 bits, a gradient times a weight overflows too early.
        self.only_weighted = not (layout.plain_in_backward or self.others)
        overflows = any(dtype is torch.float16 or dtype.itemsize == 1 for dtype in dtypes)
        self.seeds = self.only_weighted and not (self.dtensors or has_scale or overflows)


class Backward:
    """Folds the gradients of a window's leaves into its buffers; `leaves` are by their leaf indices in the output.

    The cotangent is 1 for micro-batches of equal weight. Otherwise it is the weight's share, if every leaf is a
    weighted sum, the loss's dtype holds that number, and nothing is float16, which would overflow. Where it cannot be,
    a hook scales the gradients in the accumulator's dtype.

    `around`: what a function's own backward pass may write to; `since`: what was `last_applied` before the window.
    `seeds`: whether the cotangent may be a weight.
    """

    def __init__(
        self, buffers: Buffers, leaves: dict[int, torch.Tensor], routes: Routes, around: Callable[[], Surroundings],
        since: object, seeds: bool = True,
    ):  # fmt: skip
        self.buffers, self.leaves, self.inputs = buffers, leaves, tuple(leaves.values())
        self.routes, self.around, self.since, self.seeds = routes, around, since, seeds and routes.seeds
        # A sum in a wider dtype begins with zeros: autograd could only begin it in the gradient's own dtype.
        for position, index, dtype in routes.wide:
            self.inputs[position].grad_dtype = None  # .grad may have another dtype than the leaf
            if buffers.reduced[index] is None:
                buffers.reduced[index] = torch.zeros_like(self.inputs[position], dtype=dtype, requires_grad=False)
        # From here until `release` buffers and leaves share the accumulators: autograd adds to `leaf.grad` in place.
        self.sums = [(self.inputs[position], index, plain) for position, index, plain in routes.sums]
        for leaf, index, _ in self.sums:
            if buffers.reduced[index] is not None:
                leaf.grad = buffers.reduced[index]
        self.attached = True  # whether autograd adds to the accumulators of weighted sums, and not only of plain ones
        self.begun = False  # whether every sum has an accumulator
        self.accumulators: list[torch.Tensor] = []  # all of them, where every leaf has one as its `.grad`, and no hook
        self.autocast = (
            autocasting({leaf.device.type for leaf in self.inputs}) if _private.is_any_autocast_enabled() else []
        )
        self.on_host = all(leaf.is_cpu for leaf in self.inputs)
        self._survey()
        self.writes = self._count_writes()

    def settle(self) -> None:
        """Accepts all writes to accumulators so far: funcga itself made them, and not a backward pass of loss_fn."""
        self.writes = self._count_writes()

    def _survey(self) -> None:
        """Notes whether every sum has begun, and its accumulators, if all of them are added to by autograd."""
        accumulators = [self.buffers.reduced[index] for _, index, _ in self.sums]
        self.begun = all(accumulator is not None for accumulator in accumulators)
        hooked = self.routes.others or self.routes.dtensors
        self.accumulators = accumulators if self.begun and self.attached and not hooked else []

    def _count_writes(self) -> int:
        """A number that changes with everything that is added to a leaf's `.grad`."""
        if self.accumulators:
            return sum(map(_private.version, self.accumulators))
        return sum([_private.version(leaf.grad) + 1 for leaf in self.inputs if leaf.grad is not None])

    def __call__(
        self,
        loss: torch.Tensor,
        weight: Scalar,
        moving: Sequence[torch.Tensor] = (),
        announce: Callable[[], Callable[[int], None]] | None = None,
        communicates: bool = False,
    ) -> float | None:
        """Folds the gradients of this loss in, with this weight; to the leaves `moving` it leaves them as `.grad`.

        `announce()` begins a last pass, and returns what is called with the index of each sum, among what is reduced,
        as soon as it is complete. A loss that `communicates` leaves the gradients of other processes' losses here as
        well, whatever its own weight.
        Returns the share of the weight. Raises FuncgaError if loss_fn ran a backward pass of its own before.
        """
        # Nothing was added since the last pass, unless loss_fn itself has called .backward().
        if self._count_writes() != self.writes:
            raise ran_backward()
        ready = None if announce is None else announce()
        share = self.buffers.share(weight)
        # The cotangent, None for no pass at all; and whether it gives the gradients their weight.
        seed, has_weight = (1.0, True) if share == 1.0 else self._seed(loss, share, bool(moving), communicates)
        if seed is not None:
            if has_weight != self.attached:
                self._attach(has_weight)
            inputs = (*self.inputs, *moving) if moving else self.inputs
            if not (loss.requires_grad and inputs):
                self._add_zeros(self.routes.others, weight)
            elif self.accumulators and not (moving or ready or self.autocast) and last_applied() is self.since:
                # The usual case, and the cheapest: every sum has begun, and nothing needs a hook.
                cotangent = torch.full_like(loss, seed, requires_grad=False)
                _private.run_backward(loss, cotangent, inputs, self.on_host and loss.is_cpu)
            else:
                self._run_with_care(loss, seed, inputs, weight, has_weight, ready)
        self.writes = self._count_writes()
        return share

    def _seed(
        self, loss: torch.Tensor, share: float | None, moves: bool, communicates: bool
    ) -> tuple[float | None, bool]:
        """The cotangent for a share that is not 1, and whether autograd is to add what comes of it to weighted sums."""
        if share is None:
            return 1.0, False
        # A weight of 0 needs no pass: it adds nothing, not even a NaN. But the loss may communicate in its backward
        # pass, and other processes wait for that. The gradients that they send here have their weights, so they are
        # added.
        if self.routes.only_weighted and not moves and share == 0:
            if not (dist.is_available() and dist.is_initialized()):
                return None, True
            return 0.0, communicates
        may_seed = self.seeds and not moves and (communicates or not self.autocast)
        if may_seed and holds(loss.dtype, share):
            return share, True
        return 1.0, False

    def _attach(self, has_weight: bool) -> None:
        """Lets autograd add to the accumulators, to those of weighted sums only if gradients come with the weight."""
        self._check_grads()
        for leaf, index, plain in self.sums:
            leaf.grad = self.buffers.reduced[index] if has_weight or plain else None
        self.attached = has_weight
        self._survey()

    def _run(self, loss: torch.Tensor, seed: float, inputs: tuple[torch.Tensor, ...]) -> None:
        """`torch.autograd.backward(loss, seed, inputs=inputs)`, outside of autocast: that is for the forward pass."""
        with ExitStack() as outside:
            for device in self.autocast:
                outside.enter_context(torch.autocast(device, enabled=False))
            cotangent = torch.full_like(loss, seed, requires_grad=False)
            _private.run_backward(loss, cotangent, inputs, self.on_host and loss.is_cpu)

    def _run_with_care(
        self, loss: torch.Tensor, seed: float, inputs: tuple[torch.Tensor, ...], weight: Scalar, has_weight: bool,
        ready: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """A pass in which sums begin, leaves have hooks, or functions written in Python may run passes of their own."""
        routes = self.routes
        # Leaves whose gradients a hook takes out and folds in, as soon as they are there.
        waiting = {*routes.others, *routes.dtensors, *(() if has_weight else routes.weighted)}
        others: list[torch.Tensor] = []
        custom = False
        if last_applied() is not self.since:
            others, custom = reach(loss, {*map(id, inputs)})
        if custom:
            self._run_by_hand(loss, seed, inputs, others)
            # A leaf may get several gradients in such a pass, so each is taken when the pass is over, without a hook.
            arrived = [leaf_index for leaf_index in waiting if self.leaves[leaf_index].grad is not None]
            for leaf_index in arrived:
                self._take(leaf_index, weight, waiting, self.leaves[leaf_index])
        elif not (waiting or ready):
            self._run(loss, seed, inputs)
        else:
            self._run_hooked(loss, seed, inputs, weight, waiting, ready)
        if not self.begun:
            self._adopt()
        if routes.others:
            self._add_zeros(waiting.intersection(routes.others), weight)

    def _run_by_hand(
        self, loss: torch.Tensor, seed: float, inputs: tuple[torch.Tensor, ...], others: list[torch.Tensor]
    ) -> None:
        """`torch.autograd.backward(loss, seed)`, and no leaf but the inputs has another `.grad` afterwards."""
        around = self.around()
        foreign = {id(leaf): leaf for leaf in (*others, *around.leaves)}
        for leaf in inputs:
            foreign.pop(id(leaf), None)
        in_graph = {*map(id, others)}
        # What the whole pass leaves in the `.grad`s of others is read before they get their own back.
        with left_alone([*foreign.values()]):
            self._run(loss, seed, ())
            written = [leaf for key, leaf in foreign.items() if leaf.grad is not None and key not in in_graph]
        around.check(written)

    def _run_hooked(
        self, loss: torch.Tensor, seed: float, inputs: tuple[torch.Tensor, ...], weight: Scalar, waiting: set[int],
        ready: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """The pass, with a hook on each leaf `waiting` that takes its gradient."""
        # The hooks run after autograd has added the gradient to `.grad`, so they find it whole there.
        handles = [
            _after(self.leaves[leaf_index], partial(self._take, leaf_index, weight, waiting)) for leaf_index in waiting
        ]
        if ready is not None:
            handles += [_after(leaf, partial(_tell, ready, index)) for leaf, index, _ in self.sums]
        try:
            self._run(loss, seed, inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _take(self, leaf_index: int, weight: Scalar, waiting: set[int], leaf: torch.Tensor) -> None:
        """Folds in the gradient of a leaf, and frees it."""
        gradient, leaf.grad = leaf.grad, None
        waiting.discard(leaf_index)
        assert gradient is not None
        self.buffers.add_leaf(leaf_index, gradient, weight)

    def _adopt(self) -> None:
        """Makes accumulators of the first gradients that autograd has left in the leaves."""
        reduced = self.buffers.reduced
        for leaf, index, _ in self.sums:
            gradient = leaf.grad
            if reduced[index] is None and gradient is not None:
                # Later gradients are added in place, so nobody else may hold this memory.
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                reduced[index] = dense if is_alone(dense) else dense.clone()
                if reduced[index] is not gradient:
                    leaf.grad = reduced[index]
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
        if not self.accumulators or any(map(operator.is_not, map(_GRAD, self.inputs), self.accumulators)):
            self._check_grads()
        for leaf in self.inputs:
            leaf.grad = None
        self.accumulators, reduced = [], self.buffers.reduced
        # No loss of the window depended on what has no accumulator yet: its sum is 0.
        for leaf, index, _ in () if self.begun else self.sums:
            if reduced[index] is None:
                reduced[index] = torch.zeros_like(leaf, requires_grad=False)
        for leaf_index in self.routes.dtensors:
            index = self.buffers.layout.index_of[leaf_index]
            if reduced[index] is None:
                dtype = self.buffers.folds[index].accumulator_dtype
                reduced[index] = torch.zeros_like(self.leaves[leaf_index], dtype=dtype, requires_grad=False)

    def _check_grads(self) -> None:
        """Raises FuncgaError if an accumulator no longer stands where autograd adds to it."""
        for leaf, index, plain in self.sums:
            if leaf.grad is not (self.buffers.reduced[index] if self.attached or plain else None):
                raise FuncgaError(
                    "loss_fn cleared or replaced the .grad of a parameter, with zero_grad() for instance, and what was "
                    "accumulated in it. Leave that line out: gradients are returned, not kept in the module."
                )


def _after(leaf: torch.Tensor, call: Callable[[torch.Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = leaf.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
    return handle


def _tell(ready: Callable[[int], None], index: int, _: torch.Tensor) -> None:
    ready(index)


def ran_backward() -> FuncgaError:
    """The error for a loss that runs a backward pass into its own parameters."""
    return FuncgaError(
        "loss_fn called .backward(): the gradients that it leaves in the parameters would be added to those of the "
        "loss. Return the loss and leave that to funcga; for a gradient inside of the loss use torch.autograd.grad or "
        "torch.func.grad."
    )


def is_alone(gradient: torch.Tensor) -> bool:
    """Whether nobody else holds the memory of a gradient, and the memory is no larger than the gradient."""
    storage = gradient.untyped_storage()
    # Two references to the memory are expected: that of the gradient, and `storage` here.
    alone = _private.use_count(storage._cdata) == 2 and storage.nbytes() == gradient.nbytes
    # Memory that is not torch's own, such as a NumPy array's, cannot be resized. Its owner does not count as a
    # reference.
    return alone and storage.resizable()


def holds(dtype: torch.dtype, number: float) -> bool:
    """Whether this dtype holds a number exactly, or rounds it no more than float32 does."""
    return number == 1 or dtype.itemsize >= 4 or torch.tensor(number, dtype=dtype, device="cpu").item() == number


def autocasting(devices: Iterable[str]) -> list[str]:
    """The device types that autocast is on for, of the CPU and these."""
    if not _private.is_any_autocast_enabled():  # as usual
        return []
    types = {"cpu", *devices}
    return [type for type in types if torch.amp.is_autocast_available(type) and torch.is_autocast_enabled(type)]
