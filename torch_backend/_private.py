"""What is used of torch that is private, and what for.

All versions in the table of docs/reference/versions.md have these names. Those of a tool alone
stand with the tool.
"""

import functools
import itertools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

# The versions of torch in that table, as errors name them.
TRIED = "2.13 to 2.15"

# --- Backward passes ------------------------------------------------------------------------------

# `torch.autograd.backward` without its checks, which take 30 microseconds for 24 inputs.
ENGINE: Callable[..., object] = torch.autograd.graph._engine_run_backward
# The same without a copy of the caller's context for the threads of devices: on the CPU a pass runs
# in the thread that calls it.
ENGINE_ON_HOST: Callable[..., object] = torch.autograd.Variable._execution_engine.run_backward

# The number of the backward pass that this thread runs part of; -1 if it runs none.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
# The node of the graph that this thread runs in a backward pass.
current_node: Callable[[], object] = torch._C._current_autograd_node
# Its text changes with each new kind of function that is written in Python.
KINDS_MADE: object = torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER


# Tensors that have shapes and no numbers.
FAKE = FakeTensor
# What weights are in the mode that makes them: each time another number.
NUMBERS = itertools.count(2)


# How many tensors and storages hold the memory of this storage, by its `_cdata`.
use_count: Callable[[int], int] = torch._C._storage_Use_Count
# Whether autocast is on for any type of device.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# --- Transforms -----------------------------------------------------------------------------------

# How many transforms of torch.func are running, one inside the other.
transforms: Callable[[], int] = torch._C._functorch.get_dynamic_layer_stack_depth
# The level of forward-mode AD: -1 outside of all of them.
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")

# --- Tensors --------------------------------------------------------------------------------------

# A number that changes with every write to a tensor in place, which the manual names.
version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
# The hooks that `register_hook` has put on a tensor, by number, and those of
# `register_post_accumulate_grad_hook`: None for one that never had a hook, as most are.
has_hooks: Callable[[torch.Tensor], object] = operator.attrgetter("_backward_hooks")
has_hooks_on_grad: Callable[[torch.Tensor], object] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)


# The same as torch.compile can trace them; None of other objects.
def hooks_of(tensor: object) -> dict[int, Callable[..., Any]] | None:
    """The hooks that `register_hook` has put on a tensor, by number."""
    return getattr(tensor, "_backward_hooks", None)


def acts_on_grad(tensor: object) -> bool:
    """Whether a tensor has a hook of `register_post_accumulate_grad_hook`."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def remove_hook(tensor: torch.Tensor, hook: RemovableHandle) -> None:
    """Takes a hook away, and the empty table that it leaves in the tensor: every backward pass
    would still look there, and take a few percent longer.
    """
    hook.remove()
    if tensor._backward_hooks is not None and not tensor._backward_hooks:
        tensor._backward_hooks = None


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors in the same memory have in common, and no others."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # of a sparse tensor, or of a torch.func transform
        return id(tensor)


# --- Modules --------------------------------------------------------------------------------------

# The tables in which a module keeps its parameters, buffers and parts, in its `__dict__`, as in
# every module that was saved whole.
PARAMETERS, BUFFERS, PARTS = "_parameters", "_buffers", "_modules"
# What puts tensors into a module in functional_call, which calls the module and no function of it.
with_tensors: Callable[..., Any] = nn.utils.stateless._reparametrize_module
# The hooks of `register_module_forward_pre_hook`, each under a key of its own: that makes a handle
# for each, which takes 5 microseconds.
FORWARD_PRE_HOOKS: dict[Any, Callable[..., Any]] = nn.modules.module._global_forward_pre_hooks

# --- Replicas -------------------------------------------------------------------------------------


def group_of_our_own(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new process group of gloo, on the processes of this one, which all of them have to make.

    `torch.distributed.new_group` would have to be called by the processes of no other group as
    well, and names groups by how many a process has, which may differ. Where torch is built without
    gloo, or the group's backend has no options, the result is the given group itself: then
    collectives of a loss must not be called in other orders on other replicas.
    """
    try:
        store = dist.PrefixStore("funcga", group.get_group_store())  # type: ignore[attr-defined]
        options = group._get_backend(group._device_types[0]).options
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=options._timeout)
    except (AttributeError, TypeError):
        return group
    own = dist.ProcessGroup(store, group.rank(), group.size())
    own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    own._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return own


def collectives_called(group: dist.ProcessGroup | None = None) -> int | None:
    """How many collectives this process has called, of one group or of all; None if a backend does
    not tell.

    Then no loss is known to communicate, and a window in which one does needs equal weights on all
    replicas.
    """
    try:
        groups: list[Any] = [*dist.distributed_c10d._world.pg_map] if group is None else [group]
        return sum([int(each._get_sequence_number_for_group()) for each in groups])
    except RuntimeError:
        return None


# --- DTensors -------------------------------------------------------------------------------------


# What this process holds of a DTensor, in the same memory and without a place in any graph.
local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")


# --- DistributedDataParallel ----------------------------------------------------------------------


def is_in_join(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether a call is inside of `Join`, which is refused."""
    return bool(ddp._join_config.enable)


def has_comm_hooks(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether others than DDP's own reducer communicate."""
    return bool(ddp._comm_hooks)


def unfinished(ddp: nn.parallel.DistributedDataParallel) -> str | None:
    """What the last backward pass has not reduced, in torch's words; None if it has reduced all.

    The reducer finds it out when it rebuilds its buckets, as the next forward pass would do first.
    """
    try:
        ddp.reducer._rebuild_buckets()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        return str(error)
    return None


def reset_ddp(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Makes the reducer forget a backward pass that an error has ended."""
    ddp.reducer._reset_state()


# The attribute of the state of a replicate() that says whether passes wait, as
# set_requires_gradient_sync() sets it.
WAITS_REPLICATE = "_no_sync"


def state_and_ddp(module: nn.Module) -> tuple[object, nn.parallel.DistributedDataParallel]:
    """The state of a module of `torch.distributed._composable.replicate`, and its DDP.

    Torch makes the DDP at the first forward pass, or here. Without the state there is no replicate
    either.
    """
    state: Any = sys.modules["torch.distributed._composable.replicate"].replicate.state(module)
    if state._init_args or state._init_kwargs:
        state.lazy_init()
    return state, state._ddp


# --- fully_shard, FSDP2 ---------------------------------------------------------------------------
# Without one of these module_value_and_grad refuses the module.

# Parameters that are communicated together.
ParamGroup = Any


def param_groups(module: Any) -> list[ParamGroup]:
    """The groups of a module."""
    return module._get_fsdp_state()._fsdp_param_groups  # type: ignore[no-any-return]


def sharded_params(group: ParamGroup) -> list[torch.Tensor]:
    """The DTensors."""
    return [param.sharded_param for param in group.fsdp_params]


def unsharded_params(group: ParamGroup) -> list[tuple[int, torch.Tensor]]:
    """The leaves that a forward pass computes with, none before the first; each with the id of the
    DTensor that it is gathered of.
    """
    return [
        (id(param.sharded_param), param._unsharded_param)
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
    ]


def process_groups_of(group: ParamGroup) -> list[Any]:
    """The process group that shards and the one that replicates, those that there are."""
    names = "shard_process_group", "replicate_process_group"
    groups = [getattr(group.mesh_info, name, None) for name in names]
    return [process_group for process_group in groups if process_group is not None]


def dtype_of_sums(groups: list[ParamGroup], sharded: torch.Tensor) -> torch.dtype:
    """What passes without synchronisation sum the gradients of a sharded parameter in."""
    for group in groups:
        for param in group.fsdp_params:
            if param.sharded_param is sharded:
                in_grad = sharded.grad_dtype if holds_sums_in_grad(group) else None
                policy: Any = param.mp_policy
                dtype: torch.dtype = policy.reduce_dtype or in_grad or policy.param_dtype
                return dtype or sharded.dtype
    return sharded.dtype


def values_in_a_window(group: ParamGroup) -> list[tuple[Any, str, object]]:
    """What attributes a group and its parameters have in a window, as (object, name, value).

    What one replica alone has used is reduced too, and averaged whatever
    set_gradient_divide_factor was given. What holds the sums of passes without synchronisation is
    empty: of a group, and of each parameter. From torch 2.15 on those of parameters are the `.grad`
    of the unsharded ones.
    """
    values: list[tuple[Any, str, object]] = [
        (group, "gradient_divide_factor", None),
        (group, "_partial_reduce_output", None),
        (group, "reduce_scatter_unused_params", True),
    ]
    if hasattr(group, _OUTER_LAYOUT):
        values.append((group, _OUTER_LAYOUT, {}))
    params = [] if holds_sums_in_grad(group) else group.fsdp_params
    return values + [(param, _SUM, None) for param in params]


# What passes without synchronisation have summed, of a parameter; and where the parameters lie in
# `_partial_reduce_output`, from torch 2.15 on.
_SUM, _OUTER_LAYOUT = "unsharded_accumulated_grad", "_partial_reduce_output_layout"


def holds_sums_in_grad(group: ParamGroup) -> bool:
    """Whether passes without synchronisation sum in the `.grad` of unsharded parameters."""
    return any(isinstance(vars(type(p)).get(_SUM), property) for p in group.fsdp_params)


def begin_sums(group: ParamGroup) -> None:
    """Lets parameters that have no sum yet begin with zeros, where others have one in reduce_dtype.

    Before torch 2.15 zeros of unused parameters, and first gradients, are in another dtype, and the
    two are not reduced together.
    """
    sums = [] if holds_sums_in_grad(group) else waiting_sums(group)
    dtypes = {total.dtype for total in sums if total is not None}
    for param in group.fsdp_params if dtypes else ():
        whole: torch.Tensor | None = getattr(param, "_unsharded_param", None)
        if param.unsharded_accumulated_grad is None and whole is not None and whole.requires_grad:
            zeros = torch.zeros_like(whole, dtype=param.reduce_dtype, requires_grad=False)
            param.unsharded_accumulated_grad = zeros


def waiting_sums(group: ParamGroup) -> list[torch.Tensor | None]:
    """What passes without synchronisation have summed in reduce_dtype, of each parameter."""
    return [getattr(param, _SUM, None) for param in group.fsdp_params]


def sync_flags(
    modules: list[Any], groups: list[ParamGroup], scatters: bool, syncs: bool
) -> list[tuple[Any, str, bool]]:
    """What set_requires_gradient_sync, set_requires_all_reduce and set_is_last_backward set, as
    (object, name, value).
    """
    flags = [(group, "reduce_grads", scatters) for group in groups]
    flags += [(group, "all_reduce_grads", syncs) for group in groups]
    contexts = [module._get_fsdp_state()._state_ctx for module in modules]
    return flags + [(context, "is_last_backward", syncs) for context in contexts]


def reset_fsdp2(module: Any) -> None:
    """Forgets the traces of a pass that an error has ended."""
    if module._get_fsdp_state()._is_root:
        module.reset_iter_state()


# --- Compilers ------------------------------------------------------------------------------------

# What compiles the functions that are called now, also where a function that is compiled runs this
# one as it is.
compiling: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def untraced(
    function: Callable[..., Any],
    always: bool = True,
    why: str = "funcga accumulates here; compile the loss, and not the step",
) -> Callable[..., Any]:
    """The function, which torch.compile runs as it is, and leaves out of its graph. `always`: also
    where nothing that calls it is compiled now.
    """
    is_compiled = torch.compiler.is_compiling()
    if is_compiled:
        torch._dynamo.graph_break(f"{why}")  # of a variable torch.compile would not read the text
    # torch.compiler.disable imports torch._dynamo, which takes seconds. Without it nothing is
    # compiled.
    is_compiled = is_compiled or always or callable(compiling())
    if not is_compiled or "torch._dynamo" not in sys.modules:
        return function
    untraced: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return untraced


# --- Trees ----------------------------------------------------------------------------------------

# Trees as torch.func, torch.compile and torch.export walk them, with the classes that anyone has
# registered. There is no public module.
pytree = torch.utils._pytree
