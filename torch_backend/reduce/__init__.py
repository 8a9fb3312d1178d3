"""The merge of one window: what has been folded here becomes what has been folded on all replicas.

    propose   the structure of what is folded is known here
    agree     each says in a header what it has: all know the weight, the unit, and one structure
    merge     everything is sent, in one order on all replicas, before anything is waited for
    abort     an error ends the window here, and the others are told

Before a window communicates by itself, its replicas meet: the same header, of nothing folded yet.

Only torch has this package: in JAX the merge is a psum after the loop.

Design note: docs/concepts/inside_replicas.md.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from funcga._call import Memory
from funcga._types import Array, Scalar
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import as_dtensor, local, spec_of
from torch_backend.reduce.agreement import Agreement, Histories, History, Rebuild
from torch_backend.reduce.header import (
    Report,
    check_in_step,
    exchange_reports,
    nothing_to_fold,
)
from torch_backend.reduce.wire import Addition, gather
from torch_backend.replicas import InTurn, Replicas, replicas_of
from torch_backend.sums import Sums, power_above


class Reduction:
    """Merges what one window folds over the replicas: `propose`, `agree` and `merge`, or `abort`.

    A window that communicates by itself has them `meet` before. A replica without any micro-batch
    proposes nothing; when the replicas have agreed it sets empty `sums` of what the others fold.
    Where an error ends the call, `telling` aborts what is running.
    """

    sums: Sums  # set by `propose`, or from outside
    # An Agreement on what is folded here, set by `propose`; from `agree` on that of all replicas,
    # which tells one without any micro-batch what the others fold.
    agreement: Any = None
    reports: list[Report]  # those of all replicas; set by each `meet` and `agree`
    unit = 0.0  # of the weighted sums of all replicas; set by `agree` once they have agreed
    # What waits for the reports of all: set while `agree` waits. After an error `abort` waits on.
    awaited: Callable[[], list[Report]] | None = None
    addition: Addition | None = None  # the sums that are under way; set by `_send`
    # What waits for leaves that are gathered, and takes them in: set by `_send`, or by `_receive`
    # where replicas have to exchange shapes first.
    take_in: Callable[[], None] | None = None

    def __init__(self, memory: Memory, replicas: Replicas, updates: Scalar = 0):
        """`updates`: how many a state of multi_steps has made; 0 in the window of a call."""
        self.replicas, self.channel, self.updates = replicas, replicas.channel, updates
        histories = memory.keep(Histories)
        if replicas.group not in histories:
            histories[replicas.group] = History(memory, replicas)
        history = self.history = histories[replicas.group]
        # Every window counts, merged or not: by that replicas notice that they are out of step.
        histories.begun += 1
        history.begun += 1
        self.window, history.running = history.begun, self
        # Where each DTensor lies, by leaf; set by `_send`, as it travels as its shard.
        self.specs: dict[int, Any] = {}

    # --- what is folded

    def propose(self, sums: Sums, leaves: Mapping[int, Array]) -> None:
        """Takes the sums of a window whose first micro-batch has these leaves, by their indices.

        One that is missing, or None, is reduced elsewhere.
        """
        self.sums = sums
        self.agreement = self.history.agreement_on(sums.folding, leaves)

    def meet(self, last: bool) -> bool:
        """Waits for the other replicas, before something else than this merge communicates; whether
        all say that it is the `last` time.

        Raises FuncgaError, on all replicas, if one has raised an error, or if they do not do the
        same: collectives of two windows would be taken for one another.
        """
        with self._same_on_all():
            self.channel.send_owed()  # by earlier windows, before anything of this one
            return self._are_last(self._tell(last=last))

    def agree(self, last: bool = True, rebuild: Rebuild | None = None) -> bool:
        """`meet`, and each tells what it has folded. Where it is the last time for all, they agree
        on that, and on the unit of weighted sums.

        A replica without any micro-batch is told what the others fold in a first window: `rebuild`
        makes it of a value like theirs, whose tensors have no memory.
        """
        if self.unit:
            return True
        with self._same_on_all():
            if self.awaited is None:
                self.channel.send_owed()
                self.awaited = self._tell(self.agreement, last=last)
            are_last = self._are_last(self.awaited)
            self.awaited = None
            if not are_last:
                return False
            if not any(report.digest for report in self.reports):
                raise nothing_to_fold()
            self.agreement = self.history.agreement_of_all(self.agreement, rebuild, self.reports)
        self.unit = _unit_of(self.reports)
        return True

    def _tell(self, agreement: Agreement | None = None, **said: Any) -> Callable[[], list[Report]]:
        """Tells the others how far the step has come, and what is folded by an agreement; returns
        what waits for the reports of all.
        """
        if agreement is not None:
            sums = self.sums
            # Counts that only a device knows are sent with the sums.
            counts = sums.total, sums.steps, sums.rejected
            known = [0.0 if torch.is_tensor(count) else float(count) for count in counts]
            said["weight"], said["steps"], said["rejected"] = known
            said.update(
                on_device=any(map(torch.is_tensor, counts)),
                digest=agreement.digest,
                agreed=agreement.is_agreed,
                unit=sums.unit or 0.0,
                numbers=[float(arrays.scalar(sums.of[leaf]) or 0) for leaf in agreement.numbers],
            )
        history = self.history
        mine = Report(history.digest, self.window, history.finished, float(self.updates), **said)
        return exchange_reports(self.channel, mine)

    def _are_last(self, receive: Callable[[], list[Report]]) -> bool:
        """Waits for the reports of all replicas, and checks them; whether all say that it is the
        last time.
        """
        self.reports = reports = receive()
        # What a replica has not finished is in each header from now on: as long as the others
        # cannot know what it has left out, all windows are refused.
        if self.updates < max([report.updates for report in reports]):
            self.history.finished -= 1
        check_in_step(reports)
        self.history.check_steps(reports)
        return all(report.last for report in reports)

    # --- the sums travel

    def merge(self) -> None:
        """Sends everything, and waits: the sums are then those of all replicas, and the state that
        of the last one that has folded anything.
        """
        self.agree()
        with self._same_on_all():
            self._send()
            self._receive()
        self.end()

    def _send(self) -> None:
        """Begins all messages that are left, except those before which the replicas have to
        exchange shapes.
        """
        sums, of, agreement = self.sums, self.sums.of, self.agreement
        for leaf in sums.sparse:  # each replica has other rows
            of[leaf] = of[leaf].to_dense()
        sums.sparse = set()
        collects = agreement.outputs.collected
        if self.addition is None:
            sums.hold_in(self.unit)  # from the unit of this replica to that of all
            for leaf in (*agreement.summed, *agreement.gathered):
                # All send the same shapes: where nothing is folded it is the identity.
                if of[leaf] is None:
                    of[leaf] = sums.folding.folds[leaf].identity(agreement.likes[leaf])
                if type(of[leaf]) is not torch.Tensor:
                    self.specs[leaf], of[leaf] = spec_of(of[leaf]), local(of[leaf])
            counts = sums.total, sums.steps, sums.rejected
            told = counts if any(report.on_device for report in self.reports) else ()
            # Also where no sum travels: the mark of an error has to be read before the exchanges
            # that all else takes.
            others = agreement.gathered, collects, agreement.outputs.threads
            if any((told, agreement.summed, *others)):
                self.addition = Addition(sums, agreement, self.replicas, told)
        # If its last message is sent already when this replica fails, the others have all of the
        # window, and the next header shows that it was not finished here.
        if self.addition is not None:
            self.addition.begin(has_failed=self.history.running is not self)
        if agreement.gathered and not (self.take_in or collects):
            self.take_in = gather(sums, agreement, self.replicas)

    def _receive(self) -> None:
        """Waits for everything, and takes in what the others have folded."""
        sums, agreement, state = self.sums, self.agreement, self.sums.state
        collects = agreement.outputs.collected
        self._count()
        if self.addition is not None:
            counts, mark = self.addition.finish()
            if counts:
                sums.total, sums.rejected = sums.total + counts[0], sums.rejected + counts[2]
                sums.steps = sums.steps + counts[1].to(torch.int64)
            self._look_at(mark[0], may_wait=bool(mark.is_cpu or collects or state))
        if collects:
            self.take_in = gather(sums, agreement, self.replicas)
        if self.take_in is not None:
            self.take_in()
        for leaf, spec in self.specs.items():
            sums.of[leaf] = as_dtensor(sums.of[leaf], spec)
        folded = [rank for rank, report in enumerate(self.reports) if report.steps]
        if state and folded:
            told = self.channel.broadcast_from(folded[-1], [*map(_portable, state)])
            for index, leaf in enumerate(told):
                if isinstance(leaf, torch.Tensor):
                    state[index] = leaf.to(agreement.device)
                elif leaf is not None:
                    state[index] = leaf

    def _count(self) -> None:
        """Takes in what all headers say: the counts, and numbers, in the order of the replicas."""
        sums, folding, reports = self.sums, self.sums.folding, self.reports
        sums.unit, sums.total = self.unit, sum([report.weight for report in reports])
        sums.steps = int(sum([report.steps for report in reports]))
        sums.rejected = int(sum([report.rejected for report in reports]))
        for position, leaf in enumerate(self.agreement.numbers):
            # From the unit of each replica to that of all; one without a unit has nothing to add.
            is_weighted = folding.adds[leaf] == "weighted"
            units = [report.unit / self.unit if is_weighted else 1.0 for report in reports]
            numbers = [report.numbers[position] for report in reports]
            total = sum(map(operator.mul, numbers, units))
            dtype = folding.folds[leaf].accumulator_dtype
            sums.of[leaf] = torch.tensor(total, dtype=dtype, device="cpu")

    def _look_at(self, mark: torch.Tensor, may_wait: bool) -> None:
        """Raises FuncgaError, on all replicas, if one has marked its sums as failed."""
        # Reading the mark from a device makes the host wait. Instead the weight becomes NaN there,
        # and so does every mean of the window. But before another exchange between hosts it has to
        # be read: a replica that has given up would not answer.
        if may_wait and self.channel.is_marked(mark):
            raise FuncgaError(
                "another replica has raised an error, or was interrupted, when the others had "
                "begun to merge this window: nothing of it can be used. See what that process "
                "says, and let the error end all of them; or leave this window out on every rank."
            )
        if not mark.is_cpu:
            unknown = torch.where(mark != 0, float("nan"), 0.0)
            self.sums.total = self.sums.total + unknown.to(torch.float64)

    # --- the window ends

    @contextmanager
    def _same_on_all(self) -> Iterator[None]:
        """A context in which a FuncgaError is raised on all replicas: none waits for this one."""
        try:
            yield
        except FuncgaError:
            self.history.running = None
            raise

    def end(self) -> None:
        """Counts the window as finished, here as on the other replicas."""
        self.history.running = None
        self.history.finished = self.window

    def abort(self) -> None:
        """Unblocks the other replicas: sends the remaining messages flagged as failed, now or
        once they are ready.
        """
        self.history.running = None
        if self.unit:
            self._send_rest()
        else:
            # In a first window the channel may have no group yet. Making it is a collective, and no
            # other replica would take part in it now.
            self.channel.owe(self._send_rest)

    def _send_rest(self) -> None:
        """Sends the rest of a window that was given up; if nothing was said yet, a header that says
        so.
        """
        # Where this raises an error the others have raised the same, and wait for nothing.
        with suppress(FuncgaError, RuntimeError):
            if self.unit or (self.awaited is not None and self.agree()):
                self._send()
            else:
                self._tell(failed=True)


def _unit_of(reports: Sequence[Report]) -> float:
    """The unit of the sums of all replicas."""
    # If all replicas have one unit, as with equal weights, nothing is rescaled. Otherwise the unit
    # is a power of two, and a sum is rounded once at most.
    units = {report.unit for report in reports} - {0.0} or {1.0}
    return units.pop() if len(units) == 1 else power_above(max(units))


def _portable(leaf: object) -> object:
    """An array, number or text of the state as another process can have it; None for any other
    object, which stays each replica's own.
    """
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu()
    return leaf if isinstance(leaf, int | float | complex | str) else None


def reductions_of(across: Any, memory: Memory) -> list[Reduction]:
    """What merges a window over the replicas of `across=`, one after the other: one, or none
    without it.
    """
    if across is None:
        return []
    if arrays.in_transform():
        raise FuncgaError(
            "across= was given inside of a torch.func transform, or of a loss that is being "
            "differentiated, where replicas cannot be merged: the merge has no derivative. Take "
            "the transform on each replica, inside of grad_fn; or run the step under "
            "torch.no_grad(), if it is a constant there."
        )
    # What is counted for a wrapped module is merged over what its wrapper says.
    several = across if isinstance(across, InTurn) else [replicas_of(across)]
    return [Reduction(memory, replicas) for replicas in several]
