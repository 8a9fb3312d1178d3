"""What is used of torch that is private: what for, which versions have it, and what happens without it.

Each name has a fallback that gives the same numbers. Other files call these through the module, as in
`_private.transforms()`: then a test can take a name away from torch and load this file again.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

# --- Backward passes ------------------------------------------------------------------------------------------------

# `torch.autograd.backward` without its checks, which take 30 microseconds for 24 inputs. Torch 2.11 to 2.13 have it.
# Without it the public function runs.
_run_anywhere: Callable[..., Any] | None = getattr(torch.autograd.graph, "_engine_run_backward", None)
# The same without a copy of the caller's context for the threads of devices: on the CPU a pass runs in the thread that
# calls it. Torch 2.11 to 2.13 have it. Without it the one above runs.
_run_on_host: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", _run_anywhere
)


def run_backward(loss: torch.Tensor, cotangent: torch.Tensor, inputs: Sequence[torch.Tensor], on_host: bool) -> None:
    """`torch.autograd.backward(loss, cotangent, inputs=inputs)`; `on_host` says that no device takes part in it."""
    run = _run_on_host if on_host else _run_anywhere
    if run is None or type(loss) is not torch.Tensor:
        torch.autograd.backward(loss, cotangent, inputs=inputs or None)
    else:
        run((loss,), (cotangent,), False, False, inputs, allow_unreachable=True, accumulate_grad=True)


# How many tensors and storages hold some memory. Torch 2.11 to 2.13 have it. Without it nobody knows who else holds a
# gradient, and each first one of a window is copied.
_use_count: Callable[[Any], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


def holders(storage: torch.UntypedStorage) -> int:
    """How many hold this memory, `storage` itself among them; 0 if torch does not tell."""
    return _use_count(storage._cdata)


# Whether autocast is on for any type of device. Torch 2.11 to 2.13 have it. Without it each type is asked.
is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

# --- Transforms -----------------------------------------------------------------------------------------------------

# How many transforms of torch.func are running. Torch 2.11 to 2.13 have it, and no public function tells. Without it a
# tensor is asked to require a gradient, which each transform refuses: then the number is only known not to be 0.
_depth: Callable[[], int] | None = getattr(getattr(torch._C, "_functorch", None), "get_dynamic_layer_stack_depth", None)


def transforms() -> int:
    """How many transforms of torch.func are running, one inside the other; 2 for some if torch does not tell."""
    if _depth is not None:
        return int(_depth())
    try:
        torch.empty(0, device="cpu").requires_grad_()
    except RuntimeError:
        return 2
    return 0


# Whether forward-mode AD says at which level it is, as torch 2.11 to 2.13 do: -1 outside of all of them. Without it a
# dual number is made, which is refused there.
_TELLS_LEVEL = hasattr(forward_ad, "_current_level")


def in_forward_mode() -> bool:
    """Whether there is a level of forward-mode AD."""
    if _TELLS_LEVEL:
        return forward_ad._current_level >= 0
    number = torch.empty(0, device="cpu")
    try:
        forward_ad.make_dual(number, number)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


# --- Tensors --------------------------------------------------------------------------------------------------------

# A number that changes with every write to a tensor in place. Every version has it, and the manual names it. Without it
# a loss that writes to its parameters, or runs a backward pass of its own, goes unnoticed.
version: Callable[[torch.Tensor], int] = (
    operator.attrgetter("_version") if hasattr(torch.Tensor, "_version") else lambda _: 0
)


def hooks_of(tensor: Any) -> Mapping[int, Callable[..., Any]] | None:
    """The hooks that `register_hook` has put on a tensor, which every version keeps there.

    Without this nobody knows of them, and they are not called.
    """
    hooks: Mapping[int, Callable[..., Any]] | None = getattr(tensor, "_backward_hooks", None)
    return hooks


def acts_on_grad(tensor: Any) -> bool:
    """Whether a tensor has a hook of `register_post_accumulate_grad_hook`; False if torch does not tell."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


# --- Modules --------------------------------------------------------------------------------------------------------

# The tables in which a module keeps its parameters, buffers and parts, in its `__dict__`. Every version has them, as
# they are in every module that was saved whole. Without them no other parameters can be put into a module: then
# `pure_loss` runs on torch.func.functional_call alone, where torch.compile traces it.
PARAMETERS, BUFFERS, PARTS = "_parameters", "_buffers", "_modules"

# What all BatchNorm layers are. Torch 2.11 to 2.13 have it. Without it they are those that torch itself has.
BatchNorm: Any = getattr(
    nn.modules.batchnorm, "_BatchNorm", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
)


def layer_and_input_of(error: BaseException) -> tuple[nn.Module | None, object]:
    """The BatchNorm layer whose forward pass has raised the error, and its input; (None, None) if it is not found.

    They are the variables `self` and `input` of `_BatchNorm.forward`. Where they have other names the error of torch
    stays as it is.
    """
    for frame, _ in walk_tb(error.__traceback__):
        layer, x = (frame.f_locals.get(name) for name in ("self", "input"))
        if isinstance(layer, BatchNorm) and isinstance(x, torch.Tensor):
            return layer, x
    return None, None


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors in the same memory have in common, and no others."""
    # Every version has `_cdata`. Without it empty tensors on a device are thought to share memory.
    storage = tensor.untyped_storage()
    key: int = getattr(storage, "_cdata", None) or storage.data_ptr()
    return key


# --- Replicas -------------------------------------------------------------------------------------------------------


def group_of_our_own(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new process group of gloo, on the processes of this one, which all of them have to make.

    `torch.distributed.new_group` would have to be called by the processes of no other group as well, and names groups
    by how many a process has, which may differ. Torch 2.11 to 2.13 have what this is made of. Without it, the result is
    the given group itself: then collectives of a loss must not be called in other orders on other replicas.
    """
    try:
        store = dist.PrefixStore("funcga", group.get_group_store())  # type: ignore[attr-defined]
        on_host = "cpu" in {device.type for device in group._device_types}
        options = group._get_backend(torch.device("cpu" if on_host else "cuda")).options
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=options._timeout)
        own = dist.ProcessGroup(store, group.rank(), group.size())
        own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        own._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    except (AttributeError, TypeError):
        return group
    return own


def collectives_called(group: dist.ProcessGroup | None = None) -> int | None:
    """How many collectives this process has called, of one group or of all; None if torch does not tell.

    Torch 2.11 to 2.13 do. Without it no loss is known to communicate: then a window in which it does needs equal
    weights on all replicas.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    try:
        groups: list[Any] = [*dist.distributed_c10d._world.pg_map] if group is None else [group]
        return sum([int(each._get_sequence_number_for_group()) for each in groups])
    except (AttributeError, RuntimeError):
        return None


# --- DTensors -------------------------------------------------------------------------------------------------------


def local_tensor(tensor: Any) -> torch.Tensor:
    """What this process holds of a DTensor, in the same memory and without a place in any graph.

    Every version keeps it there. Without it the public function gives it, which may record a graph.
    """
    held: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor.to_local().detach() if held is None else held
