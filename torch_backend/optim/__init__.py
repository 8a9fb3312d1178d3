"""The tool that makes torch's optimizers pure functions, and clips before them.

    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)
    tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)

Nothing here folds: a transform takes gradients, wherever they come from. `from_optimizer` is in
this file, what a state holds in `state.py`, options, schedules and schedulers in `options.py`, the
optimizer that takes the steps in `built.py`, chains and clipping in `chain.py`. It stands on the
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
    """Makes an optimizer of torch a transform: two pure functions, `(init, update)`.

    `init(params)` is an OptimizerState. `update(grads, state, params)` is `(updates, state)`: new
    parameters minus old ones, in the dtype of both, by the optimizer's own step on a copy, so that
    the state is bitwise identical to that of `optimizer.step()`. A parameter whose gradient is None
    is skipped, as torch does, and its update is 0. `donated` is the same, in the memory of the
    state it is given, and it may write to the gradients. With `funcga.transforms.apply` the new
    parameters come back instead of the difference, and are bitwise identical to those of
    `optimizer.step()`, too.

    Refused are optimizers that evaluate the loss themselves, such as LBFGS, and SparseAdam, which
    takes no dense gradients: call their own step. Other extra arguments than `closure` are ignored,
    as they may be meant for other transforms of a chain.

    The state is complete from init on, so a checkpoint can be restored into it: one step on a copy
    of each parameter by itself finds what the optimizer keeps.

    Args:
        optimizer: A class, any of torch.optim or one's own, which keeps what it keeps for each
            parameter in `.state`.
        groups: `groups(name)` is a dict of the options that one parameter has for itself; {} for
            none. Names are the keys of the tree, joined by dots: those of
            `module.named_parameters()`.
        scheduler: Makes a scheduler of torch.optim.lr_scheduler, which is stepped once an update,
            such as `functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2,
            total_steps=100)`.
        **options: The optimizer's own: lr, betas, fused, foreach, maximize ... One that is a
            function is a schedule of the count of updates, from 0 on: `lr=lambda count: 1e-3 *
            0.9**count`. With a second parameter named weight it gets the weight of the window, too,
            such as its tokens: `betas=lambda count, weight: (0.9, beta_for_half_life(weight,
            10_000_000))`, with `funcga.transforms.beta_for_half_life`. multi_steps gives its total;
            else it is an argument, `tx.update(grads, state, params, weight=tokens)`, a number or a
            0-d tensor, for which the host waits if it lies on a device. init calls such functions
            with a weight of 1.

    Returns:
        The transform.

    Raises:
        FuncgaError: The optimizer does not have an option. The functions raise it for structures,
            shapes and dtypes that differ, for a state without what the optimizer keeps, such as
            another one's, and for optimizers that keep what belongs to no parameter.

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
    """The `update` of the transform, and its other functions."""

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
        """What it says of itself: the optimizers of torch copy what they keep of the gradients."""
        # What groups(name) returns is not known here.
        functions = filter(callable, self.options.options.values())
        takes = self.options.groups is not None or any(map(takes_weight, functions))
        return Traits(leaves_gradients=self.is_stock, takes_weight=takes)

    @cached_property
    def is_stock(self) -> bool:
        """Whether the optimizer is torch's own. These write to nothing but parameters and state,
        and SGD to gradients; those of others are checked at every step.
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
        """Zeros for what the optimizer keeps for a tensor, as a step on a copy of it shows."""
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
        """What the step adds to the parameters, or these after it, and the state."""
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
        """The state after a step that the optimizer takes on copies of the parameters.

        If the state is `owned`, it lies in its memory, and the gradients may be written to.
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
        """Has the optimizer step. Raises FuncgaError if that changes what no state would hold."""
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
        """The gradients, in the strides of the copies and in memory that the step may write to."""
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
    """Whether the step of one of torch's own may write to the gradients, as SGD alone does, in
    its foreach form.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["nesterov"] for group in optimizer.param_groups
    )


def _address(tensor: torch.Tensor) -> int:
    return int(local_tensors([tensor])[0].untyped_storage().data_ptr())
