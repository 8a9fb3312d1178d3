"""The optimizer that takes a step: built for the tensors of one update, and used again for others of their kind."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from funcga._types import Structure
from torch_backend.optim.options import Group, Options, without_params
from torch_backend.optim.state import UpdateArguments


@dataclass(frozen=True)
class Built:
    """An optimizer, to which group each of its tensors belongs, and the options that the groups began with.

    kinds: the dtypes, devices and shapes of the parameters of this structure.
    varies: whether these are others after another count of updates.
    """

    optimizer: Optimizer
    kinds: list[tuple[Any, ...] | None]
    structure: Structure
    members: list[list[int]]
    options: list[Group]
    varies: bool


class Builder:
    """Builds optimizers with these options. If it `keeps` them, the last one is used again for tensors of its kinds.

    Building one takes longer than the step of a small model. One that changes nothing of its own in a step, as those of
    torch, is as good as new once it has other tensors and another state.
    """

    def __init__(self, options: Options, keeps: bool):
        self.options, self.keeps = options, keeps
        self.kept: list[Built] = []

    @contextmanager
    def built(self, tensors: Sequence[torch.Tensor], arguments: UpdateArguments, count: int) -> Iterator[Optimizer]:
        """The optimizer of the tensors that stand for the parameters after `count` updates, its state empty."""
        kept = self._taken(arguments)
        if kept is None:
            kept = self._new(tensors, arguments, count)
        else:
            for group, members in zip(kept.optimizer.param_groups, kept.members, strict=True):
                group["params"] = [tensors[index] for index in members]
        self.options.schedule_groups(kept.optimizer, kept.options, count)
        yield kept.optimizer
        # Only after a step without an error it is used again. It keeps no memory of the caller's.
        if self.keeps and not kept.varies:
            kept.optimizer.state = defaultdict(dict)
            for group in kept.optimizer.param_groups:
                group["params"] = []
            self.kept = [kept]

    def _taken(self, arguments: UpdateArguments) -> Built | None:
        """The optimizer that is kept, if it is one of such parameters; another thread does not get it."""
        try:
            kept = self.kept.pop()
        except IndexError:
            return None
        is_alike = kept.kinds == arguments.kinds and kept.structure == arguments.structure
        return kept if is_alike else None

    def _new(self, tensors: Sequence[torch.Tensor], arguments: UpdateArguments, count: int) -> Built:
        optimizer, varies = self.options.build(tensors, arguments.params, count)
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        members = [[index_of[id(tensor)] for tensor in group["params"]] for group in optimizer.param_groups]
        options = [*map(without_params, optimizer.param_groups)]
        return Built(optimizer, arguments.kinds, arguments.structure, members, options, varies)
