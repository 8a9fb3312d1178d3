"""The optimizer that takes a step: built for the tensors of one update, and used again for others of their kind."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from funcga._types import Structure, Tree
from torch_backend.optim.options import Group, Options, without_params


@dataclass(frozen=True)
class Built:
    """An optimizer, to which group each of its tensors belongs, and the options that the groups began with.

    varies: whether these are others after another count of updates.
    """

    optimizer: Optimizer
    kinds: list[tuple[Any, ...]]
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
    def built(
        self, tensors: Sequence[torch.Tensor], params: Tree, structure: Structure, count: int
    ) -> Iterator[Optimizer]:
        """The optimizer of the tensors that stand for these parameters after `count` updates, its state empty."""
        kinds = [(tensor.dtype, tensor.device, tensor.shape, tensor.layout) for tensor in tensors]
        kept = self._taken(kinds, structure)
        if kept is None:
            kept = self._new(tensors, kinds, params, structure, count)
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

    def _taken(self, kinds: list[tuple[Any, ...]], structure: Structure) -> Built | None:
        """The optimizer that is kept, if it is one of such tensors; another thread does not get it."""
        try:
            kept = self.kept.pop()
        except IndexError:
            return None
        return kept if kept.kinds == kinds and kept.structure == structure else None

    def _new(
        self,
        tensors: Sequence[torch.Tensor],
        kinds: list[tuple[Any, ...]],
        params: Tree,
        structure: Structure,
        count: int,
    ) -> Built:
        optimizer, varies = self.options.build(tensors, params, count)
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        members = [[index_of[id(tensor)] for tensor in group["params"]] for group in optimizer.param_groups]
        return Built(optimizer, kinds, structure, members, [*map(without_params, optimizer.param_groups)], varies)
