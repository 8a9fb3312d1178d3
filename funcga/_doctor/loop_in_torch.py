"""A training loop of torch, watched: what calls `backward`, clips, scales and steps.

Two sources, and nothing is computed a second time: the graph of each loss, read before `backward`
frees it (`graph_in_torch`); and a sketch of `.grad`, some thousand elements, looked at before and
after each event (`ledger`).
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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

from funcga._doctor.graph_in_torch import read
from funcga._doctor.ledger import Event, settle
from funcga._doctor.windows import Finding, MicroBatch, Term, Window, merged
from funcga.errors import FuncgaError, listed
from torch_backend.dtensor import local

ELEMENTS, PARAMETERS = 4096, 64  # of a sketch at most, and how many parameters they are of


class Ledger:
    """What the gradients of an optimizer went through since its last step.

    It looks at some of their elements, and keeps how these differ from the look before.
    """

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.optimizer, self.number = optimizer, number
        self.unknown = ""
        self.looks: list[tuple[str, torch.Tensor, MicroBatch | None]] = []
        self.begin()

    def begin(self) -> None:
        """Looks at what gradients hold before the first backward of a window."""
        groups = self.optimizer.param_groups
        params = [param for group in groups for param in group["params"] if param.requires_grad]
        self.params = params[:: math.ceil(len(params) / PARAMETERS) or 1]
        self.last = self.sketch()

    def sketch(self) -> torch.Tensor:
        """Elements of the gradients, in float64 if the device has it; 0 if there is no gradient."""
        parts = [_elements(param, ELEMENTS // len(self.params)) for param in self.params]
        parts = [part.to(parts[0].device, non_blocking=True) for part in parts]
        joined = torch.cat(parts or [torch.zeros(1)])
        return joined.to(torch.float32 if joined.device.type == "mps" else torch.float64)

    def look(self, kind: str, micro_batch: MicroBatch | None = None) -> None:
        now = self.sketch()
        self.looks.append((kind, _change(self.last, now), micro_batch))
        self.last = now

    def settle(self, window: Window, scale: float) -> None:
        """Writes into the window what became of its micro-batches, and begins the next."""
        changes = torch.stack([change for _, change, _ in self.looks]).tolist()
        events = [
            Event(kind, micro_batch, *change)
            for (kind, _, micro_batch), change in zip(self.looks, changes, strict=True)
        ]
        settle(window, events, scale)
        # A factor is known as exactly as gradients are rounded.
        if window.by_hand != 1:
            window.precision = max(torch.finfo(param.dtype).eps for param in self.params)
        window.unknown = self.unknown or window.unknown
        self.looks, self.unknown = [], ""


def _elements(param: torch.Tensor, most: int) -> torch.Tensor:
    count = min(most, local(param).numel())
    grad = None if param.grad is None else local(param.grad.detach())
    # Only what has a view without axes: a copy would be as large as the parameter.
    if grad is None or grad.layout != torch.strided or not grad.is_contiguous():
        return torch.zeros(count, dtype=param.dtype, device=param.device)
    flat: torch.Tensor = grad.view(-1)
    return flat[:: max(1, len(flat) // max(1, count))][:count]


def _change(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """The numbers of an Event."""
    return torch.stack([before @ before, before @ now, now @ now, (before != now).any().to(now)])


class Loop:
    """Everything that is watched while a `watch` is open.

    Nothing of it may stop the run: an error of its own ends the watch, and is told once.
    """

    def __init__(self, model: Any, optimizer: Any, across: Any, steps: int) -> None:
        self.models, self.optimizers = (
            [*given] if isinstance(given, list | tuple) else [given] * (given is not None)
            for given in (model, optimizer)
        )
        for each in self.models + self.optimizers:
            if not isinstance(each, torch.nn.Module | Optimizer):
                raise FuncgaError(
                    f"watch was given {type(each).__name__}: it takes a module and its optimizer, "
                    "or lists of them. Write funcga.watch(model, optimizer)."
                )
        self.across, self.steps = across, steps
        self.windows: list[Window] = []
        self.findings: list[Finding] = []  # that are no matter of one window
        self.is_blind = False
        self._ledgers: dict[tuple[int, ...], Ledger] = {}
        self._undo: list[Callable[[], object]] = []
        self._is_inside = self._is_reduced = self._has_others = False
        self._scaler: Any = None

    # --- what is replaced while it is open

    def open(self) -> None:
        scaler = torch.amp.grad_scaler.GradScaler
        for owner, name, around in (
            (Optimizer, "__init__", self._made),
            (torch.autograd, "backward", self._backward),
            (scaler, "scale", self._scale),
            (scaler, "step", self._scaler_step),
            (DistributedDataParallel, "forward", self._forward),
            # However it was imported, clip_grad_norm_ calls this by its name.
            (clip_grad, "_clip_grads_with_norm_", self._clip),
            (torch.nn.utils, "clip_grad_value_", self._clip),
        ):
            self._replace(owner, name, around)
        self._undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.append(register_optimizer_step_post_hook(self._after_step).remove)
        # By type, as a proxy may claim to be an instance of anything.
        alive = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
        self._quietly(self._find_optimizers, alive)

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        for ledger in self._ledgers.values():
            self._quietly(self._end_window, ledger, False)
        is_alone = len({window.optimizer for window in self.windows}) == 1 and not self._has_others
        for window in self.windows:
            window.is_alone = is_alone
        owned = {key for keys in self._ledgers for key in keys}
        names = [name for name, param in self._params() if id(param) not in owned]
        if names and self.windows:
            self.findings.append(Finding("in no optimizer", {"names": listed(names)}))

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Has a function called inside of `around(*args)`, as long as this is open."""
        original = vars(owner)[name]

        def replacement(*args: Any, **kwargs: Any) -> Any:
            with around(*args, **kwargs) if self._undo else nullcontext():
                return original(*args, **kwargs)

        def undo() -> None:
            # Where somebody has replaced it meanwhile, this one stays below, and does nothing.
            if vars(owner)[name] is replacement:
                setattr(owner, name, original)

        setattr(owner, name, replacement)
        self._undo.append(undo)

    def _quietly(self, look: Callable[..., Any], *args: Any) -> Any:
        try:
            with torch.no_grad():
                return None if self.is_blind else look(*args)
        except Exception as error:
            self.is_blind = True
            text = f"{type(error).__name__}: {error}"
            self.findings.append(Finding("error", {"error": text}))
            sys.stderr.write(f"funcga.watch sees nothing more of this run: {text}\n")

    # --- what a loop does

    @contextmanager
    def _backward(
        self, tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any
    ) -> Iterator[None]:
        # A checkpoint may call backward inside of one.
        if self._is_inside:
            yield
            return
        micro_batch = MicroBatch(is_reduced=self._is_reduced)
        self._is_reduced, self._is_inside = False, True
        self._quietly(self._before_backward, micro_batch, tensors, grad_tensors)
        try:
            yield
            self._look("backward", micro_batch)
        except BaseException:
            self._look("failed")
            raise
        finally:
            self._is_inside = False

    def _before_backward(self, micro_batch: MicroBatch, tensors: Any, gradient: Any) -> None:
        losses = [tensors] if torch.is_tensor(tensors) else tensors
        micro_batch.terms = [term for loss in losses for term in read(loss)]
        if gradient is not None:
            micro_batch.terms = [Term("backward with a gradient")]
        self._look("before")

    def _look(self, kind: str, micro_batch: MicroBatch | None = None) -> None:
        for ledger in self._ledgers.values():
            self._quietly(ledger.look, kind, micro_batch)

    @contextmanager
    def _made(self, optimizer: Optimizer, *_: Any, **__: Any) -> Iterator[None]:
        yield
        self._quietly(self._find_optimizers, [optimizer])

    @contextmanager
    def _clip(self, *_: Any, **__: Any) -> Iterator[None]:
        self._look("before")
        yield
        self._look("clip")

    @contextmanager
    def _forward(self, module: Any, *_: Any, **__: Any) -> Iterator[None]:
        self._is_reduced = module.require_backward_grad_sync
        yield

    @contextmanager
    def _scale(self, scaler: Any, *_: Any) -> Iterator[None]:
        self._scaler = scaler
        yield

    @contextmanager
    def _scaler_step(self, _: Any, optimizer: Any, *__: Any, **___: Any) -> Iterator[None]:
        before = len(self.windows)
        yield
        ledger = self._ledger(optimizer)
        if len(self.windows) == before and ledger is not None:
            ledger.unknown = "GradScaler skipped the step"
            self._quietly(self._end_window, ledger, False)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = (*args[1:], *kwargs.values(), None)[0]
        if not callable(closure):
            self._step(optimizer)
            return None

        # The last backward of the window is in the closure.
        def with_step() -> Any:
            loss = closure()
            self._step(optimizer)
            return loss

        return (optimizer, with_step), {}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (ledger := self._ledger(optimizer)) is not None:
            self._quietly(ledger.begin)
            self.steps -= 1
            if not self.steps:
                self.findings.append(Finding("too long"))
                self.close()

    # --- windows

    def _find_optimizers(self, optimizers: Iterable[Optimizer], unknown: str = "") -> None:
        ours = {id(param) for _, param in self._params()}
        ours.update(*map(_key, self.optimizers))
        for optimizer in optimizers:
            key = _key(optimizer)
            if key not in self._ledgers and not (ours and ours.isdisjoint(key)):
                self._ledgers[key] = Ledger(optimizer, len(self._ledgers) + 1)
                self._ledgers[key].unknown = unknown

    def _ledger(self, optimizer: Any) -> Ledger | None:
        return self._ledgers.get(_key(optimizer))

    def _params(self) -> list[tuple[str, torch.nn.Parameter]]:
        named = [pair for model in self.models for pair in model.named_parameters()]
        return [(name, param) for name, param in named if param.requires_grad]

    def _step(self, optimizer: Optimizer) -> None:
        """What one step got; with `across` every process gathers here, whatever befell it."""
        window = self._quietly(self._see_step, optimizer)
        if self.across is not None and dist.is_initialized() and (window or self.is_blind):
            group = None if self.across == "world" else self.across
            everyone: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, window, group)
            self._quietly(_merge, window, everyone)

    def _see_step(self, optimizer: Optimizer) -> Window | None:
        self._find_optimizers([optimizer], "its optimizer was made after the window had begun")
        if (ledger := self._ledger(optimizer)) is None:
            # One of another model: what it steps with is not lost.
            self._has_others = True
            for each in self._ledgers.values():
                for _, _, micro_batch in each.looks:
                    if micro_batch is not None:
                        micro_batch.steps += 1
            return None
        ledger.optimizer = optimizer  # another one may be around it
        if self._is_inside:
            ledger.unknown = "its optimizer steps inside of backward"
        return self._end_window(ledger, is_step=True)

    def _end_window(self, ledger: Ledger, is_step: bool) -> Window:
        optimizer = ledger.optimizer
        name = f"{type(optimizer).__name__} {ledger.number}"
        window = Window(len(self.windows) + 1, name, is_step=is_step)
        ledger.look("before")
        scale = 0.0 if self._scaler is None else self._scaler.get_scale()
        # An optimizer that unscales by itself has this while it steps.
        own = getattr(optimizer, "grad_scale", None)
        window.is_alone = len(self._ledgers) == 1
        ledger.settle(window, scale if own is None else 0.0)
        window.scale(1.0 if own is None else 1 / float(own))
        window.is_part = dist.is_initialized() and dist.get_world_size() > 1
        for each, coefficient in zip(window.micro_batches, window.coefficients, strict=True):
            each.terms = merged([term.plain() for term in each.terms])
            each.rank = dist.get_rank() if window.is_part else 0
            each.steps += is_step and coefficient != 0
        if window.micro_batches or is_step:
            self.windows.append(window)
        return window


def _key(optimizer: Any) -> tuple[int, ...]:
    """What it updates: an optimizer inside of another one is the same."""
    return tuple(id(param) for group in optimizer.param_groups for param in group["params"])


def _merge(window: Window, everyone: Sequence[Window | None]) -> None:
    """Makes a window that of all processes, whose gradients are averaged."""
    windows = [each for each in everyone if each is not None]
    if len(windows) < len(everyone):
        window.unknown = "another process sees nothing more of its run"
        return
    window.micro_batches = [each for other in windows for each in other.micro_batches]
    window.coefficients = [each for other in windows for each in other.coefficients]
    window.ranks, window.is_part = len(windows), False
