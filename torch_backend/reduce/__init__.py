"""The reduction of one window: what has been folded here becomes what has been folded on all
replicas.

Only torch has this file: in JAX it is a psum after the loop.

When its last micro-batch is folded, each replica says in a header what it has. So all of them know
the total weight and the unit that weighted sums travel in, and that they take the same step. Then
everything is sent, in one order on all replicas, before anything is waited for.

Design note: docs/concepts/inside_replicas.md.
"""

from collections import deque
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
from torch_backend.dtensor import Spec, as_dtensor, is_dtensor
from torch_backend.engine.sums import Folding, Sums, power_below
from torch_backend.reduce.agreement import (
    Agreement,
    Progress,
    Rebuild,
    agree,
    check_options,
    progress_of,
    propose,
)
from torch_backend.reduce.header import (
    Report,
    check_in_step,
    check_updates,
    digest_of,
    exchange_reports,
)
from torch_backend.reduce.wire import Form, Receive, Wire, add, gather
from torch_backend.replicas import InTurn, Replicas, explained


class Reduction:
    """Merges what one window folds over the replicas, once.

    `begin` once the first output is known, then `finish`. A replica without any micro-batch calls
    `take_part` and `finish`. A window that communicates itself calls `meet` before it does, or
    `announce` before the last time. `give_up` tells the other replicas of an error that ends the
    window.
    """

    agreement: Agreement  # of all replicas, as soon as they have announced what they fold
    sums: Sums

    def __init__(self, progress: Progress, replicas: Replicas):
        self.history, self.replicas = progress.over(replicas.group), replicas
        if progress.of_call is not None:
            # Without a reference: a window may free what it holds before the call ends.
            progress.of_call.append(ref(self))
        # Every window counts, merged or not. Replicas that are out of step notice it by different
        # counts.
        self.history.begun += 1
        self.window = self.history.begun
        # What is folded here, and how it is to travel; None without any micro-batch.
        self.proposal: Agreement | None = None
        self.rebuild: Rebuild | None = None  # of what the others fold, without any micro-batch
        # What waits for the reports of all replicas, while they are under way; and these.
        self.exchange: Callable[[], list[Report]] | None = None
        self.reports: list[Report] = []
        # Of the weighted sums when they travel; 0 until all replicas have said theirs.
        self.unit = 0.0
        # What begins each message, None before the first; and what waits for each that is sent.
        self.unsent: deque[Callable[[], Receive]] | None = None
        self.unreceived = deque[Receive]()
        # It travels in the last message of sums: not 0 if any replica has raised an error.
        self.mark = torch.zeros(1, device="cpu")
        # How many the state of multi_steps has made; 0 in the window of a call.
        self.updates: Scalar = 0
        # Whether the replicas were given other options, and so may have other windows in a call.
        self.differs = False
        # Whether it is merged, or all replicas raise the same error, or it was given up here.
        self.is_over = False

    # ------------------------------------------------------------------------------ a window begins

    def begin(self, sums: Sums, leaves: Sequence[Array]) -> None:
        """Takes the sums of a window whose first micro-batch has these leaves.

        A leaf that is None is reduced elsewhere.
        """
        self.sums = sums
        self.proposal = propose(self.history, sums.folding, leaves, self.replicas)

    def take_part(
        self,
        sums_of: Callable[[Folding], Sums],
        bind: Callable[[Tree], Outputs],
        known: Sequence[Any],
    ) -> Sums:
        """Begins with empty sums of what the others fold, on a replica without any micro-batch.

        In a first window they say what that is: `bind(value)` is the Outputs of a value like
        theirs, of numbers that mean nothing, on the device of what is `known` here.
        """
        tensors = [leaf for leaf in known if isinstance(leaf, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")

        def rebuild(tree: Tree, forms: list[Form | None]) -> tuple[Outputs, list[Any]]:
            leaves = [
                None if form is None else torch.empty(form[0], dtype=form[1], device=device)
                for form in forms
            ]
            return bind(trees.unflatten(trees.flatten(tree)[1], leaves)), leaves

        self.rebuild = rebuild
        self.announce()
        self.sums = sums_of(Folding(self.agreement.outputs))
        return self.sums

    # ---------------------------------------------------------------------------- the replicas meet

    def meet(self, is_last: bool) -> bool:
        """Waits for the other replicas, before what these reduce by themselves; whether it is the
        last such for all.

        Raises FuncgaError, on all of them, if one has raised an error, or is in another window:
        collectives of two windows would be taken for one another.
        """
        self.replicas.channel.send_owed()
        reports = exchange_reports(
            self.replicas.channel, Report(*self._counts, digest=1, steps=is_last)
        )()
        self._check(reports)
        return all(report.steps for report in reports)

    def announce(self) -> None:
        """Tells the other replicas what is folded here, waits for what they tell, and sets the
        unit.

        What is still owed to them from earlier windows is sent first. Raises FuncgaError, on all
        replicas, if they do not do the same.
        """
        if self.unit:
            return
        if self.exchange is None:
            self.replicas.channel.send_owed()
            self.exchange = exchange_reports(self.replicas.channel, self._report())
        self.reports = self.exchange()
        self._check(self.reports)
        with self._over_if_refused():
            self.agreement = agree(
                self.history, self.proposal, self.rebuild, self.reports, self.replicas
            )
            # What a replica has not finished is in each header from now on: as long as the others
            # cannot know what it has left out, all windows are refused.
            if self.updates < max(report.updates for report in self.reports):
                self.history.finished -= 1
            check_updates(self.reports)
        # If all replicas have one unit, as with equal weights, nothing is rescaled. Otherwise the
        # unit is a power of two, and a sum is rounded once at most.
        units = {report.unit for report in self.reports} - {0.0}
        self.unit = units.pop() if len(units) == 1 else power_below(max(units)) if units else 1.0
        self.exchange = None

    def _check(self, reports: list[Report]) -> None:
        """Raises FuncgaError, on all replicas, if one has failed, or they do not do the same."""
        with self._over_if_refused():
            check_in_step(reports)
            self.differs = len({report.options for report in reports}) > 1
            if self.differs:
                check_options(self.history, self.replicas)

    @contextmanager
    def _over_if_refused(self) -> Iterator[None]:
        """A context in which a FuncgaError is raised on all replicas: no other waits for this
        one.
        """
        try:
            yield
        except FuncgaError:
            self.is_over = True
            raise

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        """What every Report begins with: the step, how many windows have begun and are finished,
        and the options.
        """
        history, step = self.history, self.history.step
        number = 0 if step is None else digest_of(tuple(step))
        return number, self.window, history.finished, digest_of([*history.options.items()])

    def _report(self) -> Report:
        """What this replica has folded."""
        if self.proposal is None:
            return Report(*self._counts, agreed=self.history.recalled() is not None)
        sums = self.sums
        counts = sums.total, sums.steps, sums.rejected
        weight, steps, rejected = [_if_known(count) for count in counts]
        numbers = [sums.of[leaf] for leaf in self.proposal.plan.numbers]
        return Report(
            *self._counts,
            digest=self.proposal.digest,
            agreed=bool(self.proposal.steps),
            on_device=any(isinstance(count, torch.Tensor) for count in counts),
            steps=steps,
            weight=float(weight),
            unit=sums.unit or 0.0,
            rejected=rejected,
            updates=float(self.updates),
            numbers=tuple(
                [0.0 if number is None else float(arrays.scalar(number)) for number in numbers]
            ),
        )

    # -------------------------------------------------------------------------------- a window ends

    def finish(self, state: list[Array]) -> list[Array]:
        """Sends everything, and waits: the sums are then those of all replicas.

        Returns the state to be threaded on: that of the last replica that folded anything.
        """
        try:
            self.announce()
            likes = {
                leaf: _like(self.sums.of[leaf], spec) for leaf, spec in self.agreement.specs.items()
            }
            with explained(), self._over_if_refused():
                self._send()
                state = self._take_in(state)
        except BaseException:
            self.give_up()
            raise
        for leaf, like in likes.items():
            self.sums.of[leaf] = as_dtensor(self.sums.of[leaf], like)
        self.is_over, self.history.finished = True, self.window
        return state

    def give_up(self) -> None:
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
            self.send_rest()
        else:
            # In a first window the channel may have no group yet. Making it is a collective, and no
            # other replica would take part in it now.
            self.replicas.channel.owe(self.send_rest)

    def send_rest(self) -> None:
        """Sends the rest of a window that was given up; if it was never announced, a header that
        says so.
        """
        if self.exchange is None and not self.reports:
            exchange_reports(self.replicas.channel, Report(*self._counts, failed=True))
            return
        try:
            self.announce()
            # If the message with the mark is sent already, the others have all of this window, and
            # the next header shows that it was not finished here.
            self.mark.fill_(1)
            self._send()
        except (FuncgaError, RuntimeError):
            # The others have raised the same, and wait for nothing.
            return

    def _send(self) -> None:
        """Begins all messages that are left, except those before which the replicas have to
        exchange shapes.
        """
        if self.unsent is None:
            # From the unit of this replica to that of all.
            self.sums.hold_in(self.unit)
            self.unsent = deque(self._messages())
        while self.unsent:
            self.unreceived.append(self.unsent[0]())
            self.unsent.popleft()

    def _messages(self) -> Iterator[Callable[[], Receive]]:
        """What begins each of them, in their order."""
        sums, plan = self.sums, self.agreement.plan
        for message in plan.sums:
            wire, mark = self._wire(message.kind.device), None
            if message is plan.sums[-1]:
                mark = self.mark = torch.full(
                    (1,), self.is_over, dtype=message.kind.dtype, device=wire.device
                )
            yield partial(add, sums, plan, message, wire, mark)
        if any(report.on_device for report in self.reports):
            yield self._count_on_device
        if plan.gathered and not sums.folding.outputs.collected:
            yield self._gather

    def _wire(self, device: torch.device) -> Wire:
        """What arrays on a device travel over."""
        replicas = self.replicas
        return Wire(replicas.channel.carrier(device, replicas.group), device, replicas.channel)

    def _gather(self) -> Receive:
        plan = self.agreement.plan
        return gather(self.sums, plan, self._wire(plan.device))

    def _count_on_device(self) -> Receive:
        """Begins to add up what the devices have counted: the weight, and micro-batches that the
        host cannot see.
        """
        sums, wire = self.sums, self._wire(self.agreement.plan.device)
        # Those that the host knows are in the headers.
        counts = [
            count if isinstance(count, torch.Tensor) else 0
            for count in (sums.total, sums.steps, sums.rejected)
        ]
        sent = torch.stack([_on_device(count, wire.device) for count in counts])
        work = wire.carrier.allreduce([sent])

        def receive() -> None:
            work.wait()
            sums.total = sums.total + sent[0]
            sums.steps = sums.steps + sent[1].to(torch.int64)
            sums.rejected = sums.rejected + sent[2]

        return receive

    # ----------------------------------------------------------------------- what the others folded

    def _take_in(self, state: list[Array]) -> list[Array]:
        """Waits for everything, and takes in what the others have folded. Returns the state."""
        sums, collects = self.sums, self.sums.folding.outputs.collected
        self._count()
        while self.unreceived:
            self.unreceived.popleft()()
        mark = self.mark
        # Reading the mark from a device would make the host wait. Instead the weight becomes NaN
        # there, and so does every mean of the window. But before another exchange between hosts the
        # mark has to be read: a replica that has given up would not answer.
        may_wait = mark.is_cpu or collects or state
        if may_wait and self.replicas.channel.is_marked(mark):
            raise FuncgaError(
                "another replica has raised an error, or was interrupted, when the others had "
                "begun to merge this window: nothing of it can be used. See what that process "
                "says, and let the error end all of them; or leave this window out on every rank."
            )
        if not mark.is_cpu:
            sums.total = sums.total + torch.where(mark[0] != 0, float("nan"), 0.0).to(torch.float64)
        if collects:
            self._gather()()
        folded = [rank for rank, report in enumerate(self.reports) if report.steps]
        return self._state_of(folded[-1], state) if state and folded else state

    def _state_of(self, source: int, state: list[Array]) -> list[Array]:
        """The state of a replica: its arrays, numbers and texts. Any other object stays each
        replica's own.
        """
        device = self.agreement.plan.device
        told = self.replicas.channel.broadcast_from(source, [*map(_portable, state)])
        told = [each.to(device) if isinstance(each, torch.Tensor) else each for each in told]
        return [mine if each is None else each for mine, each in zip(state, told, strict=True)]

    def _count(self) -> None:
        """Takes in what all headers say: the counts, and scalars, in the order of the replicas."""
        sums, reports = self.sums, self.reports
        sums.unit, sums.total = self.unit, sum(report.weight for report in reports)
        sums.steps = int(sum(report.steps for report in reports))
        sums.rejected = int(sum(report.rejected for report in reports))
        for position, leaf in enumerate(self.agreement.plan.numbers):
            # From the unit of each replica to that of all; one without a unit has nothing to add.
            is_weighted = sums.folding.kinds[leaf] == "weighted"
            addends = [
                r.numbers[position] * (r.unit / self.unit if is_weighted else 1.0) for r in reports
            ]
            sums.of[leaf] = torch.tensor(
                sum(addends), dtype=sums.folding.folds[leaf].accumulator_dtype, device="cpu"
            )


def _portable(leaf: object) -> object:
    """A leaf of the state as another process can have it; None for an object of this process."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu()
    return leaf if isinstance(leaf, bool | int | float | complex | str) else None


def _if_known(count: Any) -> Any:
    """A count that the host knows; 0 for one that only a device does."""
    return 0 if isinstance(count, torch.Tensor) else count


def _on_device(count: Scalar, device: torch.device) -> torch.Tensor:
    """A number as a float64 on the device. The host does not wait for it."""
    if isinstance(count, torch.Tensor):
        return count.to(device, torch.float64)
    return torch.full((), float(count), dtype=torch.float64, device=device)


def _like(accumulated: Any, spec: Spec) -> Any:
    """What tells the placements of a leaf of DTensors: the leaf itself, or the Spec where
    nothing was folded.
    """
    return accumulated if isinstance(accumulated, tuple) or is_dtensor(accumulated) else spec


def reductions_of(program: Program, backend: Backend) -> list[Reduction]:
    """What merges a window over the replicas of `across=`, one after the other; usually one."""
    if arrays.in_transform():
        raise _differentiated_across()
    # A wrapper of a module says itself what it is merged over.
    across = program.across
    several = across if isinstance(across, InTurn) else [program.replicas(backend)]
    progress = progress_of(program.memory)
    return [Reduction(progress, replicas) for replicas in several]


def _differentiated_across() -> FuncgaError:
    if arrays.is_recorded():
        return FuncgaError(
            "across= was given to a step inside of a loss that is being differentiated, and the "
            "merge over replicas has no derivative. Leave it out there. If the step is a constant "
            "for that loss, run it under torch.no_grad()."
        )
    return FuncgaError(
        "across= was given inside of a torch.func transform, where replicas cannot be merged. Take "
        "the transform on each replica, inside of grad_fn."
    )
