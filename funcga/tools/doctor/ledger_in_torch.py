"""With which factor a micro-batch reaches a step, from looks at some elements of the gradients."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from funcga.tools.doctor.windows import Finding, MicroBatch, Window
from torch_backend.dtensor import local

ELEMENTS, PARAMETERS = 4096, 16  # of a sketch at most, and how many parameters they are of


class Look(NamedTuple):
    """A look at the gradients: after the backward of a micro-batch, a "clip" or a "zero_grad", or
    "before" either or a step.

    line: that of the program; "" before a micro-batch or a clip.
    is_new: whether a gradient was written to since the look before.
    change: numbers, perhaps on a device: the products of some elements with themselves in the look
        before, with those in this one, and of these with themselves; and how many batches a
        BatchNorm has seen, if there is one.
    """

    event: MicroBatch | str
    line: str
    is_new: bool
    change: torch.Tensor


class Ledger:
    """What the gradients of an optimizer went through since its last step.

    It looks at some of their elements, and keeps how these differ from the look before.
    """

    def __init__(self, optimizer: Optimizer, number: int, norms: Sequence[Any]) -> None:
        self.optimizer, self.number = optimizer, number
        self.norms = [norm for norm in norms if norm.track_running_stats][-1:]
        self.forget()
        self.begin()
        # What gradients hold by now is of nothing that was seen.
        self.last = torch.zeros_like(self.sketch())

    def forget(self) -> None:
        """Forgets what a window has gone through."""
        self.looks: list[Look] = []
        self.count = 0  # of micro-batches, by `look`
        # After how many of them a "schedule" or an "average" went on, and in which line.
        self.done = defaultdict[tuple[str, str], set[int]](set)

    def begin(self) -> None:
        """Looks at what gradients hold before the first backward of a window."""
        params = [param for param in params_of(self.optimizer) if param.requires_grad]
        self.params = params[:: math.ceil(len(params) / PARAMETERS) or 1]
        # A sharded module may keep gradients elsewhere until it reduces them.
        self.is_sharded = any(local(param) is not param for param in self.params)
        self.last, self.versions = self.sketch(), self.version()

    def version(self) -> list[tuple[int, int]]:
        """Of each gradient; another one when it was written to."""
        grads = [param.grad for param in self.params]
        return [(id(grad), 0 if grad is None else grad._version) for grad in grads]

    def sketch(self) -> torch.Tensor:
        """Elements of the gradients; 0 where there is no gradient."""
        parts = [_elements(param, ELEMENTS // len(self.params)) for param in self.params]
        parts = [part.to(parts[0].device, non_blocking=True) for part in parts]
        return torch.cat(parts or [torch.zeros(1, device="cpu")]).float()

    def look(self, event: MicroBatch | str, line: str) -> None:
        """Compares the gradients with what they were at the last look."""
        now, versions, last = self.sketch(), self.version(), self.last
        is_new = versions != self.versions or self.is_sharded
        batches = [
            local(norm.num_batches_tracked).to(now, non_blocking=True) for norm in self.norms
        ]
        change = torch.stack([last @ last, last @ now, now @ now, *batches])
        self.looks.append(Look(event, line, is_new, change))
        self.count += is_new and isinstance(event, MicroBatch)
        self.last, self.versions = now, versions

    def settle(self, window: Window, scale: float) -> None:
        """Writes into the window what became of its micro-batches, and begins the next. `scale`:
        the factor of the GradScaler; 0 if there is none.
        """
        is_old = self._follow(window, scale)
        window.lines["step"] = self.looks[-1].line
        if window.is_step and is_old:
            window.findings.append(Finding("left over"))
        if window.is_step and window.by_hand * scale > 1.5:
            window.findings.append(Finding("never unscaled", {"factor": scale}))
        # A factor is known as exactly as gradients are rounded.
        if window.by_hand != 1:
            window.precision = max(torch.finfo(param.dtype).eps for param in self.params)
        self.forget()

    def _follow(self, window: Window, scale: float) -> bool:
        """Follows the gradient of each micro-batch to the step, and writes that into the window.
        Returns whether gradients were not empty when the first micro-batch came.
        """
        changes = torch.stack([look.change for look in self.looks]).tolist()
        is_old: bool = changes[0][0] > 0
        clipped, clip = 1.0, ""  # by how much since the last micro-batch, and where
        batches = set()
        for look, (before, both, now, *seen) in zip(self.looks, changes, strict=True):
            factor = _factor(before, both, now)
            if not math.isfinite(now):
                window.unknown = "gradients are not finite"
            if look.event == "clip":
                clipped, clip = clipped * factor, look.line
                if window.by_hand * scale > 1.5 and not window.unknown:
                    window.findings.append(Finding("clipped before unscaling", {"clip": clip}))
            elif not isinstance(look.event, MicroBatch):
                if look.event == "zero_grad" and window.parts and factor == 0:
                    window.lines["zero_grad"] = look.line
                _apply(window, factor, is_empty=now == 0)
                is_old = is_old and now > 0
                clipped = clipped if now else 1.0  # an update that is skipped
            elif look.is_new:
                if clipped != 1:
                    window.findings.append(Finding("clipped inside the window", {"clip": clip}))
                    window.scale(clipped)
                clipped, window.by_hand = 1.0, 1.0
                batches.add(tuple(seen))
                window.parts.append((look.event, 1.0))
                window.lines["backward"] = look.line
        window.findings += self._repeated(window, len(batches))
        return is_old

    def _repeated(self, window: Window, batches: int) -> Iterator[Finding]:
        """What belongs to the step, and was done after each micro-batch. `batches`: how many
        numbers of batches BatchNorm had seen after them.
        """
        n, of_a_place = self.count, Counter(each.place for each, a in window.parts if a)
        if not window.is_step or max(of_a_place.values(), default=0) < 2:
            return
        for (event, line), counts in self.done.items():
            # Between all of them, and beside the step: an epoch may end inside of a window.
            if counts >= {*range(1, n)} and counts & {0, n}:
                yield Finding(f"{event} per micro-batch", {"n": n, "line": line})
        if batches == n:
            yield Finding("batch statistics", {"n": n})


def params_of(optimizer: Any) -> list[Any]:
    """The parameters that an optimizer updates."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _elements(param: torch.Tensor, most: int) -> torch.Tensor:
    count = min(most, local(param).numel())
    grad = None if param.grad is None else local(param.grad.detach())
    # Only what has a view without axes: a copy would be as large as the parameter.
    if grad is None or grad.layout != torch.strided or not grad.is_contiguous():
        return torch.zeros(count, dtype=param.dtype, device=param.device)
    flat: torch.Tensor = grad.view(-1)
    return flat[:: max(1, len(flat) // max(1, count))][:count]


def _factor(before: float, both: float, now: float) -> float:
    """What gradients were multiplied by; NaN if that is no factor, or if they were 0."""
    if before == both == now:
        return 1.0
    if now == 0:
        return 0.0
    if before == 0 or not math.isfinite(now):
        return math.nan
    # The part of them that is no multiple of what they were; 16 bits round it.
    rest = 1 - both * both / (before * now)
    return both / before if rest < 1e-4 else math.nan


def _apply(window: Window, factor: float, is_empty: bool) -> None:
    """What somebody has done to the gradients between two events."""
    if is_empty and window.unknown:
        # They were seen to be wrong, and erased: somebody tries again.
        window.parts, window.unknown = [], ""
    elif math.isnan(factor):
        window.unknown = window.unknown or "gradients change between backward and step"
    else:
        window.scale(factor)
        window.by_hand *= factor
