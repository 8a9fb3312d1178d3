"""The options of an optimizer of torch: for each parameter, and at each count of updates.

Only torch has this file: the options of an optax transform are in its functions.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from funcga.errors import FuncgaError, similar
from torch_backend import trees
from torch_backend.optim.schedules import Schedule


@dataclass(frozen=True)
class Options:
    """What an optimizer is made with."""

    optimizer: type[Optimizer]
    options: dict[str, Any]
    groups: Callable[[str], Any] | None
    schedule: Schedule | None
    needs_closure: bool

    def build(self, tensors: list[torch.Tensor], names: list[str], count: int) -> Optimizer:
        """The optimizer of these tensors after `count` updates, with nothing in its state."""
        options = _at(self.options, count)
        groups = tensors if self.groups is None else self._grouped(tensors, names, count)
        made = self.optimizer(groups, **options)
        if self.schedule is not None:
            for group, current in zip(made.param_groups, self.schedule(made, count), strict=True):
                group.update(current)
        return made

    def alone(self, tensors: list[torch.Tensor], names: list[str]) -> list[Callable[[torch.Tensor], Optimizer]]:
        """What makes the optimizer of each tensor by itself, before its first update, with the options of its group."""
        groups = self.build(tensors, names, 0).param_groups if tensors else []
        group_of = {id(tensor): group for group in groups for tensor in group["params"]}
        return [partial(self._of_one, group_of[id(tensor)]) for tensor in tensors]

    def _of_one(self, group: dict[str, Any], tensor: torch.Tensor) -> Optimizer:
        return self.optimizer([{**group, "params": [tensor]}], **_at(self.options, 0))

    def _grouped(self, tensors: list[torch.Tensor], names: list[str], count: int) -> list[dict[str, Any]]:
        """A group for all tensors of the same options, in the order of their first ones."""
        assert self.groups is not None
        groups: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        for tensor, name in zip(tensors, names, strict=True):
            own = self.groups(name)
            self._check_group(own, name)
            held = next((held for options, held in groups if options == own), None)
            if held is None:
                groups.append((own, [tensor]))
            else:
                held.append(tensor)
        return [{"params": held, **_at(own, count)} for own, held in groups]

    def _check_group(self, own: Any, name: str) -> None:
        if not isinstance(own, dict):
            raise FuncgaError(
                f"groups({name!r}) is {own!r}. It returns a dict, of the options the parameter has for itself, such "
                f'as {{"weight_decay": 0.0}}, and {{}} where it has none.'
            )
        check_names(self.optimizer, own, f"groups({name!r}) gives an option `{{}}`, which")


def _at(options: dict[str, Any], count: int) -> dict[str, Any]:
    return {name: value(count) if callable(value) else value for name, value in options.items()}


def check_names(optimizer: type[Optimizer], options: dict[str, Any], says: str = "`{}`") -> None:
    """Raises FuncgaError for an option that the optimizer does not have."""
    signature = list(inspect.signature(optimizer).parameters.values())[1:]
    names = [p.name for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in signature):
        return
    for option in options:
        if option not in names:
            raise FuncgaError(
                f"{says.format(option)} is no option of {optimizer.__name__}{similar(option, names)}. "
                f"Its options are {', '.join(names)}."
            )


def names_of(params: Any) -> list[str]:
    """The name of each leaf: the keys that lead to it, joined by dots."""
    return _names(params, "")


def _names(tree: Any, name: str) -> list[str]:
    children = trees.children(tree)
    if children is None:
        return [name.removeprefix(".")]
    return [found for key, child in children for found in _names(child, f"{name}.{key.strip(_QUOTES)}")]


_QUOTES = "[]'\"."


class Beside(NamedTuple):
    """What an optimizer keeps that belongs to no parameter."""

    shared: dict[str, Any]  # options of its groups, and state under other keys than parameters
    own: dict[str, Any]  # numbers and tensors among its attributes


def beside(optimizer: Optimizer) -> Beside:
    """What the optimizer keeps now that belongs to no parameter."""
    groups = [(i, k, v) for i, group in enumerate(optimizer.param_groups) for k, v in group.items() if k != "params"]
    shared: dict[str, Any] = {f"param_groups[{i}][{k!r}]": _seen(v) for i, k, v in groups}
    shared |= {f"state[{key!r}]": None for key in optimizer.state if not isinstance(key, torch.Tensor)}
    own = {name: _seen(value) for name, value in vars(optimizer).items() if type(value) in (int, float, torch.Tensor)}
    return Beside(shared, own)


class _Seen(NamedTuple):
    """A tensor, and how often it had been written to."""

    tensor: torch.Tensor
    version: int


def _seen(value: Any) -> Any:
    """What shows later whether the value was changed in place."""
    if isinstance(value, torch.Tensor):
        return _Seen(value, 0 if value.is_inference() else value._version)
    if type(value) in (list, tuple):
        return [_seen(item) for item in value]
    return {key: _seen(item) for key, item in value.items()} if type(value) is dict else value


def check_kept(optimizer: Optimizer, before: Beside) -> None:
    """Raises FuncgaError if the step changed what belongs to no parameter, which a pure update would lose."""
    after = beside(optimizer)
    old = before.shared
    changed = [name for name, value in after.shared.items() if name not in old or _differs(value, old[name])]
    # An attribute that was no number before is a cache, as LBFGS has one.
    changed += [name for name, value in after.own.items() if _differs(value, before.own.get(name, value))]
    if changed:
        raise FuncgaError(
            f"a step of {type(optimizer).__name__} changes its `{changed[0]}`, which belongs to no parameter, so that "
            f"it is in no state, and a pure update would lose it. Keep optimizer.step() and give it gradients: "
            f"torch_backend.assign_grads(params, grads)."
        )


def _differs(new: Any, old: Any) -> bool:
    if type(new) is not type(old):
        return bool(new != old)
    if isinstance(new, _Seen):
        return new.version != old.version if new.tensor is old.tensor else _unequal(new.tensor, old.tensor)
    if isinstance(new, list):
        return len(new) != len(old) or any(map(_differs, new, old))
    if isinstance(new, dict):
        return new.keys() != old.keys() or any(_differs(new[key], old[key]) for key in new)
    return new is not old and bool(new != old)


def _unequal(new: torch.Tensor, old: torch.Tensor) -> bool:
    return (new.dtype, new.device) != (old.dtype, old.device) or not torch.equal(new, old)
