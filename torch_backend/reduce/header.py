"""The header of a window: what each replica says of it before anything is added up.

Only torch has this file: a program of XLA is one for all replicas.

It is one small all_gather of plain numbers. It begins before the last backward pass, when all of them are known, so
that it is over when the first gradients can be sent. Whatever a replica can see wrong, all of them see in it, and all
raise, in the same window.
"""

import struct
from typing import NamedTuple

import torch

from funcga.errors import FuncgaError
from torch_backend.reduce.channel import Channel, explained


class Report(NamedTuple):
    """What a replica says of its window."""

    step: int  # a digest of the Step; 0 if it has none
    begun: int  # windows of this step, with this one
    finished: int
    digest: int  # of what is folded; 0 without any micro-batch
    known: bool  # whether the replica has an Agreement on that
    on_device: bool  # whether some weights are counted on the device
    steps: int
    whole: int  # the weight, if it is an integer
    real: float  # the weight, if it is not
    unit: float  # that weighted sums are held in; 0 if none is
    failed: bool = False  # whether it has raised an error


_FORMAT = "=qqqq??qqdd?"
NBYTES = struct.calcsize(_FORMAT)


class Header:
    """The reports of all replicas, begun; they can be asked for when it is `done`."""

    def __init__(self, channel: Channel, mine: Report):
        self.known: list[Report] = []
        self.sent = torch.frombuffer(bytearray(struct.pack(_FORMAT, *mine)), dtype=torch.uint8)
        self.said = torch.zeros(channel.count, NBYTES, dtype=torch.uint8)
        self.work = channel.group.allgather([[*self.said]], [self.sent])

    @property
    def done(self) -> bool:
        """Whether all replicas have said theirs."""
        return bool(self.known or self.work.is_completed())

    def reports(self) -> list[Report]:
        """Those of all replicas, in their order; it waits for them."""
        if not self.known:
            with explained():
                self.work.wait()
            self.known = [Report(*struct.unpack(_FORMAT, bytes(row))) for row in self.said.tolist()]
        return self.known


def check_in_step(reports: list[Report]) -> None:
    """Raises FuncgaError if a replica has failed, or they merge different windows, or none has anything to fold."""
    failed = [str(rank) for rank, report in enumerate(reports) if report.failed]
    if failed:
        raise FuncgaError(
            f"rank {', '.join(failed[:8])} has raised an error in this window, and has nothing to merge. See what that "
            f"process says, and let the error end all of them; or leave this window out on every rank."
        )
    if len({(r.begun, r.finished) for r in reports}) > 1:
        spelled = ", ".join(
            f"rank {i} begins window {r.begun} and has finished {r.finished}" for i, r in enumerate(reports[:8])
        )
        raise FuncgaError(
            f"the replicas are out of step: {spelled}. One of them has left out a window that the others merged, "
            f"as after an error or an interruption that was caught. Let an error end the process, or fold nothing in "
            f"its place: an empty batch, or an empty window."
        )
    if not any(r.digest for r in reports):
        raise nothing_to_fold()


def nothing_to_fold() -> FuncgaError:
    """The error, on all replicas, for a window in which none of them has a micro-batch."""
    return FuncgaError(
        "no replica has a micro-batch to fold, so there is no gradient to return. Check the loaders, or that a "
        "generator was not used up before."
    )
