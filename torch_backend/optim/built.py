"""The torch optimizer that takes a step, built for the tensors of one update and reused for
tensors of the same kind; and the options of the last update.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from funcga._transform import Transform
from funcga._types import Structure, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.optim.options import Group, Options, without_params
from torch_backend.optim.state import OptimizerState, UpdateArguments


class Built(NamedTuple):
    """An optimizer without its tensors, the indices of the tensors of each group, and the initial
    options of the groups.

    `kind` has the dtypes, devices and shapes of the parameters that it was built for, and their
    tree structure.
    """

    optimizer: Optimizer
    members: list[list[int]]
    options: list[Group]
    kind: tuple[list[tuple[Any, ...] | None], Structure]


class Builder:
    """Builds optimizers with these options. If `keeps`, the last one is reused for tensors of the
    same kind.

    Building an optimizer takes longer than the step of a small model. If its steps change only
    tensors and state, as those of torch.optim do, it can be given other tensors and another state.
    """

    def __init__(self, options: Options, keeps: bool):
        self.options, self.keeps = options, keeps
        self.kept: list[Built] = []

    @contextmanager
    def built(
        self, tensors: Sequence[torch.Tensor], arguments: UpdateArguments, weight: object
    ) -> Iterator[Optimizer]:
        """A context with the optimizer of these copies of the parameters, its state empty."""
        count, kind = int(arguments.state.count), (arguments.kinds, arguments.structure)
        try:
            last = self.kept.pop()  # so that another thread builds its own
        except IndexError:
            last = None
        if last is not None and last.kind == kind:
            built, keeps, optimizer = last, True, last.optimizer
            for group, members in zip(optimizer.param_groups, built.members, strict=True):
                group["params"] = [tensors[index] for index in members]
            self.options.follow_schedule(optimizer, built.options, count)
        else:
            made = self.options.build(tensors, arguments.params, count, weight)
            optimizer = made.optimizer
            index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
            members_of = [[index_of[id(t)] for t in g["params"]] for g in optimizer.param_groups]
            built = Built(optimizer, members_of, made.began_with, kind)
            # Options that are functions are others in another update.
            keeps = self.keeps and not made.functions
        yield optimizer
        # Only after a step without an error it is used again. It keeps no memory of the caller's.
        if keeps:
            optimizer.state = defaultdict(dict)
            for group in optimizer.param_groups:
                group["params"] = []
            self.kept = [built]


def last_options(tx: Transform, state: OptimizerState, params: Tree) -> list[dict[str, Any]]:
    """Returns the options of the last update, such as its learning rate, for logging.

    They are computed from the number of updates and the weight of the last window, which are in the
    state, so they are also available right after a state was loaded.

    Args:
        tx: What from_optimizer returned.
        state: Its state after an update. In `multi_steps(chain(clip, tx), n)` it is
            `state.inner[1]`.
        params: The parameters, or others of the same structure. Their values do not matter.

    Returns:
        A dict of options for each group, as in `optimizer.param_groups`, in the order of their
        first parameters; a single dict without `groups`. Schedules are evaluated.

    Raises:
        FuncgaError: If tx was not made by from_optimizer, if the state is not its own, or if there
            was no update yet.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> tx = torch_backend.from_optimizer(torch.optim.SGD, lr=lambda count: 0.5 / (1 + count))
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(grads, state, params)
        >>> torch_backend.last_options(tx, state, params)[0]["lr"]
        0.25
    """
    options = getattr(getattr(tx, "update", None), "options", None)
    if not isinstance(options, Options):
        raise FuncgaError(
            f"tx is of type {type(tx).__name__}, and not what from_optimizer returned, which alone "
            "knows its options. Give it that one, and its own state: "
            "torch_backend.last_options(adamw, state.inner[1], params)."
        )
    if not isinstance(state, OptimizerState):
        raise FuncgaError(
            f"state is {arrays.describe(state)}, and not the OptimizerState of from_optimizer. A "
            "chain has it at the optimizer's position, and multi_steps in `inner`: "
            "torch_backend.last_options(adamw, state.inner[1], params)."
        )
    last = int(state.count) - 1
    if last < 0:
        raise FuncgaError(
            "the state is that before the first update, so there are no last options. Read them "
            "after an update: updates, state = tx.update(grads, state, params)."
        )
    # An optimizer may make memory as large as its tensors, so it is built for tensors without
    # elements.
    leaves = [leaf for leaf in trees.flatten(params)[0] if leaf is not None]
    empty = [torch.empty((0,) * leaf.ndim, dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
    weight = state.weight if isinstance(state.weight, torch.Tensor) else None
    made = options.build(empty, params, last, weight)
    return [*map(without_params, made.optimizer.param_groups)]
