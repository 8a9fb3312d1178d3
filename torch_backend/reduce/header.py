"""The header of a window: what each replica says before its gradients are sent."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from funcga.errors import FuncgaError
from torch_backend.replicas import Channel


class Report(NamedTuple):
    """What a replica says of its window. Each is a number that a float64 holds."""

    step: float  # a digest of the StepId, and of the options that have to be the same everywhere
    begun: float  # windows of this step, with this one
    finished: float
    updates: float  # of the state of `multi_steps` that the window is in
    failed: float = False  # whether this replica has raised an error
    last: float = False  # whether it needs no pass after the one that comes
    digest: float = 0  # of what is folded; 0 without any micro-batch
    agreed: float = False  # whether the replicas have agreed on that before
    on_device: float = False  # whether only a device knows some of the counts, which are 0 here
    steps: float = 0
    weight: float = 0.0
    unit: float = 0.0  # of the weighted sums; 0 if nothing was weighed
    rejected: float = 0  # micro-batches that are left out
    numbers: Sequence[float] = ()  # sums that need no collective of their own, ROOM at most


ROOM = 4


def digest_of(description: object) -> int:
    """A hash of 53 bits, which a float64 holds exactly, and never 0."""
    digest = hashlib.sha256(repr(description).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 11 or 1


def exchange_reports(channel: Channel, mine: Report) -> Callable[[], list[Report]]:
    """Begins one small all_gather, and returns a function that waits for the reports of all
    replicas, in their order.

    All replicas see the same reports, so a problem makes all of them raise, in the same window.
    """
    *counts, numbers = mine
    rows = channel.exchange([*counts, *numbers, *[0.0] * (ROOM - len(numbers))])
    return lambda: [Report._make([*row[:-ROOM], row[-ROOM:]]) for row in rows()]


def check_in_step(reports: list[Report]) -> None:
    """Raises FuncgaError if a replica has failed, or they merge different windows."""
    failed = [str(rank) for rank, report in enumerate(reports) if report.failed]
    if failed:
        raise FuncgaError(
            f"rank {', '.join(failed[:8])} has raised an error in this window, and has nothing to "
            "merge. See what that process says, and let the error end all of them; or leave this "
            "window out on every rank."
        )
    if len({(report.begun, report.finished, report.updates) for report in reports}) > 1:
        # Only states of `multi_steps` have made updates.
        spelled = ", ".join(
            f"rank {rank} begins window {report.begun:.0f} and has finished {report.finished:.0f}"
            + (f", from a state after {report.updates:.0f} updates" if report.updates else "")
            for rank, report in enumerate(reports[:8])
        )
        raise FuncgaError(
            f"the replicas are out of step: {spelled}. One of them has left out a window that the "
            "others merged, as after an error or an interruption that was caught. Let an error end "
            "the process, or fold nothing in its place: an empty batch, or an empty window. After "
            "an error in multi_steps make the transform anew on every rank, and go on from one "
            "state."
        )


def nothing_to_fold() -> FuncgaError:
    """The error, on all replicas, for a window in which none of them has a micro-batch."""
    return FuncgaError(
        "no replica has a micro-batch to fold, so there is no gradient to return. Check the "
        "loaders, or that a generator was not used up before."
    )
