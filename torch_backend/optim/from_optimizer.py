"""Optimizers of torch as pure functions.

Only torch has this file: an optimizer of optax is a pair of pure functions already.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from funcga._transform.transform import DonatingTransform
from funcga.errors import FuncgaError
from torch_backend import trees
from torch_backend.dtensor import locals_of
from torch_backend.modules.checks import check_not_differentiated
from torch_backend.optim.closures import constant, evaluating, needs_closure
from torch_backend.optim.match import check_parameters
from torch_backend.optim.options import Options, beside, check_kept, check_names, names_of
from torch_backend.optim.schedules import Schedule
from torch_backend.optim.slots import from_slot, mapped, to_slot
from torch_backend.optim.state import Given, OptimizerState, fresh
from torch_backend.strides import apart, laid_as


def from_optimizer(
    optimizer: type[Optimizer],
    *,
    groups: Callable[[str], dict[str, Any]] | None = None,
    scheduler: Callable[[Optimizer], Any] | None = None,
    **options: Any,
) -> DonatingTransform:
    """`(init, update)`, both pure, of an optimizer of torch: what its step would add to the parameters.

    optimizer: a class, any of torch.optim or one's own, which keeps what it keeps for each parameter in `.state`.
    options: the optimizer's own: lr, betas, fused, foreach, maximize ... One that is a function is a schedule of the
        count of updates, from 0 on: `lr=lambda count: 1e-3 * 0.9**count`.
    groups: `groups(name)` is a dict of the options that one parameter has for itself; {} for none. Names are the keys
        of the tree, joined by dots: those of `module.named_parameters()`.
    scheduler: makes a scheduler of torch.optim.lr_scheduler, which is stepped once an update:
        `functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=100)`.

    `init(params)` is an OptimizerState. `update(grads, state, params)` is `(updates, state)`: new parameters minus old
    ones, in the dtype of both, by the optimizer's own step on a copy, so that the state is bit for bit that of
    `optimizer.step()`. A parameter whose gradient is None is skipped, as torch does, and its update is 0. `donated` is
    the same, in the memory of the state it is given, and it may write to the gradients.

    `update(..., closure=f)`: `f(params) -> (loss, grads)`, pure, for optimizers that evaluate the loss themselves: for
    LBFGS with max_iter=1 and no line search the gradients are enough. Other extra arguments are ignored, as they may be
    meant for other transforms of a chain.

    The state is complete from init on, so a checkpoint can be restored into it: one step on a copy of each parameter by
    itself finds what the optimizer keeps. What it does not keep in such a step appears with the first update, as for
    SparseAdam, which takes no dense gradients, and LBFGS.

    Raises FuncgaError for options that the optimizer does not have, structures, shapes and dtypes that differ, a state
    without what the optimizer keeps, as another one's, and optimizers that keep what belongs to no parameter.

    >>> tx = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(grads, state, params)
    >>> params = torch_backend.apply_updates(params, updates)
    """
    _check(optimizer, groups, scheduler, options)
    schedule = None if scheduler is None else Schedule(scheduler)
    made = Options(optimizer, options, groups, schedule, needs_closure(optimizer))
    functions = _Functions(made, optimizer.__module__.startswith("torch.optim."))
    return DonatingTransform(functions.init, functions.update, functions.donated)  # type: ignore[no-any-return]


def _check(optimizer: Any, groups: Any, scheduler: Any, options: dict[str, Any]) -> None:
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise FuncgaError(
            f"from_optimizer makes the optimizer anew for each update, so it takes a class and its options, and was "
            f"given {optimizer!r}. Write from_optimizer(torch.optim.AdamW, lr=1e-3)."
        )
    check_names(optimizer, options)
    if options.get("differentiable"):
        raise FuncgaError(
            "differentiable=True steps through autograd, and an update is computed on a copy, without it. Leave it out."
        )
    for name, value, example in (
        ("groups", groups, 'lambda name: {"weight_decay": 0.0} if name.endswith("bias") else {}'),
        ("scheduler", scheduler, "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30)"),
    ):
        if value is not None and not callable(value):
            raise FuncgaError(f"{name} is {value!r}, and must be a function: {name}={example}.")
    if scheduler is not None and callable(options.get("lr")):
        raise FuncgaError(
            "lr is a function of the count of updates, and scheduler sets lr, too. Give one of the two: a number for "
            "lr, or no scheduler."
        )


@dataclass(frozen=True)
class _Functions:
    """The functions of the transform."""

    options: Options
    stock: bool  # of torch's own, of which it is known what they write to

    @torch.no_grad()
    def init(self, params: Any) -> OptimizerState:
        """The state before the first update."""
        check_not_differentiated("an optimizer of torch", params)
        leaves, _ = trees.flatten(params)
        check_parameters(leaves, params)
        tensors = [leaf.detach() for leaf in leaves if leaf is not None]
        names = [name for name, leaf in zip(names_of(params), leaves, strict=True) if leaf is not None]
        found = map(self._found, tensors, self.options.alone(tensors, names))
        return fresh(params, [{} if leaf is None else next(found) for leaf in leaves])

    def _found(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], Optimizer]) -> dict[str, Any]:
        """Zeros for what the optimizer keeps for a parameter, as one step on a copy shows."""
        copy = tensor.clone()
        copy.grad = torch.zeros_like(copy)
        optimizer = make(copy.requires_grad_())
        before = beside(optimizer)
        try:
            _step(optimizer, constant(optimizer) if self.options.needs_closure else None)
        except (FuncgaError, RuntimeError):
            return {}  # SparseAdam takes no dense gradients, and LBFGS may ask for a function of the parameters
        check_kept(optimizer, before)
        return {key: mapped(torch.zeros_like, slot) for key, slot in self._kept(optimizer, copy).items()}

    def update(self, grads: Any, state: Any, params: Any = None, *, closure: Any = None, **extra: Any) -> Any:
        """What the step adds to the parameters, and the state after it."""
        check_not_differentiated("an optimizer of torch", (grads, params))
        return self._updated(Given(grads, state, params), closure, owned=False)

    def donated(self, grads: Any, state: Any, params: Any = None, *, closure: Any = None, **extra: Any) -> Any:
        """The same in the memory of the state; the gradients may be written to."""
        check_not_differentiated("an optimizer of torch", (grads, params))
        return self._updated(Given(grads, state, params), closure, owned=True)

    @torch.no_grad()
    def _updated(self, given: Given, closure: Any, owned: bool) -> tuple[Any, OptimizerState]:
        if not given.leaves:
            return given.result([], [], owned)
        copies = [leaf.clone().requires_grad_() for leaf in given.leaves]
        names = given.of(names_of(given.params)) if self.options.groups else []
        optimizer = self.options.build(copies, names, given.count)
        if isinstance(optimizer, torch.optim.SparseAdam):
            _check_sparse(given)
        closure = self._closure(optimizer, closure, given, copies)
        for copy, grad in zip(copies, self._gradients(optimizer, given, copies, owned), strict=True):
            copy.grad = grad
        for copy, slot, started in zip(copies, given.slots, given.started, strict=True):
            if started and slot:
                optimizer.state[copy] = from_slot(slot, owned, copy)
        before = beside(optimizer)
        _step_from(given, optimizer, closure)
        check_kept(optimizer, before)
        slots = [self._kept(optimizer, copy) for copy in copies]
        if self.stock and not self.options.needs_closure:  # LBFGS keeps more with its second update, and others do not
            given.check_keys(slots, type(optimizer).__name__)
        return given.result(copies, slots, owned)

    def _gradients(self, optimizer: Optimizer, given: Given, copies: list[Any], owned: bool) -> list[Any]:
        """The gradients, in the strides of the copies and in memory that the step may write to."""
        pairs = list(zip(given.grads, copies, strict=True))
        laid = [None if grad is None else laid_as(grad, copy) for grad, copy in pairs]
        if self.stock and not _writes(optimizer):
            return laid
        if owned:
            return apart(laid)
        return [
            new if new is None or new is not old else new.clone() for new, old in zip(laid, given.grads, strict=True)
        ]

    def _closure(self, optimizer: Optimizer, closure: Any, given: Given, copies: list[Any]) -> Any:
        if closure is not None:
            return evaluating(closure, given.params, given.tree, copies)
        return constant(optimizer) if self.options.needs_closure else None

    def _kept(self, optimizer: Optimizer, copy: torch.Tensor) -> dict[str, Any]:
        """What the optimizer keeps for a parameter."""
        slot: dict[str, Any] = to_slot(optimizer.state.get(copy, {}))
        if not self.stock:
            for name, kept in slot.items():
                mapped(partial(_check_alias, copy, name, type(optimizer).__name__), kept)
        return slot


def _writes(optimizer: Optimizer) -> bool:
    """Whether the step of one of torch's own may write to the gradients, as SGD alone does, in its foreach form."""
    return isinstance(optimizer, torch.optim.SGD) and any(group["nesterov"] for group in optimizer.param_groups)


def _step_from(given: Given, optimizer: Optimizer, closure: Any) -> None:
    try:
        _step(optimizer, closure)
    except KeyError as error:
        if closure is None:  # whose own it might be
            given.check_key(error.args[0], type(optimizer).__name__)
        raise


def _check_sparse(given: Given) -> None:
    if any(grad is not None and grad.layout is torch.strided for grad in given.grads):
        raise FuncgaError(
            "SparseAdam takes sparse gradients alone, and was given a dense one: what funcga sums, in accumulate, "
            "stream and multi_steps, is dense. Use torch.optim.Adam; or give it the sparse gradients of a .backward()."
        )


def _step(optimizer: Optimizer, closure: Any) -> None:
    if closure is None:
        optimizer.step()
    else:
        optimizer.step(closure)


def _check_alias(copy: torch.Tensor, name: str, optimizer: str, kept: torch.Tensor) -> torch.Tensor:
    if _memory(kept) == _memory(copy) != 0:
        raise FuncgaError(
            f"{optimizer} keeps the memory of the parameter itself as `{name}`, which a pure update cannot follow. "
            f"Keep optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads)."
        )
    return kept


def _memory(tensor: torch.Tensor) -> int:
    return int(locals_of([tensor])[0].untyped_storage().data_ptr())
