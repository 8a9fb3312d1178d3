"""The merge of one window: what has been folded here becomes what has been folded on all replicas.

    propose   the structure of what is folded is known here
    agree     each says in a header what it has: all know the weight, the unit, and one structure
    merge     everything is sent, in one order on all replicas, before anything is waited for
    abort     an error ends the window here, and the others are told

A window that communicates by itself has the replicas `meet` before it does: a header without more.

Only torch has this package: in JAX the merge is a psum after the loop.

Design note: docs/concepts/inside_replicas.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._types import Array, Scalar
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import as_dtensor
from torch_backend.reduce.agreement import (
    Agreement,
    History,
    Progress,
    Rebuild,
    agree,
    check_steps,
    progress_of,
    propose,
)
from torch_backend.reduce.header import Report, check_in_step, exchange_reports, nothing_to_fold
from torch_backend.reduce.wire import Receive, add, gather
from torch_backend.replicas import InTurn, Replicas, explained
from torch_backend.sums import Folding, Sums, power_below


class Reduction:
    """Merges what one window folds over the replicas: `propose`, `agree` and `merge`, or `abort`.

    A replica without any micro-batch calls `adopt` in place of `propose`. As a context it aborts
    where an error ends it.
    """

    sums: Sums  # set by `propose` or `adopt`
    agreement: Agreement  # of all replicas; set by `agree`
    proposal: Agreement | None = None  # what is folded here; None without any micro-batch
    rebuild: Rebuild | None = None  # of what the others fold, without any micro-batch
    # What waits for the reports of all replicas, while that of the last pass here is under way.
    exchange: Callable[[], None] | None = None
    reports: list[Report]  # the last ones
    unit = 0.0  # of the weighted sums when they travel; 0 until all replicas have agreed
    # What begins each message that is left, None before the first; set by `_send`.
    unsent: list[Callable[[], Receive]] | None = None
    updates: Scalar = 0  # how many a state of multi_steps has made; 0 in the window of a call
    # Whether it is merged, or all replicas raise the same error, or it was given up here.
    is_over = False

    def __init__(self, progress: Progress, replicas: Replicas):
        self.replicas = replicas
        self.history = progress.groups.setdefault(replicas.group, History(progress))
        # Every window counts, merged or not: by that replicas notice that they are out of step.
        self.history.begun += 1
        self.window, self.history.running = self.history.begun, self
        self.unreceived: list[Receive] = []  # what waits for each message that is sent

    def __enter__(self) -> "Reduction":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.abort()

    def propose(self, sums: Sums, leaves: Sequence[Array]) -> None:
        """Takes the sums of a window whose first micro-batch has these leaves.

        A leaf that is None is reduced elsewhere.
        """
        self.sums = sums
        self.proposal = propose(self.history, sums.folding, leaves, self.replicas)

    def adopt(self, sums_of: Callable[[Folding], Sums], rebuild: Rebuild) -> Sums:
        """Agrees on empty sums of what the others fold, on a replica without any micro-batch.

        In a first window they say what that is: `rebuild(value)` has the Outputs and the leaves of
        a value like theirs, whose tensors have no memory.
        """
        self.rebuild = rebuild
        self.agree()
        self.sums = sums_of(Folding(self.agreement.outputs))
        return self.sums

    def meet(self, last: bool) -> bool:
        """Waits for the other replicas, before what these reduce by themselves; whether all say
        that it is the last such.

        Raises FuncgaError, on all of them, if one has raised an error, or is in another window:
        collectives of two windows would be taken for one another.
        """
        with self._same_on_all():
            self._begin_exchange(self._header(last=last))()
        return all(report.last for report in self.reports)

    def agree(self, last: bool = True) -> bool:
        """Tells the other replicas what is folded here, waits for what they tell, and sets the
        unit; or is like `meet`, as long as not all of them say that this is their last pass.

        Raises FuncgaError, on all replicas, if they do not do the same.
        """
        if self.unit:
            return True
        with self._same_on_all():
            receive = self.exchange or self._begin_exchange(self._report(last))
            self.exchange = receive if last else None
            receive()
            self.exchange = None
            reports = self.reports
            if not all(report.last for report in reports):
                return False
            if not any(report.digest for report in reports):
                raise nothing_to_fold()
            mine = self.proposal
            self.agreement = agree(self.history, mine, self.rebuild, reports, self.replicas)
        # If all replicas have one unit, as with equal weights, nothing is rescaled. Otherwise the
        # unit is a power of two, and a sum is rounded once at most.
        units = {report.unit for report in reports} - {0.0} or {1.0}
        self.unit = units.pop() if len(units) == 1 else power_below(max(units))
        return True

    def _begin_exchange(self, mine: Report) -> Callable[[], None]:
        """Sends the report of this replica, after what is still owed from earlier windows. Returns
        what waits for the reports of all.

        That raises FuncgaError, on all replicas, if one has failed, or they do not do the same.
        """
        self.replicas.channel.send_owed()
        exchange, history = exchange_reports(self.replicas.channel, mine), self.history

        def receive() -> None:
            reports = self.reports = exchange()
            # What a replica has not finished is in each header from now on: as long as the others
            # cannot know what it has left out, all windows are refused.
            if self.updates < max([report.updates for report in reports]):
                history.finished -= 1
            history.differs = len({report.options for report in reports}) > 1
            check_in_step(reports)
            check_steps(history, reports, self.replicas)

        return receive

    def _report(self, last: bool) -> Report:
        """What this replica has folded."""
        proposal = self.proposal
        if proposal is None:
            return self._header(last=last)
        sums, numbers = self.sums, [self.sums.of[leaf] for leaf in proposal.route.numbers]
        counts = sums.total, sums.steps, sums.rejected
        weight, steps, rejected = [0 if isinstance(c, torch.Tensor) else c for c in counts]
        return self._header(
            last=last,
            digest=proposal.digest,
            agreed=proposal.is_agreed,
            on_device=any(isinstance(count, torch.Tensor) for count in counts),
            steps=steps,
            weight=float(weight),
            unit=sums.unit or 0.0,
            rejected=rejected,
            updates=float(self.updates),
            numbers=tuple([0.0 if n is None else float(arrays.scalar(n)) for n in numbers]),
        )

    def _header(self, **said: Any) -> Report:
        """A report that begins as all do: with the step, and how far it has come."""
        history = self.history
        return Report(*history.progress.digests, self.window, history.finished, **said)

    @contextmanager
    def _same_on_all(self) -> Iterator[None]:
        """A context in which a FuncgaError is raised on all replicas: none waits for this one."""
        try:
            with explained():
                yield
        except FuncgaError:
            self._close()
            raise

    def _close(self) -> None:
        self.is_over, self.history.running = True, None

    def merge(self) -> None:
        """Sends everything, and waits: the sums are then those of all replicas, and the state that
        of the last one that has folded anything.
        """
        try:
            self.agree()
            of = self.sums.of
            # What is a tuple tells the placements of each part by itself.
            likes = {
                leaf: of[leaf] if isinstance(of[leaf], tuple) else spec
                for leaf, spec in self.agreement.specs.items()
            }
            with self._same_on_all():
                self._send()
                self._receive()
        except BaseException:
            self.abort()
            raise
        for leaf, like in likes.items():
            of[leaf] = as_dtensor(of[leaf], like)
        self.end()

    def end(self) -> None:
        """Counts the window as finished, here as on the other replicas."""
        self._close()
        self.history.finished = self.window

    def abort(self) -> None:
        """Unblocks the other replicas: sends the remaining messages flagged as failed, now or
        once they are ready.
        """
        if self.is_over:
            return
        self._close()
        if self.unit:
            self._send_rest()
        else:
            # In a first window the channel may have no group yet. Making it is a collective, and no
            # other replica would take part in it now.
            self.replicas.channel.owe(self._send_rest)

    def _send_rest(self) -> None:
        """Sends the rest of a window that was given up; if nothing was said yet, a header that says
        so.
        """
        try:
            if (self.unit or self.exchange is not None) and self.agree():
                self._send()
            else:
                exchange_reports(self.replicas.channel, self._header(failed=True))
        except (FuncgaError, RuntimeError):
            # The others have raised the same, and wait for nothing.
            return

    def _send(self) -> None:
        """Begins all messages that are left, except those before which the replicas have to
        exchange shapes.
        """
        sums, route = self.sums, self.agreement.route
        if self.unsent is None:
            sums.hold_in(self.unit)  # from the unit of this replica to that of all
            self.unsent = [partial(self._add, bucket) for bucket in route.buckets]
            if any(report.on_device for report in self.reports):
                self.unsent.append(self._count_on_device)
            if route.gathered and not sums.folding.outputs.collected:
                self.unsent.append(partial(gather, sums, route, self.replicas))
        while self.unsent:
            self.unreceived.append(self.unsent[0]())
            del self.unsent[0]

    def _add(self, bucket: list[int]) -> Receive:
        """Begins to add the leaves of a bucket, with the mark of an error in the last one.

        If that is sent already when this replica fails, the others have all of the window, and the
        next header shows that it was not finished here.
        """
        route = self.agreement.route
        mark = float(self.is_over) if bucket is route.buckets[-1] else None
        return add(self.sums, route, bucket, self.replicas, mark)

    def _count_on_device(self) -> Receive:
        """Begins to add up what the devices have counted: the weight, and micro-batches that the
        host cannot see.
        """
        sums, device = self.sums, self.agreement.route.device
        # Those that the host knows are in the headers.
        counts = sums.total, sums.steps, sums.rejected
        sent = torch.zeros(3, dtype=torch.float64, device=device)
        for total, count in zip(sent, counts, strict=True):
            if isinstance(count, torch.Tensor):
                total.copy_(count)
        work = self.replicas.channel.carrier(device).allreduce([sent])

        def receive() -> None:
            work.wait()
            sums.total = sums.total + sent[0]
            sums.steps = sums.steps + sent[1].to(torch.int64)
            sums.rejected = sums.rejected + sent[2]

        return receive

    def _receive(self) -> None:
        """Waits for everything, and takes in what the others have folded."""
        sums, route, collects = self.sums, self.agreement.route, self.sums.folding.outputs.collected
        channel, state = self.replicas.channel, sums.state
        self._count()
        for receive in self.unreceived:
            mark = receive()
            if mark is not None:
                self._look_at(mark, may_wait=bool(mark.is_cpu or collects or state))
        if collects:
            gather(sums, route, self.replicas)()
        folded = [rank for rank, report in enumerate(self.reports) if report.steps]
        if state and folded:
            # Its arrays, numbers and texts. Any other object stays each replica's own.
            told = channel.broadcast_from(folded[-1], [*map(_portable, state)])
            for index, leaf in enumerate(told):
                is_tensor = isinstance(leaf, torch.Tensor)
                if leaf is not None:
                    state[index] = leaf.to(route.device) if is_tensor else leaf

    def _look_at(self, mark: torch.Tensor, may_wait: bool) -> None:
        """Raises FuncgaError, on all replicas, if one has marked its sums as failed."""
        # Reading the mark from a device makes the host wait. Instead the weight becomes NaN there,
        # and so does every mean of the window. But before another exchange between hosts it has to
        # be read: a replica that has given up would not answer.
        if may_wait and self.replicas.channel.is_marked(mark):
            raise FuncgaError(
                "another replica has raised an error, or was interrupted, when the others had "
                "begun to merge this window: nothing of it can be used. See what that process "
                "says, and let the error end all of them; or leave this window out on every rank."
            )
        if not mark.is_cpu:
            unknown = torch.where(mark[0] != 0, float("nan"), 0.0)
            self.sums.total = self.sums.total + unknown.to(torch.float64)

    def _count(self) -> None:
        """Takes in what all headers say: the counts, and scalars, in the order of the replicas."""
        sums, reports = self.sums, self.reports
        sums.unit, sums.total = self.unit, sum(report.weight for report in reports)
        sums.steps = int(sum(report.steps for report in reports))
        sums.rejected = int(sum(report.rejected for report in reports))
        for position, leaf in enumerate(self.agreement.route.numbers):
            # From the unit of each replica to that of all; one without a unit has nothing to add.
            is_weighted = sums.folding.kinds[leaf] == "weighted"
            addends = [
                r.numbers[position] * (r.unit / self.unit if is_weighted else 1.0) for r in reports
            ]
            dtype = sums.folding.folds[leaf].accumulator_dtype
            sums.of[leaf] = torch.tensor(sum(addends), dtype=dtype, device="cpu")


def _portable(leaf: object) -> object:
    """A leaf of the state as another process can have it; None for an object of this process."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu()
    return leaf if isinstance(leaf, bool | int | float | complex | str) else None


def reductions_of(program: Program, backend: Backend) -> list[Reduction]:
    """What merges a window over the replicas of `across=`, one after the other; usually one."""
    if arrays.in_transform():
        raise FuncgaError(
            "across= was given inside of a torch.func transform, or of a loss that is being "
            "differentiated, where replicas cannot be merged: the merge has no derivative. Take "
            "the transform on each replica, inside of grad_fn; or run the step under "
            "torch.no_grad(), if it is a constant there."
        )
    # A wrapper of a module says itself what it is merged over.
    across = program.across
    several = across if isinstance(across, InTurn) else [program.replicas(backend)]
    return [Reduction(progress_of(program.memory), replicas) for replicas in several]
