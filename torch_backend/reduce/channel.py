"""The channel: a process group of funcga's own beside the one that was given, on the same processes.

Only torch has this file: a program of XLA has one order of collectives.

The collectives of one group have to be called in one order on all of its processes. A loss may call some in its
backward pass, while gradients are sent, and with a branch in the loss the order differs from replica to replica. So
what replicas say of their windows, and gradients on the CPU, travel over a group that nobody else uses. It is made
once for each group that is given, with gloo, which needs no device: what the host knows never waits for one.
"""

import atexit
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist


class Channel:
    """A group of our own on the processes of a given one. Its collectives are called in one order on all of them."""

    def __init__(self, group: Any):
        self.group, self.rank, self.count = group, group.rank(), group.size()
        self.owed: list[Any] = []  # windows that were given up, whose rest the others still wait for

    def carrier(self, device: torch.device, given: Any) -> Any:
        """The group that arrays on this device travel over: our own on the CPU, the given one elsewhere.

        A second communicator of NCCL would take some 100 MB of each device.
        """
        return self.group if device.type == "cpu" else given

    def settle(self) -> None:
        """Sends what is owed to the others of windows that an error has ended: they may still wait for it."""
        while self.owed:
            self.owed.pop(0).settle()

    def gathered(self, mine: Any) -> list[Any]:
        """What each replica has said, in their order: any objects that can be pickled."""
        with explained():
            data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
            lengths = [int(n) for n in all_gathered(self.group, torch.tensor([data.numel()]))]
            sent = torch.zeros(max(lengths), dtype=torch.uint8)
            sent[: data.numel()] = data
            said = all_gathered(self.group, sent)
        return [pickle.loads(bytes(row[:n].tolist())) for row, n in zip(said, lengths, strict=True)]


def all_gathered(group: Any, mine: torch.Tensor) -> Sequence[torch.Tensor]:
    """An array of each process, in their order."""
    found = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([found], [mine]).wait()
    return found


def channel_if_any(group: Any) -> Channel | None:
    """The channel of a process group, if there is one."""
    return _CHANNELS.get(group)


def channel_of(group: Any) -> Channel:
    """The channel of a process group. When it is first asked for, every process of the group has to ask."""
    channel = _CHANNELS.get(group)
    if channel is None:
        with explained():
            channel = _CHANNELS[group] = Channel(_own(group))
    return channel


_CHANNELS: WeakKeyDictionary[Any, Channel] = WeakKeyDictionary()  # they go with the group that was given
atexit.register(_CHANNELS.clear)  # threads of gloo that outlive the interpreter may end the process with an abort


def _own(group: Any) -> Any:
    """A new group of the processes of this one.

    torch.distributed.new_group would have to be called by all processes, and names groups by how many there are in a
    process, which may differ. If torch no longer has what this is made of, it is the given group itself.
    """
    try:
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            "funcga", group.get_group_store()
        )
        options = group._get_backend(torch.device("cpu" if _has_cpu(group) else "cuda")).options
        backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=options._timeout)
        own = dist.ProcessGroup(store, group.rank(), group.size())
        own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        own._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    except (AttributeError, TypeError):
        return group
    return own


def _has_cpu(group: Any) -> bool:
    return "cpu" in {device.type for device in group._device_types}


class Listener:
    """Tells whether collectives have been called since it was made: of one group, or of any."""

    def __init__(self, group: Any = None):
        self.group = group
        self.before = self._calls()

    @property
    def heard(self) -> bool:
        """Whether there were any; False if torch does not tell."""
        return self._calls() != self.before

    @property
    def is_silent(self) -> bool:
        """Whether there were none; False if torch does not tell."""
        return self._calls() == self.before is not None

    def _calls(self) -> int | None:
        if not (dist.is_available() and dist.is_initialized()):
            return 0
        try:
            groups: Iterable[Any] = dist.distributed_c10d._world.pg_map if self.group is None else [self.group]
            return sum([int(group._get_sequence_number_for_group()) for group in groups])
        except (AttributeError, RuntimeError):
            return None


@contextmanager
def explained() -> Iterator[None]:
    """A context that says of an error in a collective what it means."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(COULD_NOT_MERGE)
        raise


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error comes from torch's collectives, as far as it says."""
    unexplained = COULD_NOT_MERGE not in getattr(error, "__notes__", ())
    return unexplained and (isinstance(error, dist.DistError) or "gloo/" in str(error))


COULD_NOT_MERGE = (
    "funcga: the replicas could not be merged. One of them has died, has raised an error of its own, or did not call "
    "the step within the group's timeout; see what the other processes say."
)
