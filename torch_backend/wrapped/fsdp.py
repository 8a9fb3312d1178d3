"""How FSDP1 and FSDP2 want to be driven through a window.

Only torch has this file: in JAX nothing synchronises but what the program says.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from funcga.errors import FuncgaError
from torch_backend.modules.checks import kind_of
from torch_backend.wrapped.ddp import Plain, flagged, mark, without_sync


class FSDP1(Plain):
    """torch.distributed.fsdp.FullyShardedDataParallel: reduce-scatters one flat gradient for each wrapped module."""

    name, in_step = "FullyShardedDataParallel", True
    remedy = (
        'Keep the parameters in float32 and write module_value_and_grad(module, loss_fn, sync="every"), which sums '
        "shards in their dtype; or use fully_shard with MixedPrecisionPolicy(reduce_dtype=torch.float32)."
    )

    def _all(self) -> list[Any]:
        return [m for root in self.wrapped for m in root.modules() if (kind := kind_of(m)) and kind.name == self.name]

    def _handles(self) -> list[Any]:
        return [m._handle for m in self._all() if m._handle is not None]

    def covered(self) -> set[int]:
        """All that are in a flat parameter."""
        flat = [handle.flat_param for handle in self._handles()]
        return {id(p) for f in flat for p in (f, *(f._params or ()))}

    def holders(self) -> list[torch.Tensor]:
        """The flat parameters."""
        return [handle.flat_param for handle in self._handles()]

    def part_groups(self) -> list[list[Any]]:
        """The group that shards, and for HYBRID_SHARD the one that replicates."""
        found = []
        for m in self._all():
            outer = getattr(m, "_inter_node_pg", None) if "HYBRID" in m.sharding_strategy.name else None
            found.append([m.process_group] if outer is None else [m.process_group, outer])
        return found

    def sums_in(self, param: torch.Tensor, sync: str) -> torch.dtype:
        """While it waits it sums the gradients as they are computed, else shards in the parameter's own dtype."""
        if sync != "last":
            return param.dtype
        for m in self._all():
            flat = m._handle and m._handle.flat_param
            if flat is not None and any(param is p for p in (flat, *(flat._params or ()))):
                return m.mixed_precision.param_dtype or param.dtype
        return param.dtype

    def aside(self) -> AbstractContextManager[None]:
        """Raises FuncgaError if there are sums that are not synchronised, which FSDP1 has in the place of shards."""
        for handle in self._handles():
            flat = handle.flat_param
            if handle.uses_sharded_strategy and flat.grad is not None and flat.grad.shape != flat._local_shard.shape:
                raise FuncgaError(
                    "the module is wrapped by FullyShardedDataParallel and has gradients of a .backward() in "
                    "no_sync(), which would be reduced along with those of this call. First end that window by a "
                    "backward pass outside of no_sync(), or drop it: module.zero_grad()."
                )
        return nullcontext()

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

    name, fresh, in_step = "fully_shard", True, True
    remedy = (
        "Say that it sums in float32: "
        "fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))."
    )

    def __init__(self, module: nn.Module, wrapped: Sequence[Any] = ()):
        super().__init__(module, wrapped)
        self.inner = [
            m
            for root in wrapped
            for m in root.modules()
            if (kind := kind_of(m)) and kind.name in ("fully_shard", "replicate")
        ]

    def _groups(self) -> list[Any]:
        """The groups of parameters that are communicated together."""
        return list({id(group): group for module in self.inner for group in _param_groups(module)}.values())

    def covered(self) -> set[int]:
        """All that are sharded or replicated by it."""
        self._reshard()
        return {id(param.sharded_param) for group in self._groups() for param in group.fsdp_params}

    def _reshard(self) -> None:
        """Parameters may be left unsharded by the forward pass of an evaluation, and are other tensors then."""
        for module in self.inner:
            if any(not group.is_sharded for group in _param_groups(module)):
                module.reshard()

    def params(self) -> dict[str, torch.Tensor]:
        """The sharded ones, DTensors."""
        self._reshard()
        return super().params()

    def has_outer(self) -> bool:
        """Where the mesh has two dimensions."""
        return all(len(groups) == 2 for groups in self.part_groups())

    def part_groups(self) -> list[list[Any]]:
        """The group of the mesh, or for a mesh of two dimensions the one that shards, then the one that replicates."""
        return [_process_groups(group.mesh_info) for group in self._groups()]

    def scales(self, params: Iterable[torch.Tensor]) -> list[float]:
        """FSDP2 averages, or divides by set_gradient_divide_factor, which each part may have of its own."""
        scale = self.scale()
        divided = {
            id(p.sharded_param): group.gradient_divide_factor
            for group in self._groups() if group.gradient_divide_factor is not None
            for p in group.fsdp_params
        }  # fmt: skip
        return [divided.get(id(param), scale) for param in params]

    def sums_in(self, param: torch.Tensor, sync: str) -> torch.dtype:
        """While it waits it sums in reduce_dtype, else shards in the parameter's own dtype."""
        if sync == "every":
            return param.dtype
        group = next(g for g in self._groups() if any(p.sharded_param is param for p in g.fsdp_params))
        return group.mp_policy.reduce_dtype or group.mp_policy.param_dtype or param.dtype

    def graph_leaves(self) -> list[torch.Tensor]:
        """The unsharded ones, which are made at the first forward pass."""
        params = [param for group in self._groups() for param in group.fsdp_params]
        return [param._unsharded_param for param in params if hasattr(param, "_unsharded_param")]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What backward passes without synchronisation have summed, in the three places where FSDP2 keeps it."""
        places: list[tuple[Any, str]] = [(tensor, "grad") for tensor in self.graph_leaves()]
        for group in self._groups():
            places.append((group, "_partial_reduce_output"))
            places += [(param, "unsharded_accumulated_grad") for param in group.fsdp_params]
        before = [(where, name, getattr(where, name)) for where, name in places]
        for where, name, _ in before:
            setattr(where, name, None)
        try:
            yield
        finally:
            for where, name, value in before:
                setattr(where, name, value)

    @contextmanager
    def steering(self) -> Iterator[None]:
        """Synchronises, whatever the user has set, and what one replica alone has used too, if torch can do that."""
        unused = "reduce_scatter_unused_params"
        groups = [group for group in self._groups() if hasattr(group, unused)]
        with flagged(groups, unused, True), self._synchronised():
            yield

    @contextmanager
    def _synchronised(self) -> Iterator[None]:
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
