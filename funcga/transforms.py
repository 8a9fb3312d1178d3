"""A transform: an optimizer as two pure functions, as optax has it."""

from collections.abc import Callable
from typing import Any, NamedTuple

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


def read_transform(tx: Any, name: str = "tx") -> Transform:
    """What can be used as a transform, as one: any object with init and update, or a pair of functions.

    Raises FuncgaError for what is none.
    """
    if not hasattr(tx, "init") and type(tx) is tuple and len(tx) == 2 and all(map(callable, tx)):
        return Transform(*tx)
    if isinstance(tx, type) or not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise FuncgaError(_no_transform(tx, name))
    return tx  # type: ignore[no-any-return]


def _no_transform(tx: Any, name: str) -> str:
    kind = tx if isinstance(tx, type) else type(tx)
    if any(base.__module__ == "torch.optim.optimizer" for base in kind.__mro__):
        return (
            f"{name} is {'the class' if tx is kind else 'a'} {kind.__name__}, whose step() changes parameters in place. "
            f"Make it a pair of pure functions: torch_backend.from_optimizer(torch.optim.{kind.__name__}, lr=1e-3); or "
            f"keep optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads)."
        )
    hint = " Call it first: it seems to be what makes a transform." if callable(tx) else ""
    return (
        f"{name} is {tx!r}, which has no functions init and update.{hint} Pass a transform, such as optax.adamw(1e-3) or "
        f"torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3), or a pair (init, update)."
    )
