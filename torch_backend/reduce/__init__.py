"""The reduction of one window: what has been folded here becomes what has been folded on all replicas.

Only torch has this file: in JAX it is a psum after the loop.

Each replica first says in a header what it will have folded. So all of them know the total weight and the unit that
weighted sums travel in, and that they take the same step. While the last backward pass runs, a bucket is sent once the
headers are here, and it and all buckets before it are complete: all replicas send in one order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from funcga._fold import Tally
from funcga._fold.outputs import Outputs
from funcga._types import Scalar, Structure, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import Spec, as_dtensor, is_dtensor
from torch_backend.engine.buffers import Buffers, power_below
from torch_backend.engine.layout import Layout
from torch_backend.reduce.agreement import Agreement, Progress, Rebuild, agreed, check_weighed, proposed
from torch_backend.reduce.header import ROOM, Header, Report, check_in_step, digest_of
from torch_backend.reduce.wire import Sums, Wire, add_converted, carried, gather
from torch_backend.replicas import Replicas, explained, owed_to


class Reduction:
    """Merges what one window folds over the replicas, once.

    The order of calls: `begin` once the first output is known, `announce` before the last backward pass, `ready`
    during that pass, then `finish`. A replica without any micro-batch calls `take_part` and `finish`. `give_up` tells
    the other replicas of an error that ends the window.

    `announces_all`: whether nothing is folded after `announce`, on any replica. A few scalars then travel in the
    header.
    """

    agreement: Agreement
    buffers: Buffers
    sums: Sums

    def __init__(self, progress: Progress, replicas: Replicas, announces_all: bool = False):
        self.history, self.replicas, self.announces_all = progress.over(replicas.group), replicas, announces_all
        self.numbers: tuple[int, ...] = ()  # the leaves that travel in the header
        # Every window counts, merged or not. Replicas that are out of step notice it by different counts.
        self.history.begun += 1
        self.window = self.history.begun
        self.header: Header | None = None
        self.unit = 0.0  # of the weighted sums when they travel; 0 until all replicas have said theirs
        # An error that is seen inside of a backward pass is kept here, and raised after it.
        self.problem: Exception | None = None
        self.rebuild: Rebuild | None = None
        # Whether gradients of other replicas' losses came in, and nothing had weighed them; and the weights of the
        # micro-batches, if their unit does not tell whether they differ.
        self.unweighed, self.weights = False, set[Scalar]()
        self.is_over = False
        self.counted: tuple[dist.Work, torch.Tensor] | None = None
        self.buffers_of: Callable[[Layout], Buffers] = Buffers  # for a replica without any micro-batch
        self.converted = False  # whether leaves that are added as what their monoid makes of them are added
        self.combine: Callable[[], None] | None = None  # waits for leaves in no bucket, and combines them

    # ------------------------------------------------------------------------------------------------- a window begins

    def begin(self, buffers: Buffers, leaves: Sequence[Any]) -> None:
        """Takes the buffers of a window whose first micro-batch has these leaves; they may be folded already.

        A leaf that is None is reduced elsewhere.
        """
        self._take_buffers(proposed(self.history, buffers.outputs, leaves, buffers.layout, self.replicas), buffers)

    def _take_buffers(self, agreement: Agreement, buffers: Buffers) -> None:
        """Takes the buffers, and lets sums that have not begun accumulate in the memory of the buckets."""
        self.agreement, self.buffers, plan = agreement, buffers, agreement.plan
        # Without a bucket there is no mark of an error, which has to be read before the exchanges that these take.
        outputs = buffers.outputs
        if self.announces_all and not (agreement.specs or outputs.collected or outputs.threads):
            self.numbers = plan.numbers(ROOM)
        self.sums = Sums(plan._replace(buckets=()) if self.numbers else plan)
        self.weighted = {*buffers.layout.weighted}
        # An accumulator that is a view of its bucket need not be copied when the bucket is sent.
        for leaf, view in self.sums.views.items():
            is_added_in_place = buffers.layout.kinds[leaf] is not None and leaf not in agreement.specs
            if is_added_in_place and buffers.reduced[leaf] is None:
                buffers.reduced[leaf] = view

    def take_part(self, bind: Callable[[Tree], Outputs], device: torch.device) -> Outputs:
        """Learns what the others fold, on a replica without any micro-batch, and begins with empty buffers for it.

        `bind(value)` is the Outputs of a value like those of the others, which is made on `device`.
        """

        def rebuild(structure: Structure) -> tuple[Outputs, list[Any]]:
            # A value like those of the others, of numbers that mean nothing.
            skeleton, likes = structure
            leaves = [None if like is None else torch.empty_like(like, device=device) for like in likes]
            return bind(trees.unflatten(trees.flatten(skeleton)[1], leaves)), leaves

        self.rebuild = rebuild
        self.announce()
        self.agree()
        return self.agreement.outputs

    # -------------------------------------------------------------------------------------- the last backward pass runs

    @property
    def overlaps(self) -> bool:
        """Whether buckets can be sent while the last backward pass runs."""
        # Three things forbid it. The replicas have not agreed yet. Or there are several devices, whose hooks run in
        # several threads. Or the loss uses the same group, and its collectives come earlier on some replicas than on
        # others.
        one_device = len({bucket.device for bucket in self.sums.buckets}) == 1
        shared = self.history.communicates and self._wire.carrier is self.replicas.group
        return bool(self.agreement.steps) and one_device and not shared

    @property
    def _wire(self) -> Wire:
        return self._wire_among(0)

    def _wire_among(self, group: int, device: torch.device | None = None) -> Wire:
        """What travels over the group of replicas of this number; if not from a device, from that of the plan."""
        replicas, device = self.agreement.groups[group], device or self.agreement.plan.device
        return Wire(replicas.channel.carrier(device, replicas.group), device, replicas.channel)

    def meet(self, is_last: bool) -> bool:
        """Waits for the other replicas, before what these reduce by themselves; whether it is the last such for all.

        Raises FuncgaError, on all of them, if one has raised an error, or is in another window: collectives of two
        windows would be taken for one another.
        """
        self.replicas.channel.settle()
        reports = Header(self.replicas.channel, Report(*self._counts, digest=1, steps=is_last)).reports()
        try:
            check_in_step(reports)
        except FuncgaError as problem:
            self.problem = problem
            raise
        return all(report.steps for report in reports)

    def announce(self, weight: Scalar = 0, steps: int = 0) -> None:
        """Sends the header: what this replica will have folded after a last micro-batch of this weight, if any.

        What is still owed to the others from earlier windows is sent first.
        """
        self.replicas.channel.settle()
        if self.rebuild is not None:
            report = Report(*self._counts, agreed=self.history.recalled() is not None)
        else:
            buffers, on_device = self.buffers, isinstance(weight, torch.Tensor)
            if steps:
                buffers.share(weight)  # the first weight chooses the unit
            numbers = [buffers.reduced[leaf] for leaf in self.numbers]
            unit, weights = buffers.unit or 0.0, float(buffers.weight + (0 if on_device else weight))
            report = Report(
                *self._counts,
                digest=self.agreement.digest,
                agreed=bool(self.agreement.steps),
                on_device=on_device or buffers.counted is not None,
                steps=buffers.steps + steps,
                weight=weights,
                unit=unit,
                unweighed=self.unweighed,
                uneven=len(self.weights) > 1 or not (self.weights or weights == (buffers.steps + steps) * unit),
                rejected=0 if isinstance(buffers.rejected, torch.Tensor) else buffers.rejected,
                numbers=tuple([0.0 if n is None else float(arrays.scalar(n)) for n in numbers]),
            )
        self.header = Header(self.replicas.channel, report)

    @property
    def _counts(self) -> tuple[int, int, int]:
        """What every Report begins with: the step, and how many windows have begun and are finished."""
        step = self.history.step
        return 0 if step is None else digest_of(tuple(step)), self.window, self.history.finished

    def ready(self, leaf: int) -> None:
        """Says that nothing more will be added to a leaf, and sends the buckets that this completes."""
        self.sums.complete(leaf)
        # The backward pass goes on without the headers of slower replicas: these could not receive a bucket yet anyway.
        if self.header is None or not self.header.done:
            return
        try:
            self.agree()
        except (FuncgaError, RuntimeError):  # `finish` raises it
            return
        with explained():
            while self.sums.next_is_complete:
                self._send()

    def agree(self) -> None:
        """Waits for the headers, and sets the unit. Raises FuncgaError, on all replicas, if they do not do the same."""
        assert self.header is not None
        if self.problem is not None:
            raise self.problem
        if self.unit:
            return
        try:
            reports = self.header.reports()
            check_in_step(reports)
            mine = None if self.rebuild is not None else self.agreement
            agreement = agreed(self.history, mine, self.rebuild, reports, self.replicas)
            check_weighed(agreement, reports)
        except (FuncgaError, RuntimeError) as problem:
            self.problem = problem
            raise
        if self.rebuild is not None:
            self._take_buffers(agreement, self.buffers_of(Layout(agreement.outputs)))
        # If all replicas have one unit, as with equal weights, nothing is rescaled. Otherwise the unit is a power of
        # two, and a sum is rounded once at most.
        units = {report.unit for report in reports} - {0.0}
        self.unit = units.pop() if len(units) == 1 else power_below(max(units)) if units else 1.0

    # --------------------------------------------------------------------------------------------------- a window ends

    def finish(self, state: list[Any]) -> list[Any]:
        """Sends the rest, and waits: the buffers are then those of all replicas.

        Returns the state to be threaded on: that of the last replica that folded anything.
        """
        if self.header is None:
            self.announce()
        try:
            self.agree()
            likes = {leaf: _like(self.buffers.reduced[leaf], spec) for leaf, spec in self.agreement.specs.items()}
            with explained():
                self._send_rest()
                state = self._receive(state)
        except BaseException as error:
            if isinstance(error, FuncgaError):  # then the others raise it too
                self.problem = error
            self.give_up()
            raise
        for leaf, like in likes.items():
            self.buffers.reduced[leaf] = as_dtensor(self.buffers.reduced[leaf], like)
        self.is_over, self.history.finished = True, self.window
        self.history.folded = None if self.buffers.counted is not None else self.buffers.tally
        return state

    @property
    def folded(self) -> int:
        """How many replicas have something to fold, once it is known what all of them have."""
        assert self.header is not None
        return sum(bool(report.steps) for report in self.header.reports())

    def give_up(self) -> None:
        """Sends what the others still wait for, with the mark of an error; owes it if they are not ready yet."""
        if self.is_over or isinstance(self.problem, FuncgaError):
            return
        self.is_over = True
        if self.header is not None and self.header.done:
            self.settle()
        else:
            # In a first window there may be no channel yet. Making it is a collective, and no other replica would take
            # part in it now.
            owed_to(self.replicas.group).append(self)

    def settle(self) -> None:
        """Sends the rest of a window that was given up; if it was never announced, a header that says so."""
        if self.header is None:
            Header(self.replicas.channel, Report(*self._counts, failed=True))
            return
        try:
            self.agree()
            # The mark travels in the last bucket. If that is sent already, the others have all of this window, and the
            # next header shows that it was not finished here.
            if self.sums.left:
                self.sums.mark.fill_(1)
            self._send_rest()
        except (FuncgaError, RuntimeError):
            # The others have raised the same, and wait for nothing.
            return

    def _send_rest(self) -> None:
        """Begins all collectives that are left, except those before which the replicas have to exchange shapes."""
        assert self.header is not None
        while self.sums.left:
            self._send()
        if self.counted is None and any(report.on_device for report in self.header.reports()):
            self.counted = self._count_on_device()
        plan = self.agreement.plan
        if plan.converted and not self.converted:
            self.converted = True
            add_converted(self.buffers, plan, self._wire_among)
        if self.combine is None and plan.gathered and not self.buffers.outputs.collected:
            self.combine = self._gather()

    def _send(self) -> None:
        # From the unit of this replica to that of all.
        factor = (self.buffers.unit or self.unit) / self.unit
        # Not the device of the plan: a count on the host may be beside gradients, or totals, on a device.
        bucket = self.sums.next_bucket
        carrier = self._wire_among(bucket.among, bucket.device).carrier
        self.sums.send(carrier, self.buffers.reduced, self.weighted, factor)

    def _gather(self) -> Callable[[], None]:
        members = [[*map(self.replicas.ranks.index, group.ranks)] for group in self.agreement.groups]
        return gather(self.buffers, self.agreement.plan, self._wire, members)

    def _count_on_device(self) -> tuple[dist.Work, torch.Tensor]:
        """Begins to add up what the devices have counted: the weight, and micro-batches that the host cannot see."""
        counted, wire = self.buffers.counted, self._wire
        rejected = self.buffers.rejected if isinstance(self.buffers.rejected, torch.Tensor) else 0
        counts = (0, 0, rejected) if counted is None else (counted.weight[0], counted.steps, rejected)
        sent = torch.stack([_on_device(count, wire.device) for count in counts])
        return wire.carrier.allreduce([sent]), sent

    # ------------------------------------------------------------------------------------------- what the others folded

    def _receive(self, state: list[Any]) -> list[Any]:
        """Waits for everything, and takes in what the others have folded. Returns the state."""
        assert self.header is not None
        reports, buffers = self.header.reports(), self.buffers
        self.sums.wait()
        # Reading the mark from a device would make the host wait. Instead `_count` makes the weight NaN there. But
        # before another exchange between hosts the mark has to be read: a replica that has given up would not answer.
        exchanges_more = bool(buffers.outputs.collected or state)
        may_wait = self.sums.mark.is_cpu or exchanges_more
        if may_wait and self.replicas.channel.is_marked(self.sums.mark):
            raise FuncgaError(
                "another replica has raised an error, or was interrupted, when the others had begun to merge this "
                "window: nothing of it can be used. See what that process says, and let the error end all of them; or "
                "leave this window out on every rank."
            )
        self._add_numbers(reports)
        self._count(reports)
        # A view would keep its whole bucket alive as long as the caller keeps a loss.
        for leaf in buffers.layout.rest:
            if leaf in self.sums.views and self.sums.views[leaf].nbytes <= _SMALL:
                buffers.reduced[leaf] = self.sums.views[leaf].clone()
        if buffers.outputs.collected:
            self.combine = self._gather()
        if self.combine is not None:
            self.combine()
        folded = [rank for rank, report in enumerate(reports) if report.steps]
        return carried(state, folded[-1], self._wire) if state and folded else state

    def _add_numbers(self, reports: list[Report]) -> None:
        """Adds up the scalars of all headers, in the order of the replicas."""
        for position, leaf in enumerate(self.numbers):
            # From the unit of each replica to that of all; one without a unit has nothing to add.
            factors = [report.unit / self.unit if leaf in self.weighted else 1.0 for report in reports]
            total = sum(report.numbers[position] * factor for report, factor in zip(reports, factors, strict=True))
            self.buffers.reduced[leaf] = torch.tensor(total, dtype=self.buffers.folds[leaf].accumulator_dtype)

    def _count(self, reports: list[Report]) -> None:
        """Takes in what all replicas have counted."""
        buffers, mark = self.buffers, self.sums.mark
        buffers.unit, buffers.counted = self.unit, None
        buffers.steps, buffers.weight = int(sum(report.steps for report in reports)), sum(r.weight for r in reports)
        buffers.rejected = int(sum(report.rejected for report in reports))
        if self.counted is not None:
            work, counts = self.counted
            work.wait()
            buffers.counted = Tally((counts[0],), counts[1].to(torch.int64))
            buffers.rejected = buffers.rejected + counts[2]
        if not mark.is_cpu:
            # The weight is NaN where a replica has given up, and so is every mean of the window.
            spoilt = torch.where(mark != 0, float("nan"), 0.0).to(torch.float64)
            nothing = Tally((spoilt,), torch.zeros((), dtype=torch.int64, device=mark.device))
            buffers.counted = nothing if buffers.counted is None else buffers.counted.merge(nothing)


_SMALL = 2**12  # bytes of a value that is copied out of its bucket


def _on_device(count: Scalar, device: torch.device) -> torch.Tensor:
    """A number as a float64 on the device. The host does not wait for it."""
    if isinstance(count, torch.Tensor):
        return count.to(device, torch.float64)
    return torch.full((), float(count), dtype=torch.float64, device=device)


def _like(accumulated: Any, spec: Spec) -> Any:
    """What tells the placements of a leaf of DTensors: the leaf itself, or the Spec where nothing was folded."""
    return accumulated if isinstance(accumulated, tuple) or is_dtensor(accumulated) else spec
