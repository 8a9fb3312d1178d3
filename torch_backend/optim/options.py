"""The options of an optimizer of torch: for each parameter, and at each count of updates, as a
scheduler sets them.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from funcga._backend.prefixes import paths_and_leaves
from funcga._transform import takes_weight
from funcga._types import Tree
from funcga.errors import FuncgaError, refuses_arguments, similar
from torch_backend import _private, trees

Group = dict[str, Any]
"""The options of a group of parameters, without these."""


@dataclass(frozen=True)
class Options:
    """What an optimizer is made with."""

    optimizer: type[Optimizer]
    options: Group
    groups: Callable[[str], Mapping[str, object]] | None
    schedule: "Schedule | None"

    def build(
        self, tensors: Sequence[torch.Tensor], params: Tree, count: int, weight: object
    ) -> tuple[Optimizer, list[Callable[..., object]]]:
        """The optimizer of the tensors that stand for these parameters after `count` updates, its
        state empty.

        weight: that of the window, None if it is not known. And those of its options that are
        functions.
        """
        # A group of one's own options overrides the options for all, as torch's param_groups do.
        groups = [] if self.groups is None else self._grouped(tensors, params)
        functions = [
            value
            for options in (self.options, *groups)
            for value in options.values()
            if callable(value)
        ]
        grouped = (
            tensors if self.groups is None else [_at(group, count, weight) for group in groups]
        )
        return self.optimizer(grouped, **_at(self.options, count, weight)), functions

    def schedule_groups(self, optimizer: Optimizer, began_with: list[Group], count: int) -> None:
        """Gives each group of an optimizer the options that the scheduler has for it after
        `count` updates.
        """
        # A scheduler has the last word: it began with the options that the optimizer was built
        # with.
        if self.schedule is not None:
            for group, options in zip(optimizer.param_groups, began_with, strict=True):
                group.update(options)
            for group, options in zip(
                optimizer.param_groups, self.schedule(optimizer, count), strict=True
            ):
                group.update(options)

    def singles(
        self, tensors: Sequence[torch.Tensor], optimizer: Optimizer
    ) -> Iterator[tuple[torch.Tensor, Optimizer]]:
        """A copy of each tensor, and the optimizer of it alone, one after the other, by an
        optimizer of all of them.
        """
        self.schedule_groups(optimizer, [*map(without_params, optimizer.param_groups)], 0)
        group_of = {
            id(tensor): group for group in optimizer.param_groups for tensor in group["params"]
        }
        for tensor in tensors:
            # Only one copy is there at a time.
            copy = tensor.clone().requires_grad_()
            yield (
                copy,
                self.optimizer(
                    [{**group_of[id(tensor)], "params": [copy]}], **_at(self.options, 0, 1.0)
                ),
            )

    def _grouped(self, tensors: Sequence[torch.Tensor], params: Tree) -> list[Group]:
        """A group for all tensors of the same options, in the order of their first ones."""
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


class Schedule:
    """`schedule(optimizer, count)`: the options that each group of the optimizer has after `count`
    updates.

    make: what gives a scheduler to an optimizer: `functools.partial(CosineAnnealingLR, T_max=50)`,
    or a function of the
        optimizer. The scheduler is stepped once an update, and it gets an optimizer that has
        options and nothing else.

    It is a function of its arguments, although a scheduler is not: the one that is kept goes
    forward to the count asked for, and another one begins at 0 where a count lies behind. Raises
    FuncgaError for schedulers that depend on more than a count, as ReduceLROnPlateau does, and for
    a count that the scheduler refuses, as OneCycleLR does after its total_steps.
    """

    def __init__(self, make: Callable[[Optimizer], object]):
        self.make = make
        self.lock = threading.Lock()
        self.running: _Running | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[Callable[[Optimizer], object]]]:
        """How it is copied: a copy has a running scheduler and a lock of its own."""
        return type(self), (self.make,)

    def __call__(self, optimizer: Optimizer, count: int) -> list[Group]:
        """The options of each group, `params` left out."""
        options = [without_params(group) for group in optimizer.param_groups]
        with self.lock:
            # A scheduler cannot go back. Another one begins for an earlier count, and for groups of
            # other options.
            if (
                self.running is None
                or self.running.count > count
                or self.running.began_with != options
            ):
                self.running = _Running(self.make, optimizer.defaults, options)
            try:
                return self.running.forward(count)
            except Exception:
                self.running = None  # it has gone further than it says
                raise


def without_params(group: Group) -> Group:
    """The options of a group, without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


class _Running:
    """A scheduler, the options that it changes, and how many updates it has seen."""

    def __init__(self, make: Callable[[Optimizer], object], defaults: Group, options: list[Group]):
        self.began_with, self.count = options, 0
        self.optimizer = _OnlyOptions(
            [{"params": [torch.zeros(1)], **_cloned(group)} for group in options], defaults
        )
        scheduler = make(self.optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise _no_schedule(scheduler)
        self.scheduler = scheduler

    def forward(self, count: int) -> list[Group]:
        """The options after `count` updates, not before those that it has seen."""
        while self.count < count:
            self.optimizer.step()  # which schedulers want to see called before their own
            try:
                self.scheduler.step()
            except ValueError as error:
                # Which OneCycleLR says; all else is the user's own.
                if "Tried to step" not in str(error):
                    raise
                raise FuncgaError(
                    f"{type(self.scheduler).__name__} does not go on after update "
                    f"{self.count + 1}: {error}. It is stepped once an update, and a last, shorter "
                    "window is an update too. Plan for as many: total_steps=epochs * "
                    "math.ceil(len(loader) / n)."
                ) from error
            self.count += 1
        # Schedulers add options of their own, such as initial_lr, which the optimizer does not
        # know.
        groups = zip(self.optimizer.param_groups, self.began_with, strict=True)
        return [_cloned({name: group[name] for name in began}) for group, began in groups]


class _OnlyOptions(Optimizer):
    """An optimizer that does nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Nothing."""


def _cloned(options: Group) -> Group:
    """The options, with tensors of their own: schedulers write into them."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }


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


def shared(optimizer: Optimizer) -> dict[str, object]:
    """What an optimizer keeps now that belongs to no parameter: options of its groups, state,
    numbers and tensors.

    Later `check_kept` says whether any of it has changed, also in place.
    """
    options = {
        f"param_groups[{index}][{name!r}]": value
        for index, group in enumerate(optimizer.param_groups)
        for name, value in without_params(group).items()
    }
    # State under a key that is no parameter is lost, too; that it appears is what shows.
    state = {
        f"state[{key!r}]": None for key in optimizer.state if not isinstance(key, torch.Tensor)
    }
    attributes = {k: v for k, v in vars(optimizer).items() if type(v) in (int, float, torch.Tensor)}
    return {name: _snapshot(value) for name, value in {**options, **state, **attributes}.items()}


def check_kept(before: dict[str, object], optimizer: Optimizer) -> None:
    """Raises FuncgaError if a step has changed what was `shared` before it, which a pure update
    would lose.
    """
    for name, value in shared(optimizer).items():
        # An attribute that is new is a cache, as LBFGS has one. Values are compared in lists, where
        # an object equals itself, even a NaN.
        is_kept = [value] == [before[name]] if name in before else name in vars(optimizer)
        if not is_kept:
            raise FuncgaError(
                f"a step of {type(optimizer).__name__} changes its `{name}`, which belongs to no "
                "parameter, so that it is in no state, and a pure update would lose it. Keep "
                "optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads)."
            )


class _Snapshot:
    """A tensor, equal to a later one of the same numbers, and to itself only if nothing was
    written to it.
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.version = tensor, 0 if tensor.is_inference() else _private.version(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Snapshot):
            return NotImplemented
        if self.tensor is other.tensor:  # no numbers are read, for which the host would wait
            return self.version == other.version
        alike = (self.tensor.dtype, self.tensor.device) == (other.tensor.dtype, other.tensor.device)
        return alike and torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


def _snapshot(value: object) -> object:
    """A copy of the value that shows later whether it was changed in place."""
    if isinstance(value, torch.Tensor):
        return _Snapshot(value)
    if isinstance(value, list | tuple):
        return [_snapshot(item) for item in value]
    return (
        {key: _snapshot(item) for key, item in value.items()} if isinstance(value, dict) else value
    )
