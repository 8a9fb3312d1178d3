"""The options of a torch optimizer for each parameter and each update, as groups, functions and
schedulers set them.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from funcga._backend.prefixes import paths_and_leaves
from funcga._transform import takes_weight
from funcga._types import Tree
from funcga.errors import FuncgaError, refuses_arguments, similar
from torch_backend import trees

Group = dict[str, Any]
"""The options of a group of parameters, without these."""


class Made(NamedTuple):
    """An optimizer, the options of its groups before the scheduler set any, and the options that
    are functions.
    """

    optimizer: Optimizer
    began_with: list[Group]
    functions: list[Callable[..., object]]


@dataclass(frozen=True)
class Options:
    """What an optimizer is made with."""

    optimizer: type[Optimizer]
    options: Group
    groups: Callable[[str], Mapping[str, object]] | None
    schedule: "Schedule | None"

    def build(
        self, tensors: Sequence[torch.Tensor], params: Tree, count: int, weight: object
    ) -> "Made":
        """The optimizer of these copies of the parameters after `count` updates, its state empty.

        `weight` is that of the window, or None if it is not known.
        """
        # A group of one's own options overrides the options for all, as torch's param_groups do.
        groups = [] if self.groups is None else self._grouped(tensors, params)
        grouped = (
            tensors if self.groups is None else [_at(group, count, weight) for group in groups]
        )
        optimizer = self.optimizer(grouped, **_at(self.options, count, weight))
        values = [value for options in (self.options, *groups) for value in options.values()]
        began_with = [*map(without_params, optimizer.param_groups)]
        self.follow_schedule(optimizer, began_with, count)
        return Made(optimizer, began_with, [*filter(callable, values)])

    def build_alone(self, tensor: torch.Tensor, group: Group) -> Optimizer:
        """The optimizer of a single tensor before the first update, with the options of a group."""
        return self.optimizer([{**group, "params": [tensor]}], **_at(self.options, 0, 1.0))

    def follow_schedule(self, optimizer: Optimizer, began_with: list[Group], count: int) -> None:
        """Sets the options of each group to those of the scheduler after `count` updates."""
        if self.schedule is not None:
            scheduled = self.schedule(began_with, optimizer.defaults, count)
            for group, options in zip(optimizer.param_groups, scheduled, strict=True):
                group.update(options)

    def _grouped(self, tensors: Sequence[torch.Tensor], params: Tree) -> list[Group]:
        """The param groups: a group for all tensors with the same options."""
        assert self.groups is not None
        names = [
            name for name, leaf in paths_and_leaves(params, trees.children) if leaf is not None
        ]
        groups: list[tuple[Mapping[str, object], list[torch.Tensor]]] = []
        for tensor, name in zip(tensors, names, strict=True):
            options = self.groups(name)
            self._check_group(options, name)
            # Options are compared, not hashed: they may be tensors or lists.
            members = next((members for others, members in groups if others == options), None)
            if members is None:
                groups.append((options, [tensor]))
            else:
                members.append(tensor)
        return [{"params": members, **options} for options, members in groups]

    def _check_group(self, options: object, name: str) -> None:
        if not isinstance(options, dict):
            raise FuncgaError(
                f"groups({name!r}) is {options!r}. It returns a dict, of the options the parameter "
                "has for itself, "
                f'such as {{"weight_decay": 0.0}}, and {{}} where it has none.'
            )
        check_names(self.optimizer, options, f"groups({name!r}) gives an option `{{}}`, which")


def _at(options: Mapping[str, object], count: int, weight: object) -> Group:
    return {
        name: _called(value, name, count, weight) if callable(value) else value
        for name, value in options.items()
    }


def _called(function: Callable[..., object], name: str, count: int, weight: object) -> object:
    given: dict[str, object] = {}
    if takes_weight(function):
        given["weight"] = weight.item() if isinstance(weight, torch.Tensor) else weight
    if given and weight is None:
        raise FuncgaError(
            f"the option {name} is a function of the window's weight, and the update was given "
            "none. Say it, tx.update(grads, state, params, weight=tokens), or let "
            "funcga.multi_steps(tx, n) add up the weights of its micro-batches."
        )
    try:
        return function(count, **given)
    except TypeError as error:
        if not refuses_arguments(function, 1, given, error):
            raise
        raise FuncgaError(
            f"the option {name} is a function that takes other arguments ({error}). It gets the "
            "number of updates before this one, and the window's weight if it asks for it by name: "
            f"{name}=lambda count, weight: ..."
        ) from error


def check_names(
    optimizer: type[Optimizer], options: Mapping[str, object], says: str = "`{}`"
) -> None:
    """Raises FuncgaError for an option that the optimizer does not have."""
    signature = list(inspect.signature(optimizer).parameters.values())[1:]
    names = [p.name for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in signature):
        return
    for option in options:
        if option not in names:
            raise FuncgaError(
                f"{says.format(option)} is no option of "
                f"{optimizer.__name__}{similar(option, names)}. Its options are {', '.join(names)}."
            )


def check_scheduler(make: Callable[[Optimizer], object]) -> None:
    """Raises FuncgaError if a function that makes a scheduler wants more than an optimizer."""
    try:
        inspect.signature(make).bind(None)
    except TypeError as error:
        name = getattr(
            make.func if isinstance(make, functools.partial) else make,
            "__qualname__",
            "MyScheduler",
        )
        raise FuncgaError(
            "scheduler is called with an optimizer and nothing else, and takes other arguments: "
            f"{error}. Give it these before: scheduler=functools.partial({name}, ...)."
        ) from error
    except ValueError:  # it has no signature
        pass


class _Running(NamedTuple):
    """A scheduler, the initial options of its optimizer, and the number of updates that it was
    stepped.
    """

    began_with: list[Group]
    optimizer: Optimizer
    scheduler: LRScheduler
    updates: int


class Schedule:
    """`schedule(began_with, defaults, count)`: the options of each group after `count` updates.

    A pure function of a stateful scheduler: the last scheduler is stepped forward to the given
    count, and a new one is made for an earlier count. The scheduler gets an optimizer that has
    options and nothing else.

    Args:
        make: A function from an optimizer to a scheduler, such as
            `functools.partial(CosineAnnealingLR, T_max=50)`.

    Raises:
        FuncgaError: When called, if the scheduler depends on more than the count, as
            ReduceLROnPlateau does, or cannot be stepped that far, as OneCycleLR after total_steps.
    """

    def __init__(self, make: Callable[[Optimizer], object]):
        self.make = make
        self.lock = threading.Lock()
        self.running: _Running | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[Callable[[Optimizer], object]]]:
        """How it is copied: without the running scheduler and the lock."""
        return type(self), (self.make,)

    def __call__(self, began_with: list[Group], defaults: Group, count: int) -> list[Group]:
        """The options of each group, `params` left out."""
        with self.lock:
            # Where one of its steps fails, a scheduler has gone further than it says: none is kept.
            running, self.running = self.running, None
            if running is None or running.updates > count or running.began_with != began_with:
                running = self._begun(began_with, defaults)
            for update in range(running.updates, count):
                running.optimizer.step()  # which schedulers want to see called before their own
                _step(running.scheduler, update)
            self.running = running._replace(updates=count)
            # Schedulers write into tensors, and add options of their own, such as initial_lr.
            groups = zip(running.optimizer.param_groups, began_with, strict=True)
            return [deepcopy({name: group[name] for name in began}) for group, began in groups]

    def _begun(self, began_with: list[Group], defaults: Group) -> _Running:
        groups = [
            {"params": [torch.zeros(1, device="cpu")], **deepcopy(group)} for group in began_with
        ]
        optimizer = _OnlyOptions(groups, defaults)
        scheduler = self.make(optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise _no_schedule(scheduler)
        return _Running(began_with, optimizer, scheduler, 0)


class _OnlyOptions(Optimizer):
    """An optimizer whose steps do nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing."""


def _step(scheduler: LRScheduler, update: int) -> None:
    try:
        scheduler.step()
    except ValueError as error:
        # Which OneCycleLR says; all else is the user's own.
        if "Tried to step" not in str(error):
            raise
        raise FuncgaError(
            f"{type(scheduler).__name__} does not go on after update {update + 1}: {error}. It is "
            "stepped once an update, and a last, shorter window is an update too. Plan for as "
            "many: total_steps=epochs * math.ceil(len(loader) / n)."
        ) from error


def without_params(group: Group) -> Group:
    """The options of a group, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _no_schedule(returned: object) -> FuncgaError:
    if isinstance(returned, ReduceLROnPlateau):
        return FuncgaError(
            "scheduler makes a ReduceLROnPlateau, which follows a metric and not the count of "
            "updates, so there is no pure function that has its options. Keep optimizer.step() and "
            "scheduler.step(metric), and give the optimizer its gradients: "
            "torch_backend.assign_grads(params, grads)."
        )
    return FuncgaError(
        f"scheduler returned {returned!r}, which is no scheduler of torch.optim.lr_scheduler. "
        "Write scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, "
        "T_max=100), or a function of the count of updates for an option: lr=lambda count: 1e-3 * "
        "0.9**count."
    )


def unowned(optimizer: Optimizer) -> dict[str, list[object]]:
    """What an optimizer keeps that belongs to no parameter, by name: the options of its groups,
    other state, numbers and copies of tensors.
    """
    kept: dict[str, object] = {
        f"param_groups[{index}][{name!r}]": value
        for index, group in enumerate(optimizer.param_groups)
        for name, value in without_params(group).items()
    }
    # State under a key that is no parameter is lost, too; that it appears is what shows.
    kept |= {f"state[{key!r}]": None for key in optimizer.state if not torch.is_tensor(key)}
    kept |= {k: v for k, v in vars(optimizer).items() if type(v) in (int, float, torch.Tensor)}
    return {
        name: [x.clone() if torch.is_tensor(x) else x for x in trees.flatten(value)[0]]
        for name, value in kept.items()
    }


def check_unchanged(before: dict[str, list[object]], optimizer: Optimizer) -> None:
    """Raises FuncgaError if a step has changed what is `unowned`: a pure update would lose it."""
    for name, values in unowned(optimizer).items():
        # An attribute that is new is a cache.
        if name not in before and name in vars(optimizer):
            continue
        earlier = before.get(name, [])
        if len(values) != len(earlier) or not all(map(_is_same, values, earlier)):
            raise FuncgaError(
                f"a step of {type(optimizer).__name__} changes its `{name}`, which belongs to no "
                "parameter, so that it is in no state, and a pure update would lose it. Keep "
                "optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads)."
            )


def _is_same(value: object, earlier: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(earlier, torch.Tensor):
        alike = (value.dtype, value.device) == (earlier.dtype, earlier.device)
        return alike and torch.equal(value, earlier)
    return value is earlier or value == earlier  # an object is itself, even a NaN
