"""Schedules: a scheduler of torch.optim.lr_scheduler as a function of the count of updates.

Only torch has this file: a schedule of optax is such a function already.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from funcga.errors import FuncgaError

Options = list[dict[str, Any]]


class Schedule:
    """`schedule(optimizer, count)`: the options that each group of the optimizer has after `count` updates.

    make: what gives a scheduler to an optimizer: `functools.partial(CosineAnnealingLR, T_max=50)`, or a function of the
        optimizer. The scheduler is stepped once an update, and it gets an optimizer that has options and nothing else.

    It is a function of its arguments, although a scheduler is not: the one that is kept goes forward to the count
    asked for, and another one begins at 0 where a count lies behind. Raises FuncgaError for schedulers that depend on
    more than a count, as ReduceLROnPlateau does, for what cannot be made of an optimizer alone, and for a count that
    the scheduler refuses, as OneCycleLR does after its total_steps.
    """

    def __init__(self, make: Callable[[Optimizer], Any]):
        self.make = make
        self.lock = threading.Lock()
        self.running: _Running | None = None

    def __reduce__(self) -> Any:
        """How it is copied: what runs, and its lock, are each one's own."""
        return type(self), (self.make,)

    def __call__(self, optimizer: Optimizer, count: int) -> Options:
        """The options of each group, `params` left out."""
        options = [_options(group) for group in optimizer.param_groups]
        with self.lock:
            if self.running is None or self.running.count > count or self.running.began_with != options:
                self.running = _Running(self.make, optimizer.defaults, options)
            try:
                return self.running.forward(count)
            except Exception:
                self.running = None  # it has gone further than it says
                raise


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class _Running:
    """A scheduler, the options that it changes, and how many updates it has seen."""

    def __init__(self, make: Callable[[Optimizer], Any], defaults: dict[str, Any], options: Options):
        self.began_with, self.count = options, 0
        self.optimizer = _OnlyOptions([{"params": [torch.zeros(1)], **_own(group)} for group in options], defaults)
        try:
            self.scheduler = make(self.optimizer)
        except TypeError as error:
            if _takes_an_optimizer(make):
                raise
            raise FuncgaError(_not_made(make, error)) from error
        if not isinstance(self.scheduler, LRScheduler) or isinstance(self.scheduler, ReduceLROnPlateau):
            raise FuncgaError(_no_schedule(self.scheduler))

    def forward(self, count: int) -> Options:
        """The options after `count` updates, not before those that it has seen."""
        while self.count < count:
            self.optimizer.step()  # which schedulers want to see called before their own
            try:
                self.scheduler.step()
            except ValueError as error:
                if "Tried to step" not in str(error):  # which OneCycleLR says; all else is the user's own
                    raise
                raise FuncgaError(_no_more(self.scheduler, self.count + 1, error)) from error
            self.count += 1
        groups = zip(self.optimizer.param_groups, self.began_with, strict=True)
        return [_own({name: group[name] for name in began}) for group, began in groups]


class _OnlyOptions(Optimizer):
    """An optimizer that does nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


def _own(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with tensors of their own: schedulers write into them."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def _takes_an_optimizer(make: Any) -> bool:
    try:
        inspect.signature(make).bind(None)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        pass
    return True


def _not_made(make: Any, error: TypeError) -> str:
    name = getattr(make.func if isinstance(make, functools.partial) else make, "__qualname__", "MyScheduler")
    return (
        f"scheduler is called with an optimizer and nothing else, and raised: {error}. Give it the other arguments "
        f"before: scheduler=functools.partial({name}, ...)."
    )


def _no_more(scheduler: Any, count: int, error: ValueError) -> str:
    return (
        f"{type(scheduler).__name__} does not go on after update {count}: {error}. It is stepped once an update, and a "
        f"last, shorter window is an update too. Plan for as many: total_steps=epochs * math.ceil(len(loader) / n)."
    )


def _no_schedule(found: Any) -> str:
    if isinstance(found, ReduceLROnPlateau):
        return (
            "scheduler makes a ReduceLROnPlateau, which follows a metric and not the count of updates, so there is no "
            "pure function that has its options. Keep optimizer.step() and scheduler.step(metric), and give the "
            "optimizer its gradients: torch_backend.assign_grads(params, grads)."
        )
    return (
        f"scheduler returned {found!r}, which is no scheduler of torch.optim.lr_scheduler. Write "
        f"scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100), or a function "
        f"of the count of updates for an option: lr=lambda count: 1e-3 * 0.9**count."
    )
