"""Any optimizer of torch as a transform: its own step, on aliases or copies of the parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from funcga._backend.prefixes import leaf_paths
from funcga._transform import DonatingTransform, Traits, Transform
from funcga._transform.apply import UpdateFunction
from funcga._types import Tree
from funcga.errors import FuncgaError
from funcga.tools.optimizers.chain_in_torch import ClipNormState, check_not_differentiated, copies
from funcga.tools.optimizers.options_in_torch import Options, options_of
from torch_backend import arrays, trees
from torch_backend._private import pytree
from torch_backend.dtensor import local_tensors, without_partials
from torch_backend.parameters import matched
from torch_backend.transforms import storages


class OptimizerState(NamedTuple):
    """The state of an optimizer between two updates: a tree of tensors, which can be saved as it
    is. Of an optimizer of your own it also has what that keeps beside tensors.

    Attributes:
        count: The number of updates; int32[], on the CPU, where reading it waits for nothing.
        slots: The tree of the parameters with a dict for each leaf, such as
            `state.slots["w"]["exp_avg"]`: what the optimizer keeps for that parameter. Zeros before
            the parameter's first update.
        started: Whether each parameter has had its first update, in the order of their paths;
            bool[parameters], on the CPU.
        weight: The weight of the last update's window, 0 where none was given; float32[].
    """

    count: torch.Tensor  # type: ignore[assignment]  # a tuple's own method
    slots: Tree
    started: torch.Tensor
    weight: torch.Tensor


# For torch.load with weights_only=True.
torch.serialization.add_safe_globals([ClipNormState, OptimizerState])


def from_optimizer(
    optimizer: type[Optimizer],
    *,
    groups: Callable[[str], Mapping[str, object]] | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    **options: object,
) -> DonatingTransform:
    """Turns a torch optimizer into a transform: two pure functions, `(init, update)`.

    `init(params)` returns an OptimizerState. `update(grads, state, params)` returns
    `(updates, state)`. The updates are the new parameters minus the old ones, computed by the
    optimizer's own step on a copy, so the state is bitwise identical to that of
    `optimizer.step()`. As in torch, a parameter whose gradient is None is skipped, and its update
    is 0. `donated` does the same in the memory of the given state, and may write to the gradients.
    `funcga.transforms.apply` returns the new parameters instead of the updates; they are bitwise
    identical to those of `optimizer.step()`.

    Optimizers that evaluate the loss themselves, such as LBFGS, and SparseAdam, which takes no
    dense gradients, are not supported: call their own step. Extra arguments are ignored, as they
    may be meant for other transforms of a chain.

    The state is complete after init, so a checkpoint can be restored into it: init takes one step
    on a copy of each parameter to find what the optimizer keeps.

    Args:
        optimizer: An optimizer class, of torch.optim or your own, that keeps its state for each
            parameter in `.state`.
        groups: A function from a parameter's name to a dict of its own options; {} for none. Names
            are the keys of the tree, joined by dots, as in `module.named_parameters()`.
        scheduler: A function from an optimizer to a scheduler of torch.optim.lr_scheduler, which is
            stepped once per update, such as `functools.partial(
            torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=100)`.
        **options: The optimizer's own options: lr, betas, fused, foreach, maximize ... An option
            that is a function is a schedule: it is called with the number of updates so far,
            `lr=lambda count: 1e-3 * 0.9**count`. If it has a second parameter named weight, it also
            gets the weight of the window, such as its number of tokens: `betas=lambda count,
            weight: (0.9, beta_for_half_life(weight, 10_000_000))`, with
            `funcga.transforms.beta_for_half_life`. multi_steps passes the total weight; otherwise
            pass it, `tx.update(grads, state, params, weight=tokens)`, as a number or a 0-d tensor,
            which is read from its device. init calls such functions with a weight of 1.

    Returns:
        The transform.

    Raises:
        FuncgaError: If lr is a function and there is a scheduler, too. The functions raise it if
            structures differ, if the state is that of another optimizer, if groups gives an option
            that the optimizer does not have, and if the optimizer keeps state that belongs to no
            parameter. What torch or Python refuse, as an optimizer in place of its class, raises
            their error.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> tx = torch_backend.from_optimizer(torch.optim.SGD, lr=0.5)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(grads, state, params)
        >>> torch_backend.apply_updates(params, updates)
        {'w': tensor([0.5000, 0.5000])}
    """
    if scheduler is not None and callable(options.get("lr")):
        raise FuncgaError(
            "lr is a function of the count of updates, and scheduler sets lr, too. Give one of "
            "the two: a number for lr, or no scheduler."
        )
    functions = _Update(Options(optimizer, options, groups, scheduler))
    return DonatingTransform(functions.init, functions)


@dataclass(frozen=True, eq=False)
class _Update(UpdateFunction):
    """The functions of the transform; calling it is `update`."""

    options: Options

    traits = Traits(takes_weight=True)  # which is read from a device only where an option asks

    @torch.no_grad()
    def init(self, params: Tree) -> OptimizerState:
        """The state before the first update: zeros like all that a step keeps."""
        check_not_differentiated("an optimizer of torch", params)
        leaves, structure = trees.flatten(params)
        zeros = [None if leaf is None else torch.zeros_like(leaf.detach()) for leaf in leaves]
        like = trees.unflatten(structure, zeros)
        state = OptimizerState(
            arrays.cast(0, torch.int32),
            trees.unflatten(structure, [{} for _ in leaves]),
            torch.zeros(len(leaves), dtype=torch.bool, device="cpu"),
            arrays.cast(0, torch.float32),
        )
        # Zeros are parameters and gradients at once: this takes no more than one copy of them.
        _, after = self.stepped(False, True, like, state, like, {"weight": 1.0})
        pytree.tree_map_only(torch.Tensor, torch.zero_, trees.flatten(after.slots)[0])
        return state._replace(slots=after.slots)

    def stepped(
        self,
        owned: bool,
        into: bool | None,
        grads: Tree,
        state: Any,
        params: Tree,
        extra: dict[str, Any],
    ) -> tuple[Tree, OptimizerState]:
        """The updates, or the parameters after the step, and the new state."""
        check_not_differentiated("an optimizer of torch", (grads, params))
        leaves, structure = trees.flatten(params)
        gradients = matched(grads, params, "grads")
        with torch.no_grad():
            gradients = [
                None if grad is None else without_partials(grad.detach(), leaf)
                for grad, leaf in zip(gradients, leaves, strict=True)
            ]
            # A tensor without elements, which gets no gradient, stands for a leaf that is None.
            aliases = [
                torch.empty(0, device="cpu") if leaf is None else leaf.detach() for leaf in leaves
            ]
            # Only parameters that are given away are written to. Tied ones become two: each has a
            # step and a state.
            tensors = arrays.without_overlap(aliases) if into else copies(aliases)
            after = self._step(tensors, gradients, state, params, owned, extra.get("weight"))
            if into is None:
                _subtract(tensors, aliases, gradients)
        results = [None if leaf is None else x for leaf, x in zip(leaves, tensors, strict=True)]
        return trees.unflatten(structure, results), after

    def _step(
        self,
        tensors: list[torch.Tensor],
        grads: list[torch.Tensor | None],
        state: OptimizerState,
        params: Tree,
        owned: bool,
        weight: Any,
    ) -> OptimizerState:
        """The state after a step of the optimizer on these tensors.

        If the state is `owned`, the result reuses its memory, and the gradients may be written to.
        """
        optimizer = self.options.build(params, tensors, int(state.count), weight)
        slots, flags = matched(state.slots, params, "state.slots"), state.started.tolist()
        order: Sequence[int] = range(len(flags))
        if not all(flags):
            # They are in the order of the paths: a file may return dicts in another order.
            order = sorted(order, key=leaf_paths(params, trees).__getitem__)
        started = dict(zip(order, flags, strict=True))
        # A parameter's first update begins with the optimizer's own state, not with zeros.
        used = [
            slot if started[index] or grad is None else {}
            for index, (slot, grad) in enumerate(zip(slots, grads, strict=True))
        ]
        grads = _laid(grads, tensors)
        if self.options.writes_to_gradients(optimizer):
            grads = arrays.without_overlap(grads if owned else copies(grads))
        written = _writable(used, tensors, owned)
        for tensor, grad, slot in zip(tensors, grads, written, strict=True):
            tensor.grad = grad
            if slot:
                optimizer.state[tensor] = slot
        if self.options.is_stock:
            optimizer.step()
        else:
            _checked_step(optimizer, tensors)
        for index, (tensor, before) in enumerate(zip(tensors, used, strict=True)):
            tensor.grad = None
            slots[index] = optimizer.state.get(tensor, {})
            started[index] |= grads[index] is not None or not slots[index]
            if before and before.keys() != slots[index].keys():
                raise FuncgaError(
                    f"the state has {', '.join(before)}, and after a step of "
                    f"{type(optimizer).__name__} {', '.join(slots[index])}: it is the state of "
                    "another optimizer, or of other options. Begin with state = tx.init(params)."
                )
        return OptimizerState(
            state.count + 1,
            trees.unflatten(trees.flatten(params)[1], slots),
            torch.tensor([*started.values()], dtype=torch.bool, device="cpu"),
            arrays.cast(0 if weight is None else weight, torch.float32).clone(),
        )


def _subtract(
    tensors: list[torch.Tensor], before: list[torch.Tensor], grads: list[torch.Tensor | None]
) -> None:
    """Makes the updates of the parameters after a step, in their memory."""
    after, subtrahends = [], []
    for tensor, old, grad in zip(tensors, before, grads, strict=True):
        if grad is None:
            tensor.zero_()  # not subtracted: an infinite parameter less itself is NaN
        else:
            after.append(tensor)
            subtrahends.append(old)
    if after:
        torch._foreach_sub_(local_tensors(after), local_tensors(subtrahends))


def _writable(
    slots: list[dict[str, Any]], tensors: list[torch.Tensor], owned: bool
) -> list[dict[str, Any]]:
    """The slots in new memory, or in their own if they are `owned`, in the strides of their
    parameters.
    """
    values = [value for slot in slots for value in slot.values()]
    values = _laid(values, [like for slot, like in zip(slots, tensors, strict=True) for _ in slot])
    remaining = iter(values if owned else copies(values))
    return [{name: next(remaining) for name in slot} for slot in slots]


def _laid(values: Sequence[Any], likes: Sequence[torch.Tensor]) -> list[Any]:
    """The values, where each tensor of another one's shape has its strides, too: a step may run
    through the memory of both.
    """
    return [
        value
        if not isinstance(value, torch.Tensor)
        or (type(value) is torch.Tensor and value.stride() == like.stride())
        else arrays.with_strides_of(value, like)
        for value, like in zip(values, likes, strict=True)
    ]


def _checked_step(optimizer: Optimizer, tensors: list[torch.Tensor]) -> None:
    """Takes a step of an optimizer that is not torch's own. Raises FuncgaError if it changes
    anything that is not in the state, or keeps the memory of a parameter.
    """
    for tensor in tensors:
        tensor.requires_grad_()  # which it may ask for
    before = _others(optimizer)
    optimizer.step()
    after = _others(optimizer)
    # An attribute that is new is a cache.
    changed = [name for name in before.keys() & after.keys() if after[name] != before[name]]
    for tensor in tensors:
        tensor.requires_grad_(False)
        # The address of what has no elements is 0.
        if changed or storages(tensor) & storages(optimizer.state.get(tensor)) - {0}:
            raise FuncgaError(
                f"{type(optimizer).__name__} is no pure update: beside the state of each parameter "
                f"a step keeps {', '.join(changed) or 'the memory of a parameter itself'}, which a "
                "pure update would lose. Keep optimizer.step() and give it gradients: "
                "torch_backend.assign_grads(params, grads)."
            )


def _others(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps that belongs to no parameter, by name: options, state under other
    keys, numbers and tensors.
    """
    kept = {name: x for name, x in vars(optimizer).items() if type(x) in (int, float, torch.Tensor)}
    kept |= {
        "param_groups": [{**group, "params": None} for group in optimizer.param_groups],
        "state": {key for key in optimizer.state if not torch.is_tensor(key)},
    }
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, kept)  # type: ignore[no-any-return]


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
        FuncgaError: If there was no update yet.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> tx = torch_backend.from_optimizer(torch.optim.SGD, lr=lambda count: 0.5 / (1 + count))
        >>> state = tx.init(params)
        >>> for _ in range(2):
        ...     updates, state = tx.update(grads, state, params)
        >>> torch_backend.last_options(tx, state, params)[0]["lr"]
        0.25
    """
    if not state.count:
        raise FuncgaError(
            "the state is that before the first update, so there are no last options. Read them "
            "after an update: updates, state = tx.update(grads, state, params)."
        )
    options: Options = tx.update.options  # type: ignore[attr-defined]
    leaves = trees.flatten(params)[0]
    return options_of(options.build(params, leaves, int(state.count) - 1, state.weight))
