"""What is used of torch that is private: what for, and what happens without it.

All versions in the table of docs/reference/versions.md have all of these names:
tests/torch_backend/test_private.py says so in each. For those to come, each name has a fallback
that gives the same numbers, and is read by `_attribute`, which says what stands in for it. Other
files call these through the module, as in `_private.transforms()`: then a test can take a name away
from torch and load this file again.
"""

import functools
import inspect
import itertools
import operator
import sys
import types
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from traceback import walk_tb
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

T = TypeVar("T")

# The versions of torch in that table, as errors name them.
TRIED = "2.13 to 2.15"


def _attribute(owner: object, path: str, otherwise: T) -> T:
    """What stands at a dotted path below an object of torch; `otherwise` in a version that has
    no such name.
    """
    try:
        return operator.attrgetter(path)(owner)  # type: ignore[no-any-return]
    except AttributeError:
        return otherwise


def _reader(*names: str, otherwise: T) -> Callable[[torch.Tensor], T]:
    """A function that reads these attributes of a tensor, as a tuple if there are several."""
    read: Callable[[object], Any] = operator.attrgetter(*names)
    try:
        read(torch.Tensor)
    except AttributeError:
        return lambda _: otherwise
    return read


# --- Backward passes ------------------------------------------------------------------------------


def _run_publicly(
    losses: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    keeps_graph: bool,
    makes_graph: bool,
    leaves: Sequence[torch.Tensor],
    **how: bool,
) -> None:
    torch.autograd.backward(losses, cotangents, keeps_graph, makes_graph, inputs=leaves or None)


# `torch.autograd.backward` without its checks, which take 30 microseconds for 24 inputs. Without it
# the public function runs.
ENGINE: Callable[..., object] = _attribute(
    torch.autograd.graph, "_engine_run_backward", _run_publicly
)
# The same without a copy of the caller's context for the threads of devices: on the CPU a pass runs
# in the thread that calls it.
ENGINE_ON_HOST: Callable[..., object] = _attribute(
    torch.autograd.Variable, "_execution_engine.run_backward", ENGINE
)


def run_backward(
    loss: torch.Tensor, cotangent: torch.Tensor, leaves: tuple[torch.Tensor, ...], on_host: bool
) -> None:
    """`torch.autograd.backward(loss, cotangent, inputs=leaves)`; `on_host` says that no device
    takes part in it.
    """
    run = ENGINE_ON_HOST if on_host else ENGINE
    if type(loss) is not torch.Tensor:
        run = _run_publicly
    how = {"allow_unreachable": True, "accumulate_grad": True}
    run((loss,), (cotangent,), False, False, leaves, **how)


# The number of the backward pass that this thread runs part of; -1 if it runs none, or if torch
# does not tell.
graph_task: Callable[[], int] = _attribute(torch._C, "_current_graph_task_id", lambda: -1)


# The node of the graph that this thread runs in a backward pass; None if torch does not tell: then
# functions written in Python that run a module are not recognised.
current_node: Callable[[], object] = _attribute(torch._C, "_current_autograd_node", lambda: None)


class _Ever:
    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __repr__(self) -> str:
        return str(next(self.numbers))


# Its text changes with each new kind of function that is written in Python. Without it the table of
# these is read each time.
KINDS_MADE: Any = _attribute(torch.autograd.function, "AUTOGRAD_FUNCTION_COUNTER", _Ever())


def in_backward() -> bool:
    """Whether this thread runs part of a backward pass; False if torch does not tell."""
    return graph_task() != -1


# Tensors that have shapes and no numbers, and the mode that makes them. Without them nothing can be
# planned.
FAKE: type | None = _attribute(torch, "_subclasses.fake_tensor.FakeTensor", None)
_FAKE_MODE: Callable[..., Any] | None = _attribute(
    torch, "_subclasses.fake_tensor.FakeTensorMode", None
)
# What weights are in such a mode: each time another number.
NUMBERS = itertools.count(2)


def fake_mode() -> Any | None:
    """A mode in which nothing is allocated and no kernel runs; None if this version has none."""
    return None if _FAKE_MODE is None else _FAKE_MODE(allow_non_fake_inputs=True)


def is_for_lack_of_numbers(error: BaseException) -> bool:
    """Whether an error is that of such a mode: it was asked for a number, or runs no such
    operator.
    """
    return type(error).__module__.startswith(("torch._subclasses", "torch.fx.experimental"))


def sends_no_fakes() -> bool:
    """Whether a collective of such tensors returns at once and sends nothing.

    Where it does not, no module that is wrapped can be planned.
    """
    has_kernel: Callable[..., bool] = _attribute(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False
    )
    names = "allreduce_", "_allgather_base_", "_reduce_scatter_base_", "allgather_", "broadcast_"
    return all(has_kernel(f"c10d::{name}", "Meta") for name in names)


def stand_in(weight: Any) -> Any:
    """A number for a tensor on the host that has none: True, or one that weighs differently each
    time.
    """
    if weight.device.type != "cpu":
        return weight
    return True if weight.dtype == torch.bool else next(NUMBERS)


# How many tensors and storages hold the memory of this storage, by its `_cdata`. Without it nobody
# knows who else holds a gradient, and each first one of a window is copied.
use_count: Callable[[int], int] = _attribute(torch._C, "_storage_Use_Count", lambda _: 0)

# Whether autocast is on for any type of device. Without it each type is asked.
is_any_autocast_enabled: Callable[[], bool] = _attribute(
    torch._C, "_is_any_autocast_enabled", lambda: True
)

# --- Transforms -----------------------------------------------------------------------------------


def _transforms_found_out() -> int:
    try:
        torch.empty(0, device="cpu").requires_grad_()
    except RuntimeError:
        return 2
    return 0


# How many transforms of torch.func are running, one inside the other. Without it a tensor is asked
# to require a gradient, which each transform refuses: then it is 2 for some.
transforms: Callable[[], int] = _attribute(
    torch._C, "_functorch.get_dynamic_layer_stack_depth", _transforms_found_out
)


def _probed_level() -> int:
    number = torch.empty(0, device="cpu")
    try:
        forward_ad.make_dual(number, number)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return -1
    return 0


# The level of forward-mode AD: -1 outside of all of them. Without it a dual number is made, which
# is refused there.
forward_level: Callable[[], int] = (
    _probed_level
    if _attribute(forward_ad, "_current_level", None) is None
    else functools.partial(getattr, forward_ad, "_current_level")
)


# --- Tensors --------------------------------------------------------------------------------------

# A number that changes with every write to a tensor in place, which the manual names. Without it a
# loss that writes to its parameters, or runs a backward pass of its own, goes unnoticed.
version: Callable[[torch.Tensor], int] = _reader("_version", otherwise=0)


def hooks_of(tensor: object) -> MutableMapping[int, Callable[..., Any]] | None:
    """The hooks that `register_hook` has put on a tensor, by number.

    Without this nobody knows of them, and they are not called.
    """
    return _attribute(tensor, "_backward_hooks", None)


def acts_on_grad(tensor: object) -> bool:
    """Whether a tensor has a hook of `register_post_accumulate_grad_hook`; False if torch does
    not tell.
    """
    return bool(_attribute(tensor, "_post_accumulate_grad_hooks", None))


def remove_hook(tensor: torch.Tensor, hook: RemovableHandle) -> None:
    """Takes a hook away, and the empty table that it leaves in the tensor: every backward pass
    would still look there.

    Without this a backward pass takes a few percent longer.
    """
    hook.remove()
    if hooks_of(tensor) is not None and not hooks_of(tensor):
        tensor._backward_hooks = None


# Whether a tensor has such hooks, at a glance: None for one that never had a hook, as most are.
# Without these each tensor is looked at.
has_hooks: Callable[[torch.Tensor], object] = _reader("_backward_hooks", otherwise=True)
has_hooks_on_grad: Callable[[torch.Tensor], object] = _reader(
    "_post_accumulate_grad_hooks", otherwise=True
)


# --- Modules --------------------------------------------------------------------------------------

# The tables in which a module keeps its parameters, buffers and parts, in its `__dict__`, as in
# every module that was saved whole. Without them no other parameters can be put into a module: then
# `pure_loss` runs on torch.func.functional_call alone, where torch.compile traces it.
PARAMETERS, BUFFERS, PARTS = "_parameters", "_buffers", "_modules"


# What all BatchNorm layers are. Without it they are those that torch itself has.
BatchNorm: Any = _attribute(
    nn.modules.batchnorm,
    "_BatchNorm",
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)


def layer_and_input_of(error: BaseException) -> tuple[nn.Module | None, object]:
    """The BatchNorm layer whose forward pass has raised the error, and its input; (None, None) if
    it is not found.

    They are the variables `self` and `input` of `_BatchNorm.forward`. Where they have other names
    the error of torch stays as it is.
    """
    for frame, _ in walk_tb(error.__traceback__):
        layer, x = (frame.f_locals.get(name) for name in ("self", "input"))
        if isinstance(layer, BatchNorm) and isinstance(x, torch.Tensor):
            return layer, x
    return None, None


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors in the same memory have in common, and no others."""
    # Without `_cdata` empty tensors on a device are thought to share memory.
    storage = tensor.untyped_storage()
    try:
        return int(storage._cdata)
    except AttributeError:
        return storage.data_ptr()


# Whether a tensor tells which one it is a view of. Without it two tensors with one storage are
# taken for views of the same.
_TELLS_BASE = _attribute(torch.Tensor, "_base", None) is not None


def is_view_of_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one, or one is a view of the other, or both are views of a third."""
    if not _TELLS_BASE:
        return storage_key(tensor) == storage_key(other)
    bases = [each if each._base is None else each._base for each in (tensor, other)]
    return bases[0] is bases[1]


# --- Replicas -------------------------------------------------------------------------------------


def group_of_our_own(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new process group of gloo, on the processes of this one, which all of them have to make.

    `torch.distributed.new_group` would have to be called by the processes of no other group as
    well, and names groups by how many a process has, which may differ. Without what this is made
    of, the result is the given group itself: then collectives of a loss must not be called in other
    orders on other replicas.
    """
    try:
        store = dist.PrefixStore("funcga", group.get_group_store())  # type: ignore[attr-defined]
        options = group._get_backend(group._device_types[0]).options
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=options._timeout)
        own = dist.ProcessGroup(store, group.rank(), group.size())
        own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        own._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    except (AttributeError, TypeError):
        return group
    return own


def collectives_called(group: dist.ProcessGroup | None = None) -> int | None:
    """How many collectives this process has called, of one group or of all; None if torch does not
    tell.

    Then no loss is known to communicate, and a window in which one does needs equal weights on all
    replicas.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    try:
        groups: list[Any] = [*dist.distributed_c10d._world.pg_map] if group is None else [group]
        return sum([int(each._get_sequence_number_for_group()) for each in groups])
    except (AttributeError, RuntimeError):
        return None


# --- DTensors -------------------------------------------------------------------------------------


def local_tensor(tensor: Any) -> torch.Tensor:
    """What this process holds of a DTensor, in the same memory and without a place in any graph.

    Without its attribute the public function gives it, which may record a graph.
    """
    try:
        shard: torch.Tensor = tensor._local_tensor
    except AttributeError:
        shard = tensor.to_local().detach()
    return shard


# --- DistributedDataParallel ----------------------------------------------------------------------


def is_in_join(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether a call is inside of `Join`, which is refused, if torch tells."""
    return bool(_attribute(ddp, "_join_config.enable", False))


def has_comm_hooks(ddp: nn.parallel.DistributedDataParallel) -> bool:
    """Whether others than DDP's own reducer communicate; if torch does not tell, True: then
    nobody listens to it.
    """
    return bool(_attribute(ddp, "_comm_hooks", True))


def is_finished(ddp: nn.parallel.DistributedDataParallel, guess: bool) -> bool:
    """Whether the last backward pass has reduced every gradient.

    The reducer finds it out when it rebuilds its buckets, as the next forward pass would do first.
    Without it every parameter is thought to need a gradient, unless find_unused_parameters=True:
    the `guess`.
    """
    rebuild: Callable[[], object] | None = _attribute(ddp.reducer, "_rebuild_buckets", None)
    if rebuild is None:
        return guess or ddp.find_unused_parameters
    try:
        rebuild()
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        return False
    return True


def reset_ddp(ddp: nn.parallel.DistributedDataParallel) -> None:
    """Makes the reducer forget a backward pass that an error has ended.

    Without this the next forward pass raises an error of torch's own.
    """
    _attribute(ddp.reducer, "_reset_state", lambda: None)()


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


# --- FullyShardedDataParallel, FSDP1 --------------------------------------------------------------
# Without one of these module_value_and_grad refuses the module.

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
    shapes = {_attribute(flat, f"{each}.shape", None) for each in ("_local_shard", name)}
    return len(shapes - {None}) > 1


def holders_of_fsdp1(module: Any) -> list[object]:
    """All objects beside the module whose attributes change in a pass, or hold tensors."""
    return [holder for holder in (module._handle, module._exec_order_data) if holder is not None]


def whole_of_flat(flat: object) -> torch.Tensor | None:
    """The memory of a whole flat parameter; None before the first pass."""
    return _attribute(flat, "_full_param_padded", None)


def says_that_a_shard_is_missing(error: AssertionError) -> bool:
    """Whether the last backward pass did not come to a flat parameter, which is found out when
    all are sharded.
    """
    return "_saved_grad_shard" in str(error)


def reset_fsdp1(roots: Sequence[Any], modules: Sequence[Any]) -> None:
    """Drops all sums, and the traces of a pass that an error has ended, as torch does at the end of
    one. Without `reshard` parameters stay unsharded.
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
            if _attribute(flat, "_local_shard", None) is not None:  # as from the first pass on
                _attribute(handle, "reshard", bool)(handle.uses_sharded_strategy)
    for root in roots:
        root._post_backward_callback_queued = False


# --- fully_shard, FSDP2 ---------------------------------------------------------------------------
# Without one of these module_value_and_grad refuses the module.

# Parameters that are communicated together.
ParamGroup = Any


def param_groups(module: Any) -> list[ParamGroup]:
    """The groups of a module."""
    return module._get_fsdp_state()._fsdp_param_groups  # type: ignore[no-any-return]


def is_sharded(group: ParamGroup) -> bool:
    """Whether the module's own parameters are the sharded ones now."""
    return bool(group.is_sharded)


def sharded_params(group: ParamGroup) -> list[torch.Tensor]:
    """The DTensors."""
    return [param.sharded_param for param in group.fsdp_params]


def unsharded_params(group: ParamGroup) -> list[torch.Tensor]:
    """The leaves that a forward pass computes with; none before the first."""
    params: list[torch.Tensor | None] = [
        _attribute(param, "_unsharded_param", None) for param in group.fsdp_params
    ]
    return [param for param in params if param is not None]


def process_groups_of(group: ParamGroup) -> list[Any]:
    """The process group that shards and the one that replicates, those that there are."""
    groups = [
        _attribute(group.mesh_info, f"{kind}_process_group", None)
        for kind in ("shard", "replicate")
    ]
    return [process_group for process_group in groups if process_group is not None]


def dtype_of_sums(group: ParamGroup, sharded: torch.Tensor) -> torch.dtype | None:
    """What passes without synchronisation sum the gradients of a sharded parameter in; None for its
    own dtype.
    """
    (policy,) = [param.mp_policy for param in group.fsdp_params if param.sharded_param is sharded]
    in_grad = sharded.grad_dtype if holds_sums_in_grad(group) else None
    return policy.reduce_dtype or in_grad or policy.param_dtype


def values_in_a_window(group: ParamGroup) -> list[tuple[Any, str, object]]:
    """What attributes a group and its parameters have in a window, as (object, name, value).

    What one replica alone has used is reduced too, and averaged whatever
    set_gradient_divide_factor was given. What holds the sums of passes without synchronisation is
    empty: of a group, and of each parameter. From torch 2.15 on those of parameters are the `.grad`
    of the unsharded ones.
    """
    reduced = "reduce_grads", "all_reduce_grads", "reduce_scatter_unused_params"
    others = "gradient_divide_factor", "_partial_reduce_output"
    values: list[tuple[Any, str, object]] = [(group, name, True) for name in reduced]
    values += [(group, name, None) for name in others]
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
        whole: torch.Tensor | None = _attribute(param, "_unsharded_param", None)
        if param.unsharded_accumulated_grad is None and whole is not None and whole.requires_grad:
            zeros = torch.zeros_like(whole, dtype=param.reduce_dtype, requires_grad=False)
            param.unsharded_accumulated_grad = zeros


def holders_of_fsdp2(module: Any) -> list[object]:
    """All objects whose attributes change in a pass, or hold tensors."""
    state, groups = module._get_fsdp_state(), param_groups(module)
    of_groups = [each for group in groups for each in (group, group.comm_ctx, *group.fsdp_params)]
    return [state, state._state_ctx, state._comm_ctx, *of_groups]


def forget_unsharded(group: ParamGroup) -> None:
    """Drops the unsharded parameters of a group, as if there had been no pass."""
    group._reset_sharded_params = True  # else it compares addresses of the shards
    for param in group.fsdp_params:
        param.all_gather_outputs, param._unsharded_inner_tensors = [], []
        vars(param).pop("_unsharded_param", None)


def waiting_sums(group: ParamGroup) -> list[torch.Tensor | None]:
    """What passes without synchronisation have summed in reduce_dtype, of each parameter."""
    return [_attribute(param, _SUM, None) for param in group.fsdp_params]


def last_backward_flag(module: Any) -> tuple[Any, str, bool]:
    """The attribute that set_is_last_backward sets, as (object, name, value)."""
    return module._get_fsdp_state()._state_ctx, "is_last_backward", True


def reset_fsdp2(module: Any) -> None:
    """Drops the traces of a pass that an error has ended."""
    if module._get_fsdp_state()._is_root:
        module.reset_iter_state()


# --- Compilers ------------------------------------------------------------------------------------

# What compiles the functions that are called now, also where a function that is compiled runs this
# one as it is. Without it a module_value_and_grad inside of a compiled function runs as it is,
# uncompiled.
compiling: Callable[[], object] = _attribute(
    torch._C, "_dynamo.eval_frame.get_eval_frame_callback", lambda: None
)


class Compiled(NamedTuple):
    """What torch.compile has made of a `function`: `compile(other)` compiles another one with the
    same options.

    `compile_whole` compiles one as a whole, that is, it refuses what it cannot trace. `replays`:
    whether calls are captured as CUDA graphs.
    """

    function: Callable[..., Any]
    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    compile_whole: Callable[[Callable[..., Any]], Callable[..., Any]]
    replays: bool


def compiled_of(function: object) -> Compiled | None:
    """The Compiled of a function that torch.compile has made; None for any other.

    The function that it returns holds its options, in a variable of its own. Without that no
    function is known to be compiled: then autograd adds the gradients of a compiled loss.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")  # without it nothing is compiled
    if frames is None or not isinstance(function, types.FunctionType):
        return None
    marks = vars(function)
    # A function that wraps a compiled one by functools.wraps has the marks of that one.
    if "_torchdynamo_orig_callable" not in marks or marks.get("_torchdynamo_wrapper_id") != id(
        function
    ):
        return None
    try:
        context: Any = inspect.getclosurevars(function).nonlocals["self"]
        if not isinstance(context, frames.OptimizeContext):
            return None
        backend, dynamic = frames.innermost_backend(context.callback), context._dynamic
        guards = getattr(context._hooks, "guard_filter_fn", None)
        options = function.get_compiler_config() or {}  # type: ignore[attr-defined]
    except (AttributeError, KeyError, TypeError):
        return None

    def without_checkpoints(
        graph: torch.fx.GraphModule, inputs: Sequence[object]
    ) -> Callable[..., Any]:
        # A compiler that is given the backward pass too would keep what a checkpoint is to compute
        # again.
        modules = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        if any(
            "activation_checkpoint" in str(node.target)
            for module in modules
            for node in module.graph.nodes
        ):
            raise NotImplementedError("a checkpoint in a graph with its backward pass")
        return backend(graph, inputs)  # type: ignore[no-any-return]

    whole = torch._dynamo.optimize(
        backend=without_checkpoints, nopython=True, dynamic=dynamic, guard_filter_fn=guards
    )
    return Compiled(
        marks["_torchdynamo_orig_callable"], context, whole, bool(options.get("triton.cudagraphs"))
    )


def may_compile() -> bool:
    """Whether torch.compile has been called in this process. If torch does not tell, it may have
    been.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")  # without it nothing is compiled
    backends: Mapping[int, object] = _attribute(frames, "cached_backends", {0: frames})
    return any(backend is not None for backend in backends.values())


def refusals_to_compile() -> tuple[type[Exception], ...]:
    """What torch.compile raises for a function that it cannot compile, before any of it has run.

    Without these the error of torch is raised.
    """
    errors = sys.modules.get("torch._dynamo.exc")
    names = "TorchDynamoException", "FailOnRecompileLimitHit"
    return tuple([error for name in names if (error := getattr(errors, name, None)) is not None])


# How many modes there are that see every operation. Without it none is known.
dispatch_modes: Callable[[], int] = _attribute(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def saves_by_hooks() -> bool:
    """Whether hooks of `torch.autograd.graph.saved_tensors_hooks` are in force.

    If torch does not tell, they are thought not to be: then a compiled loss may be computed without
    them.
    """
    top: Callable[[bool], object] = _attribute(
        torch._C, "_autograd._top_saved_tensors_default_hooks", lambda _: None
    )
    return top(True) is not None


# --- Pipelines ------------------------------------------------------------------------------------


def loss_of_schedule(schedule: object, otherwise: object) -> object:
    """The loss that a schedule of torch.distributed.pipelining was built with.

    If that does not tell, the schedule is taken to have the loss that it was given, `otherwise`.
    """
    return _attribute(schedule, "_loss_fn", otherwise)


def has_weight_passes(schedule: object) -> bool:
    """Whether a schedule computes gradients of parameters in passes of their own, as zero-bubble
    schedules do.

    Its actions tell. Without them it is not known, and the reduction that is missing is found where
    it should have been.
    """
    order: Mapping[int, Sequence[Any]] | None = _attribute(schedule, "pipeline_order", None)
    actions = itertools.chain.from_iterable((order or {}).values())
    return any(
        _attribute(action, "computation_type.name", "") == "BACKWARD_WEIGHT" for action in actions
    )


# --- Trees ----------------------------------------------------------------------------------------

# Trees as torch.func, torch.compile and torch.export walk them, with the classes that anyone has
# registered. There is no public module. Without it nothing runs.
pytree = torch.utils._pytree
