"""What a plan asks of what DDP or FSDP has put around a module: where it keeps tensors and the
traces of passes, and what it holds.

Only torch has this file: in JAX nothing is reduced but by the program.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from funcga._tools import load
from funcga.tools.plan import private_in_torch
from torch_backend import _private

Held = dict[str, list[torch.Tensor | None]]
"""Tensors, those that are there already, by what they are called in a plan."""


@dataclass(frozen=True)
class Unwrapped:
    """What a plan asks of a module that nothing wraps."""

    wrapper: Any = None

    def holders(self) -> list[object]:
        """What has tensors, and traces of passes, as attributes beside the modules."""
        return []

    def begin(self) -> None:
        """Makes ready for a window that is planned: all `holders`, and the modules, have stand-ins
        for their tensors.

        Nothing is sent in it, and afterwards all of their attributes are as before.
        """

    def held(self) -> Held:
        """What it holds beside the parameters, and gradients in their shapes here."""
        return {}


class _DDP(Unwrapped):
    def holders(self) -> list[object]:
        return [part for ddp in self.wrapper.wrapped for part in ddp.modules()]

    def begin(self) -> None:
        for ddp in self.wrapper.wrapped:
            reducer = _Reducer(ddp)
            # No buffers are broadcast.
            vars(ddp).update(reducer=reducer, logger=reducer, modules_buffers=[])

    def held(self) -> Held:
        # They are as large as all gradients.
        return {"buckets": [each for ddp in self.wrapper.wrapped for each in ddp.reducer.buckets]}


class _Reducer:
    """In the place of the reducer of a DDP, which is not written in Python: it has buckets, puts
    gradients into them, and sends nothing.
    """

    def __init__(self, ddp: nn.parallel.DistributedDataParallel):
        self.ddp, self.buckets, self.nodes = ddp, list[torch.Tensor](), list[Node]()
        for name, p in ddp.module.named_parameters():
            if p.requires_grad and name not in ddp.parameters_to_ignore:
                bucket = torch.zeros_like(p, requires_grad=False)
                node = get_gradient_edge(p).node
                node.register_hook(partial(self._reduce, bucket, p))
                self.nodes.append(node)  # it lives as long as the reducer
                self.buckets.append(bucket)

    def _reduce(self, bucket: torch.Tensor, p: torch.Tensor, *gradients: object) -> None:
        if self.ddp.require_backward_grad_sync and p.grad is not None:
            bucket.copy_(p.grad)
            if self.ddp.gradient_as_bucket_view:
                p.grad = bucket.view_as(bucket)

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Whatever else DDP tells its reducer, and its logger.
        return lambda *args: None


class _FSDP1(Unwrapped):
    @property
    def private(self) -> Any:
        """What the tool knows of FSDP1, by name alone, as it may be taken away."""
        return load("fsdp1.private_in_torch", "a plan of FullyShardedDataParallel")

    def holders(self) -> list[object]:
        return [*chain.from_iterable(map(self.private.holders_of_fsdp1, self.wrapper.modules))]

    def held(self) -> Held:
        private = self.private
        flats = [
            private.flat_param_of(module)
            for module in self.wrapper.modules
            if private.is_unsharded(module, "grad")
        ]
        return {
            "unsharded parameters": [*map(private.whole_of_flat, self.wrapper.leaves().values())],
            "unsharded gradients": [flat.grad for flat in flats],
        }


class _FSDP2(Unwrapped):
    def holders(self) -> list[object]:
        return [*chain.from_iterable(map(private_in_torch.holders_of_fsdp2, self.wrapper.modules))]

    def begin(self) -> None:
        # The first pass makes new ones.
        for group in self.wrapper.param_groups:
            private_in_torch.forget_unsharded(group)

    def held(self) -> Held:
        groups, wholes = self.wrapper.param_groups, [*self.wrapper.leaves().values()]
        waiting = [each for group in groups for each in _private.waiting_sums(group)]
        gradients = [*waiting, *[whole.grad for whole in wholes]]
        return {"unsharded parameters": wholes, "unsharded gradients": gradients}


# By the name of the core's class: its file is loaded only when a module is wrapped.
OF_WRAPPER = {"DDP": _DDP, "Replicate": _DDP, "FSDP1": _FSDP1, "FSDP2": _FSDP2}
"""What a plan asks of what wraps a module."""
