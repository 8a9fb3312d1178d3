"""The reduction of one window: what has been folded here becomes what has been folded on all replicas.

Only torch has this file: in JAX it is a psum after the loop.

Sums are accumulated in the buckets themselves. While the last micro-batch's backward pass runs, a bucket is sent as
soon as it and those before it are complete, so that all replicas send in one order. The counts, and what is small and
no sum of the buckets' dtype, ride in the tail of the last one. What is large and no sum is gathered, and combined in
the order of the replicas.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from funcga import tally
from funcga.errors import FuncgaError
from funcga.program import Program
from torch_backend import arrays, tail
from torch_backend.agreement import Agreement, agree, last_agreement
from torch_backend.buckets import view
from torch_backend.buffers import Buffers
from torch_backend.comparison import explained
from torch_backend.placements import Place, is_placed, local, rewrapped
from torch_backend.replicas import Replicas
from torch_backend.tail import Field


class Reduction:
    """Merges the buffers of one window over the replicas, once.

    `window` is how many this replica has begun. `begins`: nothing is folded yet, and sums are accumulated in the
    buckets. `overlaps`: a bucket is sent as soon as its leaves are `ready`; else all of them are sent by `finish`.
    """

    def __init__(
        self, agreement: Agreement, buffers: Buffers, replicas: Replicas, window: int, begins: bool = True,
        overlaps: bool = False,
    ):  # fmt: skip
        self.plan, self.unit, self.agreement = agreement.plan, agreement.unit, agreement
        self.outputs, self.buffers, self.replicas = buffers.outputs, buffers, replicas
        self.bucket_of = self.plan.bucket_of() if overlaps else {}
        self.missing = [{slot.place for slot in bucket.slots} for bucket in self.plan.buckets]
        self.sent: list[tuple[Any, torch.Tensor]] = []
        self.window = window
        self.small = {k: self._identity(k) for k in self.plan.small}
        self.fields = [
            Field(torch.Size([3 + len(self.outputs.collected)]), torch.int64),
            Field(torch.Size([]), torch.float64),
        ]
        self.fields += [Field(part.shape, part.dtype) for held in self.small.values() for part in _parts(held)]
        self._allocate()
        if begins:
            lifts = buffers.layout.lifts
            for k, accumulator in self.views.items():
                if lifts[k] is not None and k not in agreement.placed:
                    buffers.reduced[k] = accumulator

    def _allocate(self) -> None:
        """Makes the buckets, and views of the leaves in them."""
        width = sum(field.nbytes for field in self.fields)
        extra = [0] * (len(self.plan.buckets) - 1) + [self.replicas.count * width]
        self.flats = [
            torch.zeros(bucket.length + more, dtype=bucket.dtype, device=bucket.device)
            for bucket, more in zip(self.plan.buckets, extra, strict=True)
        ]
        self.tail = self.flats[-1][self.plan.buckets[-1].length :].view(self.replicas.count, width)
        folds, kinds = self.buffers.folds, self.agreement.kinds
        self.views = {
            slot.place: view(flat, slot, *kinds[slot.place], folds[slot.place].accumulator_dtype)
            for bucket, flat in zip(self.plan.buckets, self.flats, strict=True)
            for slot in bucket.slots
        }

    def _identity(self, k: int) -> Any:
        dtype = self.outputs.dtypes[self.outputs.reduced[k]]
        like = torch.zeros(self.agreement.kinds[k][0], dtype=dtype, device=self._device)
        return self.buffers.folds[k].identity(like)

    @property
    def _device(self) -> torch.device:
        return self.plan.buckets[-1].device

    def ready(self, k: int) -> None:
        """Says that nothing more will be added to a leaf. The last bucket waits for the counts in any case."""
        bucket = self.bucket_of.get(k)
        if bucket is not None:
            self.missing[bucket].discard(k)
            with explained():
                while len(self.sent) < len(self.flats) - 1 and not self.missing[len(self.sent)]:
                    self._send()

    def finish(self, state: list[Any]) -> list[Any]:
        """Sends the rest, and waits: the buffers are then those of all replicas.

        Returns the state to be threaded on: that of the last replica that folded anything.
        """
        others = (*self.plan.small, *self.plan.large)
        likes = {k: _like(self.buffers.reduced[k], place) for k, place in self.agreement.placed.items()}
        for k in likes:
            self.buffers.reduced[k] = local(self.buffers.reduced[k])
        for k in others:
            if self.buffers.reduced[k] is None:
                self.buffers.reduced[k] = self._identity(k)
        self._rescale(others)
        self._write_tail()
        with explained():
            while len(self.sent) < len(self.flats):
                self._send()
            for (work, sent), flat in zip(self.sent, self.flats, strict=True):
                work.wait()
                if sent is not flat:
                    flat.copy_(sent)
            counts = self._read_tail()
            for k in self.plan.large:
                self._combine(k, self._gathered([*_parts(self.buffers.reduced[k])]))
            self._collect(counts)
            state = self._state(state, counts)
        for k, like in likes.items():
            self.buffers.reduced[k] = rewrapped(self.buffers.reduced[k], like)
        return state

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
        self.sent.append((dist.all_reduce(sent, group=self.replicas.group, async_op=True), sent))

    def _rescale(self, places: Sequence[int]) -> None:
        """Takes weighted sums to the unit of all replicas."""
        factor = (self.buffers.unit or self.unit) / self.unit
        if factor != 1 and places:
            chosen = {*places}
            held = [self.buffers.reduced[k] for k in self.buffers.layout.scaled if k in chosen]
            if held:
                torch._foreach_mul_(held, factor)

    def _write_tail(self) -> None:
        buffers, host = self.buffers, self.buffers.weight
        whole = isinstance(host, int) and host < 2**53
        rows = [_rows(buffers.collected[i], self._axis(i)) for i in self.outputs.collected]
        counts = _sent(torch.tensor([buffers.steps, host if whole else 0, self.window, *rows]), self._device)
        real = _sent(torch.tensor(0.0 if whole else float(host), dtype=torch.float64), self._device)
        if buffers.counted is not None:
            counted = buffers.counted.weight[0].to(self._device)
            if counted.is_floating_point():
                real += counted
            else:
                counts[1] += counted
        small = [part for k in self.plan.small for part in _parts(buffers.reduced[k])]
        tail.write(self.tail, self.replicas.rank, [counts, real, *small])

    def _read_tail(self) -> torch.Tensor:
        """Takes in what the others have counted, and their small leaves. Returns the counts, int64[replicas, ...]."""
        said = tail.read(self.tail, self.fields)
        counts = torch.stack([values[0] for values in said])
        real = torch.stack([values[1] for values in said]).sum()
        buffers, start = self.buffers, 2
        buffers.unit = self.unit
        if self._device.type == "cpu":
            self._check_windows(counts[:, 2].tolist())
            (buffers.steps, whole), part = counts[:, :2].sum(0).tolist(), real.item()
            buffers.weight, buffers.counted = whole + part if part else whole, None
        else:
            # out of step they would be wrong, and asking would make the host wait
            total = torch.where((counts[:, 2] == counts[0, 2]).all(), real + counts[:, 1].sum(), float("nan"))
            buffers.weight, buffers.steps = 0, 0
            buffers.counted = tally.Tally((total,), counts[:, 0].sum())
        for k, held in self.small.items():
            end = start + len(_parts(held))
            self._combine(k, [values[start:end] for values in said])
            start = end
        return counts

    def _check_windows(self, windows: list[int]) -> None:
        """Raises FuncgaError if the replicas have not merged the same window."""
        if len({*windows}) > 1:
            spelled = ", ".join(f"rank {rank} its window {window}" for rank, window in enumerate(windows[:8]))
            raise FuncgaError(
                f"the replicas are out of step: {spelled}. One of them has left out a window that the others merged, "
                f"as after an error that was caught. Let an error end the process, or fold nothing in its place: an "
                f"empty batch, or an empty window."
            )

    def _combine(self, k: int, said: list[list[torch.Tensor]]) -> None:
        """Makes a leaf what its parts from all replicas, in their order, are together."""
        is_tuple = isinstance(self.buffers.reduced[k], tuple)
        lifted = [tuple(parts) if is_tuple else parts[0] for parts in said]
        self.buffers.reduced[k] = reduce(self.buffers.folds[k].combine, lifted)

    def _gathered(self, parts: list[torch.Tensor], rows: list[list[int]] | None = None) -> list[list[torch.Tensor]]:
        """These arrays from each replica; `rows` says for each replica how many rows of each it has, if they differ."""
        count, group = self.replicas.count, self.replicas.group
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
        own = torch.cat([tail.as_bytes(part) for part in parts])
        sent[: own.numel()] = own
        said = [torch.empty_like(sent) for _ in range(count)]
        dist.all_gather(said, sent, group=group)
        return [tail.split(data, mine) for data, mine in zip(said, fields, strict=True)]

    def _collect(self, counts: torch.Tensor) -> None:
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
        said = self._gathered(own, counts[:, 3:].tolist())
        for k, i in enumerate(places):
            self.buffers.collected[i] = [parts[k].movedim(0, self._axis(i)) for parts in said]

    def _axis(self, i: int) -> int:
        fold = self.outputs.folds[i]
        assert fold is not None
        return (fold.fold.reducer.monoid.axis or 0) % len(self.outputs.shapes[i] or (0,))

    def _state(self, state: list[Any], counts: torch.Tensor) -> list[Any]:
        folded = [rank for rank, steps in enumerate(counts[:, 0].tolist()) if steps] if state else []
        if not folded:
            return state
        source = dist.get_global_rank(self.replicas.group, folded[-1])
        said: list[Any] = [[_kind(leaf) for leaf in state]]
        dist.broadcast_object_list(said, src=source, group=self.replicas.group)
        fields = [kind for kind in said[0] if isinstance(kind, Field)]
        sent = torch.zeros(sum(field.nbytes for field in fields), dtype=torch.uint8, device=self._device)
        if folded[-1] == self.replicas.rank and fields:
            sent = torch.cat([tail.as_bytes(leaf) for leaf in state if arrays.is_array(leaf)]).to(self._device)
        if fields:
            dist.broadcast(sent, src=source, group=self.replicas.group)
        found = iter(tail.split(sent, fields))
        return [
            next(found) if isinstance(kind, Field) else own if kind is None else kind[0]
            for kind, own in zip(said[0], state, strict=True)
        ]


def _kind(leaf: Any) -> Any:
    """What is said of a leaf of the state: its Field, or in a tuple a number itself; None of any other object."""
    if arrays.is_array(leaf):
        return Field(leaf.shape, leaf.dtype)
    return (leaf,) if isinstance(leaf, bool | int | float | complex | str) else None


def count_window(program: Program) -> None:
    """Counts one more window of the program, so that replicas that are out of step can be told."""
    program.compiled["windows"] = program.compiled.get("windows", 0) + 1


def begun(program: Program, buffers: Buffers, leaves: Sequence[Any], weight: Any, replicas: Replicas) -> Reduction:
    """The Reduction of a window whose first micro-batch has given these leaves, with this weight."""
    known = (
        last_agreement(program, replicas) is not None
    )  # and so is what a window does, which may begin anew in the first
    agreement = agree(program, buffers.outputs, leaves, weight, buffers.layout, replicas)
    one_device = len({bucket.device for bucket in agreement.plan.buckets}) == 1  # else hooks run in several threads
    return Reduction(agreement, buffers, replicas, program.compiled["windows"], overlaps=known and one_device)


def merged(
    program: Program, buffers: Buffers, leaves: Sequence[Any], state: list[Any], groups: Sequence[Replicas]
) -> list[Any]:
    """The state when the buffers of a whole window, in units of 1, have been merged over each of the groups in turn.

    What has None among `leaves` is reduced elsewhere.
    """
    for replicas in groups:
        agreement = agree(program, buffers.outputs, leaves, 1, buffers.layout, replicas)
        state = Reduction(agreement, buffers, replicas, program.compiled["windows"], begins=False).finish(state)
    return state


def _like(held: Any, place: Place) -> Any:
    """What tells where a reduced leaf lies: itself; on a replica that has folded nothing, what was agreed on."""
    return held if isinstance(held, tuple) or is_placed(held) else place


def _parts(lifted: Any) -> Sequence[Any]:
    return lifted if isinstance(lifted, tuple) else (lifted,)


def _sent(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A few numbers of the host's, on the device, without waiting for it."""
    return number.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else number.to(device)


def _rows(chunks: list[torch.Tensor], axis: int) -> int:
    return sum(chunk.shape[axis] for chunk in chunks)
