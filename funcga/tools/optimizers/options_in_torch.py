"""The options of a torch optimizer for each parameter and each update, as groups, functions and
schedulers set them.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from funcga._backend.prefixes import paths_and_leaves
from funcga._transform import takes_weight
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import trees

Group = dict[str, Any]
"""The options of a group of parameters."""


@dataclass(eq=False)
class Options:
    """What an optimizer is made with.

    `kept` has the scheduler that a call leaves for the next one, which takes it, so that no other
    thread has it.
    """

    optimizer: type[Optimizer]
    options: Group
    groups: Callable[[str], Mapping[str, object]] | None
    scheduler: Callable[[Optimizer], LRScheduler] | None
    kept: dict[str, tuple[list[Group], LRScheduler, int]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """How it is copied: without what is kept."""
        return {**vars(self), "kept": {}}

    @property
    def is_stock(self) -> bool:
        """Whether the optimizer is one of torch.optim; others are checked at every step."""
        return self.optimizer.__module__.startswith("torch.optim")

    def writes_to_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a step may; of torch's own only SGD does, with nesterov in its foreach form."""
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []
        return not self.is_stock or any(group["nesterov"] for group in groups)

    def grouped(
        self, params: Tree, tensors: list[torch.Tensor]
    ) -> list[tuple[Group, list[torch.Tensor]]]:
        """The options of each group of its own, and the tensors of its parameters."""
        if self.groups is None:
            return [({}, tensors)]
        groups: list[tuple[Group, list[torch.Tensor]]] = []
        named = paths_and_leaves(params, trees.children)
        for (name, _), tensor in zip(named, tensors, strict=True):
            own = {**self.groups(name)}
            # Options are compared, not hashed: they may be tensors or lists.
            alike = [members for options, members in groups if options == own]
            if alike:
                alike[0].append(tensor)
            else:
                groups.append((own, [tensor]))
        return groups or [({}, [])]

    def build(
        self, params: Tree, tensors: list[torch.Tensor], count: int, weight: object
    ) -> Optimizer:
        """The optimizer of a tensor for each leaf of params, after `count` updates, without state.

        `weight` is that of the window, or None if it is not known.
        """
        groups = self.grouped(params, tensors)
        # A group of one's own options overrides the options for all, as torch's param_groups do.
        # Those of torch look at tensors in a step alone, and are built faster without.
        made = [
            {**_at(own, count, weight), "params": [] if self.is_stock else members}
            for own, members in groups
        ]
        optimizer = self.optimizer(made, **_at(self.options, count, weight))
        for name in [name for own, _ in groups for name in own if name not in optimizer.defaults]:
            raise FuncgaError(
                f"groups gives `{name}`, which is no option of {self.optimizer.__name__}: its "
                f"options are {', '.join(optimizer.defaults)}."
            )
        self._follow(optimizer, count)
        for group, (_, members) in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = members
        return optimizer

    def _follow(self, optimizer: Optimizer, count: int) -> None:
        """Sets the options of an optimizer to those after `count` steps of the scheduler.

        A pure function of a stateful scheduler: the last one is stepped forward to the given count,
        and a new one is made for an earlier count. One that follows anything else than the count,
        as ReduceLROnPlateau does, torch refuses at the second update.
        """
        if self.scheduler is None:
            return
        began_with = options_of(optimizer)
        began, scheduler, updates = self.kept.pop("last", (None, None, 0))
        if scheduler is None or began != began_with or updates > count:
            # Schedulers write into tensors.
            groups = [{**deepcopy(group), "params": []} for group in began_with]
            scheduler, updates = self.scheduler(_OnlyOptions(groups, optimizer.defaults)), 0
            scheduler.optimizer.step()  # which schedulers want to see called before their own
        for _ in range(updates, count):
            scheduler.step()
        self.kept["last"] = began_with, scheduler, count
        options = deepcopy(options_of(scheduler.optimizer))
        for group, of_group in zip(optimizer.param_groups, options, strict=True):
            group.update(of_group)


class _OnlyOptions(Optimizer):
    """An optimizer whose steps do nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing."""


def options_of(optimizer: Optimizer) -> list[Group]:
    """The options of each group, without what schedulers add to them."""
    return [{name: group[name] for name in optimizer.defaults} for group in optimizer.param_groups]


def _at(options: Mapping[str, object], count: int, weight: Any) -> Group:
    result = {**options}
    for name, value in options.items():
        if not callable(value):
            continue
        if not takes_weight(value):
            result[name] = value(count)
        elif weight is None:
            raise FuncgaError(
                f"the option {name} is a function of the window's weight, and the update was "
                "given none. Say it, tx.update(grads, state, params, weight=tokens), or let "
                "funcga.multi_steps(tx, n) add up the weights of its micro-batches."
            )
        else:
            result[name] = value(count, weight=float(weight))
    return result
