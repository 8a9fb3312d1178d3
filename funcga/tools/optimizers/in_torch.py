"""Any optimizer of torch as a transform, and clipping: torch's own functions, which write in place,
on aliases or copies.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import utils
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from funcga._backend.prefixes import leaf_paths, paths_and_leaves
from funcga._transform import DonatingTransform, Traits, Transform, takes_weight
from funcga._transform.apply import UpdateFunction
from funcga._types import Kwargs, Tree, TreeFn
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend._private import pytree
from torch_backend.dtensor import is_dtensor, local_tensors, without_partials
from torch_backend.parameters import matched
from torch_backend.states import zeros_like
from torch_backend.transforms import added, storages

Group = dict[str, Any]
"""The options of a group of parameters."""


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


class ClipNormState(NamedTuple):
    """The state of `clip_grad_norm`.

    Attributes:
        norm: The norm of the last gradients before they were clipped, NaN before the first update;
            a 0-d tensor on the device of the gradients, float32, or float64 if a parameter has 64
            bits.
    """

    norm: torch.Tensor


# For torch.load with weights_only=True.
torch.serialization.add_safe_globals([ClipNormState, OptimizerState])


def from_optimizer(
    optimizer: type[Optimizer],
    *,
    groups: Callable[[str], Mapping[str, object]] | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    **options: object,
) -> "OptimizerTransform":
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
    functions = _Update(optimizer, options, groups, scheduler)
    return OptimizerTransform(functions.init, functions)


class OptimizerTransform(DonatingTransform):
    """What `from_optimizer` returns."""

    __slots__ = ()

    init: Callable[[Tree], OptimizerState]
    update: "_Update"


@dataclass(frozen=True, eq=False)
class _Update(UpdateFunction[OptimizerState]):
    """The functions of the transform; calling it is `update`."""

    optimizer: type[Optimizer]
    options: Group
    groups: Callable[[str], Mapping[str, object]] | None
    scheduler: Callable[[Optimizer], LRScheduler] | None

    traits = Traits(takes_weight=True)  # which is read from a device only where an option asks

    @property
    def is_stock(self) -> bool:
        """Whether the optimizer is one of torch.optim; others are checked at every step."""
        return self.optimizer.__module__.startswith("torch.optim")

    @torch.no_grad()
    def init(self, params: Tree) -> OptimizerState:
        """The state before the first update: zeros like all that a step keeps."""
        check_not_differentiated("an optimizer of torch", params)
        leaves, structure = trees.flatten(params)
        like = trees.unflatten(structure, zeros_like(leaves, views=False))
        slots = trees.unflatten(structure, [{} for _ in leaves])
        started = torch.zeros(len(leaves), dtype=torch.bool, device="cpu")
        count = weight = arrays.as_array(0, torch.int32)
        state = OptimizerState(count, slots, started, weight)
        # Zeros are parameters and gradients at once: this takes no more than one copy of them.
        _, state = self.stepped(False, True, like, state, like, {"weight": 1.0})
        pytree.tree_map_only(torch.Tensor, torch.zero_, trees.flatten(state)[0])
        return state

    def stepped(
        self,
        owned: bool,
        into: bool | None,
        grads: Tree,
        state: Any,
        params: Tree,
        extra: Kwargs,
    ) -> tuple[Tree, OptimizerState]:
        """The updates, or the parameters after the step, and the new state."""
        check_not_differentiated("an optimizer of torch", (grads, params))
        leaves, structure = trees.flatten(params)
        gradients = trees.detached_leaves(matched(grads, params, "grads"))
        gradients = [*map(without_partials, gradients, leaves)]
        # A tensor without elements, which gets no gradient, stands for a leaf that is None.
        aliases = [
            torch.empty(0, device="cpu") if leaf is None else leaf.detach() for leaf in leaves
        ]
        # Only parameters that are given away are written to. Tied ones become two: each has a step
        # and a state.
        tensors = arrays.without_overlap(aliases) if into else copies(aliases)
        slots, started = matched(state.slots, params, "state.slots"), state.started.tolist()
        if not all(started):
            # They are in the order of the paths: a file may return dicts in another order.
            order = sorted(range(len(leaves)), key=leaf_paths(params, trees).__getitem__)
            for place, index in enumerate(order):
                if not started[place] and (gradients[index] is not None or not slots[index]):
                    # The first update begins with the optimizer's own state, not with zeros.
                    started[place], slots[index] = True, {}
        weight = extra.get("weight")
        optimizer = self.build(params, tensors, int(state.count), weight)
        slots = self._step(optimizer, tensors, gradients, slots, owned)
        if into is None:
            _subtract(tensors, aliases, gradients)
        results = [None if leaf is None else x for leaf, x in zip(leaves, tensors, strict=True)]
        return trees.unflatten(structure, results), OptimizerState(
            state.count + 1,
            trees.unflatten(structure, slots),
            torch.tensor(started, dtype=torch.bool, device="cpu"),
            arrays.as_array(0 if weight is None else weight, torch.float32).clone(),
        )

    def build(self, params: Tree, tensors: list[Any], count: int, weight: Any) -> Optimizer:
        """Makes the optimizer of a tensor for each leaf of params, after `count` updates, without
        state.

        `weight` is that of the window, or None if it is not known.
        """
        # What each group has for itself, and the tensors of its parameters.
        owns, members = [Group()], [tensors]
        if self.groups is not None and tensors:
            owns, members = [], []
            named = paths_and_leaves(params, trees.children)
            for (name, _), tensor in zip(named, tensors, strict=True):
                own = {**self.groups(name)}
                # Options are compared, not hashed: they may be tensors or lists.
                if own not in owns:
                    owns.append(own)
                    members.append([])
                members[owns.index(own)].append(tensor)
        # A group of one's own options overrides the options for all, as torch's param_groups do.
        # Those of torch look at tensors in a step alone, and are built faster without.
        groups = [
            {**_at(own, count, weight), "params": [] if self.is_stock else group}
            for own, group in zip(owns, members, strict=True)
        ]
        optimizer = self.optimizer(groups, **_at(self.options, count, weight))
        for name in [name for own in owns for name in own if name not in optimizer.defaults]:
            raise FuncgaError(
                f"groups gives `{name}`, which is no option of {self.optimizer.__name__}: its "
                f"options are {', '.join(optimizer.defaults)}."
            )
        self._follow(optimizer, count)
        for group, tensors in zip(optimizer.param_groups, members, strict=True):
            group["params"] = tensors
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
        began, scheduler, updates = _SCHEDULERS.pop(self, (None, None, 0))
        if began != began_with or updates > count:
            # Schedulers write into tensors.
            groups = [{**deepcopy(group), "params": []} for group in began_with]
            scheduler, updates = self.scheduler(_OnlyOptions(groups, optimizer.defaults)), 0
            scheduler.optimizer.step()  # which schedulers want to see called before their own
        for _ in range(updates, count):
            scheduler.step()
        _SCHEDULERS[self] = began_with, scheduler, count
        options = deepcopy(options_of(scheduler.optimizer))
        for group, of_group in zip(optimizer.param_groups, options, strict=True):
            group.update(of_group)

    @torch.no_grad()
    def _step(
        self,
        optimizer: Optimizer,
        tensors: list[Any],
        grads: list[Any],
        slots: list[dict[str, Any]],
        owned: bool,
    ) -> list[dict[str, Any]]:
        """The slots after a step of the optimizer on these tensors.

        If the state is `owned`, the result reuses its memory, and the gradients may be written to.
        """
        if self._writes_to_gradients(optimizer):
            grads = arrays.without_overlap(grads if owned else copies(grads))
        values = [value for slot in slots for value in slot.values()]
        remaining = iter(values if owned else copies(values))
        for tensor, grad, slot in zip(tensors, grads, slots, strict=True):
            tensor.grad = _laid(grad, tensor)
            if slot:
                optimizer.state[tensor] = {name: _laid(next(remaining), tensor) for name in slot}
        if self.is_stock:
            optimizer.step()
        else:
            _checked_step(optimizer, tensors)
        after = [optimizer.state.get(tensor, {}) for tensor in tensors]
        for tensor, before, slot in zip(tensors, slots, after, strict=True):
            tensor.grad = None
            if before and before.keys() != slot.keys():
                raise FuncgaError(
                    f"the state has {', '.join(before)}, and after a step of "
                    f"{type(optimizer).__name__} {', '.join(slot)}: it is the state of another "
                    "optimizer, or of other options. Begin with state = tx.init(params)."
                )
        return after

    def _writes_to_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a step may; of torch's own only SGD does, with nesterov in its foreach form."""
        is_sgd = self.optimizer is torch.optim.SGD
        return not self.is_stock or (
            is_sgd and any(group["nesterov"] for group in optimizer.param_groups)
        )


# The scheduler that a call leaves for the next one, which takes it, so that no other thread has it;
# with the options that it began with, and its count of steps.
_SCHEDULERS: WeakKeyDictionary[_Update, Any] = WeakKeyDictionary()


class _OnlyOptions(Optimizer):
    """An optimizer whose steps do nothing."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Does nothing."""


def options_of(optimizer: Optimizer) -> list[Group]:
    """The options of each group, without what schedulers add to them."""
    return [{name: group[name] for name in optimizer.defaults} for group in optimizer.param_groups]


def _at(options: Group, count: int, weight: Any) -> Group:
    """The options, where functions are what they return at this count and this weight."""
    result = {**options}
    for name, value in options.items():
        if callable(value):
            is_known = weight is not None and takes_weight(value)
            result[name] = value(count, weight=float(weight)) if is_known else value(count)
    return result


def _subtract(tensors: list[Any], before: list[Any], grads: list[Any]) -> None:
    """Makes the updates of the parameters after a step, in their memory."""
    if tensors:
        torch._foreach_sub_(local_tensors(tensors), local_tensors(before))
    for tensor, grad in zip(tensors, grads, strict=True):
        if grad is None:
            tensor.zero_()  # an infinite parameter less itself is NaN


def _laid(value: Any, like: torch.Tensor) -> Any:
    """The value, if a tensor of another one's shape, in its strides: a step may run through the
    memory of both.
    """
    is_laid = type(value) is torch.Tensor and value.stride() == like.stride()
    if is_laid or not isinstance(value, torch.Tensor):
        return value
    return arrays.with_strides_of(value, like)


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
    kept = [name for name in before if before[name] != after.get(name)]
    # The address of what has no elements is 0.
    if storages(tensors) & storages([*optimizer.state.values()]) - {0}:
        kept.append("the memory of a parameter itself")
    if kept:
        raise FuncgaError(
            f"{type(optimizer).__name__} is no pure update: beside the state of each parameter "
            f"a step keeps {', '.join(kept)}, which a pure update would lose. Keep "
            "optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads)."
        )
    for tensor in tensors:
        tensor.requires_grad_(False)


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
    update: _Update = tx.update  # type: ignore[assignment]
    leaves = trees.flatten(params)[0]
    return options_of(update.build(params, leaves, int(state.count) - 1, state.weight))


def clip_grad_norm(
    max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> DonatingTransform:
    """Returns a transform that clips the gradients to a maximum norm, taken over all of them.

    The result is bitwise identical to that of `torch.nn.utils.clip_grad_norm_`, which runs on
    copies. A gradient that is None stays None.

    `state.norm` is the norm before clipping, as `clip_grad_norm_` returns it: a 0-d tensor, NaN
    before the first update. It is not read from the device, unless error_if_nonfinite.

    Args:
        max_norm: The maximum norm.
        norm_type: The order of the norm, a number or "inf".
        error_if_nonfinite: Whether to wait for the norm and raise torch's RuntimeError if it is
            infinite or NaN.

    Returns:
        The transform.

    Raises:
        FuncgaError: If max_norm is negative, or norm_type is not a number. The functions raise it
            for anything that is not a dense gradient.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([30.0, 40.0])}
        >>> tx = torch_backend.clip_grad_norm(1.0)
        >>> updates, state = tx.update(grads, tx.init(params))
        >>> updates
        {'w': tensor([0.6000, 0.8000])}
        >>> state.norm
        tensor(50.)
    """
    clip = partial(
        utils.clip_grad_norm_, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
    )
    return _clipping(clip, "max_norm", max_norm)


def clip_grad_value(clip_value: float) -> DonatingTransform:
    """Returns a transform that clips each element of the gradients to [-clip_value, clip_value].

    The result is bitwise identical to that of `torch.nn.utils.clip_grad_value_`, which runs on
    copies. A gradient that is None stays None. The state is `()`.

    Args:
        clip_value: The maximum absolute value.

    Returns:
        The transform.

    Raises:
        FuncgaError: If clip_value is negative. The functions raise it for anything that is not a
            dense gradient.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([0.1, -3.0])}
        >>> tx = torch_backend.clip_grad_value(0.5)
        >>> updates, state = tx.update(grads, tx.init(params))
        >>> updates
        {'w': tensor([ 0.1000, -0.5000])}
    """
    return _clipping(utils.clip_grad_value_, "clip_value", clip_value)


def _clipping(clip: TreeFn, name: str, limit: float) -> DonatingTransform:
    """The transform of a function that clips the `.grad`s of tensors in place to a limit."""
    if not limit >= 0:  # as NaN is not
        raise FuncgaError(f"{name} is {limit!r}, and must be a number, at least 0: {name}=1.0.")
    functions = _Clipping(partial(clip, **{name: limit}))
    return DonatingTransform(functions.init, functions)


@dataclass(frozen=True)
class _Clipping(UpdateFunction[Any]):
    """The functions of a transform that clips; calling it is `update`."""

    clip: TreeFn

    def init(self, params: Tree) -> Tree:
        """The state before the first update: that of one number for each parameter, made NaN."""
        leaves = trees.flatten(params)[0]
        ones = [None if leaf is None else leaf.detach().new_ones(()) for leaf in leaves]
        _, state = self.stepped(True, None, ones, (), None, {})
        return pytree.tree_map_only(torch.Tensor, lambda norm: norm.fill_(torch.nan), state)

    def stepped(
        self,
        owned: bool,
        into: bool | None,
        grads: Tree,
        state: Any,
        params: Tree,
        extra: Kwargs,
    ) -> tuple[Tree, Tree]:
        """The clipped gradients, in their own memory if they are `owned`, and the new state."""
        check_not_differentiated("clipping", grads)
        leaves, structure = trees.flatten(grads)
        detached = trees.detached_leaves(leaves)
        clipped = arrays.without_overlap(detached) if owned else copies(detached)
        # Torch reads nothing of a parameter but its `.grad`.
        norm = self.clip([SimpleNamespace(grad=grad) for grad in clipped])
        if norm is not None:
            # The norm of shards is a sum over them that is still to be done. Nothing here makes
            # the host wait for a device.
            whole = norm.full_tensor() if is_dtensor(norm) else norm
            state = ClipNormState(whole.to(torch.promote_types(whole.dtype, torch.float32)))
        updates = trees.unflatten(structure, clipped)
        return updates if into is None else added(params, updates, state, into), state


def check_not_differentiated(name: str, tree: Tree) -> None:
    """Raises FuncgaError if these are differentiated from outside: the result of `name` has no
    derivative.
    """
    is_tracked = lambda leaf: isinstance(leaf, torch.Tensor) and leaf.requires_grad
    if arrays.in_transform() and any(map(is_tracked, trees.flatten(tree)[0])):
        raise FuncgaError(
            f"{name} is used inside of a loss that is being differentiated, and its updates carry "
            "no derivative. Write the update as a function of tensors, such as `p - lr * g`. If it "
            "is a constant for that loss, compute it under torch.no_grad()."
        )


def copies(values: Sequence[Any]) -> list[Any]:
    """Copies in memory of their own; on a device one kernel copies many tensors."""
    copied, by_device = [], defaultdict[torch.device, list[Any]](list)
    for value in values:
        is_plain = type(value) is torch.Tensor
        # A DTensor of FSDP may lie inside of other memory, which torch cannot copy deeply.
        copy = torch.clone if is_dtensor(value) else deepcopy
        copied.append(torch.empty_like(value) if is_plain else copy(value))
        if is_plain:
            by_device[value.device].append((copied[-1], value))
    for pairs in by_device.values():
        new, old = zip(*pairs, strict=True)
        torch._foreach_copy_(new, old)
    return copied
