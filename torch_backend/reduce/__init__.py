"""The merge of one window: what has been folded here becomes what has been folded on all replicas.

    propose   the structure of what is folded is known here
    meet      the replicas meet before something that communicates by itself
    agree     each says in a header what it has: all know the weight, the unit, and one structure
    merge     everything is sent, in one order on all replicas, before anything is waited for
    abort     an error ends the window here, and the others are told

Only torch has this package: in JAX the merge is a psum after the loop.

Design note: docs/concepts/inside_replicas.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch

from funcga._backend import Backend
from funcga._call import Program
from funcga._fold.outputs import Outputs
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import as_dtensor
from torch_backend.reduce.agreement import (
    Agreement,
    History,
    Progress,
    Rebuild,
    agree,
    check_options,
    progress_of,
    propose,
)
from torch_backend.reduce.header import Report, check_in_step, check_updates, exchange_reports
from torch_backend.reduce.wire import Receive, add, gather
from torch_backend.replicas import InTurn, Replicas, explained
from torch_backend.sums import Folding, Sums, power_below


class Reduction:
    """Merges what one window folds over the replicas: `propose`, `agree` and `merge`, or `abort`.

    A replica without any micro-batch calls `adopt` in place of `propose`. A window that
    communicates itself calls `meet` before it does.
    """

    sums: Sums  # set by `propose` or `adopt`
    agreement: Agreement  # of all replicas; set by `agree`
    proposal: Agreement | None = None  # what is folded here; None without any micro-batch
    rebuild: Rebuild | None = None  # of what the others fold, without any micro-batch
    # What waits for the reports of all replicas, set when this one is sent; and these.
    exchange: Callable[[], list[Report]] | None = None
    reports: list[Report]
    unit = 0.0  # of the weighted sums when they travel; 0 until all replicas have said theirs
    # What begins each message that is left, None before the first; set by `_send`.
    unsent: list[Callable[[], Receive]] | None = None
    updates: Scalar = 0  # how many a state of multi_steps has made; 0 in the window of a call
    # Whether the replicas were given other options, and so may have other windows in a call.
    differs = False
    # Whether it is merged, or all replicas raise the same error, or it was given up here.
    is_over = False

    def __init__(self, progress: Progress, replicas: Replicas):
        new = History(progress.step, progress.options)
        self.history, self.replicas = progress.groups.setdefault(replicas.group, new), replicas
        if progress.of_call is not None:
            # Without a reference: a window may free what it holds before the call ends.
            progress.of_call.append(ref(self))
        # Every window counts, merged or not: by that replicas notice that they are out of step.
        self.history.begun += 1
        self.window = self.history.begun
        self.unreceived: list[Receive] = []  # what waits for each message that is sent

    def propose(self, sums: Sums, leaves: Sequence[Array]) -> None:
        """Takes the sums of a window whose first micro-batch has these leaves.

        A leaf that is None is reduced elsewhere.
        """
        self.sums = sums
        self.proposal = propose(self.history, sums.folding, leaves, self.replicas)

    def adopt(
        self,
        sums_of: Callable[[Folding], Sums],
        bind: Callable[[Tree], tuple[Outputs, Sequence[Any]]],
        known: Sequence[Any],
    ) -> Sums:
        """Agrees on empty sums of what the others fold, on a replica without any micro-batch.

        In a first window they say what that is: `bind(value)` has the Outputs and the leaves of a
        value like theirs, of numbers that mean nothing, on the device of what is `known` here.
        """
        devices = [leaf.device for leaf in known if isinstance(leaf, torch.Tensor)]
        device = devices[0] if devices else torch.device("cpu")

        def rebuild(value: Tree) -> tuple[Outputs, Sequence[Any]]:
            likes, structure = trees.flatten(value)
            leaves = [x if x is None else torch.empty_like(x, device=device) for x in likes]
            return bind(trees.unflatten(structure, leaves))

        self.rebuild = rebuild
        self.agree()
        self.sums = sums_of(Folding(self.agreement.outputs))
        return self.sums

    def meet(self, is_last: bool) -> bool:
        """Waits for the other replicas, before what these reduce by themselves; whether it is the
        last such for all.

        Raises FuncgaError, on all of them, if one has raised an error, or is in another window:
        collectives of two windows would be taken for one another.
        """
        self.replicas.channel.send_owed()
        mine = self._header(digest=1, steps=is_last)
        with self._same_on_all():
            reports = exchange_reports(self.replicas.channel, mine)()
            self._check(reports)
        return all(report.steps for report in reports)

    def agree(self) -> None:
        """Tells the other replicas what is folded here, waits for what they tell, and sets the
        unit.

        What is still owed to them from earlier windows is sent first. Raises FuncgaError, on all
        replicas, if they do not do the same.
        """
        if self.unit:
            return
        history, channel = self.history, self.replicas.channel
        with self._same_on_all():
            if self.exchange is None:
                channel.send_owed()
                self.exchange = exchange_reports(channel, self._report())
            reports = self.reports = self.exchange()
            self._check(reports)
            self.agreement = agree(history, self.proposal, self.rebuild, reports, self.replicas)
            # What a replica has not finished is in each header from now on: as long as the others
            # cannot know what it has left out, all windows are refused.
            if self.updates < max([report.updates for report in reports]):
                history.finished -= 1
            check_updates(reports)
        # If all replicas have one unit, as with equal weights, nothing is rescaled. Otherwise the
        # unit is a power of two, and a sum is rounded once at most.
        units = {report.unit for report in reports} - {0.0} or {1.0}
        self.unit = units.pop() if len(units) == 1 else power_below(max(units))

    def _report(self) -> Report:
        """What this replica has folded."""
        proposal = self.proposal
        if proposal is None:
            return self._header(agreed=bool(self.history.agreed()))
        sums, numbers = self.sums, [self.sums.of[leaf] for leaf in proposal.route.numbers]
        counts = sums.total, sums.steps, sums.rejected
        weight, steps, rejected = [0 if isinstance(c, torch.Tensor) else c for c in counts]
        return self._header(
            digest=proposal.digest,
            agreed=bool(proposal.steps),
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
        return Report(*history.digests, self.window, history.finished, **said)

    def _check(self, reports: list[Report]) -> None:
        """Raises FuncgaError, on all replicas, if one has failed, or they do not do the same."""
        check_in_step(reports)
        self.differs = len({report.options for report in reports}) > 1
        if self.differs:
            check_options(self.history, self.replicas)

    @contextmanager
    def _same_on_all(self) -> Iterator[None]:
        """A context in which a FuncgaError is raised on all replicas: none waits for this one."""
        try:
            with explained():
                yield
        except FuncgaError:
            self.is_over = True
            raise

    def merge(self, state: list[Array]) -> list[Array]:
        """Sends everything, and waits: the sums are then those of all replicas.

        Returns the state to be threaded on: that of the last replica that folded anything.
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
                state = self._receive(state)
        except BaseException:
            self.abort()
            raise
        for leaf, like in likes.items():
            of[leaf] = as_dtensor(of[leaf], like)
        self.end()
        return state

    def end(self) -> None:
        """Counts the window as finished, here as on the other replicas."""
        self.is_over, self.history.finished = True, self.window

    def abort(self) -> None:
        """Unblocks the other replicas: sends the remaining messages flagged as failed, now or
        once they are ready.

        If these have the result already, the next window is refused on all of them.
        """
        if self.is_over:
            # By what each header says of the windows that are finished.
            if self.history.finished == self.window:
                self.history.finished -= 1
            return
        self.is_over = True
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
        if self.exchange is None:
            exchange_reports(self.replicas.channel, self._header(failed=True))
            return
        try:
            self.agree()
            self._send()
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

    def _receive(self, state: list[Array]) -> list[Array]:
        """Waits for everything, and takes in what the others have folded. Returns the state."""
        sums, route, collects = self.sums, self.agreement.route, self.sums.folding.outputs.collected
        self._count()
        marks = [mark for receive in self.unreceived if (mark := receive()) is not None]
        for mark in marks:
            self._look_at(mark, may_wait=bool(mark.is_cpu or collects or state))
        if collects:
            gather(sums, route, self.replicas)()
        folded = [rank for rank, report in enumerate(self.reports) if report.steps]
        if not (state and folded):
            return state
        # Its arrays, numbers and texts. Any other object stays each replica's own.
        told = self.replicas.channel.broadcast_from(folded[-1], [*map(_portable, state)])
        told = [each.to(route.device) if isinstance(each, torch.Tensor) else each for each in told]
        return [mine if each is None else each for mine, each in zip(state, told, strict=True)]

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
        if arrays.is_recorded():
            raise FuncgaError(
                "across= was given to a step inside of a loss that is being differentiated, and "
                "the merge over replicas has no derivative. Leave it out there. If the step is a "
                "constant for that loss, run it under torch.no_grad()."
            )
        raise FuncgaError(
            "across= was given inside of a torch.func transform, where replicas cannot be merged. "
            "Take the transform on each replica, inside of grad_fn."
        )
    # A wrapper of a module says itself what it is merged over.
    across = program.across
    several = across if isinstance(across, InTurn) else [program.replicas(backend)]
    return [Reduction(progress_of(program.memory), replicas) for replicas in several]
