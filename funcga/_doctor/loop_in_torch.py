"""A training loop of torch, watched: what calls `backward`, clips, scales and steps.

Two sources, and nothing is computed a second time:

- the graph of each loss, read before `backward` frees it (`graph_in_torch`);
- a sketch of `.grad`, some thousand elements, looked at before and after each event. From one look
  to the next the gradient stays, is multiplied by a factor, is erased, or is something else. The
  product of the factors since its own `backward` is what a micro-batch reaches the step with.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from funcga._doctor.graph_in_torch import Reading, read
from funcga._doctor.ledger import CHANGED, Change, Event, settle
from funcga._doctor.windows import Finding, MicroBatch, Window, merged
from funcga.errors import FuncgaError, listed
from torch_backend.dtensor import local

ELEMENTS, PARAMETERS = 4096, 64  # of a sketch at most, and how many parameters they are of


class Sketch:
    """Some elements of the gradients of an optimizer's parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.params = params[:: math.ceil(len(params) / PARAMETERS) or 1]
        self.most = ELEMENTS // max(1, len(self.params))
        # The largest rounding error of a gradient that somebody multiplies.
        self.precision = max((torch.finfo(p.dtype).eps for p in self.params), default=1e-5)

    def now(self) -> torch.Tensor:
        """The elements, in float64 where the device has it; 0 where there is no gradient."""
        parts = [self._elements(param) for param in self.params]
        device = parts[0].device
        joined = torch.cat([part.to(device, non_blocking=True) for part in parts])
        return joined.to(torch.float32 if device.type == "mps" else torch.float64)

    def _elements(self, param: torch.Tensor) -> torch.Tensor:
        size = local(param).numel()
        count = min(self.most, size)
        if param.grad is None or param.grad.layout != torch.strided:
            return local(param).new_zeros(count)
        grad = local(param.grad.detach())
        # A view where memory has no gaps, whatever the order of the axes.
        extent = sum((n - 1) * stride for n, stride in zip(grad.shape, grad.stride(), strict=True))
        flat = grad.as_strided((size,), (1,)) if extent + 1 == size else grad.reshape(-1)
        return flat[:: max(1, size // max(1, count))][:count]


@dataclass
class Call(MicroBatch):
    """A micro-batch whose loss is read, and whose numbers may still be on a device."""

    readings: list[Reading] = field(default_factory=list)

    def settle(self, scaler: Any) -> None:
        """Waits for its numbers."""
        if self.readings:
            self.terms = merged([reading.term() for reading in self.readings])
            self.loss_scale = scaler.get_scale() if scaler is not None else 1.0
            self.readings = []


def _change(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """What is needed to tell how a sketch has changed: three products, and whether it has."""
    return torch.stack([before @ before, before @ now, now @ now, (before != now).any().to(now)])


@dataclass
class Ledger:
    """What the gradients of an optimizer went through since its last step."""

    name: str
    sketch: Sketch
    last: torch.Tensor
    looks: list[tuple[str, torch.Tensor, MicroBatch | None, bool]] = field(default_factory=list)
    is_unscaled: bool = False
    unknown: str = ""

    def look(self, kind: str, micro_batch: MicroBatch | None = None, scaled: bool = False) -> None:
        now = self.sketch.now()
        self.looks.append((kind, _change(self.last, now), micro_batch, scaled))
        self.last = now

    def events(self) -> list[Event]:
        """The looks in plain numbers, for which this waits, once."""
        if not self.looks:
            return []
        changes = torch.stack([change for _, change, _, _ in self.looks]).tolist()
        return [
            Event(kind, Change(*change), micro_batch, scaled)
            for (kind, _, micro_batch, scaled), change in zip(self.looks, changes, strict=True)
        ]


class Loop:
    """Everything that is watched while a `watch` is open.

    Nothing of it may stop the run: an error of its own ends the watch, and is told once.
    """

    def __init__(
        self,
        params: Callable[[], dict[str, torch.Tensor]],
        optimizers: Sequence[Optimizer],
        across: object,
        steps: int,
    ) -> None:
        self.params, self.optimizers, self.across, self.steps = params, optimizers, across, steps
        self.windows: list[Window] = []
        self.error = ""
        self.without_optimizer: list[str] = []
        self._ledgers: dict[tuple[int, ...], Ledger] = {}
        self._undo: list[Callable[[], object]] = []
        self._is_inside = self._is_reduced = False
        self._scaler: Any = None

    def findings(self) -> list[Finding]:
        """What is no matter of one window."""
        names = {"names": listed(self.without_optimizer)}
        return [Finding("in no optimizer", names)] if self.without_optimizer else []

    # --- what is replaced while it is open

    def open(self) -> None:
        scaler = torch.amp.grad_scaler.GradScaler
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(scaler, "scale", self._scale)
        self._replace(scaler, "unscale_", self._unscale)
        self._replace(scaler, "step", self._scaler_step)
        self._replace(DistributedDataParallel, "forward", self._forward)
        # However it was imported, clip_grad_norm_ calls this by its name.
        self._replace(clip_grad, "_clip_grads_with_norm_", self._clip)
        self._replace(torch.nn.utils, "clip_grad_value_", self._clip)
        if fsdp := sys.modules.get("torch.distributed.fsdp"):
            self._replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", self._clip)
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before_step),
            (register_optimizer_step_post_hook, self._after_step),
        ):
            self._undo.append(register(hook).remove)
        self._quietly(self._find_optimizers, self.optimizers)

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        # What no step got.
        for ledger in self._ledgers.values():
            self._quietly(self._end_window, ledger, False)

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Has `around(original, *args)` called in place of a function, as long as it is open."""
        original = vars(owner)[name]

        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs) if self._undo else original(*args, **kwargs)

        def undo() -> None:
            # Where somebody has replaced it meanwhile, this one stays below, and does nothing.
            if vars(owner)[name] is replacement:
                setattr(owner, name, original)

        setattr(owner, name, replacement)
        self._undo.append(undo)

    def _quietly(self, look: Callable[..., object], *args: Any) -> None:
        if self.error:
            return
        try:
            with torch.no_grad():
                look(*args)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"funcga.watch sees nothing more of this run: {self.error}\n")

    # --- events of the loop

    def _backward(
        self, original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        # A checkpoint may call backward inside of one.
        if self._is_inside:
            return original(tensors, grad_tensors, *args, **kwargs)
        micro_batch = Call(is_reduced=self._is_reduced)
        self._is_reduced = False
        self._quietly(self._before_backward, micro_batch, tensors, grad_tensors)
        self._is_inside = True
        try:
            original(tensors, grad_tensors, *args, **kwargs)
        except BaseException:
            for ledger in self._ledgers.values():
                ledger.unknown = "a backward raised an error"
            raise
        finally:
            self._is_inside = False
        self._look("backward", micro_batch)

    def _before_backward(self, micro_batch: Call, tensors: Any, grad_tensors: Any) -> None:
        if not self._ledgers and not self.optimizers:
            # By type, as a proxy may claim to be an instance of anything.
            alive = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
            self._find_optimizers(alive)
        roots = [tensors] if torch.is_tensor(tensors) else [*tensors]
        gradients = (
            [grad_tensors]
            if grad_tensors is None or torch.is_tensor(grad_tensors)
            else [*grad_tensors]
        )
        gradients = gradients * len(roots) if len(gradients) == 1 else gradients
        micro_batch.readings = [
            reading
            for root, gradient in zip(roots, gradients, strict=True)
            for reading in read(root, gradient)
        ]
        for ledger in self._ledgers.values():
            ledger.look("before")

    def _look(self, kind: str, micro_batch: MicroBatch | None = None) -> None:
        for ledger in self._ledgers.values():
            scaled = self._scaler is not None and not ledger.is_unscaled
            self._quietly(ledger.look, kind, micro_batch, scaled)

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._look("before")
        result = original(*args, **kwargs)
        self._look("clip")
        return result

    def _forward(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_reduced = module.require_backward_grad_sync
        return original(module, *args, **kwargs)

    def _scale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._scaler = scaler if scaler.is_enabled() else None
        return original(scaler, *args, **kwargs)

    def _unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        result = original(scaler, optimizer)
        if (ledger := self._ledgers.get(_key(optimizer))) is not None:
            ledger.is_unscaled = True
        return result

    def _scaler_step(
        self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        before = len(self.windows)
        result = original(scaler, optimizer, *args, **kwargs)
        ledger = self._ledgers.get(_key(optimizer))
        if len(self.windows) == before and ledger is not None:
            self._quietly(self._skipped, ledger)
        return result

    def _skipped(self, ledger: Ledger) -> None:
        ledger.unknown = "GradScaler skipped the step"
        self._end_window(ledger, False)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._step(optimizer)
            return None

        # The last backward of the window is in the closure.
        def with_step() -> Any:
            loss = closure()
            self._step(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": with_step}
        return (args[0], with_step, *args[2:]), kwargs

    def _step(self, optimizer: Optimizer) -> None:
        """What one step got; with `across` every process gathers here, whatever befell it."""
        before = len(self.windows)
        self._quietly(self._see_step, optimizer)
        if self.across is not None and _key(optimizer) in self._ledgers and dist.is_initialized():
            seen = self.windows[-1] if len(self.windows) > before else None
            group = None if self.across == "world" else self.across
            everyone: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, seen and _sent(seen, dist.get_rank(group)), group)
            if seen is not None:
                self._quietly(_merge, seen, everyone)

    def _see_step(self, optimizer: Optimizer) -> None:
        known = self._ledgers.get(_key(optimizer))
        if known is None:
            self._find_optimizers([optimizer])
            if (known := self._ledgers.get(_key(optimizer))) is None:
                return  # one of another model
            known.unknown = "its optimizer was made after the window had begun"
        if self._is_inside:
            known.unknown = "its optimizer steps inside of backward"
        if self.params() and len(self.windows) < 2:
            owned = {key for keys in self._ledgers for key in keys}
            self.without_optimizer = [
                name
                for name, param in self.params().items()
                if param.grad is not None and id(param) not in owned
            ]
        self._end_window(known, True, optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (ledger := self._ledgers.get(_key(optimizer))) is not None:
            self._quietly(self._begin_window, ledger, optimizer)
            self.steps -= 1
        if not self.steps:
            self.close()

    def _begin_window(self, ledger: Ledger, optimizer: Optimizer) -> None:
        """What gradients hold now is left from before; a step may have written to them."""
        ledger.sketch = Sketch(optimizer)
        ledger.last = ledger.sketch.now()

    # --- optimizers and windows

    def _find_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        ours = {id(param) for param in self.params().values()}
        for optimizer in optimizers:
            key = _key(optimizer)
            if key in self._ledgers or not key or (ours and ours.isdisjoint(key)):
                continue
            sketch = Sketch(optimizer)
            name = f"{type(optimizer).__name__} {len(self._ledgers) + 1}"
            if sketch.params:
                self._ledgers[key] = Ledger(name, sketch, sketch.now())

    def _end_window(self, ledger: Ledger, is_step: bool, optimizer: Any = None) -> None:
        before = ledger.last
        ledger.look("before")
        settled = settle(ledger.events(), ledger.sketch.precision, len(self._ledgers) == 1)
        settled.unknown = ledger.unknown or settled.unknown
        was_unscaled = ledger.is_unscaled
        ledger.looks, ledger.is_unscaled, ledger.unknown = [], False, ""
        if not settled.micro_batches and not is_step:
            return
        for micro_batch in settled.micro_batches:
            if isinstance(micro_batch, Call):
                micro_batch.settle(self._scaler)
        # Some optimizers unscale by themselves.
        if (own := getattr(optimizer, "grad_scale", None)) is not None:
            settled.scale(1 / float(own))
        elif is_step and self._scaler is not None and not was_unscaled:
            scale = self._scaler.get_scale()
            settled.findings.append(Finding("never unscaled", {"factor": scale}))
        for micro_batch, coefficient in zip(
            settled.micro_batches, settled.coefficients, strict=True
        ):
            micro_batch.steps += is_step and coefficient != 0
        window = Window(
            len(self.windows) + 1,
            ledger.name,
            settled.micro_batches,
            settled.coefficients,
            settled.findings,
            by_hand=settled.by_hand,
            unknown=settled.unknown,
            is_step=is_step,
            is_part=dist.is_initialized() and dist.get_world_size() > 1,
        )
        # A process that has a part of each gradient has nothing to compare.
        whole = all(local(param) is param for param in ledger.sketch.params)
        if window.is_part and self.across is not None and whole:
            window.sketches = before.tolist(), ledger.last.tolist()
        # A factor of the gradients is rounded as they are.
        if settled.by_hand != 1:
            window.precision = max(window.precision, ledger.sketch.precision)
        self.windows.append(window)


def _key(optimizer: Any) -> tuple[int, ...]:
    """What it updates: a wrapped optimizer is the same as that inside of it."""
    return tuple(id(param) for group in optimizer.param_groups for param in group["params"])


def _sent(window: Window, rank: int) -> Window:
    """A window as other processes get it."""
    plain = [
        MicroBatch(each.terms, each.loss_scale, each.steps, each.is_reduced, rank)
        for each in window.micro_batches
    ]
    return replace(window, micro_batches=plain)


def _merge(window: Window, everyone: Sequence[Window | None]) -> None:
    """Makes a window that of all processes, whose gradients are averaged."""
    windows = [each for each in everyone if each is not None]
    if len(windows) < len(everyone):
        window.unknown = "another process sees nothing more of its run"
        return
    window.micro_batches = [each for other in windows for each in other.micro_batches]
    window.coefficients = [each for other in windows for each in other.coefficients]
    window.ranks, window.is_part = len(windows), False
    if not all(each.sketches[0] for each in windows):
        return
    before, now = (
        torch.tensor([each.sketches[which] for each in windows], dtype=torch.float64)
        for which in (0, 1)
    )
    window.sketches = ((), ())
    if window.unknown == CHANGED:
        # Perhaps somebody has averaged them by hand.
        factor = Change(*_change(before.mean(0), now[0]).tolist()).factor(1e-3)
        if not math.isnan(factor):
            window.unknown, window.by_hand = "", factor
            window.coefficients = [each * factor for each in window.coefficients]
    apart = float((now - now.mean(0)).norm() / now.norm())
    if apart > 1e-3:
        window.findings.append(Finding("ranks apart", {"difference": apart}))


def loop(model: Any, optimizer: Any, across: Any, steps: int) -> Loop:
    """The Loop of the arguments of `watch`."""
    models = _several(model, torch.nn.Module, "model")
    optimizers = _several(optimizer, Optimizer, "optimizer")
    params = lambda: {
        name: param
        for each in models
        for name, param in each.named_parameters()
        if param.requires_grad
    }
    return Loop(params, optimizers, across, steps)


def _several(given: Any, kind: type, name: str) -> list[Any]:
    """One or several, or none, as a list."""
    found = [] if given is None else [*given] if isinstance(given, list | tuple) else [given]
    for each in found:
        if not isinstance(each, kind):
            raise FuncgaError(
                f"{name} is of type {type(each).__name__}, and watch takes a "
                f"torch {kind.__name__}, or a list of them: funcga.watch(model, optimizer)."
            )
    return found
