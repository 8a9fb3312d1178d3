"""The reduction of one window: what has been folded here becomes what has been folded on all replicas.

Only torch has this file: in JAX it is a psum after the loop.

Each replica first says what it has counted, in a header, so that all of them know the total weight, the unit that sums
travel in, and that they do the same. Sums are accumulated in the buckets themselves. While the last micro-batch's
backward pass runs, a bucket is sent as soon as the header is there and the bucket and those before it are complete, so
that all replicas send in one order. What is no sum is gathered, and combined in the order of the replicas.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch

from funcga._fold import tally
from funcga._fold.outputs import Outputs
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import Place, is_placed, local, rewrapped
from torch_backend.engine.buffers import Buffers, Layout, power_below
from torch_backend.reduce import memory
from torch_backend.reduce.agreement import Agreement, Progress, agree, built, has_agreed, proposed, step_digest
from torch_backend.reduce.buckets import view
from torch_backend.reduce.channel import Channel, all_gathered, channel_if_any, explained
from torch_backend.reduce.header import Header, Report, check_in_step
from torch_backend.reduce.memory import Field
from torch_backend.replicas import Replicas


class Reduction:
    """Merges the buffers of one window over the replicas, once.

    `begins`: nothing is folded yet, and sums are accumulated in the buckets. A `header` that is given is one that the
    replicas have agreed after.
    """

    def __init__(
        self, progress: Progress, replicas: Replicas, agreement: Agreement, buffers: Buffers, begins: bool = False,
        header: Header | None = None,
    ):  # fmt: skip
        self.progress, self.replicas, self.channel = progress, replicas, replicas.channel
        self.agreement, self.buffers, self.plan, self.outputs = agreement, buffers, agreement.plan, buffers.outputs
        self.carrier = self.channel.carrier(self._device, replicas.group)
        self.header, self.agreed = header, header is not None
        self.unit = 0.0  # that sums travel in, when all have said theirs
        self.sent: list[tuple[Any, torch.Tensor]] = []
        self.rest: list[Any] = []  # collectives of what is in no bucket
        self.problem: Exception | None = None  # what is wrong, if it was seen before it can be raised
        self.given_up = False
        self.waiting = [{slot.place for slot in bucket.slots} for bucket in self.plan.buckets]
        self.bucket_of = self.plan.bucket_of()
        self._allocate()
        if begins:
            for k, accumulator in self.views.items():
                if buffers.layout.kinds[k] is not None and k not in agreement.placed:
                    buffers.reduced[k] = accumulator

    def _allocate(self) -> None:
        """Makes the buckets, and views of the leaves in them. The last has an element more, the mark of an error."""
        buckets, folds, kinds = self.plan.buckets, self.buffers.folds, self.agreement.kinds
        self.flats = [
            torch.zeros(bucket.length + (bucket is buckets[-1]), dtype=bucket.dtype, device=bucket.device)
            for bucket in buckets
        ]
        self.views = {
            slot.place: view(flat, slot, *kinds[slot.place], folds[slot.place].accumulator_dtype)
            for bucket, flat in zip(buckets, self.flats, strict=True)
            for slot in bucket.slots
        }

    @property
    def _device(self) -> torch.device:
        return self.plan.buckets[-1].device

    @property
    def overlaps(self) -> bool:
        """Whether buckets can be sent while the last backward pass runs.

        Not before the replicas have agreed; nor if hooks run in several threads, as for several devices; nor over a
        group that the loss uses as well, on some replicas earlier than on others.
        """
        one_device = len({bucket.device for bucket in self.plan.buckets}) == 1
        shared = self.carrier is self.replicas.group and self.progress.communicates
        return self.agreement.steps is not None and one_device and not shared

    def announce(self, weight: Any = 0, steps: int = 0) -> None:
        """Says what this replica will have folded when a last micro-batch of this weight is."""
        buffers, on_device = self.buffers, isinstance(weight, torch.Tensor)
        if steps:
            buffers.share(weight)
        self.header = announced(
            self.progress, self.replicas, self.agreement, buffers.weight + (0 if on_device else weight),
            buffers.steps + steps, on_device or buffers.counted is not None, buffers.unit,
        )  # fmt: skip

    def ready(self, k: int) -> None:
        """Says that nothing more will be added to a leaf. The last bucket, which has the mark, waits for `finish`."""
        bucket = self.bucket_of.get(k)
        if bucket is None or self.header is None:
            return
        self.waiting[bucket].discard(k)
        # where the others are not as far yet they cannot take what is sent, and nothing is lost
        if not self.header.done or not self._fits():
            return
        with explained():
            while len(self.sent) < len(self.flats) - 1 and not self.waiting[len(self.sent)]:
                self._send()

    def _fits(self) -> bool:
        """Whether all replicas do the same, as the header says. What is wrong, if anything, is raised by `finish`."""
        try:
            self._check()
        except (FuncgaError, RuntimeError) as problem:
            self.problem = problem
        return self.problem is None

    def _check(self) -> None:
        """Raises FuncgaError, on all replicas, if they do not do the same; else sets the unit."""
        assert self.header is not None
        if self.problem is not None:
            raise self.problem
        if self.unit:
            return
        reports = self.header.reports()
        check_in_step(reports)
        if not self.agreed:
            self.agreed = True
            agree(self.progress, self.agreement, None, reports, self.replicas)
        units = {report.unit for report in reports} - {0.0}
        self.unit = units.pop() if len(units) == 1 else power_below(max(units)) if units else 1.0

    def finish(self, state: list[Any]) -> list[Any]:
        """Sends the rest, and waits: the buffers are then those of all replicas.

        Returns the state to be threaded on: that of the last replica that folded anything.
        """
        if self.header is None:
            self.announce()
        try:
            self._check()
            likes = self._unwrapped()
            self._launch(0)
            state = self._received(state)
        except BaseException as error:
            self.problem = error if isinstance(error, FuncgaError) else None
            self.give_up()
            raise
        for k, like in likes.items():
            self.buffers.reduced[k] = rewrapped(self.buffers.reduced[k], like)
        self.progress.finished[self.replicas.group] = self.progress.windows
        return state

    def give_up(self) -> None:
        """Sends what the others still wait for, with the mark of an error. If they are not as far, it is owed to them.

        Without a header nothing is: the next one says it.
        """
        if self.header is None or self.given_up or isinstance(self.problem, FuncgaError):
            return
        self.given_up = True
        if self.header.done:
            self.settle()
        else:
            self.channel.owed.append(self)

    def settle(self) -> None:
        """Sends what is left of a window that was given up."""
        try:
            self._check()
            self._unwrapped()
            self._launch(1)
        except (FuncgaError, RuntimeError):  # then the others have raised it too, and wait for nothing
            return

    def _unwrapped(self) -> dict[int, Any]:
        """Leaves in the buffers what this process holds, and an identity where it has folded nothing.

        Returns what tells where leaves lie that lie on several devices.
        """
        reduced, placed = self.buffers.reduced, self.agreement.placed
        likes = {k: _like(reduced[k], place) for k, place in placed.items()}
        for k in likes:
            reduced[k] = local(reduced[k])
        for k in self.plan.others:
            if reduced[k] is None:
                dtype = self.outputs.dtypes[self.outputs.reduced[k]]
                like = torch.zeros(self.agreement.kinds[k][0], dtype=dtype, device=self._device)
                reduced[k] = self.buffers.folds[k].identity(like)
        return likes

    def _launch(self, mark: int) -> None:
        """Begins all collectives that are left; the mark says that this replica has raised an error."""
        assert self.header is not None
        with explained():
            while len(self.sent) < len(self.flats):
                if mark and len(self.sent) == len(self.flats) - 1:
                    self.flats[-1][-1] = mark
                self._send()
            if not self.rest:
                if any(report.on_device for report in self.header.reports()):
                    self.rest.append(self._counts())
                if self.plan.others:
                    self._rescale(self.plan.others)
                    parts = [part for k in self.plan.others for part in _parts(self.buffers.reduced[k])]
                    self.rest.append(self._gathering(parts))

    def _send(self) -> None:
        bucket, flat = self.plan.buckets[len(self.sent)], self.flats[len(self.sent)]
        reduced = self.buffers.reduced
        for k in [slot.place for slot in bucket.slots]:
            if reduced[k] is not self.views[k] and reduced[k] is not None:
                self.views[k].copy_(reduced[k])
            reduced[k] = self.views[k]
        self._rescale([slot.place for slot in bucket.slots])
        wire = self.replicas.wire_dtype if flat.is_floating_point() else None
        sent = flat if wire is None else flat.to(wire)
        self.sent.append((self.carrier.allreduce([sent]), sent))

    def _rescale(self, places: Sequence[int]) -> None:
        """Takes weighted sums to the unit of all replicas."""
        factor = (self.buffers.unit or self.unit) / self.unit
        if factor != 1 and places:
            chosen = {*places}
            held = [self.buffers.reduced[k] for k in self.buffers.layout.scaled if k in chosen]
            if held:
                torch._foreach_mul_(held, factor)

    def _counts(self) -> tuple[Any, torch.Tensor]:
        """Adds up what the devices have counted: the weight, and micro-batches that the host does not know of."""
        counted = self.buffers.counted
        parts = (0, 0) if counted is None else (counted.weight[0], counted.steps)
        sent = torch.stack([_on(part, self._device) for part in parts])
        return self.carrier.allreduce([sent]), sent

    def _received(self, state: list[Any]) -> list[Any]:
        """Waits for everything, and takes in what the others have folded. Returns the state."""
        assert self.header is not None
        reports, rest = self.header.reports(), [*self.rest]
        with explained():
            for (work, sent), flat in zip(self.sent, self.flats, strict=True):
                work.wait()
                if sent is not flat:
                    flat.copy_(sent)
            self._check_mark()
            self._count(reports, rest.pop(0) if any(report.on_device for report in reports) else None)
            if self.plan.others:
                self._combine(_split(*rest.pop()))
            self._collect()
            return self._state(state, [rank for rank, report in enumerate(reports) if report.steps])

    def _check_mark(self) -> None:
        """Raises FuncgaError if a replica has given up. A device is not waited for: see `_count`."""
        if self._device.type == "cpu" and self.flats[-1][-1] != 0:
            raise FuncgaError(
                "another replica has raised an error, or was interrupted, when the others had begun to merge this "
                "window: nothing of it can be used. See what that process says, and let the error end all of them; or "
                "leave this window out on every rank."
            )

    def _count(self, reports: list[Report], device: tuple[Any, torch.Tensor] | None) -> None:
        """Takes in what all replicas have counted, and owns the memory of what is small."""
        buffers = self.buffers
        whole, real = sum(report.whole for report in reports), sum(report.real for report in reports)
        buffers.unit, buffers.steps = self.unit, sum(report.steps for report in reports)
        buffers.weight, buffers.counted = whole + real if real else whole, None
        if device is not None:
            device[0].wait()
            buffers.counted = tally.Tally((device[1][0],), device[1][1].to(torch.int64))
        if self._device.type != "cpu":
            # with a mark it would be wrong, and asking for it would make the host wait
            spoilt = torch.where(self.flats[-1][-1] != 0, float("nan"), 0.0).to(torch.float64)
            more = tally.Tally((spoilt,), torch.zeros((), dtype=torch.int64, device=self._device))
            buffers.counted = more if buffers.counted is None else tally.merge(buffers.counted, more)
        # a view would keep its whole bucket alive as long as the caller keeps a loss
        for k in buffers.layout.own:
            if k in self.views and self.views[k].nbytes <= _SMALL:
                buffers.reduced[k] = self.views[k].clone()

    def _combine(self, said: list[list[torch.Tensor]]) -> None:
        """Makes the leaves in no bucket what their parts from all replicas, in their order, are together."""
        start = 0
        for k in self.plan.others:
            own = self.buffers.reduced[k]
            end = start + len(_parts(own))
            lifted = [tuple(parts[start:end]) if isinstance(own, tuple) else parts[start] for parts in said]
            self.buffers.reduced[k] = reduce(self.buffers.folds[k].combine, lifted)
            start = end

    def _gathering(self, parts: list[torch.Tensor], rows: list[list[int]] | None = None) -> Any:
        """Begins to gather these arrays; `rows` has for each replica how many rows of each it has, if they differ."""
        count = self.replicas.count
        rows = [[len(part) if part.ndim else 1 for part in parts]] * count if rows is None else rows
        fields = [
            [
                Field(torch.Size([n, *part.shape[1:]] if part.ndim else []), part.dtype)
                for n, part in zip(mine, parts, strict=True)
            ]
            for mine in rows
        ]
        lengths = [sum(field.nbytes for field in mine) for mine in fields]
        sent = torch.zeros(max(lengths), dtype=torch.uint8, device=self._device)
        own = torch.cat([memory.as_bytes(part).to(self._device) for part in parts])
        sent[: own.numel()] = own
        said = [torch.empty_like(sent) for _ in range(count)]
        return self.carrier.allgather([said], [sent]), said, fields

    def _collect(self) -> None:
        """Makes of what was collected the rows of all replicas, in their order."""
        places = self.outputs.collected
        if not places:
            return
        own = []
        for i in places:
            chunks, axis = self.buffers.collected[i], self._axis(i)
            shape = [*(self.outputs.shapes[i] or ())]
            shape[axis] = 0
            empty = torch.zeros(shape, dtype=self.outputs.dtypes[i], device=self._device)
            own.append(torch.cat([empty, *chunks], dim=axis).movedim(axis, 0))
        rows = all_gathered(self.channel.group, torch.tensor([len(array) for array in own]))
        said = _split(*self._gathering(own, [theirs.tolist() for theirs in rows]))
        for k, i in enumerate(places):
            self.buffers.collected[i] = [parts[k].movedim(0, self._axis(i)) for parts in said]

    def _axis(self, i: int) -> int:
        fold = self.outputs.folds[i]
        assert fold is not None
        return (fold.fold.reducer.monoid.axis or 0) % len(self.outputs.shapes[i] or (0,))

    def _state(self, state: list[Any], folded: list[int]) -> list[Any]:
        """The state of the last of the replicas that have folded anything."""
        if not state or not folded:
            return state
        source, mine = folded[-1], folded[-1] == self.replicas.rank
        kinds = self.channel.gathered([_kind(leaf) for leaf in state] if mine else None)[source]
        fields = [kind for kind in kinds if isinstance(kind, Field)]
        sent = torch.zeros(sum(field.nbytes for field in fields), dtype=torch.uint8, device=self._device)
        if mine and fields:
            own = [memory.as_bytes(leaf).to(self._device) for leaf in state if arrays.is_array(leaf)]
            sent = torch.cat(own)
        if fields:
            self.carrier.broadcast(sent, source).wait()
        found = iter(memory.split(sent, fields))
        return [
            next(found) if isinstance(kind, Field) else own if kind is None else kind[0]
            for kind, own in zip(kinds, state, strict=True)
        ]


_SMALL = 2**12  # bytes of a value that is copied out of its bucket


def _on(number: Any, device: torch.device) -> torch.Tensor:
    """A number in float64 on the device, which is not waited for."""
    if isinstance(number, torch.Tensor):
        return number.to(device, torch.float64)
    return torch.full((), float(number), dtype=torch.float64, device=device)


def _split(work: Any, said: list[torch.Tensor], fields: list[list[Field]]) -> list[list[torch.Tensor]]:
    """What was gathered: the arrays of each replica."""
    work.wait()
    return [memory.split(data, mine) for data, mine in zip(said, fields, strict=True)]


def announced(
    progress: Progress, replicas: Replicas, agreement: Agreement | None, weight: Any = 0, steps: int = 0,
    on_device: bool = False, unit: float | None = None,
) -> Header:  # fmt: skip
    """The Header of a window, begun. What was owed to the others of an earlier one is sent first."""
    channel = replicas.channel
    channel.settle()
    progress.announced = progress.windows
    whole = isinstance(weight, int) and weight < 2**53
    known = has_agreed(progress, replicas) if agreement is None else agreement.steps is not None
    report = Report(
        step_digest(progress), progress.windows, progress.finished.get(replicas.group, 0),
        0 if agreement is None else agreement.digest, known, on_device, steps, weight if whole else 0,
        0.0 if whole else float(weight), unit or 0.0,
    )  # fmt: skip
    return Header(channel, report)


def _kind(leaf: Any) -> Any:
    """What is said of a leaf of the state: its Field, or in a tuple a number itself; None of any other object."""
    if arrays.is_array(leaf):
        return Field(leaf.shape, leaf.dtype)
    return (leaf,) if isinstance(leaf, bool | int | float | complex | str) else None


def count_window(progress: Progress) -> None:
    """Counts one more window of the step, so that replicas that are out of step can be told."""
    progress.windows += 1


class Failure(NamedTuple):
    """A window that ended with an error before anything was said of it."""

    channel: Channel
    report: Report

    def settle(self) -> None:
        """Says so."""
        Header(self.channel, self.report)


@contextmanager
def owing(progress: Progress, replicas: Replicas | None) -> Iterator[None]:
    """A window; if an error ends it before its header, the others are told when this replica goes on."""
    try:
        yield
    except BaseException:
        channel = None if replicas is None else channel_if_any(replicas.group)
        window = progress.windows
        if channel is not None and replicas is not None and progress.announced != window:
            finished = progress.finished.get(replicas.group, 0)
            report = Report(step_digest(progress), window, finished, 0, False, False, 0, 0, 0.0, 0.0, failed=True)
            channel.owed.append(Failure(channel, report))
        raise


def begun(progress: Progress, buffers: Buffers, leaves: Sequence[Any], replicas: Replicas) -> Reduction:
    """The Reduction of a window whose first micro-batch has given these leaves."""
    agreement = proposed(progress, buffers.outputs, leaves, buffers.layout, replicas)
    return Reduction(progress, replicas, agreement, buffers, begins=True)


class Absence(NamedTuple):
    """The window of a replica that has nothing to fold, and takes part all the same.

    `bind(value)` is the Outputs of values like those of the others, which are made on `device`.
    """

    progress: Progress
    replicas: Replicas
    header: Header
    bind: Callable[[Any], Outputs]
    device: torch.device

    def agreement(self) -> Agreement:
        """What the others fold. Raises FuncgaError, on all replicas, if they do not do the same."""
        reports = self.header.reports()
        check_in_step(reports)
        return agree(self.progress, None, self._like, reports, self.replicas)

    def _like(self, structure: Any) -> tuple[Outputs, list[Any]]:
        value, leaves = built(structure, self.device)
        return self.bind(value), leaves

    def reduction(self, agreement: Agreement) -> Reduction:
        """One of nothing."""
        buffers = Buffers(Layout(agreement.outputs))
        return Reduction(self.progress, self.replicas, agreement, buffers, header=self.header)

    def settle(self) -> None:
        """Sends what the others still wait for, when this replica was interrupted."""
        try:
            self.reduction(self.agreement()).settle()
        except (FuncgaError, RuntimeError):  # then the others have raised it too, and wait for nothing
            return


def absent(
    progress: Progress, bind: Callable[[Any], Outputs], device: torch.device, replicas: Replicas
) -> tuple[Absence, Agreement]:
    """The window of a replica that has nothing to fold, and what the others fold."""
    absence = Absence(progress, replicas, announced(progress, replicas, None), bind, device)
    try:
        return absence, absence.agreement()
    except FuncgaError:
        raise
    except BaseException:
        replicas.channel.owed.append(absence)
        raise


def merged(
    progress: Progress, buffers: Buffers, leaves: Sequence[Any], state: list[Any], groups: Sequence[Replicas],
    header: Header | None = None,
) -> list[Any]:  # fmt: skip
    """The state when the buffers of a whole window, in units of 1, have been merged over each of the groups in turn.

    What has None among `leaves` is reduced elsewhere. A `header` that is given is that of an Absence.
    """
    for replicas in groups:
        agreement = proposed(progress, buffers.outputs, leaves, buffers.layout, replicas)
        state = Reduction(progress, replicas, agreement, buffers, header=header).finish(state)
    return state


def _like(held: Any, place: Place) -> Any:
    """What tells where a reduced leaf lies: itself; on a replica that has folded nothing, what was agreed on."""
    return held if isinstance(held, tuple) or is_placed(held) else place


def _parts(lifted: Any) -> Sequence[Any]:
    return lifted if isinstance(lifted, tuple) else (lifted,)
