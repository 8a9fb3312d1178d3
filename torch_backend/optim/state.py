"""The state of a torch optimizer as a tree of tensors, and the checked arguments of an update."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from funcga._backend.prefixes import leaf_paths
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.arrays import are_plain, with_strides_of
from torch_backend.dtensor import local_tensors, without_partials
from torch_backend.modules.checks import check_not_differentiated
from torch_backend.parameters import KIND, PLAIN, check_gradients, check_parameters, matched

Slot = dict[str, object]
"""What an optimizer keeps for one parameter: tensors, numbers, None, and dicts, lists and tuples
of these.
"""


class OptimizerState(NamedTuple):
    """The state of an optimizer between two updates. All leaves are tensors, so it can be saved as
    it is.

    Attributes:
        count: The number of updates; int32[], on the CPU, where reading it waits for nothing.
        slots: The tree of the parameters with a dict for each leaf, such as
            `state.slots["w"]["exp_avg"]`: what the optimizer keeps for that parameter. Zeros before
            the parameter's first update. Python numbers are stored as a Number.
        started: Whether each parameter has had its first update, in the order of their paths;
            bool[parameters], on the CPU.
        weight: If options are functions of it, the weight of the last update's window, NaN before
            the first; float64[], on the CPU. Otherwise (), which has no leaves.
    """

    count: torch.Tensor  # type: ignore[assignment]  # a tuple's own method
    slots: Tree
    started: torch.Tensor
    weight: torch.Tensor | tuple[()] = ()


class Number(NamedTuple):
    """A Python number, as a 0-d tensor on the CPU: int64, float64, bool or complex128."""

    value: torch.Tensor


_DTYPES = {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}


def to_slot(kept: Mapping[str, object]) -> Slot:
    """An optimizer's state for a parameter, with Numbers for numbers; tensors are not copied.

    Raises FuncgaError for anything but tensors, numbers, None, and containers of these.
    """
    return {
        name: value if isinstance(value, torch.Tensor) else _mapped(partial(_stored, name), value)
        for name, value in kept.items()
    }


def _stored(name: str, value: object) -> object:
    if value is None or isinstance(value, torch.Tensor):
        return value
    if type(value) in _DTYPES:
        return Number(torch.tensor(value, dtype=_DTYPES[type(value)], device="cpu"))
    raise FuncgaError(
        f"the optimizer keeps `{name}` of type {type(value).__name__} for a parameter, which is no "
        "tensor and cannot be put into a state. Keep optimizer.step() and give it gradients: "
        "torch_backend.assign_grads(params, grads)."
    )


def from_slots(slots: Sequence[Slot], owned: bool, likes: Sequence[torch.Tensor]) -> list[Tree]:
    """The inverse of `to_slot` for each slot and its parameter, in new memory, or in that of the
    slots if they are `owned`.

    Tensors with the shape of the parameter are returned with its strides.
    """
    # Most hold contiguous tensors and nothing else. These have the strides of their parameter,
    # unless it is not contiguous, or has sizes of 1.
    values: list[Any] = [value for slot in slots for value in slot.values()]
    if are_plain(values) and are_plain(likes) and not any(1 in like.shape for like in likes):
        kept = iter(values if owned else arrays.copies(values))
        return [{name: next(kept) for name in slot} for slot in slots]
    pairs = zip(slots, likes, strict=True)
    return [_mapped(partial(_restored, owned, like), slot) for slot, like in pairs]


def _restored(owned: bool, like: torch.Tensor, value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value.value.item() if isinstance(value, Number) else value
    laid = value if value.shape != like.shape else with_strides_of(value, like)
    return laid if owned or laid is not value else value.clone()


def on_tensors(function: Callable[[torch.Tensor], torch.Tensor], slot: Slot) -> Tree:
    """The slot with a function applied to each tensor."""

    def apply(value: object) -> object:
        if isinstance(value, Number):
            return Number(function(value.value))
        return function(value) if isinstance(value, torch.Tensor) else value

    return _mapped(apply, slot)


def _mapped(function: Callable[[object], object], value: object) -> object:
    """Applies a function to each value inside of dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):  # as most are, and much faster
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(function, item) for item in value]
    if type(value) is tuple:  # not a Number
        return tuple([_mapped(function, item) for item in value])
    return function(value)


def initial_state(params: Tree, slots: Sequence[Slot], has_weight: bool) -> OptimizerState:
    """The state before the first update, with these slots; with a `weight` if it has one."""
    count, started = arrays.integer(0), torch.zeros(len(slots), dtype=torch.bool, device="cpu")
    weight = _as_weight(torch.nan) if has_weight else ()
    return OptimizerState(count, trees.unflatten(trees.flatten(params)[1], slots), started, weight)


def _as_weight(weight: float) -> torch.Tensor:
    return torch.full((), weight, dtype=torch.float64, device="cpu")


class UpdateArguments:
    """The checked arguments of an update.

    The lists `parameters`, `grads`, `slots` and `started` have an item for each parameter that is
    not None; `leaf_indices` are their indices among the leaves of the tree.
    """

    def __init__(self, grads: Tree, state: OptimizerState, params: Tree):
        check_not_differentiated("an optimizer of torch", (grads, params))
        _check(state, params)
        self.params, self.state = params, state
        self.leaves, self.structure = trees.flatten(params)
        check_parameters(self.leaves, params)
        self.kinds = [leaf if leaf is None else KIND(leaf) for leaf in self.leaves]
        slots = matched(state.slots, params, "state.slots")
        # Parameters that are None have slots and flags, too, so that positions are those of the
        # leaves.
        started = _in_order_of_paths(state.started.tolist(), params, back=True)
        self.leaf_indices = [index for index, leaf in enumerate(self.leaves) if leaf is not None]
        self.grads: list[torch.Tensor | None] = self._present(self.gradients(grads))
        self.parameters: list[torch.Tensor] = self._present(self.leaves)
        self.slots: list[Slot] = self._present(slots)
        self.started: list[bool] = self._present(started)

    def _present(self, values: list[Any]) -> list[Any]:
        """The values, one for each leaf, of the parameters that are not None."""
        return (
            values
            if len(self.leaf_indices) == len(values)
            else [values[index] for index in self.leaf_indices]
        )

    def gradients(self, grads: Tree) -> list[torch.Tensor | None]:
        """The checked gradients in the order of the leaves, detached, laid out as their parameters
        are.
        """
        gradients = matched(grads, self.params, "grads")
        # Usually nothing is to be done: all are tensors like their parameters, and none has a
        # graph.
        are_usual = {*map(type, gradients)} <= {torch.Tensor} and {*map(type, self.leaves)} <= PLAIN
        if are_usual and [*map(KIND, gradients)] == self.kinds:
            return (
                [grad.detach() for grad in gradients]
                if any(map(_HAS_GRAPH, gradients))
                else gradients
            )
        check_gradients(
            gradients, self.leaves, lambda: leaf_paths(self.params, trees), _dtype_advice
        )
        return [
            None
            if grad is None
            else without_partials(grad.detach() if grad.requires_grad else grad, parameter)
            for grad, parameter in zip(gradients, self.leaves, strict=True)
        ]

    def tree(self, values: Sequence[Tree], absent: Tree = None) -> Tree:
        """The tree with one value for each parameter, and `absent` where it is None."""
        if len(values) == len(self.leaves):
            return trees.unflatten(self.structure, values)
        leaves = [absent] * len(self.leaves)
        for leaf_index, value in zip(self.leaf_indices, values, strict=True):
            leaves[leaf_index] = value
        return trees.unflatten(self.structure, leaves)

    def check_keys(self, wanted: Sequence[Collection[object]], optimizer: str) -> None:
        """Raises FuncgaError if a slot in use lacks a key that the optimizer needs."""
        if [*map(tuple, wanted)] == [*map(tuple, self.slots)]:  # as usual
            return
        for position, (slot, keys) in enumerate(zip(self.slots, wanted, strict=True)):
            lacking = (
                [key for key in keys if key not in slot] if self.started[position] and slot else []
            )
            if lacking:
                raise FuncgaError(
                    f"`state.slots{leaf_paths(self.params, trees)[self.leaf_indices[position]]}` "
                    f"has {', '.join(map(str, slot))}, and {optimizer} looks for {lacking[0]} "
                    "there: it is the state of another optimizer, or of other options. Begin with "
                    "state = tx.init(params)."
                )

    def state_after(
        self, copies: list[torch.Tensor], slots: list[Slot], owned: bool, weight: object
    ) -> OptimizerState:
        """The state after a step on copies of the parameters, with these slots."""
        # A parameter without a gradient is skipped. Until it has had one, its slot is that of init.
        started = [True] * len(self.leaves)
        for position, copy in enumerate(copies):
            if not (self.started[position] or copy.grad is not None or slots[position]):
                started[self.leaf_indices[position]] = False
                slot = self.slots[position]
                slots[position] = slot if owned else on_tensors(torch.clone, slot)
        # Flags are kept in the order of the paths: a file may return dicts in another order.
        flags = torch.tensor(
            _in_order_of_paths(started, self.params), dtype=torch.bool, device="cpu"
        )
        has_weight = isinstance(self.state.weight, torch.Tensor) and weight is not None
        kept = _as_weight(float(weight)) if has_weight else self.state.weight  # type: ignore[arg-type]
        return OptimizerState(self.state.count + 1, self.tree(slots, {}), flags, kept)

    def differences(self, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        """The updates: the copies after a step minus the parameters, in the copies' memory."""
        # The copies become the updates, so that no memory is needed for these.
        skipped = [copy for copy in copies if copy.grad is None]
        without_grads(copies)
        if copies:
            torch._foreach_sub_(local_tensors(copies), local_tensors(self.parameters))
        for copy in skipped:
            # Not left to the subtraction: an infinite parameter less itself is NaN.
            copy.zero_()
        return copies


def without_grads(copies: list[torch.Tensor]) -> list[torch.Tensor]:
    """The copies after a step, without their gradients."""
    for copy in copies:
        copy.grad = None
        if copy.requires_grad:
            copy.requires_grad_(False)
    return copies


_HAS_GRAPH = attrgetter("requires_grad")


def _check(state: object, params: Tree) -> None:
    if params is None:
        raise FuncgaError(
            "params are missing, and the step of a torch optimizer starts from them: "
            "tx.update(grads, state, params)."
        )
    if not isinstance(state, OptimizerState):
        raise FuncgaError(
            f"state is {arrays.describe(state)}, and should be what init or the update before "
            "returned: state = tx.init(params); updates, state = tx.update(grads, state, params)."
        )


def _dtype_advice(grad: torch.Tensor, parameter: torch.Tensor) -> str | None:
    if grad.dtype == parameter.dtype:
        return None
    return (
        "An optimizer of torch computes in one dtype. Give it the parameters in that of the "
        f"gradients, parameter.to({grad.dtype}), and let torch_backend.apply_updates round the "
        "sum, as funcga.multi_steps does; or fold to that of the parameters: "
        f"funcga.mean(out_dtype={parameter.dtype})."
    )


def _in_order_of_paths(flags: list[bool], params: Tree, back: bool = False) -> list[bool]:
    """Reorders flags from the order of the leaves to that of their paths, or `back`: the order of
    paths does not change if a file changes the order of a dict.
    """
    # Usually all are alike, and no path is needed.
    if len({*flags}) < 2:
        return flags
    paths = leaf_paths(params, trees)
    order = sorted(range(len(paths)), key=paths.__getitem__)
    if back:
        return [flag for _, flag in sorted(zip(order, flags, strict=True))]
    return [flags[leaf_index] for leaf_index in order]
