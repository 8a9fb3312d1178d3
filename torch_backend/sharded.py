"""How FSDP1 and FSDP2 want to be driven through a window.

Only torch has this file: in JAX nothing synchronises but what the program says.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from funcga.errors import FuncgaError
from torch_backend.drivers import Plain, flagged, mark, without_sync
from torch_backend.guards import wrapper_of


class FSDP1(Plain):
    """torch.distributed.fsdp.FullyShardedDataParallel: reduce-scatters one flat gradient for each wrapped module."""

    name = "FullyShardedDataParallel"
    remedy = (
        'Keep the parameters in float32 and write module_value_and_grad(module, loss_fn, sync="every"), which sums '
        "shards in their dtype; or use fully_shard with MixedPrecisionPolicy(reduce_dtype=torch.float32)."
    )

    def _all(self) -> list[Any]:
        return [m for root in self.wrapped for m in root.modules() if wrapper_of(m) == self.name]

    def _handles(self) -> list[Any]:
        return [m._handle for m in self._all() if m._handle is not None]

    def covered(self) -> set[int]:
        """All that are in a flat parameter."""
        flat = [handle.flat_param for handle in self._handles()]
        return {id(p) for f in flat for p in (f, *(f._params or ()))}

    def holders(self) -> list[torch.Tensor]:
        """The flat parameters."""
        return [handle.flat_param for handle in self._handles()]

    def groups(self) -> list[Any]:
        """The group that shards, and for HYBRID_SHARD the one that replicates."""
        root = self.wrapped[0]
        outer = getattr(root, "_inter_node_pg", None) if "HYBRID" in root.sharding_strategy.name else None
        return [root.process_group] if outer is None else [root.process_group, outer]

    def scale(self) -> float:
        """FSDP1 averages."""
        return _size(self.groups())

    def sums_in(self, param: torch.Tensor, sync: str) -> torch.dtype:
        """While it waits it sums the gradients as they are computed, else shards in the parameter's own dtype."""
        policy = self.wrapped[0].mixed_precision
        return (policy.param_dtype or param.dtype) if sync == "last" else param.dtype

    @contextmanager
    def steering(self) -> Iterator[None]:
        """Synchronises even inside of the user's no_sync()."""
        with flagged(self._all(), "_sync_gradients", True):
            yield

    def waiting(self, sync: str) -> AbstractContextManager[None]:
        """no_sync() around forward and backward passes."""
        return without_sync(self.wrapped if sync == "last" else ())

    @contextmanager
    def synchronising(self, sync: str, params: dict[str, torch.Tensor]) -> Iterator[None]:
        """A flat parameter without a gradient in the last micro-batch would keep that of this replica alone."""
        before = [(flat, mark(flat)) for flat in self.holders() if sync == "last"]
        try:
            yield
            if not any(was is not None and mark(flat) == was for flat, was in before):
                return
        except AssertionError as error:  # which comes where it is sharded
            if "_saved_grad_shard" not in str(error):
                raise
        raise FuncgaError(
            "the last micro-batch does not use all of the module that is wrapped by FullyShardedDataParallel, and it "
            "synchronises only what that backward pass reaches. Use all wrapped parts in every micro-batch, or "
            'synchronise every one: module_value_and_grad(module, loss_fn, sync="every").'
        )

    def recover(self) -> None:
        """Drops the sums, and lets the next forward pass begin anew."""
        idle = type(self.wrapped[0].training_state).IDLE
        for m in self._all():
            m.training_state, handle = idle, m._handle
            if handle is not None:
                handle._training_state = type(handle._training_state).IDLE
                handle.flat_param.grad = None
                handle.flat_param.__dict__.pop("_saved_grad_shard", None)
                handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = handle._prefetched = False
                handle._post_forward_index = None
        for root in self.wrapped:
            root._post_backward_callback_queued = False


class FSDP2(Plain):
    """fully_shard, and the replicate that is made of it: gradients are DTensors, in memory that each pass makes."""

    name, fresh = "fully_shard", True
    remedy = (
        "Say that it sums in float32: "
        "fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))."
    )

    def __init__(self, module: nn.Module, wrapped: Sequence[Any] = ()):
        super().__init__(module, wrapped)
        self.inner = [m for root in wrapped for m in root.modules() if wrapper_of(m) in ("fully_shard", "replicate")]

    def _groups(self) -> list[Any]:
        """The groups of parameters that are communicated together."""
        return list({id(group): group for module in self.inner for group in _param_groups(module)}.values())

    def covered(self) -> set[int]:
        """All that are sharded or replicated by it."""
        self._reshard()
        return {id(param.sharded_param) for group in self._groups() for param in group.fsdp_params}

    def check(self, sync: str) -> None:
        """One set of replicas for all parameters; "outer" where there are two dimensions of them."""
        groups = self._groups()
        if len({(*map(_ranks, _process_groups(group.mesh_info)),) for group in groups}) > 1:
            raise FuncgaError(
                "parts of the module are sharded over different meshes, so that there is no one set of replicas to "
                "weigh micro-batches over. Give every fully_shard(...) the same mesh."
            )
        if not all(len(_process_groups(group.mesh_info)) == 2 for group in groups):
            super().check(sync)

    def _reshard(self) -> None:
        """Parameters may be left unsharded by the forward pass of an evaluation, and are other tensors then."""
        for module in self.inner:
            if any(not group.is_sharded for group in _param_groups(module)):
                module.reshard()

    def params(self) -> dict[str, torch.Tensor]:
        """The sharded ones, DTensors."""
        self._reshard()
        return super().params()

    def groups(self) -> list[Any]:
        """The group of the mesh, or for a mesh of two dimensions the one that shards, then the one that replicates."""
        return _process_groups(self._groups()[0].mesh_info)

    def scale(self) -> float:
        """FSDP2 averages, or divides by set_gradient_divide_factor."""
        return self._groups()[0].gradient_divide_factor or _size(self.groups())

    def sums_in(self, param: torch.Tensor, sync: str) -> torch.dtype:
        """While it waits it sums in reduce_dtype, else shards in the parameter's own dtype."""
        policy = self._groups()[0].mp_policy
        return param.dtype if sync == "every" else policy.reduce_dtype or policy.param_dtype or param.dtype

    @contextmanager
    def steering(self) -> Iterator[None]:
        """Synchronises, whatever the user has set."""
        flags = [(group, group.reduce_grads, group.all_reduce_grads) for group in self._groups()]
        ends = [m._get_fsdp_state()._state_ctx.is_last_backward for m in self.inner]
        self._require(True, True, True)
        try:
            yield
        finally:
            for group, reduce, all_reduce in flags:
                group.reduce_grads, group.all_reduce_grads = reduce, all_reduce
            for module, flag in zip(self.inner, ends, strict=True):
                module.set_is_last_backward(flag)

    @contextmanager
    def waiting(self, sync: str) -> Iterator[None]:
        """set_requires_gradient_sync, set_requires_all_reduce, set_is_last_backward."""
        self._require(sync != "last", sync == "every", False)
        try:
            yield
        finally:
            self._require(True, True, True)

    def _require(self, reduce: bool, all_reduce: bool, last: bool) -> None:
        for root in self.wrapped:
            root.set_requires_gradient_sync(reduce)
            root.set_requires_all_reduce(all_reduce)
        for module in self.inner:
            module.set_is_last_backward(last)

    def recover(self) -> None:
        """Drops the sums, and lets the next forward pass begin anew."""
        for module in self.inner:
            state: Any = module._get_fsdp_state()
            if not hasattr(module, "reset_iter_state"):
                _reset(state, _param_groups(module))
            elif state._is_root:
                module.reset_iter_state()
        for group in self._groups():
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if getattr(param, "_unsharded_param", None) is not None:
                    param._unsharded_param.grad = None


def _reset(state: Any, groups: list[Any]) -> None:
    """What reset_iter_state does, for torch 2.11."""
    idle = type(state._training_state).IDLE
    state._training_state = idle
    state._state_ctx.iter_forward_root, state._state_ctx.post_backward_final_callback_queued = None, False
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    for group in groups:
        group._training_state = idle
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._post_forward_indices.clear()
        group._to_sharded()


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has no more than one
    return groups if groups is not None else [g for g in [state._fsdp_param_group] if g is not None]


def _process_groups(mesh_info: Any) -> list[Any]:
    found = [getattr(mesh_info, f"{kind}_process_group", None) for kind in ("shard", "replicate")]
    return [group for group in found if group is not None]


def _size(groups: Sequence[Any]) -> float:
    return float(prod(group.size() for group in groups))


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
