"""The channel: what the replicas of a group tell each other, beside the gradients that they add up.

All processes of a group have to call its collectives in one order. A loss may call some in its backward pass while
gradients are sent, and a branch in the loss makes the order differ between replicas. So headers, descriptions, and
gradients on the CPU travel over a process group that nobody else uses. It is made once for each group of the user's,
with gloo, which needs no device: numbers on the host never wait for one.
"""

import atexit
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from funcga.errors import FuncgaError
from torch_backend import _private


class Owed(Protocol):
    """A window that an error has ended here, while other replicas may still wait for what it sends."""

    def settle(self) -> None:
        """Sends it, without waiting for anybody."""
        ...


class Channel:
    """A process group of funcga's own, on the processes of a user's group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.count = group, group.rank(), group.size()
        self.owed: list[Owed] = []

    def carrier(self, device: torch.device, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group that arrays on this device travel over: funcga's own on the CPU, the user's elsewhere."""
        # A second communicator of NCCL would take some 100 MB of each device.
        return self.group if device.type == "cpu" else group

    def settle(self) -> None:
        """Sends what is owed to the others, before anything new."""
        while self.owed:
            self.owed.pop(0).settle()

    def gathered(self, mine: object) -> list[Any]:
        """What each replica says, in their order: any objects that can be pickled."""
        with explained():
            # The lengths are sent first: an all_gather takes tensors of one shape, so the data is padded to the
            # longest.
            data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
            lengths = [int(length) for length in all_gathered(self.group, torch.tensor([data.numel()]))]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: data.numel()] = data
            rows = all_gathered(self.group, padded)
        return [pickle.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def all_gathered(group: dist.ProcessGroup, mine: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor of each process, all of one shape, in their order."""
    tensors = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([tensors], [mine]).wait()
    return tensors


# A channel lives as long as its group: the keys are weak.
_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()
# Threads of gloo that outlive the interpreter may end the process with an abort.
atexit.register(_CHANNELS.clear)


def channel_if_any(group: dist.ProcessGroup) -> Channel | None:
    """The channel of a process group, if there is one."""
    return _CHANNELS.get(group)


def channel_of(group: dist.ProcessGroup) -> Channel:
    """The channel of a process group. When it is first asked for, every process of the group has to ask."""
    channel = _CHANNELS.get(group)
    if channel is None:
        with explained():
            channel = _CHANNELS[group] = Channel(_private.group_of_our_own(group))
    return channel


# ------------------------------------------------------------------------------------------- the header of a window


class Report(NamedTuple):
    """What a replica says of its window. Each is a number that a float64 holds."""

    step: float  # a digest of the Step; 0 if it has none
    begun: float  # windows of this step, with this one
    finished: float
    digest: float = 0  # of what is folded; 0 without any micro-batch
    agreed: float = False  # whether the replicas have agreed on that before
    on_device: float = False  # whether some weights are counted on the device, and are not in `weight`
    steps: float = 0
    weight: float = 0.0
    unit: float = 0.0  # of the weighted sums; 0 if nothing was weighed
    failed: float = False  # whether the replica has raised an error


class Header:
    """The reports of all replicas, under way: one small all_gather, over when the first gradients can be sent.

    It begins before the last backward pass, when all of its numbers are known. All replicas see the same reports, so a
    problem makes all of them raise, in the same window.
    """

    def __init__(self, channel: Channel, mine: Report):
        # The collective reads and writes these tensors until it is done, so they are kept until then.
        self._sent = torch.tensor(mine, dtype=torch.float64)
        self._rows = torch.zeros(channel.count, len(mine), dtype=torch.float64)
        self._work = channel.group.allgather([[*self._rows]], [self._sent])
        self._reports: list[Report] = []

    @property
    def done(self) -> bool:
        """Whether the reports of all replicas are here."""
        return bool(self._reports or self._work.is_completed())

    def reports(self) -> list[Report]:
        """Those of all replicas, in their order; waits for them."""
        if not self._reports:
            with explained():
                self._work.wait()
            self._reports = [Report(*row) for row in self._rows.tolist()]
        return self._reports


def check_in_step(reports: list[Report]) -> None:
    """Raises FuncgaError if a replica has failed, or they merge different windows, or none has anything to fold."""
    failed = [str(rank) for rank, report in enumerate(reports) if report.failed]
    if failed:
        raise FuncgaError(
            f"rank {', '.join(failed[:8])} has raised an error in this window, and has nothing to merge. See what that "
            f"process says, and let the error end all of them; or leave this window out on every rank."
        )
    if len({(report.begun, report.finished) for report in reports}) > 1:
        spelled = ", ".join(
            f"rank {rank} begins window {report.begun:.0f} and has finished {report.finished:.0f}"
            for rank, report in enumerate(reports[:8])
        )
        raise FuncgaError(
            f"the replicas are out of step: {spelled}. One of them has left out a window that the others merged, "
            f"as after an error or an interruption that was caught. Let an error end the process, or fold nothing in "
            f"its place: an empty batch, or an empty window."
        )
    if not any(report.digest for report in reports):
        raise nothing_to_fold()


def nothing_to_fold() -> FuncgaError:
    """The error, on all replicas, for a window in which none of them has a micro-batch."""
    return FuncgaError(
        "no replica has a micro-batch to fold, so there is no gradient to return. Check the loaders, or that a "
        "generator was not used up before."
    )


# ------------------------------------------------------------------------------------- descriptions that are compared


def digest_of(description: object) -> int:
    """A hash of 53 bits, which a float64 holds exactly, and never 0."""
    return int.from_bytes(hashlib.sha256(repr(description).encode()).digest()[:8], "little") >> 11 or 1


def check_alike(descriptions: Sequence[dict[str, str] | None], problem: str) -> None:
    """Raises FuncgaError if two replicas describe the same path differently.

    Each replica has a description for every path, or None if it has nothing to say. `problem` goes into the error, such
    as "fold different structures".
    """
    said = [(rank, description) for rank, description in enumerate(descriptions) if description is not None]
    for rank, theirs in said[1:]:
        differences = _differences(*said[0], rank, theirs)
        if differences:
            more = f"; and {len(differences) - 4} more" if differences[4:] else ""
            raise FuncgaError(
                f"the replicas {problem}: {'; '.join(differences[:4])}{more}. They are merged leaf by leaf: build the "
                f"model, the batch and the fold alike on every rank."
            )


def _differences(first: int, expected: dict[str, str], rank: int, theirs: dict[str, str]) -> list[str]:
    """How a rank differs from the first one: in the paths, in what is at them, or in their order."""
    paths = [path for path in {**expected, **theirs} if expected.get(path) != theirs.get(path)]
    if not paths and [*expected] != [*theirs]:
        return [f"rank {rank} has the leaves of rank {first} in another order"]
    here, there = f"on rank {first}", f"on rank {rank}"
    return [
        f"`{path}` is {expected.get(path, 'missing')} {here} and {theirs.get(path, 'missing')} {there}"
        for path in paths
    ]


# ------------------------------------------------------------------------------------------- collectives of the user


class Listener:
    """Tells whether collectives have been called since it was made: of one group, or of any."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.before = _private.collectives_called(group)

    @property
    def heard(self) -> bool:
        """Whether there were any; False if torch does not tell."""
        return _private.collectives_called(self.group) != self.before

    @property
    def is_silent(self) -> bool:
        """Whether there were none; False if torch does not tell."""
        return _private.collectives_called(self.group) == self.before is not None


COULD_NOT_MERGE = (
    "funcga: the replicas could not be merged. One of them has died, has raised an error of its own, or did not call "
    "the step within the group's timeout; see what the other processes say."
)


@contextmanager
def explained() -> Iterator[None]:
    """A context that adds to an error in a collective what it means for the replicas."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(COULD_NOT_MERGE)
        raise


def is_of_a_collective(error: BaseException) -> bool:
    """Whether an error comes from torch's collectives, as far as its type and text tell, and is not explained yet."""
    unexplained = COULD_NOT_MERGE not in getattr(error, "__notes__", ())
    return unexplained and (isinstance(error, dist.DistError) or "gloo/" in str(error))
