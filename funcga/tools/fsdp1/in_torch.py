"""What `FullyShardedDataParallel`, which is FSDP1, needs over a window.

`torch_backend.wrapped` loads it by name when a module is wrapped so.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from funcga._call import supported
from funcga.errors import FuncgaError
from funcga.tools.fsdp1 import private_in_torch as private
from torch_backend import _private
from torch_backend.wrapped.ddp import Flags, Wrapper


class FSDP1(Wrapper):
    """torch.distributed.fsdp.FullyShardedDataParallel: reduce-scatters one flat gradient for
    each wrapped module.
    """

    in_step = True
    kind = supported.FSDP1
    remedy = (
        "Keep the parameters in float32 and write module_value_and_grad(module, loss_fn, "
        'sync="every"), which sums '
        "shards in their dtype; or use fully_shard with "
        "MixedPrecisionPolicy(reduce_dtype=torch.float32)."
    )

    @cached_property
    def modules(self) -> list[FullyShardedDataParallel]:
        """All modules that are wrapped."""
        return [
            module
            for root in self.wrapped
            for module in FullyShardedDataParallel.fsdp_modules(root)
        ]

    def covered(self) -> set[int]:
        """All that are in a flat parameter."""
        return {id(p) for module in self.modules for p in private.params_of_fsdp1(module)}

    def leaves(self) -> dict[int, torch.Tensor]:
        """The flat parameters."""
        flats = map(private.flat_param_of, self.modules)
        return {id(flat): flat for flat in flats if flat is not None}

    @cached_property
    def groups(self) -> list[list[Any]]:
        """The group that shards, and for HYBRID_SHARD the one that replicates."""
        return [private.groups_of_fsdp1(module) for module in self.modules]

    def sums_in(self, param: torch.Tensor) -> torch.dtype:
        """Waiting passes sum gradients in the dtype that they are computed in, others in the
        parameter's own.
        """
        for module in self.modules if self.sync == "last" else ():
            if any(param is p for p in private.params_of_fsdp1(module)):
                return module.mixed_precision.param_dtype or param.dtype
        return param.dtype

    def window(self) -> AbstractContextManager[None]:
        """The context of a window.

        Raises FuncgaError if there are unsharded sums of the user's, since FSDP1 keeps them where
        the shards go; or unsharded parameters, since some would then have no gradient.
        """
        if any(
            private.is_unsharded(module, name)
            for module in self.modules
            for name in ("grad", "data")
        ):
            raise FuncgaError(
                "the module is wrapped by FullyShardedDataParallel and has gradients of a "
                ".backward() in no_sync(), which would be reduced along with those of this call: "
                "first end that window by a backward pass outside of no_sync(), or drop it, "
                "module.zero_grad(). Or an error in an earlier pass has left its parameters "
                "unsharded, so that gradients would be missing: wrap the module anew, and load its "
                "parameters, module.load_state_dict(state)."
            )
        return super().window()

    def flags(self, syncs: bool) -> Flags:
        """That of no_sync()."""
        return [(module, private.SYNCHRONISES_FSDP1, syncs) for module in self.modules]

    @contextmanager
    def synchronising(self) -> Iterator[None]:
        """Checks that every flat parameter is reached: else its gradient would stay that of this
        replica alone. Where parameters are sharded, torch itself fails an assertion.
        """
        # With sync="every" each micro-batch has been reduced by itself, and nothing waits for the
        # last pass.
        flats = self.leaves().values() if self.sync == "last" else ()
        before = [(flat, _mark(flat)) for flat in flats if flat.grad is not None]
        yield
        if any(_mark(flat) == earlier for flat, earlier in before):
            raise FuncgaError(
                "the last micro-batch does not use all of the module that is wrapped by "
                "FullyShardedDataParallel, and it synchronises only what that backward pass "
                "reaches. Use all wrapped parts in every micro-batch, or synchronise every one: "
                'module_value_and_grad(module, loss_fn, sync="every").'
            )

    def recover(self) -> None:
        """Drops the sums, and lets the next forward pass begin anew."""
        private.reset_fsdp1(self.wrapped, self.modules)


def _mark(flat: Any) -> tuple[int, int]:
    """A mark that changes whenever a `.grad` is replaced or written to."""
    return _private.storage_key(flat.grad), _private.version(flat.grad)
