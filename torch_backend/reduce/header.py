"""The header of a window: what each replica says before its gradients are sent."""

import hashlib
from typing import NamedTuple

from funcga.errors import FuncgaError
from torch_backend.replicas import Channel, Exchange


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
    unweighed: float = False  # whether gradients have what other replicas' losses add to them, unweighed
    uneven: float = False  # whether its micro-batches have different weights
    rejected: float = 0  # micro-batches that are dropped, but for those that only the device counts
    numbers: tuple[float, ...] = ()  # sums that need no collective of their own, ROOM at most


ROOM = 4


def digest_of(description: object) -> int:
    """A hash of 53 bits, which a float64 holds exactly, and never 0."""
    return int.from_bytes(hashlib.sha256(repr(description).encode()).digest()[:8], "little") >> 11 or 1


class Header:
    """The reports of all replicas, under way: one small all_gather, over when the first gradients can be sent.

    It begins before the last backward pass, when all of its numbers are known. All replicas see the same reports, so a
    problem makes all of them raise, in the same window.
    """

    def __init__(self, channel: Channel, mine: Report):
        *counts, numbers = mine
        said = [*counts, *numbers, *[0.0] * (ROOM - len(numbers))]
        self._exchange: Exchange | None = channel.exchange(said)  # None once it is over
        self._reports: list[Report] = []

    @property
    def done(self) -> bool:
        """Whether the reports of all replicas are here."""
        return self._exchange is None or self._exchange.done

    def reports(self) -> list[Report]:
        """Those of all replicas, in their order; waits for them."""
        if self._exchange is not None:
            self._reports = [Report._make([*row[:-ROOM], tuple(row[-ROOM:])]) for row in self._exchange.rows()]
            self._exchange = None
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
