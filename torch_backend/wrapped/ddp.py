"""How a wrapped module wants to be driven through a window: modules that nothing wraps, DDP and replicate.

Only torch has this file: in JAX nothing synchronises but what the program says.

Wrappers reduce gradients inside the backward pass, unless told to wait. `steering` is a context for the whole window,
after which all is as the user had set it; `waiting` one for its micro-batches before the last. The gradients that are
then in the parameters are sums over the replicas, divided by `scale()`.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from funcga.errors import FuncgaError
from torch_backend.reduce.channel import Listener


class Plain:
    """A module that nothing wraps: nobody synchronises its gradients."""

    name = ""
    fresh = False  # whether the gradients are left in memory that nobody else will write to
    views = False  # whether a `.grad` may be in memory that it writes to
    in_step = False  # whether all replicas need equally many micro-batches, though all but the last wait
    remedy = "Use funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), which sums in float32."

    def __init__(self, module: nn.Module, wrapped: Sequence[Any] = ()):
        self.module, self.wrapped = module, wrapped

    def covered(self) -> set[int]:
        """The ids of the parameters that are driven."""
        return {id(p) for p in self.module.parameters()}

    def check(self, sync: str) -> None:
        """Raises FuncgaError if it cannot be driven like this."""
        replicas = list(dict.fromkeys(" x ".join(map(_ranks, groups)) for groups in self.part_groups()))
        if len(replicas) > 1:
            raise FuncgaError(
                f"parts of the module are wrapped by {self.name} over different replicas, the ranks {replicas[0]} and "
                f"{replicas[1]}, so there is no one set of replicas to weigh micro-batches over. Give every part the "
                f"same process group or mesh; or let funcga reduce: accumulate(funcga.value_and_grad("
                f"torch_backend.pure_loss(module, loss_fn)), n, across=group), with the module that was wrapped."
            )
        if sync == "outer" and not self.has_outer():
            raise FuncgaError(
                f'sync="outer" was asked of {self.name or "a module that is not wrapped"}, which has no outer mesh to '
                f"all-reduce over. It is for fully_shard with a mesh of two dimensions (HSDP). Write "
                f'sync="last", to synchronise once, or sync="every".'
            )

    def params(self) -> dict[str, torch.Tensor]:
        """The parameters that are trained, by the names that they have in the module."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def holders(self) -> list[torch.Tensor]:
        """What else than the parameters has a `.grad`."""
        return []

    def has_outer(self) -> bool:
        """Whether it can be told when to all-reduce over the outer of two dimensions of a mesh."""
        return False

    def graph_leaves(self) -> list[torch.Tensor]:
        """What a loss's graph ends in, where that is neither the parameters nor the `holders`."""
        return []

    def part_groups(self) -> list[list[Any]]:
        """For every wrapped part the process groups that its gradients are reduced over, the inner one first."""
        return []

    def groups(self) -> list[Any]:
        """Those of all parts, which `check` has found to have the same."""
        return next(iter(self.part_groups()), [])

    def scale(self) -> float:
        """What sums over the replicas have been divided by: the number of replicas, as wrappers average."""
        return float(prod(group.size() for group in self.groups()))

    def scales(self, params: Iterable[torch.Tensor]) -> list[float]:
        """The same for each of the parameters."""
        scale = self.scale()
        return [scale for _ in params]

    def sums_in(self, param: torch.Tensor, sync: str) -> torch.dtype:
        """The dtype that gradients of a parameter are summed in over a window."""
        return param.dtype

    def aside(self) -> AbstractContextManager[None]:
        """Sums that the user's own backward passes have left in the wrapper are put aside in this context."""
        return nullcontext()

    @contextmanager
    def steering(self) -> Iterator[None]:
        """A window: synchronised unless `waiting`."""
        yield

    def waiting(self, sync: str) -> AbstractContextManager[None]:
        """The micro-batches before the last."""
        return nullcontext()

    @contextmanager
    def synchronising(self, sync: str, params: dict[str, torch.Tensor]) -> Iterator[None]:
        """The last backward pass. Raises FuncgaError if it has left out what was summed before."""
        yield

    def recover(self) -> None:
        """Forgets a window that an exception has ended."""


class DDP(Plain):
    """torch.nn.parallel.DistributedDataParallel: averages in place, in buckets, as gradients become ready."""

    name = "DistributedDataParallel"
    remedy = (
        "Keep the parameters in float32, with torch.autocast in loss_fn; or use fully_shard with "
        "MixedPrecisionPolicy(reduce_dtype=torch.float32); or let funcga reduce: accumulate(funcga.value_and_grad("
        "torch_backend.pure_loss(module, loss_fn)), n, across=group), with the module that was wrapped."
    )

    @property
    def views(self) -> bool:  # type: ignore[override]
        """Whether gradients are views of its buckets."""
        return any(ddp.gradient_as_bucket_view for ddp in self.engines())

    def engines(self) -> list[Any]:
        """The DistributedDataParallel objects."""
        return list(self.wrapped)

    def covered(self) -> set[int]:
        """All that are not ignored, which DDP leaves to the user."""
        return {
            id(p) for ddp in self.wrapped for name, p in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore
        }  # fmt: skip

    def check(self, sync: str) -> None:
        """static_graph fails in torch when a backward pass waits; the mixed precision of DDP's own sums in 16 bits."""
        super().check(sync)
        for ddp in self.wrapped:
            if ddp.static_graph and sync == "last":
                raise FuncgaError(
                    "the module is wrapped by DistributedDataParallel with static_graph=True, which fails an internal "
                    "assertion of torch when a backward pass does not synchronise. Leave static_graph out, or "
                    'synchronise every micro-batch: module_value_and_grad(module, loss_fn, sync="every").'
                )
            if ddp.mixed_precision is not None:
                raise FuncgaError(
                    "the module is wrapped by DistributedDataParallel with mixed_precision=, whose gradients of "
                    "several micro-batches would be summed in 16 bits. Leave it out, and use torch.autocast in loss_fn."
                )

    def part_groups(self) -> list[list[Any]]:
        """One group each."""
        return [[ddp.process_group] for ddp in self.engines()]

    def aside(self) -> AbstractContextManager[None]:
        """Raises FuncgaError inside of Join, which calls DDP's collectives for others and not funcga's."""
        if any(getattr(getattr(ddp, "_join_config", None), "enable", False) for ddp in self.engines()):
            raise FuncgaError(
                f"the module is wrapped by {self.name} and was called inside of Join, which answers for replicas that "
                f"have run out of data, and knows nothing of the counts that funcga merges. Leave Join out: replicas "
                f"may have different numbers of micro-batches, one of weight 0 where there is no more data."
            )
        return nullcontext()

    @contextmanager
    def steering(self) -> Iterator[None]:
        """Synchronises even inside of the user's no_sync()."""
        with flagged(self.wrapped, "require_backward_grad_sync", True):
            yield

    def waiting(self, sync: str) -> AbstractContextManager[None]:
        """no_sync() around forward and backward passes."""
        return without_sync(self.wrapped if sync == "last" else ())

    @contextmanager
    def synchronising(self, sync: str, params: dict[str, torch.Tensor]) -> Iterator[None]:
        """DDP waits for a gradient of every parameter, and says nothing if one does not come."""
        before = [mark(p) for p in params.values()]
        listeners = [Listener(ddp.process_group) for ddp in self.engines() if not ddp._comm_hooks]
        yield
        missed = [name for (name, p), was in zip(params.items(), before, strict=True) if mark(p) == was]
        try:
            for ddp in self.engines():
                ddp.reducer._rebuild_buckets()  # what forward() does first, and what finds out
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
        else:
            if listeners and all(listener.is_silent for listener in listeners):
                raise self._passed_by()
            if len(missed) < len(params):
                return
        raise FuncgaError(
            f"the last micro-batch has no gradient for {_some(missed)}, so that {self.name} did not synchronise, "
            f"nor what earlier micro-batches had summed: it waits for every parameter in that backward pass. Use all "
            f"parameters in every micro-batch, or wrap the module with find_unused_parameters=True."
        )

    def _passed_by(self) -> FuncgaError:
        return FuncgaError(
            f"{self.name} has reduced nothing in the last backward pass: loss_fn does not call it, but perhaps the "
            f"module inside of it, that it closes over, whose gradients would differ from replica to replica. Call the "
            f"module that loss_fn is given: lambda module, x, y: F.mse_loss(module(x), y)."
        )

    def recover(self) -> None:
        """Lets the next forward pass begin anew."""
        for ddp in self.engines():
            ddp.reducer._reset_state()
            ddp.require_forward_param_sync = True  # on every replica, whichever micro-batch each of them was in


class Replicate(DDP):
    """torch.distributed._composable.replicate: DDP in the hooks of a module."""

    name = "replicate"

    def engines(self) -> list[Any]:
        """The DistributedDataParallel objects, which are made at the first forward pass, or here."""
        return [state._ddp for state in self._states()]

    def _states(self) -> list[Any]:
        replicate: Any = sys.modules["torch.distributed._composable.replicate"].replicate
        states = [replicate.state(module) for module in self.wrapped]
        for state in states:
            if state._init_args or state._init_kwargs:
                state.lazy_init()
        return states

    def covered(self) -> set[int]:
        """All that its DDP has."""
        return {id(p) for state in self._states() for p in state._param_list}

    def check(self, sync: str) -> None:
        """As its DDP."""
        DDP(self.module, self.engines()).check(sync)

    @contextmanager
    def steering(self) -> Iterator[None]:
        """Synchronises, whatever the user has set."""
        with flagged(self._states(), "_no_sync", False):
            yield

    @contextmanager
    def waiting(self, sync: str) -> Iterator[None]:
        """set_requires_gradient_sync(False)."""
        self._require(sync != "last")
        try:
            yield
        finally:
            self._require(True)

    def _require(self, sync: bool) -> None:
        for module in self.wrapped:
            module.set_requires_gradient_sync(sync)


@contextmanager
def without_sync(modules: Iterable[Any]) -> Iterator[None]:
    """In no_sync() of each of the modules."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.no_sync())
        yield


@contextmanager
def flagged(objects: Iterable[Any], name: str, value: bool) -> Iterator[None]:
    """The objects have this value of an attribute in the context, and what they had before afterwards."""
    before = [(found, getattr(found, name)) for found in objects]
    for found, _ in before:
        setattr(found, name, value)
    try:
        yield
    finally:
        for found, flag in before:
            setattr(found, name, flag)


def mark(tensor: torch.Tensor) -> Any:
    """What changes with everything that is written to a tensor's `.grad`; None if it has none."""
    grad = tensor.grad
    if grad is None:
        return None
    return (grad.data_ptr() if grad.layout is torch.strided else id(grad)), grad._version  # sparse ones have no address


def _ranks(group: Any) -> str:
    return str(sorted(dist.get_process_group_ranks(group)))


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:4]) + (", ..." if len(names) > 4 else "")
    return listed or "some of the parameters"
