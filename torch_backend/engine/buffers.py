"""The accumulators of one call, updated in place: what funcga's mathematics says, in one kernel for all leaves.

Only torch has this file: XLA updates the carry of a loop in place by itself.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from funcga._fold import tally
from funcga._fold.leaf import LeafFold
from funcga._fold.outputs import Outputs
from torch_backend import arrays
from torch_backend.dtensor import as_dtensor, local, local_tensors, redistributed, without_partials


class Layout:
    """What becomes of each leaf of an output: sums are added in place, every other fold is combined leaf by leaf.

    Places in it are those in `outputs.reduced`. The leaves `given`, places in the output, are left to the caller.
    """

    def __init__(self, outputs: Outputs, given: Collection[int] = ()):
        self.outputs = outputs
        self.folds = outputs.reduced_folds
        self.pure = arrays.in_transform()  # there nothing is written to, so that it can be differentiated and vmapped
        self.kinds = kinds = [None] * len(self.folds) if self.pure else _kinds(outputs)
        self.scaled = [k for k, kind in enumerate(kinds) if kind == "weighted"]
        self.plain = [k for k, kind in enumerate(kinds) if kind == "plain"]
        self.sums = {*self.scaled, *self.plain}
        self.places = {i: k for k, i in enumerate(outputs.reduced)}
        self.own = [k for i, k in self.places.items() if i not in given]
        self.adds = [[k for k in self.own if kinds[k] == kind] for kind in ("weighted", "plain")]
        self.combines = [k for k in self.own if kinds[k] is None]
        self.collects = [i for i in outputs.collected if i not in given]
        # one sum and nothing else, as the loss is beside gradients that are added elsewhere
        self.single = len(self.own) == 1 and self.adds[0] == self.own and not (self.collects or outputs.threads)
        given_kinds = {i: kinds[k] for i, k in self.places.items() if i in given}
        self.given_scaled = [i for i, kind in given_kinds.items() if kind == "weighted"]
        self.given_plain = [i for i, kind in given_kinds.items() if kind == "plain"]
        self.given_others = [i for i in given if given_kinds.get(i) is None and outputs.folds[i] is not None]
        self.means = [self._normalized(places, "weight") for places in (self.scaled, self.plain)]
        self.cast = [k for k, fold in enumerate(self.folds) if fold.accumulator_dtype != fold.result_dtype]
        self.averages = [self._normalized(places, "steps") for places in (self.scaled, self.plain)]

    def _normalized(self, places: list[int], by: str) -> list[int]:
        """Those of these places that are divided by the total weight, or by the steps."""
        return [k for k in places if self.folds[k].fold.normalizer.divides_by == by]


def _kinds(outputs: Outputs) -> list[str | None]:
    """For each reduced leaf how it adds in place, "weighted" or "plain"; None if it does not."""
    known: dict[tuple[int, torch.dtype], str | None] = {}
    found = []
    for fold, i in zip(outputs.reduced_folds, outputs.reduced, strict=True):
        kind = (id(fold), outputs.dtypes[i])
        if kind not in known:
            known[kind] = _kind(fold, outputs.dtypes[i])
        found.append(known[kind])
    return found


def _kind(fold: LeafFold, dtype: torch.dtype) -> str | None:
    reducer = fold.fold.reducer
    halves = (torch.bfloat16, torch.float16) if fold.accumulator_dtype.is_floating_point else ()
    if not reducer.additive or dtype not in (fold.accumulator_dtype, *halves):
        return None
    return "weighted" if reducer.linear else "plain"


class Buffers:
    """What one call has folded so far. It is made by the call, owned by it and emptied into the result.

    `reduced[k]` is what the k-th reduced leaf of the output has come to; None before the first micro-batch.
    """

    def __init__(self, layout: Layout):
        self.layout, self.outputs, self.folds, self.pure = layout, layout.outputs, layout.folds, layout.pure
        self.weight: Any = 0  # what the host has counted, and in `counted` what the device has
        self.steps = 0
        self.counted: tally.Tally | None = None
        self.unit: float | None = None
        self.unit_is_fixed = False
        self.reduced: list[Any] = [None] * len(self.folds)
        self.passed: dict[int, torch.Tensor] = {}
        self.collected: dict[int, list[torch.Tensor]] = {i: [] for i in self.outputs.collected}

    def share(self, weight: Any) -> float | None:
        """A weight in the unit that weighted sums are held in, 1 at most; None if only the device knows it.

        The unit is the first weight, so that micro-batches alike are added as they are, whatever they weigh. When one
        comes whose share would not be a power of two, the unit becomes one, so that the shares are exact; and when a
        heavier one comes the unit grows, as a share may be what a backward pass in float16 begins with. A unit that
        is fixed stays, and shares may be more than 1.
        """
        if self.unit is None and (isinstance(weight, torch.Tensor) or torch.compiler.is_compiling()):
            self.unit = 1.0
        if isinstance(weight, torch.Tensor):
            return None
        if not weight:
            return 0.0
        if self.unit is None:
            self.unit = float(weight)
        if weight == self.unit:
            return 1.0
        if self.unit_is_fixed:
            return float(weight / self.unit)
        grows = weight > self.unit or not _is_power_of_two(weight / self.unit)
        if grows and not torch.compiler.is_compiling():
            self._rescale(_power_above(max(float(weight), self.unit)))
        return float(weight / self.unit)

    def _rescale(self, unit: float) -> None:
        """Takes another unit."""
        assert self.unit is not None
        held = [self.reduced[k] for k in self.layout.scaled if self.reduced[k] is not None]
        if held and unit != self.unit:
            torch._foreach_mul_(local_tensors(held), self.unit / unit)
        self.unit = unit

    def hold_in(self, unit: float) -> None:
        """Lets weighted sums be held in this unit, whatever they are held in now."""
        if self.unit is None:
            self.unit = unit
        self._rescale(unit)

    @property
    def tally(self) -> tally.Tally:
        """How much has been folded."""
        host = tally.of(self.weight, arrays, steps=self.steps)
        return host if self.counted is None else tally.merge(host, self.counted)

    def add(self, leaves: list[Any], weight: Any) -> list[Any]:
        """Folds the leaves of one micro-batch in, and returns those that are threaded to the next."""
        own, places, share = self.layout.own, self.outputs.reduced, self.share(weight)
        if self.layout.single and share is not None and self.reduced[own[0]] is not None:
            value = leaves[places[own[0]]]
            if share and type(value) is torch.Tensor:
                self.reduced[own[0]].add_(value, alpha=share)
            elif share:
                self._add_all(own, {own[0]: value}, share)
            self._count(weight)
            return []
        values = {k: _strided(leaves[places[k]]) for k in own}
        scaled, plain = self.layout.adds
        if plain:
            self._add_all(plain, values, 1)
        if scaled:
            self._add_scaled(scaled, values, share, weight)
        for k in self.layout.combines:
            self._combine(k, values[k], weight)
        for i in self.layout.collects:
            # grad_fn may use its buffer again, as a captured CUDA graph does
            self.collected[i].append(_strided(leaves[i]).clone())
        self._count(weight)
        state = [self.passed.pop(i, leaves[i]) for i in self.outputs.threads]
        # a copy, as it may be a view of the micro-batch, or of a buffer that grad_fn uses again
        return state if self.pure else [leaf.clone() if arrays.is_array(leaf) else leaf for leaf in state]

    def _count(self, weight: Any) -> None:
        if isinstance(weight, torch.Tensor):
            more = tally.of(weight, arrays, steps=0)
            self.counted = more if self.counted is None else tally.merge(self.counted, more)
        else:
            self.weight += weight
        self.steps += 1

    def add_leaf(self, i: int, value: torch.Tensor, weight: Any) -> None:
        """Folds in one of the given leaves of one micro-batch, whose memory is from now on the buffers' own."""
        value = _strided(value)
        if i in self.outputs.threads:
            self.passed[i] = value
            return
        if i in self.collected:
            self.collected[i].append(value)
            return
        k = self.layout.places[i]
        kind = self.layout.kinds[k]
        if kind == "weighted":
            self._add_scaled([k], {k: value}, self.share(weight), weight)
        elif kind == "plain":
            self._add_all([k], {k: value}, 1)
        else:
            self._combine(k, value, weight)

    def _combine(self, k: int, value: torch.Tensor, weight: Any) -> None:
        fold, before = self.folds[k], self.reduced[k]
        before = fold.identity(value) if before is None else before
        combined = fold.combine(before, fold.lift(value, weight))
        # a monoid of the user's may return what it was given, which is not the buffers' own
        self.reduced[k] = combined.clone() if combined is value else combined

    def _add_scaled(self, places: list[int], values: dict[int, torch.Tensor], share: float | None, weight: Any) -> None:
        if share is None:
            self._add_masked(places, values, weight)
        else:
            self._add_all(places, values, share)

    def _add_all(self, places: list[int], values: dict[int, torch.Tensor], factor: Any) -> None:
        """Adds factor * value to the accumulators at these places, all at once."""
        fresh = [k for k in places if self.reduced[k] is None]
        if fresh and len(fresh) < len(places):  # as where some have a place in what will be sent
            self._add_all(fresh, values, factor)
            places = [k for k in places if k not in {*fresh}]
        chosen = [values[k] for k in places]
        if self.reduced[places[0]] is not None:
            if factor:  # a weight of 0 adds nothing, not even a NaN
                held = [self.reduced[k] for k in places]
                chosen = local_tensors(list(map(redistributed, chosen, held)))
                torch._foreach_add_(local_tensors(held), chosen, alpha=factor)
            return
        raw = local_tensors(chosen)
        if factor and len(raw) > 1 and all(self.folds[k].accumulator_dtype == values[k].dtype for k in places):
            own = list(torch._foreach_mul(raw, factor))
        else:
            own = [v.to(self.folds[k].accumulator_dtype, copy=True) for k, v in zip(places, raw, strict=True)]
            if factor != 1:
                torch._foreach_mul_(own, factor) if factor else torch._foreach_zero_(own)
        for k, accumulator, like in zip(places, own, chosen, strict=True):
            self.reduced[k] = as_dtensor(accumulator, like)

    def _add_masked(self, places: list[int], values: dict[int, torch.Tensor], weight: torch.Tensor) -> None:
        """The same for a weight that the host does not see: leaf by leaf, so that one masked leaf lives at a time."""
        factors: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        for k in places:
            value, dtype = values[k], self.folds[k].accumulator_dtype
            if (value.device, dtype) not in factors:
                own = weight.to(value.device)
                factors[value.device, dtype] = own.to(dtype) / (self.unit or 1.0), own != 0
            factor, counts = factors[value.device, dtype]
            if self.reduced[k] is None:
                self.reduced[k] = as_dtensor(torch.where(counts, local(value).to(dtype), 0).mul_(factor), value)
            else:
                held, more = local_tensors([self.reduced[k], redistributed(value, self.reduced[k])])
                held.addcmul_(torch.where(counts, more.to(dtype), 0), factor)

    def settle(self, likes: Mapping[int, torch.Tensor]) -> None:
        """Reduces what lies on the devices of a mesh as sums that are not done yet, to where `likes` of outputs lie."""
        if {*map(type, self.reduced)} != {torch.Tensor}:  # as usual
            for k, value in enumerate(self.reduced):
                self.reduced[k] = without_partials(value, likes.get(self.outputs.reduced[k]))

    def result(self, state: list[Any]) -> Any:
        """The normalised result, in the structure of grad_fn's output. The buffers are empty afterwards."""
        reduced, counted = self.reduced, self.tally
        total, unit = tally.total(counted), self.unit or 1.0
        scaled_means, plain_means = self.layout.means
        scaled_averages, plain_averages = self.layout.averages
        done = {*self._divide(scaled_means, total / unit), *self._divide(scaled_averages, counted.steps / unit),
                *self._divide(plain_averages, counted.steps)}  # fmt: skip
        if not isinstance(total, torch.Tensor):
            done.update(self._divide(plain_means, total))
        if unit != 1:
            for k in {*self.layout.scaled} - done:
                local(reduced[k]).mul_(unit)
        results, self.reduced = reduced, [None] * len(reduced)
        for k in self.layout.cast if len(done) == len(reduced) else range(len(reduced)):
            fold = self.folds[k]
            results[k] = results[k].to(fold.result_dtype) if k in done else fold.normalize(results[k], counted)
        collected = []
        for fold, chunks in zip(self.outputs.collected_folds, self.collected.values(), strict=True):
            collected.append(torch.cat(chunks, dim=fold.fold.reducer.monoid.axis or 0).to(fold.result_dtype))
            chunks.clear()
        return self.outputs.join(results, collected, state)

    def _divide(self, places: list[int], total: Any) -> list[int]:
        """Divides the sums at these places in place, and returns them."""
        if isinstance(total, torch.Tensor):
            # Of a total of 0 the host knows nothing, but then nothing was added to a weighted sum: it is zeros already.
            safe = torch.where(total != 0, total, 1)
            for k in places:
                local(self.reduced[k]).div_(safe.to(self.reduced[k].device, self.reduced[k].dtype))
        elif places and total:
            _divide_all(local_tensors([self.reduced[k] for k in places]), float(total))
        elif places:
            torch._foreach_zero_(local_tensors([self.reduced[k] for k in places]))
        return places


def _divide_all(held: list[torch.Tensor], total: float) -> None:
    """Divides in place; on the CPU by a tensor, where torch would make one of the number for each of them."""
    dtype = held[0].dtype
    alike = not torch.compiler.is_compiling() and all(t.is_cpu and t.dtype is dtype for t in held)
    if not (alike and dtype in (torch.float32, torch.float64)):
        torch._foreach_div_(held, total)
    elif 1 <= total <= _MOST and _is_power_of_two(total):  # to multiply is faster, and then the same
        torch._foreach_mul_(held, torch.tensor(1 / total, dtype=dtype, device="cpu"))
    else:
        torch._foreach_div_(held, torch.tensor(total, dtype=dtype, device="cpu"))


def _strided(value: Any) -> Any:
    """The value with all of its zeros: the gradient of an embedding may be sparse, the sum of a few no longer is."""
    return value if value.layout is torch.strided else value.to_dense()


_MOST = 2.0**64  # of which a float32 holds the inverse


def power_below(number: float) -> float:
    """The greatest power of two that is not above a positive number."""
    return math.ldexp(1.0, math.frexp(number)[1] - 1)


def _power_above(number: float) -> float:
    """The smallest power of two that is not below a positive number."""
    return number if _is_power_of_two(number) else 2 * power_below(number)


def _is_power_of_two(ratio: float) -> bool:
    return math.frexp(ratio)[0] == 0.5
