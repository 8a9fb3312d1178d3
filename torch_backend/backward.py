"""One backward pass: the gradients of a micro-batch are added where autograd computes them.

Only torch has this file: XLA fuses the sum into the loop by itself.

The accumulator of a parameter stands as the `.grad` of its leaf, and the weight is the cotangent: autograd adds every
gradient in place as soon as it is there and frees it, so that no tree of gradients ever exists; a float32 accumulator
takes a bfloat16 gradient in one mixed addition. A leaf whose fold is no sum has a hook instead, which folds its
gradient in and frees it at once.
"""

import operator
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward  # the public one spends 30 microseconds on 24 inputs

from funcga.errors import FuncgaError
from torch_backend.buffers import Buffers

_NOTHING = nullcontext()
_VERSION = operator.attrgetter("_version")


class Backward:
    """Folds the gradients of a window's leaves into its buffers; `leaves` are by their place in grad_fn's output.

    A shared cotangent needs every leaf to be scaled by it: weighted sums have the weight as cotangent where nothing
    else is folded and it is exact in the loss's dtype; else they are scaled in a hook, in the accumulator's dtype.
    """

    def __init__(self, buffers: Buffers, leaves: dict[int, torch.Tensor]):
        self.buffers, self.leaves, self.inputs = buffers, leaves, tuple(leaves.values())
        layout = buffers.layout
        self.scaled, self.plain, self.others = layout.given_scaled, layout.given_plain, layout.given_others
        self.sums: dict[int, torch.Tensor] = {}
        for i in (*self.scaled, *self.plain):
            leaf, k = leaves[i], layout.places[i]
            dtype = layout.folds[k].accumulator_dtype
            # zeros, not the first gradient, of which somebody else may hold a view
            self.sums[i] = buffers.reduced[k] = torch.zeros_like(leaf, dtype=dtype, requires_grad=False)
            if dtype != leaf.dtype:
                leaf.grad_dtype = None  # .grad may have another dtype than the leaf
        self.autocast = autocasting(*{leaf.device.type for leaf in self.inputs})
        self.restricted = True  # the pass goes to the leaves alone, not to others that loss_fn may close over
        self.attached: bool | None = None
        self._attach(True)
        self._written = sum(map(_VERSION, self.inputs))
        self.settle()

    def _attach(self, scaled: bool) -> None:
        """Lets autograd add to the accumulators, to those of weighted sums only if `scaled`."""
        if scaled != self.attached:
            for i, accumulator in self.sums.items():
                self.leaves[i].grad = accumulator if scaled or i in self.plain else None
            self.attached = scaled

    def check_untouched(self) -> None:
        """Raises FuncgaError if loss_fn ran a backward pass of its own into the parameters."""
        if sum(map(_VERSION, self.sums.values())) != self._added or any(
            self.leaves[i].grad is not None for i in self.others
        ):
            raise FuncgaError(
                "loss_fn called .backward(): the gradients that it leaves in the parameters would be added to those "
                "of the loss. Return the loss and leave that to funcga; for a gradient inside of the loss use "
                "torch.autograd.grad or torch.func.grad."
            )

    def settle(self) -> None:
        """What was added until now is right."""
        self._added = sum(map(_VERSION, self.sums.values()))

    def __call__(self, loss: torch.Tensor, weight: Any, moving: Sequence[torch.Tensor] = ()) -> None:
        """Folds the gradients of this loss in, with this weight; to the leaves `moving` it leaves them as `.grad`."""
        share = self.buffers.share(weight)
        alone = not (self.plain or self.others or moving)
        if alone and share == 0:
            return  # it adds nothing, not even a NaN
        seed = share if alone and share is not None and _holds(loss.dtype, share) else 1.0
        self._attach(share == seed)
        hooked = self.others if share == seed else [*self.others, *self.scaled]
        waiting = {*hooked}
        inputs = (*self.inputs, *moving)
        if loss.requires_grad and inputs:
            handles = [self._hook(i, weight, waiting) for i in hooked]
            try:
                self._run(loss, seed, inputs)
            finally:
                for handle in handles:
                    handle.remove()
        for i in waiting.intersection(self.others):  # what the loss does not depend on has a gradient of zeros
            self.buffers.add_leaf(i, torch.zeros_like(self.leaves[i], requires_grad=False), weight)

    def _run(self, loss: torch.Tensor, seed: float, inputs: tuple[torch.Tensor, ...]) -> None:
        """`torch.autograd.backward(loss, seed, inputs=inputs)`, outside of autocast: that is for the forward pass."""
        cotangent = torch.full_like(loss, seed, requires_grad=False)
        if not self.restricted:
            _check_closed(loss, inputs)
        with self._outside() if self.autocast else _NOTHING:
            if type(loss) is not torch.Tensor:
                torch.autograd.backward(loss, cotangent, inputs=inputs)
                return
            only = inputs if self.restricted else ()
            try:
                _engine_run_backward(
                    (loss,), (cotangent,), False, False, only, allow_unreachable=True, accumulate_grad=True
                )
            except RuntimeError as error:
                if not only or "use_reentrant" not in str(error) or self.buffers.tally.steps:
                    raise
                self.restricted = False
                torch._foreach_zero_([*self.sums.values()])
                self.settle()
                raise Reentered from None

    def _outside(self) -> ExitStack:
        stack = ExitStack()
        for device in self.autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        return stack

    def _hook(self, i: int, weight: Any, waiting: set[int]) -> Any:
        def take(leaf: torch.Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            waiting.discard(i)
            assert gradient is not None
            with torch.no_grad():
                self.buffers.add_leaf(i, gradient, weight)

        return self.leaves[i].register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Takes the accumulators from the leaves, so that the buffers alone hold them.

        Raises FuncgaError if a parameter was written to during the window.
        """
        if sum(map(_VERSION, self.inputs)) != self._written:
            raise FuncgaError(
                "a parameter was changed in place during the window, by loss_fn or by another thread: the gradients of "
                "its micro-batches belong to different parameters. Write to a copy, `p = p + ...`, and update the "
                "parameters when the window is done."
            )
        for leaf in self.inputs:
            leaf.grad = None
        self.sums.clear()


class Reentered(Exception):  # noqa: N818 - a word to the caller, and no error
    """The loss has a checkpoint that runs a backward pass of its own: do the micro-batch again."""


def _check_closed(loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    """Raises FuncgaError if an unrestricted backward pass would write to the `.grad` of others than the inputs."""
    own, seen, waiting = {id(leaf) for leaf in inputs}, set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [after for after, _ in node.next_functions]
        if id(getattr(node, "variable", inputs[0])) not in own:
            raise FuncgaError(
                "loss_fn has a checkpoint with use_reentrant=True and closes over a tensor that requires grad, other "
                "than the parameters: its .grad would be written to. Detach that tensor, or use use_reentrant=False."
            )


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Whether a number loses nothing, beyond what a sum in float32 would, in this dtype."""
    return number == 1 or dtype.itemsize >= 4 or torch.tensor(number, dtype=dtype).item() == number


def autocasting(*devices: str) -> list[str]:
    """The types of device, the host's and these, that autocast is on for."""
    return [d for d in {"cpu", *devices} if torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d)]
