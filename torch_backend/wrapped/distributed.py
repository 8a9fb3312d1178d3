"""One window where torch.distributed runs: its sums may be merged over replicas, its loss may call
collectives itself, and parameters and rows may be DTensors.

A parameter that is a DTensor has gradients that are Partial sums. Autograd adds them as they are,
and each is reduced once, at the end of the window. Rows that lie on several devices are cut where
they are.
"""

from collections.abc import Sequence
from functools import partial
from itertools import compress
from math import prod
from typing import Any

import torch

from funcga._call import Program
from funcga._call.arguments import Arguments
from funcga._types import Kwargs, Tree
from torch_backend import arrays, trees
from torch_backend.dtensor import is_dtensor, settle
from torch_backend.engine.leaves import OWN
from torch_backend.engine.window import Window
from torch_backend.reduce import Reduction
from torch_backend.reduce.absent import empty_sums
from torch_backend.replicas import collectives_called
from torch_backend.sums import Sums


def rows_by_device(program: Program, arguments: Arguments, rows: int) -> tuple[int, Any]:
    """Over how many devices the rows of all split arguments lie, in equal parts, and what takes
    equally many of each for a micro-batch, so that no row travels.

    (1, None) where they are cut differently, or it matters which rows share a micro-batch: then
    these follow each other.
    """
    cuts = set[Any]()
    for leaf, axis in arguments:
        if not isinstance(axis, int) or leaf is None:
            continue
        if not is_dtensor(leaf):
            return 1, None
        is_cut = [placement.is_shard(axis % leaf.ndim) for placement in leaf.placements]
        cuts.add((leaf.device_mesh, *is_cut))
    (mesh, *is_cut), *others = cuts
    devices = prod(compress(mesh.shape, is_cut))
    # Only sums and extremes come out the same whichever rows share a micro-batch.
    folds = program.folds(arguments.backend)
    is_free = all(fold.reducer.monoid.collective for fold in folds)
    if others or devices == 1 or rows % devices or not is_free:
        return 1, None
    return devices, partial(_local_rows, devices)


def _local_rows(devices: int, dtensor: Any, axis: int, start: int, size: int) -> Any:
    """`size` rows, equally many of each device, along an axis, as one DTensor: `start` rows were
    taken before.
    """
    from torch.distributed.tensor import DTensor

    rows = dtensor.to_local().narrow(axis, start // devices, size // devices)
    return DTensor.from_local(rows, dtensor.device_mesh, dtensor.placements, run_check=False)


class Distributed(Window):
    """A window that may be merged over replicas, by one of `merges`, or by none."""

    may_communicate = True

    def __init__(self, merges: Sequence[Reduction], *window: Any):
        super().__init__(*window)
        self.merges = merges
        self.called = collectives_called()  # before the first loss

    @property
    def communicates(self) -> bool:
        """Whether the loss has called collectives. Then other processes send gradients here that
        have their weights, whatever the weight is here.
        """
        return collectives_called() != self.called

    def _takes(self, seed: float, dtype: torch.dtype) -> bool:
        if self.communicates:
            is_exact = arrays.represents_exactly(dtype, seed)
            return self.plan.takes_weights and not self.hooked and is_exact
        return seed != 0 and super()._takes(seed, dtype)

    def _bind(self, loss: torch.Tensor, aux: Tree) -> Sums:
        sums = super()._bind(loss, aux)
        if self.merges and self.communicates:
            # Collectives of the loss add cotangents of several replicas, which have to be in one
            # unit.
            sums.unit, sums.unit_is_fixed = 1.0, True
        grads = [self.leaves.trees[index] for index in self.plan.indices]
        like = self.gradient.compose(loss, trees.detached(aux, True), grads)
        for merge in self.merges:
            merge.propose(sums, dict(enumerate(trees.flatten(like)[0])))
        return sums

    def merged(self, sums: Sums) -> Tree:
        """The normalised result, of all replicas."""
        settle(sums.of, dict(zip(sums.folding.grads, self.inputs, strict=True)))
        for merge in self.merges:
            merge.merge()
        return sums.result()

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: Kwargs, state: list[Any]
    ) -> Tree:
        """The result on a replica that has nothing to fold; `state` is what came in."""
        (merge,), program, own = self.merges, self.program, self.leaves.trees.get(OWN)
        assert program is not None
        sums = empty_sums(merge, program, arguments, own)
        sums.state = state
        merge.merge()
        return sums.result()
