"""What wrappers of a module need over a window: the base class; DistributedDataParallel; replicate.

Only torch has this file: in JAX nothing synchronises but what the program says.

Wrappers reduce gradients inside the backward pass, unless told to wait. After a window the
parameters have the sums over the replicas as gradients, divided by the `scale`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from funcga._call import supported
from funcga._types import Across
from funcga.errors import FuncgaError
from torch_backend import _private, arrays
from torch_backend.replicas import InTurn, Replicas, collectives_called, replicas_of

LET_FUNCGA = (
    "or let funcga reduce: accumulate(funcga.value_and_grad(torch_backend.pure_loss(module, "
    "loss_fn)), n, across=group), with the module that was wrapped"
)


Flags = Sequence[tuple[object, str, object]]  # attributes and values, as (object, name, value)


class Wrapper:
    """How a wrapper reduces the gradients of a module over a window. This class is for a module
    that nothing wraps, in a window that is for wrapped ones.

    `name`: what wraps. `wrapped`: the outermost modules that it wraps. `fresh`: whether the
    gradients lie in memory that nobody else will write to. `in_step`: whether all replicas need
    equally many micro-batches, even if all but the last wait. `kind`: its row of the table of what
    is supported. `searches`: whether unused parameters are marked ready before the backward pass
    begins, as with find_unused_parameters=True. `begins_with_buffers`: whether the first forward
    pass of a window may broadcast buffers. `takes_outer`: whether sync="outer" is for it, on a mesh
    of two dimensions. `remedy`: what to do where sums in 16 bits are refused. `sync`: when it
    reduces, as module_value_and_grad says.
    """

    fresh = in_step = searches = begins_with_buffers = takes_outer = False
    kind = supported.WRAPPED
    remedy = "Keep parameters in float32, and let the module compute under torch.autocast."

    def __init__(self, wrapped: Sequence[nn.Module], name: str, sync: str):
        self.wrapped, self.name, self.sync = wrapped, name, sync

    @property
    def meets_in_every_pass(self) -> bool:
        """Whether every pass of a window communicates, so that all replicas need equally many."""
        return self.in_step or self.sync != "last"

    def covered(self) -> set[int]:
        """The ids of the parameters whose gradients it reduces."""
        return set()

    @cached_property
    def groups(self) -> list[list[dist.ProcessGroup]]:
        """For every wrapped part the process groups that its gradients are reduced over, the
        inner one first.
        """
        return [[]]

    def check(self) -> None:
        """Raises FuncgaError if its gradients cannot be computed like this."""
        ranks = [
            " x ".join([str(Replicas(group).ranks) for group in groups]) for groups in self.groups
        ]
        if len({*ranks}) > 1:
            first, other = [*dict.fromkeys(ranks)][:2]
            raise FuncgaError(
                f"parts of the module are wrapped by {self.name} over different replicas, the "
                f"ranks {first} and {other}, so there is no one set of replicas to weigh "
                f"micro-batches over. Give every part the same process group or mesh; {LET_FUNCGA}."
            )
        if self.sync == "outer" and not (self.takes_outer and self.groups[0][1:]):
            raise FuncgaError(
                f'sync="outer" was asked of {self.name}, which has no outer mesh to all-reduce '
                "over. It is for fully_shard with a mesh of two dimensions (HSDP). Write "
                'sync="last", to synchronise once, or sync="every".'
            )

    def replicas(self, across: Across) -> InTurn:
        """What a window is merged over, one after the other, the inner group first. Raises
        FuncgaError if `across=` names anything else than what wraps the module.
        """
        if not self.wrapped:
            return InTurn([] if across is None else [replicas_of(across)])
        in_turn = InTurn([Replicas(group) for group in self.groups[0]])
        if across is not None:
            named = replicas_of(across).ranks
            # On a mesh of two dimensions a process sees its own row and its own column.
            ranks = sorted({rank for group in in_turn for rank in group.ranks})
            if not {*ranks} <= {*named} or len(named) != self.scale:
                raise FuncgaError(
                    f"across= names the ranks {sorted(named)}, and the module is wrapped by "
                    f"{self.name}, which reduces over the ranks {ranks}. Leave across= out: the "
                    "wrapper knows its replicas."
                )
        return in_turn

    def reshard(self) -> None:
        """Lets the module have the parameters that get gradients."""

    def leaves(self) -> dict[int, torch.Tensor]:
        """The leaves of a loss's graph in the place of the parameters, as far as they are there:
        each by the id of the parameter whose gradient comes to it on this replica.
        """
        return {}

    @cached_property
    def scale(self) -> float:
        """What sums have been divided by. Wrappers average, so it is the number of replicas."""
        return float(prod(group.size() for group in self.groups[0]))

    def sums_in(self, param: torch.Tensor) -> torch.dtype:
        """The dtype that gradients of a parameter are summed in over a window."""
        return param.dtype

    def flags(self, syncs: bool) -> Flags:
        """What says whether passes synchronise, forward and backward, and the values for that."""
        return []

    def window(self) -> AbstractContextManager[None]:
        """The context of a window: no pass synchronises until flags say so, but for sync="every",
        whatever the user has set; and the user's own sums are put aside.
        """
        return assigned(self.flags(self.sync == "every"))

    def synchronising(self) -> AbstractContextManager[None]:
        """The context of the last backward pass. Raises FuncgaError if that pass leaves out what
        was summed before.
        """
        return nullcontext()

    def recover(self) -> None:
        """Forgets a window that an exception has ended."""


class DDP(Wrapper):
    """torch.nn.parallel.DistributedDataParallel: averages in place, in buckets, as gradients
    become ready.
    """

    remedy = (
        "Keep the parameters in float32, with torch.autocast in loss_fn; or use fully_shard with "
        f"MixedPrecisionPolicy(reduce_dtype=torch.float32); {LET_FUNCGA}."
    )
    wrapped: "Sequence[nn.parallel.DistributedDataParallel]"

    def covered(self) -> set[int]:
        """All parameters but those that DDP was told to ignore."""
        return {
            id(p)
            for ddp in self.wrapped
            for name, p in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore
        }

    def check(self) -> None:
        """Refuses mixed_precision, which sums in 16 bits."""
        super().check()
        self.searches = any(ddp.find_unused_parameters for ddp in self.wrapped)
        self.begins_with_buffers = any(
            ddp.broadcast_buffers and [*ddp.module.buffers()] for ddp in self.wrapped
        )
        if any(ddp.mixed_precision for ddp in self.wrapped):
            raise FuncgaError(
                "the module is wrapped by DistributedDataParallel with mixed_precision=, whose "
                "gradients of several micro-batches would be summed in 16 bits. Leave it out, and "
                "use torch.autocast in loss_fn."
            )

    @cached_property
    def groups(self) -> list[list[dist.ProcessGroup]]:
        """One group each."""
        return [[ddp.process_group] for ddp in self.wrapped]

    def flags(self, syncs: bool) -> Flags:
        """That of no_sync()."""
        return [(ddp, "require_backward_grad_sync", syncs) for ddp in self.wrapped]

    def window(self) -> AbstractContextManager[None]:
        """The context of a window. Raises FuncgaError inside of Join."""
        if any(map(_private.is_in_join, self.wrapped)):
            raise FuncgaError(
                f"the module is wrapped by {self.name} and was called inside of Join, which "
                "answers for replicas that have run out of data, and knows nothing of the counts "
                "that funcga merges. Leave Join out: replicas may have different numbers of "
                "micro-batches, one of weight 0 where there is no more data."
            )
        # With gradient_as_bucket_view the user's gradients may be views of DDP's buckets, which
        # this window overwrites.
        views = [ddp for ddp in self.wrapped if ddp.gradient_as_bucket_view]
        for p in (p for ddp in views for p in ddp.module.parameters()):
            if p.grad is not None:
                (p.grad,) = arrays.in_own_memory([p.grad])
        return super().window()

    @contextmanager
    def synchronising(self) -> Iterator[None]:
        """Checks that DDP has synchronised: it waits for every gradient, and is silent if one is
        missing.
        """
        # A communication hook of the user's may reduce by other means than this group.
        hooked = any(map(_private.has_comm_hooks, self.wrapped))
        groups = [ddp.process_group for ddp in self.wrapped]
        before = collectives_called(groups)
        yield
        # Two things can go wrong. A parameter was not reached, so its bucket was not sent. Or
        # nothing was sent, as loss_fn called the module inside of the wrapper.
        for ddp in self.wrapped:
            missing = _private.unfinished(ddp)
            if missing is not None:
                raise FuncgaError(
                    "the last micro-batch does not use all parameters, so that "
                    f"{self.name} did not synchronise, nor what earlier micro-batches had summed: "
                    "it waits for every parameter in that backward pass. Use all parameters in "
                    "every micro-batch, or wrap the module with find_unused_parameters=True. Torch "
                    f"says: {missing}"
                )
        if not (hooked or None in before) and collectives_called(groups) == before:
            raise FuncgaError(
                f"{self.name} has reduced nothing in the last backward pass: loss_fn does not call "
                "it, but perhaps the module inside of it, that it closes over, whose gradients "
                "would differ from replica to replica. Call the module that loss_fn is given: "
                "lambda module, x, y: F.mse_loss(module(x), y)."
            )

    def recover(self) -> None:
        """Lets the next forward pass begin anew."""
        for ddp in self.wrapped:
            _private.reset_ddp(ddp)
            # The replicas may have stopped in different micro-batches, and must begin with the same
            # flag.
            ddp.require_forward_param_sync = True


class Replicate(DDP):
    """torch.distributed._composable.replicate: DDP in the hooks of a module."""

    def check(self) -> None:
        """Makes the DistributedDataParallel objects, as the first forward pass would, and checks
        them.
        """
        self.states, self.wrapped = zip(*map(_private.state_and_ddp, self.wrapped), strict=True)
        super().check()

    def flags(self, syncs: bool) -> Flags:
        """That of set_requires_gradient_sync(), and that of the DDP."""
        own = [(state, _private.WAITS_REPLICATE, not syncs) for state in self.states]
        return [*own, *super().flags(syncs)]


@contextmanager
def assigned(values: Flags) -> Iterator[None]:
    """A context in which attributes have other values, given as (object, name, value)."""
    # All are read before one is set, as the setter of one may change another.
    before = [(each, name, getattr(each, name)) for each, name, _ in values]
    assign(values)
    try:
        yield
    finally:
        assign(before)


def assign(values: Flags) -> None:
    """Sets attributes to values, given as (object, name, value)."""
    for entry in values:
        setattr(*entry)
