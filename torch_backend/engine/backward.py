"""One backward pass: the gradients of a micro-batch are added where autograd computes them.

Only torch has this file: XLA fuses the sum into the loop by itself.

The accumulator of a parameter stands as the `.grad` of its leaf, and the weight is the cotangent: autograd adds every
gradient in place as soon as it is there and frees it, so that no tree of gradients ever exists. The first gradient
becomes the accumulator itself, unless somebody else may hold its memory; a float32 accumulator of a 16-bit leaf begins
with zeros, and takes each gradient in one mixed addition. A leaf whose fold is no sum has a hook instead, which folds
its gradient in and frees it at once.

Functions written in Python may run backward passes of their own, as a reentrant checkpoint does. A pass restricted to
the leaves leaves them out without a word where their inputs lead to no leaf, and some refuse it; a leaf can get its
gradient in several parts. So a micro-batch whose graph has such a function is run as a loop by hand would run it, and
what belongs to others has its own `.grad` again afterwards.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from funcga.errors import FuncgaError
from torch_backend import _private
from torch_backend.dtensor import is_dtensor
from torch_backend.engine.buffers import Buffers, Layout
from torch_backend.engine.others import Surroundings, last_applied, left_alone, reach

_NOTHING = nullcontext()
_Ready = Callable[[int], None]
_GRAD = operator.attrgetter("grad")


class Routes:
    """How the gradient of each leaf comes to its accumulator: the same for every window with leaves of these kinds.

    `leaves` are by their place in grad_fn's output. `scaled`: the loss comes with a scale of its own, which is as much
    as a backward pass in float16 can begin with: no weight is added.
    """

    def __init__(self, layout: Layout, leaves: dict[int, torch.Tensor], scaled: bool):
        self.scaled, self.plain, self.others = layout.given_scaled, layout.given_plain, layout.given_others
        # what lies on several devices is added where it lies, not by autograd
        self.placed = [i for i in (*self.scaled, *self.plain) if is_dtensor(leaves.get(i))]
        self.scaled, self.plain = ([i for i in p if i not in {*self.placed}] for p in (self.scaled, self.plain))
        added = {*self.scaled, *self.plain}
        # of each leaf that autograd adds, where it is among the leaves and among what is reduced, and whether it is
        # added whatever the weight
        self.sums = [(n, layout.places[i], i in {*self.plain}) for n, i in enumerate(leaves) if i in added]
        dtypes = [leaf.dtype for i, leaf in leaves.items() if i in added]
        # those whose sums are in another dtype than the gradients
        self.widened = [
            (n, k, layout.folds[k].accumulator_dtype)
            for (n, k, _), dtype in zip(self.sums, dtypes, strict=True)
            if layout.folds[k].accumulator_dtype != dtype
        ]
        self.alone = not (layout.given_plain or self.others)  # whether all that is done is to sum with weights
        narrow = any(dtype is torch.float16 or dtype.itemsize == 1 for dtype in dtypes)
        self.seeds = self.alone and not (self.placed or scaled or narrow)


class Backward:
    """Folds the gradients of a window's leaves into its buffers; `leaves` are by their place in grad_fn's output.

    The cotangent is 1 for micro-batches that weigh the same. Else it is the weight, in units of the first one, if every
    leaf is a weighted sum, the loss's dtype holds that number, and nothing is float16, which would overflow; where it
    cannot be, the gradients are scaled in a hook, in the accumulator's dtype.

    `around`: what a function's own backward pass may write to. `seeds`: whether the cotangent may be a weight.
    """

    def __init__(
        self, buffers: Buffers, leaves: dict[int, torch.Tensor], routes: Routes, around: Surroundings,
        seeds: bool = True,
    ):  # fmt: skip
        self.buffers, self.leaves, self.inputs = buffers, leaves, tuple(leaves.values())
        self.routes, self.around, self.seeds = routes, around, seeds and routes.seeds
        for n, k, dtype in routes.widened:
            self.inputs[n].grad_dtype = None  # .grad may have another dtype than the leaf
            if buffers.reduced[k] is None:
                buffers.reduced[k] = torch.zeros_like(self.inputs[n], dtype=dtype, requires_grad=False)
        self.sums = [(self.inputs[n], k, plain) for n, k, plain in routes.sums]
        self.autocast = autocasting(leaf.device.type for leaf in self.inputs)
        self.on_host = all(leaf.is_cpu for leaf in self.inputs)
        self.held: list[torch.Tensor] = []  # the accumulators, where every leaf has one and it stands as `.grad`
        self.begun = False  # whether every sum has an accumulator
        self.attached = True
        for leaf, k, _ in self.sums:
            if buffers.reduced[k] is not None:
                leaf.grad = buffers.reduced[k]
        self._survey()
        self._written = sum(map(_private.version, self.inputs))
        self.settle()

    def _attach(self, scaled: bool) -> None:
        """Lets autograd add to the accumulators, to those of weighted sums only if `scaled`."""
        if scaled == self.attached:
            return
        self._check_grads()
        for leaf, k, plain in self.sums:
            leaf.grad = self.buffers.reduced[k] if scaled or plain else None
        self.attached = scaled
        self._survey()

    def _survey(self) -> None:
        accumulators = [self.buffers.reduced[k] for _, k, _ in self.sums]
        self.begun = not [k for k, accumulator in enumerate(accumulators) if accumulator is None]
        hooked = self.routes.others or self.routes.placed
        self.held = accumulators if self.begun and self.attached and not hooked else []

    def _check_grads(self) -> None:
        """Raises FuncgaError if an accumulator no longer stands where autograd adds to it."""
        if self.held and all(map(operator.is_, map(_GRAD, self.inputs), self.held)):
            return  # as usual
        for leaf, k, plain in self.sums:
            expected = self.buffers.reduced[k] if self.attached or plain else None
            if leaf.grad is not expected:
                raise FuncgaError(
                    "loss_fn cleared or replaced the .grad of a parameter, with zero_grad() for instance, and what was "
                    "accumulated in it. Leave that line out: gradients are returned, not kept in the module."
                )

    def _adopt(self) -> None:
        """Makes accumulators of the first gradients that autograd has left in the leaves."""
        reduced = self.buffers.reduced
        for leaf, k, _ in self.sums:
            if reduced[k] is None and (gradient := leaf.grad) is not None:
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                reduced[k] = own = dense if is_alone(dense) else dense.clone()
                if own is not gradient:
                    leaf.grad = own
        self._survey()

    def check_untouched(self) -> None:
        """Raises FuncgaError if loss_fn ran a backward pass of its own into the parameters."""
        if self._count() != self._added:
            raise _ran_backward()

    def settle(self) -> None:
        """What was added until now is right."""
        self._added = self._count()

    def _count(self) -> int:
        """A number that changes with everything that is added to a leaf's `.grad`."""
        if self.held:
            return sum(map(_private.version, self.held))
        grads = [leaf.grad for leaf in self.inputs]
        return sum([_private.version(grad) + 1 for grad in grads if grad is not None])

    def __call__(
        self, loss: torch.Tensor, weight: Any, moving: Sequence[torch.Tensor] = (), ready: _Ready | None = None,
        communicates: bool = False,
    ) -> None:  # fmt: skip
        """Folds the gradients of this loss in, with this weight; to the leaves `moving` it leaves them as `.grad`.

        `ready` is called with the place of each sum, among what is reduced, as soon as it is complete. A loss that
        `communicates` leaves the gradients of other processes' losses here as well, whatever its own weight.
        """
        share, routes = self.buffers.share(weight), self.routes
        # it adds nothing, not even a NaN; but other processes may wait for what the loss communicates in its pass
        idle = routes.alone and not moving and share == 0
        if idle and not (dist.is_available() and dist.is_initialized()):
            return
        # what a loss that communicates gets from other processes has their weights, and not this one's
        seeds = self.seeds and not moving and (communicates or not self.autocast)
        seed = 1.0 if share is None or not (idle or (seeds and holds(loss.dtype, share))) else share
        added = share == seed and (communicates or not idle)
        self._attach(added)
        inputs = (*self.inputs, *moving) if moving else self.inputs
        if not (loss.requires_grad and inputs):
            self._add_zeros(routes.others, weight)
            return
        applied = last_applied() is not self.around.since
        foreign, custom = reach(loss, {*map(id, inputs)}) if applied else ([], False)
        if self.held and not (moving or custom or ready):  # then nothing else is to be done
            self._run(loss, seed, inputs)
            return
        waiting = {*routes.others, *routes.placed, *(() if added else routes.scaled)}
        if custom:
            self._run_by_hand(loss, seed, inputs, foreign)
            for i in [i for i in waiting if self.leaves[i].grad is not None]:
                self._take(i, weight, waiting, self.leaves[i])
        else:
            self._run_hooked(loss, seed, inputs, weight, waiting, ready)
        if not self.begun:
            self._adopt()
        self._add_zeros(waiting.intersection(routes.others), weight)

    def _add_zeros(self, places: Iterable[int], weight: Any) -> None:
        """Folds in what the loss does not depend on."""
        for i in places:
            self.buffers.add_leaf(i, torch.zeros_like(self.leaves[i], requires_grad=False), weight)

    def _run_hooked(
        self, loss: torch.Tensor, seed: float, inputs: tuple[torch.Tensor, ...], weight: Any, waiting: set[int],
        ready: _Ready | None,
    ) -> None:  # fmt: skip
        """The pass, with a hook on each leaf `waiting` that takes its gradient."""
        handles = [_after(self.leaves[i], partial(self._take, i, weight, waiting)) for i in waiting]
        if ready is not None:
            handles += [_announce(leaf, k, ready) for leaf, k, _ in self.sums]
        try:
            self._run(loss, seed, inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _run_by_hand(
        self, loss: torch.Tensor, seed: float, inputs: tuple[torch.Tensor, ...], foreign: list[torch.Tensor]
    ) -> None:
        """`torch.autograd.backward(loss, seed)`, and no leaf but the inputs has another `.grad` afterwards."""
        others = {id(leaf): leaf for leaf in (*foreign, *self.around.leaves)}
        for leaf in inputs:
            others.pop(id(leaf), None)
        with left_alone([*others.values()]):
            self._run(loss, seed, ())
            written = {key: leaf for key, leaf in others.items() if leaf.grad is not None}
        self.around.check([leaf for key, leaf in written.items() if key not in {*map(id, foreign)}])

    def _run(self, loss: torch.Tensor, seed: float, inputs: tuple[torch.Tensor, ...]) -> None:
        """`torch.autograd.backward(loss, seed, inputs=inputs)`, outside of autocast: that is for the forward pass."""
        cotangent = torch.full_like(loss, seed, requires_grad=False)
        with self._outside() if self.autocast else _NOTHING:
            _private.run_backward(loss, cotangent, inputs, self.on_host and loss.is_cpu)

    def _outside(self) -> ExitStack:
        stack = ExitStack()
        for device in self.autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        return stack

    def _take(self, i: int, weight: Any, waiting: set[int], leaf: torch.Tensor) -> None:
        """Folds in the gradient of a leaf, and frees it."""
        gradient, leaf.grad = leaf.grad, None
        waiting.discard(i)
        assert gradient is not None
        self.buffers.add_leaf(i, gradient, weight)

    def release(self) -> None:
        """Takes the accumulators from the leaves, so that the buffers alone hold them.

        Raises FuncgaError if a parameter, or its `.grad`, was written to during the window.
        """
        if sum(map(_private.version, self.inputs)) != self._written:
            raise FuncgaError(
                "a parameter was changed in place during the window, by loss_fn or by another thread: the gradients of "
                "its micro-batches belong to different parameters. Write to a copy, `p = p + ...`, and update the "
                "parameters when the window is done."
            )
        self._check_grads()
        self.held, reduced = [], self.buffers.reduced
        for leaf in self.inputs:
            leaf.grad = None
        for leaf, k, _ in () if self.begun else self.sums:
            if reduced[k] is None:  # nothing depends on it
                reduced[k] = torch.zeros_like(leaf, requires_grad=False)
        for i in self.routes.placed:
            k = self.buffers.layout.places[i]
            if self.buffers.reduced[k] is None:
                dtype = self.buffers.folds[k].accumulator_dtype
                self.buffers.reduced[k] = torch.zeros_like(self.leaves[i], dtype=dtype, requires_grad=False)


def _after(leaf: torch.Tensor, call: Callable[[torch.Tensor], None]) -> Any:
    return leaf.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def _announce(leaf: torch.Tensor, k: int, ready: _Ready) -> Any:
    return _after(leaf, lambda _: ready(k))


def check_no_backward(leaves: Sequence[torch.Tensor | None]) -> None:
    """Raises FuncgaError if leaves that were just made have a `.grad`."""
    if any(leaf is not None and leaf.grad is not None for leaf in leaves):
        raise _ran_backward()


def _ran_backward() -> FuncgaError:
    return FuncgaError(
        "loss_fn called .backward(): the gradients that it leaves in the parameters would be added to those of the "
        "loss. Return the loss and leave that to funcga; for a gradient inside of the loss use torch.autograd.grad or "
        "torch.func.grad."
    )


def is_alone(gradient: torch.Tensor) -> bool:
    """Whether nobody else holds the memory of a gradient, nor it more than it needs."""
    storage = gradient.untyped_storage()
    alone = _private.holders(storage) == 2 and storage.nbytes() == gradient.nbytes
    return alone and storage.resizable()  # which memory that is not torch's, as that of a NumPy array, is not


def holds(dtype: torch.dtype, number: float) -> bool:
    """Whether a number loses nothing, beyond what a sum in float32 would, in this dtype."""
    return number == 1 or dtype.itemsize >= 4 or torch.tensor(number, dtype=dtype, device="cpu").item() == number


def autocasting(devices: Iterable[str]) -> list[str]:
    """The types of device, the host's and these, that autocast is on for."""
    if not _private.is_any_autocast_enabled():  # as usual
        return []
    found = {"cpu", *devices}
    return [d for d in found if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d)]
