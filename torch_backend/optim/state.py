"""What an optimizer has between two updates, and the arguments of an update, read.

Only torch has this file: a state of optax is a tree already.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from funcga._backend.prefixes import leaf_paths
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import locals_of, settled
from torch_backend.optim.match import check_gradients, check_parameters, is_flat, matched
from torch_backend.optim.slots import mapped


class OptimizerState(NamedTuple):
    """What an optimizer has between two updates; all leaves are tensors, so it can be saved as it is.

    count: how many updates were done; int32[], on the CPU, where reading it waits for nothing.
    slots: what the optimizer keeps for each parameter: the tree of the parameters with a dict for each leaf,
        `state.slots["w"]["exp_avg"]`. Zeros before a parameter's first update. A Python number is a Number there.
    started: whether each parameter has had its first update, in the order of their paths; bool[parameters], on the CPU.
    """

    count: torch.Tensor  # type: ignore[assignment]  # a tuple's own method
    slots: Any
    started: torch.Tensor


def fresh(params: Any, slots: Sequence[Any]) -> OptimizerState:
    """The state before the first update, with these slots."""
    count, started = torch.zeros((), dtype=torch.int32), torch.zeros(len(slots), dtype=torch.bool)
    return OptimizerState(count, trees.unflatten(trees.flatten(params)[1], slots), started)


class Given:
    """The arguments of an update, checked, and what belongs to each parameter; parameters that are None left out."""

    def __init__(self, grads: Any, state: Any, params: Any):
        _check(state, params)
        self.flat = is_flat(params)
        leaves = list(params.values()) if self.flat else trees.flatten(params)[0]
        check_parameters(leaves, params)
        grads, slots = matched(grads, params, "grads"), matched(state.slots, params, "state.slots")
        check_gradients(grads, leaves, params)
        _check_slots(slots, params)
        self.params, self.state, self.count = params, state, int(state.count)
        self.length = len(leaves)
        self.places = [place for place, leaf in enumerate(leaves) if leaf is not None]
        self.leaves, self.slots = self.of(leaves), self.of(slots)
        self.grads = [_plain(grad, leaf) for grad, leaf in zip(self.of(grads), self.leaves, strict=True)]
        self.started = self.of(_by_leaf(state.started.tolist(), params))

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Of one value for each leaf, those of the parameters."""
        return [values[place] for place in self.places]

    def tree(self, values: Sequence[Any], absent: Any = None) -> Any:
        """The tree with these in the place of the parameters."""
        if self.flat:
            return dict(zip(self.params, values, strict=True))
        leaves = [absent] * self.length
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return trees.unflatten(trees.flatten(self.params)[1], leaves)

    def check_keys(self, slots: list[dict[str, Any]], optimizer: str) -> None:
        """Raises FuncgaError if a step has added to what a started slot has, which was not the optimizer's then."""
        for slot, old, started in zip(slots, self.slots, self.started, strict=True):
            added = [key for key in slot if key not in old] if started and old else []
            if added:
                self.check_key(added[0], optimizer)

    def check_key(self, key: str, optimizer: str) -> None:
        """Raises FuncgaError if a started slot has not what the optimizer looks for in it."""
        for place, slot, started in zip(self.places, self.slots, self.started, strict=True):
            if started and slot and key not in slot:
                raise FuncgaError(
                    f"`state.slots{leaf_paths(self.params, trees)[place]}` has {', '.join(map(str, slot))}, and "
                    f"{optimizer} looks for {key} there: it is the state of another optimizer, or of other options. "
                    f"Begin with state = tx.init(params)."
                )

    def result(self, copies: list[Any], slots: list[Any], owned: bool) -> tuple[Any, OptimizerState]:
        """What a step has added to the copies of the parameters, in their memory, and the state with these slots."""
        skipped = [copy.grad is None for copy in copies]
        started = list(self.started)
        for number, slot in enumerate(slots):
            started[number] = started[number] or not skipped[number] or bool(slot)
            if not started[number]:
                slots[number] = self.slots[number] if owned else mapped(torch.clone, self.slots[number])
        state = OptimizerState(self.state.count + 1, self.tree(slots, {}), self._flags(started))
        return self.tree(_added(copies, self.leaves, skipped)), state

    def _flags(self, started: list[bool]) -> torch.Tensor:
        if started == self.started:
            return torch.clone(self.state.started)
        done = [True] * self.length  # nothing is waited for where a parameter is None
        for place, flag in zip(self.places, started, strict=True):
            done[place] = flag
        return torch.tensor(_by_path(done, self.params), dtype=torch.bool)


def _check(state: Any, params: Any) -> None:
    if params is None:
        raise FuncgaError(
            "params are missing, and the step of a torch optimizer starts from them: tx.update(grads, state, params)."
        )
    if not isinstance(state, OptimizerState):
        raise FuncgaError(
            f"state is {arrays.describe(state)}, and should be what init or the update before returned: "
            f"state = tx.init(params); updates, state = tx.update(grads, state, params)."
        )


def _check_slots(slots: list[Any], params: Any) -> None:
    for place, slot in enumerate(slots):
        if not isinstance(slot, dict):
            raise FuncgaError(
                f"`state.slots{leaf_paths(params, trees)[place]}` is {arrays.describe(slot)}, and should be a "
                f"dict of what the optimizer keeps for that parameter: it is the state of others. "
                f"Begin with state = tx.init(params)."
            )


def _plain(grad: Any, leaf: Any) -> Any:
    """The gradient without a graph, where its parameter lies."""
    if grad is None:
        return None
    return settled(grad.detach() if grad.requires_grad else grad, leaf)


def _by_leaf(flags: list[bool], params: Any) -> list[bool]:
    """In the order of the leaves what is in that of their paths, which no dict can change on its way elsewhere."""
    return flags if _alike(flags) else [flags[rank] for rank in _ranks(params)]


def _by_path(flags: list[bool], params: Any) -> list[bool]:
    """In the order of the paths what is in that of the leaves."""
    return flags if _alike(flags) else [flag for _, flag in sorted(zip(_ranks(params), flags, strict=True))]


def _alike(flags: list[bool]) -> bool:
    return all(flags) or not any(flags)


def _ranks(params: Any) -> list[int]:
    paths = leaf_paths(params, trees)
    ranks = {path: rank for rank, path in enumerate(sorted(paths))}
    return [ranks[path] for path in paths]


def _added(copies: list[Any], leaves: list[Any], skipped: list[bool]) -> list[Any]:
    """The copies less the leaves, in the memory of the copies."""
    for copy in copies:
        copy.grad = None
        copy.requires_grad_(False)
    if copies:
        torch._foreach_sub_(locals_of(copies), locals_of(leaves))
    for copy, skip in zip(copies, skipped, strict=True):
        if skip:
            copy.zero_()  # an infinite parameter less itself is none
    return copies
