"""What the tool uses of FullyShardedDataParallel that is private. Without one of these
module_value_and_grad refuses the module.
"""

from collections.abc import Sequence
from typing import Any

import torch

SYNCHRONISES_FSDP1 = "_sync_gradients"


def flat_param_of(module: Any) -> Any:
    """The flat parameter of a module, which all of its own are parts of; None if it has none."""
    return None if module._handle is None else module._handle.flat_param


def params_of_fsdp1(module: Any) -> list[torch.Tensor]:
    """The flat parameter of a module, and its own that are parts of it."""
    flat = flat_param_of(module)
    return [] if flat is None else [flat, *(flat._params or ())]


def groups_of_fsdp1(module: Any) -> list[Any]:
    """The group that shards, and for HYBRID_SHARD the one that replicates."""
    outer = [module._inter_node_pg] if "HYBRID" in module.sharding_strategy.name else []
    return [module.process_group, *outer]


def is_unsharded(module: Any, name: str) -> bool:
    """Whether the "data" of a flat parameter is whole, as in a pass, or its "grad", as a backward
    pass in no_sync() leaves it.
    """
    flat = flat_param_of(module)
    shapes = {getattr(getattr(flat, each, None), "shape", None) for each in ("_local_shard", name)}
    return len(shapes - {None}) > 1


def holders_of_fsdp1(module: Any) -> list[object]:
    """All objects beside the module whose attributes change in a pass, or hold tensors."""
    return [holder for holder in (module._handle, module._exec_order_data) if holder is not None]


def whole_of_flat(flat: object) -> torch.Tensor | None:
    """The memory of a whole flat parameter; None before the first pass."""
    return getattr(flat, "_full_param_padded", None)


def reset_fsdp1(roots: Sequence[Any], modules: Sequence[Any]) -> None:
    """Drops all sums, and the traces of a pass that an error has ended, as torch does at the end of
    one.
    """
    for module in modules:
        module.training_state, handle = type(module.training_state).IDLE, module._handle
        if handle is not None:
            handle._training_state, flat = type(handle._training_state).IDLE, handle.flat_param
            flat.grad = handle._post_forward_index = None
            flat.__dict__.pop("_saved_grad_shard", None)
            # The next pass has another node for it, where it computes in another dtype.
            for hook in flat.__dict__.pop("_post_backward_hook_state", ())[-1:]:
                hook.remove()
            handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = (
                handle._prefetched
            ) = False
            if getattr(flat, "_local_shard", None) is not None:  # as from the first pass on
                handle.reshard(handle.uses_sharded_strategy)
    for root in roots:
        root._post_backward_callback_queued = False
