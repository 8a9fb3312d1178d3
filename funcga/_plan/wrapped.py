"""What a plan asks of what DDP or FSDP has put around a module: where it keeps tensors and the
traces of passes, and what it holds.

Only torch has this file: in JAX nothing is reduced but by the program.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from torch_backend import _private
from torch_backend.wrapped.ddp import Wrapper


class Unwrapped:
    """What a plan asks, of a module that nothing wraps; `wrapper` knows how it is wrapped."""

    def __init__(self, wrapper: Any = None):
        self.wrapper = wrapper

    def holders(self) -> list[object]:
        """What has tensors, and traces of passes, as attributes beside the modules."""
        return []

    def begin(self) -> None:
        """Makes ready for a window that is planned: all `holders`, and the modules, have stand-ins
        for their tensors.

        Nothing is sent in it, and afterwards all of their attributes are as before.
        """

    def held(self) -> dict[str, list[torch.Tensor]]:
        """What it holds beside the parameters, and gradients in their shapes here, by the name
        in a plan.
        """
        return {}


class _DDP(Unwrapped):
    def holders(self) -> list[object]:
        return [part for ddp in self.wrapper.wrapped for part in ddp.modules()]

    def begin(self) -> None:
        for ddp in self.wrapper.wrapped:
            reducer = _Reducer(ddp)
            # No buffers are broadcast.
            vars(ddp).update(reducer=reducer, logger=reducer, modules_buffers=[])

    def held(self) -> dict[str, list[torch.Tensor]]:
        # They are as large as all gradients.
        return {"buckets": [each for ddp in self.wrapper.wrapped for each in ddp.reducer.buckets]}


class _Reducer:
    """In the place of the reducer of a DDP, which is not written in Python: it has buckets, puts
    gradients into them, and sends nothing.
    """

    def __init__(self, ddp: nn.parallel.DistributedDataParallel):
        self.ddp, self.buckets = ddp, list[torch.Tensor]()
        for name, p in ddp.module.named_parameters():
            if p.requires_grad and name not in ddp.parameters_to_ignore:
                bucket = torch.zeros_like(p, requires_grad=False)
                p.register_post_accumulate_grad_hook(partial(self._reduce, bucket))
                self.buckets.append(bucket)

    def _reduce(self, bucket: torch.Tensor, p: torch.Tensor) -> None:
        if self.ddp.require_backward_grad_sync and p.grad is not None:
            bucket.copy_(p.grad)
            if self.ddp.gradient_as_bucket_view:
                p.grad = bucket.view_as(bucket)

    def __getattr__(self, name: str) -> Any:
        # Whatever else DDP tells its reducer, and its logger.
        return lambda *args: None


class _FSDP1(Unwrapped):
    def holders(self) -> list[object]:
        return [each for part in self.wrapper.parts for each in _private.holders_of_fsdp1(part)]

    def held(self) -> dict[str, list[torch.Tensor]]:
        parts = self.wrapper.parts
        wholes = [whole for part in parts for whole in _private.whole_of_fsdp1(part)]
        summed = [part for part in parts if _private.has_unsharded_sum(part)]
        sums = [_private.flat_param_of(part).grad for part in summed]
        return {"unsharded parameters": wholes, "unsharded gradients": sums}


class _FSDP2(Unwrapped):
    def holders(self) -> list[object]:
        return [each for part in self.wrapper.parts for each in _private.holders_of_fsdp2(part)]

    def begin(self) -> None:
        # The first pass makes new ones.
        for part in self.wrapper.parts:
            _private.forget_unsharded(part)

    def held(self) -> dict[str, list[torch.Tensor]]:
        wholes = self.wrapper.leaves()
        waiting = [each for part in self.wrapper.parts for each in _private.waiting_sums(part)]
        sums = [each for each in (*waiting, *[p.grad for p in wholes]) if each is not None]
        return {"unsharded parameters": wholes, "unsharded gradients": sums}


_OF = {"DDP": _DDP, "Replicate": _DDP, "FSDP1": _FSDP1, "FSDP2": _FSDP2}


def planned(wrapper: Wrapper | None) -> Unwrapped:
    """What a plan asks of what wraps a module, or of nothing."""
    # By name: the file of a wrapper is loaded only when a module is wrapped.
    return Unwrapped() if wrapper is None else _OF[type(wrapper).__name__](wrapper)
