"""What `fully_shard`, which is FSDP2, needs over a window.

Only torch has this file: in JAX nothing synchronises but what the program says.
"""

from contextlib import AbstractContextManager
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from torch_backend import _private
from torch_backend.wrapped.ddp import Flags, Wrapper, assigned


class FSDP2(Wrapper):
    """fully_shard, and the replicate that is made of it: gradients are DTensors, in memory that
    each pass makes.
    """

    fresh = in_step = takes_outer = True
    remedy = (
        "Say that it sums in float32: fully_shard(module, "
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))."
    )

    @cached_property
    def modules(self) -> list[FSDPModule]:
        """All modules that are wrapped."""
        return [m for root in self.wrapped for m in root.modules() if isinstance(m, FSDPModule)]

    @cached_property
    def param_groups(self) -> list[_private.ParamGroup]:
        """The groups of parameters that are communicated together."""
        of_modules = map(_private.param_groups, self.modules)
        return [*dict.fromkeys(group for groups in of_modules for group in groups)]

    def covered(self) -> set[int]:
        """All that are sharded or replicated by it."""
        self.reshard()
        return {
            id(param) for group in self.param_groups for param in _private.sharded_params(group)
        }

    def reshard(self) -> None:
        """Shards the parameters again. An evaluation may have left them unsharded, and they are
        other tensors then.
        """
        for module in self.modules:
            module.reshard()

    def leaves(self) -> dict[int, torch.Tensor]:
        """The unsharded parameters, which are made at the first forward pass."""
        return dict(
            pair for group in self.param_groups for pair in _private.unsharded_params(group)
        )

    @cached_property
    def groups(self) -> list[list[dist.ProcessGroup]]:
        """The group of the mesh, or for a mesh of two dimensions the one that shards, then the
        one that replicates.
        """
        return [_private.process_groups_of(group) for group in self.param_groups]

    def sums_in(self, param: torch.Tensor) -> torch.dtype:
        """Waiting passes sum in reduce_dtype. Passes that synchronise sum shards in the
        parameter's own dtype.
        """
        if self.sync == "every":
            return param.dtype
        return _private.dtype_of_sums(self.param_groups, param)

    def flags(self, syncs: bool) -> Flags:
        """Those of set_requires_gradient_sync, set_requires_all_reduce, set_is_last_backward."""
        scatters = syncs or self.sync == "outer"
        return _private.sync_flags(self.modules, self.param_groups, scatters, syncs)

    def window(self) -> AbstractContextManager[None]:
        """The context of a window: what one replica alone has used is reduced, too, if torch can do
        that.
        """
        values = [each for g in self.param_groups for each in _private.values_in_a_window(g)]
        return assigned([*self.flags(self.sync == "every"), *values])

    def synchronising(self) -> AbstractContextManager[None]:
        """Lets all parameters of a group be reduced in one dtype."""
        for group in self.param_groups if self.sync == "last" else ():
            _private.begin_sums(group)
        return super().synchronising()

    def recover(self) -> None:
        """Forgets the sums, and lets the next forward pass begin anew."""
        for module in self.modules:
            _private.reset_fsdp2(module)
        for leaf in self.leaves().values():
            leaf.grad = None
