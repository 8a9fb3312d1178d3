"""The tool that makes torch's optimizers pure functions, and clips before them.

    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)
    tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)

Nothing here accumulates: a transform takes gradients, wherever they come from. `from_optimizer` is
in this file, the state in `state.py`, options and schedulers in `options.py`, the torch optimizer
that takes the steps in `built.py`, chains and clipping in `chain.py`. It stands on the
trees of `torch_backend` and on the transforms of `funcga`, and nothing stands on it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer

from funcga._transform import DonatingTransform, Traits, UpdateFunction, takes_weight
from funcga._types import Tree
from funcga.errors import FuncgaError, check_callable
from torch_backend import trees
from torch_backend.arrays import all_with_strides_of, copies, without_overlap
from torch_backend.dtensor import local_tensors
from torch_backend.modules.checks import check_not_differentiated
from torch_backend.optim.built import Builder
from torch_backend.optim.chain import ClipNormState
from torch_backend.optim.options import (
    Options,
    Schedule,
    check_names,
    check_scheduler,
    check_unchanged,
    unowned,
)
from torch_backend.optim.state import (
    Number,
    OptimizerState,
    Slot,
    UpdateArguments,
    from_slots,
    initial_state,
    on_tensors,
    to_slot,
    without_grads,
)
from torch_backend.parameters import check_parameters

# For torch.load with weights_only=True.
torch.serialization.add_safe_globals([ClipNormState, Number, OptimizerState])


def from_optimizer(
    optimizer: type[Optimizer],
    *,
    groups: Callable[[str], Mapping[str, object]] | None = None,
    scheduler: Callable[[Optimizer], object] | None = None,
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
    dense gradients, are not supported: call their own step. Extra arguments other than `closure`
    are ignored, as they may be meant for other transforms of a chain.

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
        FuncgaError: If the optimizer does not have an option. The functions raise it if structures,
            shapes or dtypes differ, if the state is that of another optimizer, and if the optimizer
            keeps state that belongs to no parameter.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
        >>> tx = torch_backend.from_optimizer(torch.optim.SGD, lr=0.5)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(grads, state, params)
        >>> torch_backend.apply_updates(params, updates)
        {'w': tensor([0.5000, 0.5000])}
    """
    _check(optimizer, groups, scheduler, options)
    schedule = None if scheduler is None else Schedule(scheduler)
    functions = _Update(Options(optimizer, options, groups, schedule))
    return DonatingTransform(functions.init, functions, functions.donated)


def _check(
    optimizer: type[Optimizer],
    groups: object,
    scheduler: Callable[..., object] | None,
    options: dict[str, object],
) -> None:
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise FuncgaError(
            "from_optimizer makes the optimizer anew for each update, so it takes a class and its "
            f"options, and was given {optimizer!r}. Write from_optimizer(torch.optim.AdamW, "
            "lr=1e-3)."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise _evaluates_again(f"{optimizer.__name__} evaluates the loss itself")
    if issubclass(optimizer, torch.optim.SparseAdam):
        raise FuncgaError(
            "SparseAdam takes sparse gradients alone, and what funcga sums, in accumulate, stream "
            "and multi_steps, is dense. Use torch.optim.Adam; or call the step of SparseAdam, with "
            "the sparse gradients of a .backward()."
        )
    check_names(optimizer, options)
    if options.get("differentiable"):
        raise FuncgaError(
            "differentiable=True steps through autograd, and an update is computed on a copy, "
            "without it. Leave it out."
        )
    if groups is not None:
        check_callable(
            groups, "groups", 'lambda name: {"weight_decay": 0.0} if name.endswith("bias") else {}.'
        )
    if scheduler is not None:
        step_size = "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30)."
        check_callable(scheduler, "scheduler", step_size)
        check_scheduler(scheduler)
        if callable(options.get("lr")):
            raise FuncgaError(
                "lr is a function of the count of updates, and scheduler sets lr, too. Give one of "
                "the two: a number for lr, or no scheduler."
            )


def _evaluates_again(found: str) -> FuncgaError:
    return FuncgaError(
        f"{found}, and a transform is given the gradients of one place. Call the optimizer itself, "
        "optimizer.step(closure), with a closure that assigns what accumulate returns."
    )


@dataclass(frozen=True, eq=False)
class _Update(UpdateFunction):
    """The functions of the transform; calling it is `update`."""

    options: Options

    @cached_property
    def builder(self) -> Builder:
        """What builds the optimizer of each step."""
        return Builder(self.options, keeps=self.is_stock)

    def __reduce__(self) -> Any:
        """How it is pickled: what is kept between calls can be worked out again."""
        return type(self), (self.options,)

    @property
    def traits(self) -> Traits:
        """Its traits."""
        # What groups(name) returns is not known here.
        functions = filter(callable, self.options.options.values())
        takes = self.options.groups is not None or any(map(takes_weight, functions))
        return Traits(takes_weight=takes)

    @cached_property
    def is_stock(self) -> bool:
        """Whether the optimizer is one of torch.optim. These write only to parameters and state,
        and SGD to gradients; others are checked at every step.
        """
        return self.options.optimizer.__module__.startswith("torch.optim.")

    @torch.no_grad()
    def init(self, params: Tree) -> OptimizerState:
        """The state before the first update."""
        check_not_differentiated("an optimizer of torch", params)
        leaves = trees.flatten(params)[0]
        check_parameters(leaves, params)
        tensors = [leaf.detach() for leaf in leaves if leaf is not None]
        if not tensors:
            return initial_state(params, [{} for _ in leaves], False)
        optimizer, _, functions = self.options.build(tensors, params, 0, 1.0)
        slots = {
            id(tensor): self._zeros(tensor, group)
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        of_tensors = iter([slots[id(tensor)] for tensor in tensors])
        return initial_state(
            params,
            [{} if leaf is None else next(of_tensors) for leaf in leaves],
            any(map(takes_weight, functions)),
        )

    def _zeros(self, tensor: torch.Tensor, group: dict[str, Any]) -> Slot:
        """The initial slot of a tensor: zeros like those that a step on a copy of it leaves."""
        # Only one copy is there at a time. Gradients of zeros leave zeros in momenta and averages,
        # and any other state is set to zeros.
        copy = tensor.clone().requires_grad_()
        copy.grad = torch.zeros_like(copy)
        optimizer = self.options.build_alone(copy, group)
        self._take_step(optimizer)
        zeros: Slot = on_tensors(torch.zeros_like, self._slot(optimizer, copy))
        return zeros

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
        if "closure" in extra:
            raise _evaluates_again("closure= was given")
        arguments = UpdateArguments(grads, state, params)
        with torch.no_grad():
            parameters = [parameter.detach() for parameter in arguments.parameters]
            # Only parameters that are given away are written to. Tied ones become two: each has a
            # step and a state.
            tensors = without_overlap(parameters) if into else copies(parameters)
            after = self._step(arguments, tensors, extra.get("weight"), owned)
            results = arguments.differences(tensors) if into is None else without_grads(tensors)
            return arguments.tree(results), after

    def _step(
        self, arguments: UpdateArguments, copies: list[torch.Tensor], weight: object, owned: bool
    ) -> OptimizerState:
        """The state after a step of the optimizer on copies of the parameters.

        If the state is `owned`, the result reuses its memory, and the gradients may be written to.
        """
        if not copies:
            return arguments.state_after([], [], owned, weight)
        with self.builder.built(copies, arguments, weight) as optimizer:
            grads = self._gradients(optimizer, arguments, copies, owned)
            # A slot is used from its parameter's first update on.
            in_use = [
                slot if started else {}
                for slot, started in zip(arguments.slots, arguments.started, strict=True)
            ]
            slots = from_slots(in_use, owned, copies)
            for copy, grad, slot in zip(copies, grads, slots, strict=True):
                copy.grad = grad
                copy.requires_grad_(not self.is_stock)  # optimizers of others may ask for it
                if slot:
                    optimizer.state[copy] = slot
            try:
                self._take_step(optimizer)
            except KeyError as error:
                arguments.check_keys([error.args] * len(slots), type(optimizer).__name__)
                raise
            # What it has changed is read from the copies and its state.
            slots = [self._slot(optimizer, copy) for copy in copies]
        # A key that a step adds to a slot in use was missing there: it is another optimizer's.
        if self.is_stock:
            arguments.check_keys(slots, type(optimizer).__name__)
        return arguments.state_after(copies, slots, owned, weight)

    def _take_step(self, optimizer: Optimizer) -> None:
        """Takes a step. Raises FuncgaError if it changes anything that is not in the state."""
        if self.is_stock:
            optimizer.step()
            return
        before = unowned(optimizer)
        optimizer.step()
        check_unchanged(before, optimizer)

    def _gradients(
        self,
        optimizer: Optimizer,
        arguments: UpdateArguments,
        copies: list[torch.Tensor],
        owned: bool,
    ) -> list[torch.Tensor | None]:
        """The gradients with the strides of the copies, in memory that the step may write to."""
        grads = arguments.grads
        strided = all_with_strides_of(grads, copies)
        if self.is_stock and not _writes_to_gradients(optimizer):
            return strided
        if owned:
            return without_overlap(strided)
        # The caller still has these gradients, so they are copied. Those in other strides are
        # copies already.
        for index, grad in enumerate(grads):
            if strided[index] is grad and grad is not None:
                strided[index] = grad.clone()
        return strided

    def _slot(self, optimizer: Optimizer, copy: torch.Tensor) -> Slot:
        """What the optimizer keeps for a parameter."""
        slot = to_slot(optimizer.state.get(copy, {}))
        if self.is_stock:
            return slot
        for name, kept in slot.items():
            if isinstance(kept, torch.Tensor) and _address(kept) == _address(copy) != 0:
                raise FuncgaError(
                    f"{type(optimizer).__name__} keeps the memory of the parameter itself as "
                    f"`{name}`, which a pure update cannot follow. Keep optimizer.step() and give "
                    "it gradients: torch_backend.assign_grads(params, grads)."
                )
        return slot


def _writes_to_gradients(optimizer: Optimizer) -> bool:
    """Whether the step of a torch optimizer may write to the gradients: only that of SGD with
    nesterov does, in its foreach form.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["nesterov"] for group in optimizer.param_groups
    )


def _address(tensor: torch.Tensor) -> int:
    return int(local_tensors([tensor])[0].untyped_storage().data_ptr())
