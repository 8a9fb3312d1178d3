"""Replicas: what across= names, what they tell each other, and whether that is alike.

Headers, descriptions, and gradients on the CPU travel over a channel: a process group that nobody
else uses, so that nothing is taken for a collective of the user's. It is made once for each group
of the user's, with gloo, which needs no device: numbers on the host never wait for one.
"""

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from funcga._types import Scalar
from funcga.errors import FuncgaError
from torch_backend import _private, arrays


@dataclass(frozen=True)
class Replicas:
    """The processes to merge over, and how gradients travel between them: pass it as `across=`.

    Args:
        group: A process group or a 1-D DeviceMesh.
        bucket_bytes: The bytes of one all_reduce. All of them are launched after the last
            micro-batch's backward pass.
        wire_dtype: What gradients are sent as, such as torch.bfloat16, which halves the traffic and
            rounds what each replica contributes to 8 bits. By default they are sent as they are
            accumulated. Counts, weights and scalars, such as losses, are never rounded.

    Raises:
        FuncgaError: If `group` is no group of which this process is a member, or gradients cannot
            be sent as `wire_dtype`. A mesh of several dimensions is refused by torch.

    Example:
        >>> across = torch_backend.Replicas(dist.group.WORLD, wire_dtype=torch.bfloat16)
        >>> step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).mean()), 2, across=across)
        >>> step(torch.tensor(1.0), torch.ones(4))
        tensor(1.)
    """

    group: Any
    bucket_bytes: int = 4 * 2**20
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        group = self.group.get_group() if isinstance(self.group, DeviceMesh) else self.group
        if not isinstance(group, dist.ProcessGroup):
            raise FuncgaError(
                f"across= is {group!r}, and the arrays of the call are torch tensors. Give a "
                "process group of which this process is a member, "
                "across=torch.distributed.group.WORLD, or a 1-D device mesh such as mesh['dp'], "
                "after torch.distributed.init_process_group(): in torch all leaves of a step are "
                "merged over one group. To reduce each leaf over a group of its own, fold sums "
                "without across=, and reduce them after the step (docs/howto/experts.md)."
            )
        object.__setattr__(self, "group", group)
        if self.wire_dtype not in (None, torch.float32, torch.bfloat16, torch.float64):
            raise FuncgaError(
                f"wire_dtype is {self.wire_dtype!r}: gradients can be sent as torch.float32, "
                "torch.float64 or torch.bfloat16; None sends them as they are accumulated."
            )

    @property
    def channel(self) -> "Channel":
        """What the replicas exchange messages over."""
        planned = PLANNED.get()
        if planned is not None:
            return planned(self.group)
        if self.group not in _CHANNELS:
            _CHANNELS[self.group] = Channel(self.group)
        return _CHANNELS[self.group]

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the replicas, in their order."""
        return dist.get_process_group_ranks(self.group)


class InTurn(list[Replicas]):
    """What a wrapper of a module merges over: its groups, one after the other."""


def replicas_of(across: Any) -> Replicas:
    """The replicas that `across=` names; FuncgaError if it names none."""
    return across if isinstance(across, Replicas) else Replicas(across)


def are_processes(across: Any) -> bool:
    """Whether `across=` names processes of torch, and not axes of a mesh of JAX."""
    return isinstance(across, Replicas | dist.ProcessGroup | DeviceMesh | int)


def summed(number: Scalar, across: Any) -> Scalar:
    """The sum of a scalar over the replicas that `across=` names."""
    total = torch.as_tensor(number).to(torch.float64, copy=True)
    replicas_of(across).channel.carrier(total.device).allreduce([total]).wait()
    return arrays.scalar(total)


# -------------------------------------------------------------------------------------- the channel


class Channel:
    """A process group of funcga's own, on the processes of a user's group."""

    def __init__(self, group: dist.ProcessGroup):
        # Without a reference: a channel ends with the user's group.
        self.of: Any = ref(group)
        self.rank, self.count = group.rank(), group.size()

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The group. Making it is a collective, so all processes must first ask together."""
        return _private.group_of_our_own(self.of())

    def carrier(self, device: torch.device) -> Any:
        """The group that arrays on this device travel over: funcga's own on the CPU, the user's
        elsewhere.
        """
        # A second communicator of NCCL would take some 100 MB of each device.
        return self.group if device.type == "cpu" else self.of()

    def owe(self, send: Callable[[], None]) -> None:
        """Sends this before anything new. An error may end a first window before the group is
        made.
        """
        _OWED.append((self, send))

    def send_owed(self) -> None:
        """Sends what is owed to the others, over any channel, before anything new: they may wait
        in a step that has a group of its own.
        """
        while _OWED:
            channel, send = _OWED.pop(0)
            with suppress(KeyError, RuntimeError, ValueError):
                dist.get_process_group_ranks(channel.of())  # fails if the user's was destroyed
                send()

    def gather(self, mine: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begins to tell all processes this tensor, which has one shape on all; returns what waits
        for those of each, in their order.
        """
        received = [torch.empty_like(mine) for _ in range(self.count)]
        work = self.carrier(mine.device).allgather([received], [mine])

        def wait() -> list[torch.Tensor]:
            work.wait()
            return received

        return wait

    def exchange(self, mine: list[float]) -> Callable[[], list[list[float]]]:
        """`gather` of numbers, as many as all processes tell."""
        received = self.gather(torch.tensor(mine, dtype=torch.float64, device="cpu"))
        return lambda: [numbers.tolist() for numbers in received()]

    def is_marked(self, mark: torch.Tensor) -> bool:
        """Whether the mark of an error that came is not 0. Reading it from a device makes the
        host wait.
        """
        return bool(mark != 0)

    def all_gather(self, mine: object) -> list[Any]:
        """What each replica says, in their order: any objects that can be pickled."""
        said = [None] * self.count
        dist.all_gather_object(said, mine, group=self.group)
        return said

    def broadcast_from(self, source: int, mine: object) -> Any:
        """What one replica says: any object that can be pickled."""
        said = [mine]
        dist.broadcast_object_list(said, group=self.group, group_src=source)
        return said[0]


# What windows that an error has ended here still have to send, in order.
_OWED: list[tuple[Channel, Callable[[], None]]] = []
# A channel lives as long as its group: the keys are weak.
_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()
# Threads of gloo that outlive the interpreter may end the process with an abort.
atexit.register(_CHANNELS.clear)
atexit.register(_OWED.clear)


# Makes the channel of a group while a step is planned, when nothing is sent.
PLANNED: ContextVar[Callable[[dist.ProcessGroup], Channel] | None] = ContextVar(
    "PLANNED", default=None
)


COULD_NOT_MERGE = (
    "funcga: the replicas could not be merged. One of them has died, has raised an error of its "
    "own, or did not call the step within the group's timeout; see what the other processes say."
)


@contextmanager
def explained() -> Iterator[None]:
    """A context that adds to an error of torch's collectives, as far as its type and text tell,
    what it means for the replicas.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            error.add_note(COULD_NOT_MERGE)
        raise


def collectives_called(groups: Sequence[Any] = (None,)) -> list[int | None]:
    """How many collectives this process has called, of each group, or of all; None if torch does
    not tell, and in a plan, which calls none, and knows of none that it would have called.
    """
    is_planned = PLANNED.get() is not None
    return [None if is_planned else _private.collectives_called(group) for group in groups]


# --------------------------------------------------------------------------------- what is the same


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """The elements of an array as uint8[nbytes], in its own memory if that is contiguous."""
    whole = array.detach().resolve_conj().resolve_neg().contiguous()
    # Torch calls an array of one element, or of none, contiguous whatever its strides. A view of
    # bytes needs stride 1.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def check_alike(descriptions: Sequence[dict[str, str] | None], problem: str, remedy: str) -> None:
    """Raises FuncgaError if two replicas describe the same path differently.

    Each replica has a description for every path, or None if it has nothing to say. `problem` goes
    into the error, such as "fold different structures".
    """
    said = [(rank, each) for rank, each in enumerate(descriptions) if each is not None]
    (first, expected), *others = said
    for rank, theirs in others:
        texts = [
            f"`{path}` is {expected.get(path, 'missing')} on rank {first} and "
            f"{theirs.get(path, 'missing')} on rank {rank}"
            for path in {**expected, **theirs}
            if expected.get(path) != theirs.get(path)
        ]
        if not texts and [*expected] != [*theirs]:
            texts.append(f"rank {rank} has the leaves of rank {first} in another order")
        if texts:
            more = ", and others" if texts[4:] else ""
            raise FuncgaError(f"the replicas {problem}: {'; '.join(texts[:4])}{more}. {remedy}")
