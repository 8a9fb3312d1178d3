"""A transform: an optimizer as two pure functions, as optax has it."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from funcga._transform.window import MultiStepsState
from funcga.errors import FuncgaError


class Transform(NamedTuple):
    """`init(params) -> state` and `update(grads, state, params, **extra) -> (updates, state)`, both pure.

    `params` is a tree of arrays; grads and updates are trees of the same structure and shapes. What is to be added to
    params are the updates. A state is a tree of arrays, too.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]


class DonatingTransform(Transform):
    """A transform with a third function, `donated`: `update`, which may write to the grads and the state it is given.

    What it returns may lie in their memory; the params are left as they are.
    """

    donated: Callable[..., Any]

    def __new__(cls, init: Callable[..., Any], update: Callable[..., Any], donated: Callable[..., Any]) -> Any:
        """The transform of these three functions."""
        made = super().__new__(cls, init, update)
        made.donated = donated
        return made

    def __reduce__(self) -> Any:
        """How it is copied, as all three are arguments."""
        return type(self), (self.init, self.update, self.donated)


class MultiSteps(Transform):
    """What `multi_steps` returns: a transform (init, update), and the same in two halves, `accumulate` and `flush`."""

    __slots__ = ()

    def accumulate(self, grads: Any, state: MultiStepsState, *, weight: Any = 1) -> MultiStepsState:
        """The state with one more micro-batch's gradients in its window. It only adds; nothing else is touched.

        grads: as for `update`. weight: a number or a 0-d array >= 0. Raises FuncgaError as `update` does.
        """
        return _steps(self).accumulate(grads, state, weight)  # type: ignore[no-any-return]

    def flush(self, state: MultiStepsState, params: Any = None, **extra: Any) -> tuple[Any, MultiStepsState]:
        """(updates, state) of the micro-batches that are in the window, however few they are; the window is then empty.

        Raises FuncgaError if there are none. Where that is not seen, inside of jit, and with `drop`, if every one was
        dropped, the updates are zeros and no update is counted.
        """
        return _steps(self).flush(state, params, extra)  # type: ignore[no-any-return]

    def has_updated(self, state: MultiStepsState) -> Any:
        """Whether the call that returned this state was an update: a bool, or in JAX a 0-d array of one."""
        return _steps(self).has_updated(state)

    def merge(self, states: Sequence[MultiStepsState], *, replicas: int = 1) -> MultiStepsState:
        """One state of what all replicas hold, to be saved: each can go on from it, whatever their number.

        In torch each replica has a state of its own: gather them, or load what each has saved. In JAX one state has
        the parts of all devices, and goes on as it is on as many, or on a number that divides theirs; for any other
        number of devices write tx.merge([state], replicas=number), outside of shard_map. Raises FuncgaError if a
        replica's state is missing or there twice, or if they are not of one moment.

        >>> states = [None] * dist.get_world_size()
        >>> dist.all_gather_object(states, state)
        >>> torch.save(tx.merge(states), "state.pt")  # load it on every replica, then go on: tx.update(...)
        """
        return _steps(self).merge(states, replicas)  # type: ignore[no-any-return]

    @property
    def across(self) -> Any:
        """The replicas that an update merges over, as they were given."""
        return _steps(self).across


def _steps(transform: MultiSteps) -> Any:
    return transform.update.__self__  # type: ignore[attr-defined]


def is_scaled(tx: Any) -> bool:
    """Whether a transform is given gradients that are multiplied by a loss scale, which it divides them by."""
    return bool(getattr(getattr(tx.update, "__self__", None), "scales", False))


def read_transform(tx: Any, name: str = "tx") -> Transform:
    """What can be used as a transform, as one: any object with init and update, or a pair of functions.

    Raises FuncgaError for what is none.
    """
    if not hasattr(tx, "init") and type(tx) is tuple and len(tx) == 2 and all(map(callable, tx)):
        return Transform(*tx)
    if isinstance(tx, type) or not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise FuncgaError(_no_transform(tx, name))
    _check_update(tx, name)
    return tx  # type: ignore[no-any-return]


def _check_update(tx: Any, name: str) -> None:
    """Raises FuncgaError if update is seen not to take (grads, state, params)."""
    try:
        signature = inspect.signature(tx.update)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind_partial("grads", "state", "params")  # optax has some with arguments of their own
    except TypeError as error:
        inplace = ", inplace=False" if "inplace" in signature.parameters else ""
        raise FuncgaError(
            f"{name}.update is not called as update(grads, state, params): {error}. Adapt it: ({name}.init, lambda "
            f"grads, state, params: {name}.update(grads, state, params=params{inplace}))."
        ) from error


def _no_transform(tx: Any, name: str) -> str:
    kind = tx if isinstance(tx, type) else type(tx)
    if any(base.__module__ == "torch.optim.optimizer" for base in kind.__mro__):
        found = f"{'the class' if tx is kind else 'a'} {kind.__name__}"
        return (
            f"{name} is {found}, whose step() changes parameters in place. Make it a pair of pure functions: "
            f"torch_backend.from_optimizer(torch.optim.{kind.__name__}, lr=1e-3); or keep optimizer.step() and give it "
            f"gradients: torch_backend.assign_grads(params, grads)."
        )
    hint = " Call it first: it seems to be what makes a transform." if callable(tx) else ""
    return (
        f"{name} is {tx!r}, which has no functions init and update.{hint} Pass a transform, such as "
        f"optax.adamw(1e-3) or torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3), or a pair (init, update)."
    )
