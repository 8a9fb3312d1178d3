"""A training loop of torch, watched: what calls `backward`, clips, scales and steps.

Two sources, and nothing is computed a second time: the graph of each loss, read before `backward`
frees it (`graph_in_torch`); and a sketch of `.grad`, some thousand elements, looked at before and
after each event (`ledger_in_torch`).
"""

import functools
import gc
import linecache
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel

from funcga.errors import FuncgaError, listed
from funcga.tools.doctor.graph_in_torch import hooks, read
from funcga.tools.doctor.ledger_in_torch import Ledger, params_of
from funcga.tools.doctor.windows import Finding, MicroBatch, Term, Window
from torch_backend import _private

Watcher = Callable[..., Any] | None
# Packages with no line of the program that is watched.
_LIBRARIES = {"torch", "funcga", *sys.stdlib_module_names}


class Loop:
    """Everything that is watched while a `watch` is open.

    Nothing of it may stop the run: an error of its own ends the watch, and is told once.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        across: Any,
        steps: int,
        on_step: Callable[[], object],
    ) -> None:
        self.model: Any = model or torch.nn.Module()
        of_optimizers = ((optimizer, Optimizer) for optimizer in optimizers)
        for given, kind in ((self.model, torch.nn.Module), *of_optimizers):
            if not isinstance(given, kind):
                raise FuncgaError(
                    f"watch was given {type(given).__name__} in place of a torch {kind.__name__}. "
                    "Write funcga.watch(model, optimizer), or funcga.watch() for all there are."
                )
        self.optimizers = optimizers
        self.across, self.steps, self.on_step = across, steps, on_step
        self.windows: list[Window] = []
        self.findings: list[Finding] = []  # that are no matter of one window
        self.is_blind = False
        self._ledgers: dict[tuple[int, ...], Ledger] = {}
        self._undo: list[Callable[[], object]] = []
        self._is_reduced = False
        self._micro_batch = MicroBatch()
        self._heads = defaultdict[int, int](count().__next__)
        self._scaler: Any = None

    # --- what is replaced while it is open

    def open(self) -> None:
        """Begins to watch."""
        scaler = torch.amp.grad_scaler.GradScaler
        before, clipped, erased = (
            lambda *_, event=event, **__: self._look(event)
            for event in ("before", "clip", "zero_grad")
        )
        averages = lambda _, model: self._mark("average", model.parameters())
        for owner, name, first, then in (
            (Optimizer, "__init__", None, lambda made, *_, **__: self._find_optimizers([made])),
            (torch.autograd, "backward", self._before_backward, self._after_backward),
            (scaler, "scale", self._scale, None),
            (scaler, "step", None, self._after_scaler_step),
            (DistributedDataParallel, "forward", self._before_forward, None),
            # However it was imported, clip_grad_norm_ calls this by its name.
            (clip_grad, "_clip_grads_with_norm_", before, clipped),
            (torch.nn.utils, "clip_grad_value_", before, clipped),
            (Optimizer, "zero_grad", None, erased),
            (torch.nn.Module, "zero_grad", None, erased),
            # Schedules that are made of others step those.
            (LRScheduler, "step", self._before_schedule, None),
            (CosineAnnealingWarmRestarts, "step", self._before_schedule, None),
            (AveragedModel, "update_parameters", averages, None),
        ):
            self._replace(owner, name, first, then)
        self._undo += [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        self.quietly(self._find_optimizers, _alive(Optimizer))

    def close(self, is_whole: bool, reason: str = "") -> None:
        """Ends the watch, and puts all that was replaced back.

        is_whole: whether the loop has ended, so that no step can come for micro-batches after the
        last one. reason: what has ended it too early, if something has.
        """
        if not self._undo:
            return
        for undo in self._undo:
            undo()
        self._undo = []
        for ledger in self._ledgers.values() if is_whole else ():
            self.quietly(self._end_window, ledger, False)
        owned = {key for keys in self._ledgers for key in keys}
        named = self.model.named_parameters()
        names = [name for name, p in named if p.requires_grad and id(p) not in owned]
        if names and self.windows:
            self.findings.append(Finding("in no optimizer", {"names": listed(names)}))
        if not any(window.is_step for window in self.windows):
            name = "ended before a step" if reason else "nothing"
            self.findings.append(Finding(name, {"reason": reason}))

    def _replace(self, owner: Any, name: str, first: Watcher, then: Watcher) -> None:
        """Has a function called between two others, which get its arguments, while this is open."""
        original = vars(owner)[name]

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self._undo:
                return original(*args, **kwargs)
            self.quietly(first, *args, **kwargs)
            result = original(*args, **kwargs)
            self.quietly(then, *args, **kwargs)
            return result

        def undo() -> None:
            # Where somebody has replaced it meanwhile, this one stays below, and does nothing.
            if vars(owner)[name] is replacement:
                setattr(owner, name, original)

        setattr(owner, name, replacement)
        self._undo.append(undo)

    def quietly(self, look: Watcher, *args: Any, **kwargs: Any) -> Any:
        """What a function of ours returns, and None if it raises an error."""
        try:
            with torch.no_grad():
                return None if look is None or self.is_blind else look(*args, **kwargs)
        except Exception as error:
            self.is_blind = True
            text = f"{type(error).__name__}: {error}"
            self.findings.append(Finding("error", {"error": text}))
            sys.stderr.write(f"funcga.watch sees nothing more of this run: {text}\n")

    # --- what a loop does

    def _look(self, event: MicroBatch | str) -> None:
        line = "" if event == "before" else _line()
        for ledger in self._ledgers.values():
            ledger.look(event, line)

    def _before_backward(self, tensors: Any, gradient: Any = None, *_: Any, **__: Any) -> None:
        # A checkpoint may call backward inside of one.
        if _private.graph_task() < 0:
            losses = [tensors] if torch.is_tensor(tensors) else tensors
            # Heads by their order in the program, which is the same in all processes.
            terms = [
                replace(term, head=self._heads[term.head]) for loss in losses for term in read(loss)
            ]
            if gradient is not None:
                terms = [Term("backward with a gradient")]
            self._micro_batch = MicroBatch(terms, self._is_reduced, place=_place())
            self._is_reduced = False
            self._look("before")

    def _after_backward(self, *_: Any, **__: Any) -> None:
        if _private.graph_task() < 0:
            self._look(self._micro_batch)

    def _before_forward(self, module: Any, *_: Any, **__: Any) -> None:
        self._is_reduced = module.require_backward_grad_sync

    def _before_schedule(self, schedule: LRScheduler, *epoch: Any, **named: Any) -> None:
        if not (epoch or named):  # else it is told where it stands, however often
            self._mark("schedule", params_of(schedule.optimizer))

    def _mark(self, event: str, params: Iterable[torch.Tensor]) -> None:
        """Has it that something was done for the optimizers of these parameters."""
        line, ids = _line(), {*map(id, params)}
        for key, ledger in self._ledgers.items():
            if not ids.isdisjoint(key):
                ledger.done[event, line].add(ledger.count)

    def _scale(self, scaler: Any, *_: Any) -> None:
        self._scaler = scaler

    def _after_scaler_step(self, _: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        ledger = self._ledger(optimizer)
        if ledger is not None and ledger.looks:
            self._end_window(ledger, False).unknown = "GradScaler skipped the step"

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", (*args[1:], None)[0])
        if not callable(closure):
            self._step(optimizer)
            return None

        # The last backward of the window is in the closure.
        def with_step() -> Any:
            loss = closure()
            self._step(optimizer)
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": with_step}
        return (optimizer, with_step, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (ledger := self._ledger(optimizer)) is not None:
            self.quietly(self._after_own_hooks, optimizer, ledger)
            self.quietly(ledger.begin)
            self.steps -= 1
            if not self.steps:
                self.findings.append(Finding("too long"))
                self.close(is_whole=False)
            self.quietly(self.on_step)

    def _after_own_hooks(self, optimizer: Optimizer, ledger: Ledger) -> None:
        """Sees whether hooks before the step have changed the gradients."""
        if optimizer._optimizer_step_pre_hooks and ledger.version() != ledger.versions:
            self.windows[-1].unknown = "a hook before the step changes gradients"

    # --- windows

    def _find_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        ours = {id(param) for param in self.model.parameters()}
        ours.update(key for optimizer in self.optimizers for key in _key(optimizer))
        for optimizer in optimizers:
            key = _key(optimizer)
            if key not in self._ledgers and not (ours and ours.isdisjoint(key)):
                # It may take over the parameters of one before it.
                for other in [each for each in self._ledgers if not {*each}.isdisjoint(key)]:
                    del self._ledgers[other]
                norms = [each for each in _alive(_BatchNorm) if id(each.weight) in key]
                self._ledgers[key] = Ledger(optimizer, len(self._ledgers) + 1, norms)

    def _ledger(self, optimizer: Any) -> Ledger | None:
        return self._ledgers.get(_key(optimizer))

    def _step(self, optimizer: Optimizer) -> None:
        """What one step got; with `across` every process gathers here, whatever befell it."""
        window = self.quietly(self._see_step, optimizer)
        if self.across is not None and dist.is_initialized() and (window or self.is_blind):
            group = None if self.across == "world" else self.across
            everyone: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, window, group)
            self.quietly(_merge, window, everyone)

    def _see_step(self, optimizer: Optimizer) -> Window | None:
        self._find_optimizers([optimizer])
        if (ledger := self._ledger(optimizer)) is None:
            return None  # one of another model
        ledger.optimizer = optimizer  # another one may be around it
        if _private.graph_task() >= 0:
            raise FuncgaError("an optimizer steps inside of backward")
        return self._end_window(ledger, is_step=True)

    def _end_window(self, ledger: Ledger, is_step: bool) -> Window:
        optimizer = ledger.optimizer
        name = f"{type(optimizer).__name__} {ledger.number}"
        window = Window(len(self.windows) + 1, name, is_step=is_step)
        ledger.look("before", _line())
        scaler = self._scaler
        scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 0.0
        # An optimizer that unscales by itself has this while it steps.
        own = getattr(optimizer, "grad_scale", None)
        ledger.settle(window, scale if own is None else 0.0)
        window.scale(1.0 if own is None else 1 / float(own))
        hook = hooks([*params_of(optimizer), *self.model.modules()])
        if hook:
            window.unknown = f"the hook {hook} may change gradients"
        window.is_part = dist.is_initialized() and dist.get_world_size() > 1
        for each, coefficient in window.parts:
            each.terms = [term.plain() for term in each.terms]
            each.steps += is_step and coefficient != 0
        if window.parts:
            self.windows.append(window)
        return window


def _alive(kind: type[Any]) -> list[Any]:
    """All objects of a class. By type, as a proxy may claim to be an instance of anything."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _place() -> int:
    """Where in the program this is called, the same in all processes."""
    return hash(tuple(frame.f_lasti for frame, _ in traceback.walk_stack(None)))


def _line() -> str:
    """The innermost line that is called and belongs to no installed package, as it stands in its
    file; if all do, the innermost one beside torch.
    """

    def rank(called: Any) -> tuple[bool, bool]:
        frame, _ = called
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        return package in _LIBRARIES, "-packages" in frame.f_code.co_filename

    frame, number = min(traceback.walk_stack(sys._getframe()), key=rank)
    file = frame.f_code.co_filename
    text = linecache.getline(file, number).strip()
    return f"{file.removeprefix(os.getcwd() + os.sep)}:{number}  {text}".rstrip()


def _key(optimizer: Any) -> tuple[int, ...]:
    """What it updates: an optimizer inside of another one is the same."""
    return tuple(map(id, params_of(optimizer)))


def _merge(window: Window, everyone: Sequence[Window | None]) -> None:
    """Makes a window that of all processes, whose gradients are averaged."""
    windows = [each for each in everyone if each is not None]
    if len(windows) < len(everyone):
        window.unknown = "another process sees nothing more of its run"
        return
    for rank, other in enumerate(windows):
        for each, _ in other.parts:
            each.rank = rank
    window.parts = [part for other in windows for part in other.parts]
    window.ranks, window.is_part = len(windows), False
