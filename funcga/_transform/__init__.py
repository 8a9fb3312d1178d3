"""A transform: an optimizer as two pure functions, as optax has it."""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from funcga._types import Tree


class Transform(NamedTuple):
    """An optimizer as two pure functions.

    `params` is a tree of arrays; grads and updates are trees of the same structure and shapes. The
    updates are to be added to params. A state is a tree of arrays, too.

    Attributes:
        init: `init(params) -> state`.
        update: `update(grads, state, params, **extra) -> (updates, state)`.

    Example:
        >>> init = lambda params: ()
        >>> scale = lambda grads: {name: -0.1 * g for name, g in grads.items()}
        >>> update = lambda grads, state, params=None: (scale(grads), state)
        >>> tx = funcga.multi_steps(funcga.transforms.Transform(init, update), 8)
        >>> tx.flush(tx.accumulate({"w": torch.ones(2)}, tx.init({"w": torch.zeros(2)})))[0]
        {'w': tensor([-0.1000, -0.1000])}
    """

    init: Callable[..., Tree]
    update: Callable[..., tuple[Tree, Any]]


class Traits(NamedTuple):
    """Properties of a transform."""

    scales: bool = False
    """Whether gradients come multiplied by a loss scale, which it divides out."""
    takes_weight: bool = False
    """Whether it takes the weight of a window, `weight=`."""


def takes_weight(function: Callable[..., object]) -> bool:
    """Whether a function has a parameter named `weight`."""
    try:
        # Not for **kwargs, which may be passed on to a function without this parameter.
        return "weight" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


class DonatingTransform(Transform):
    """A transform whose update has a variant, `update.donated`, which may write to the grads and
    the state it is given.

    What it returns may lie in their memory; the params are left as they are.
    """

    __slots__ = ()

    @property
    def donated(self) -> Callable[..., tuple[Tree, Any]]:
        """`update` of gradients and a state that are given away."""
        return self.update.donated  # type: ignore[attr-defined, no-any-return]


def read_transform(tx: Any) -> Transform:
    """The transform for any object with init and update, or a pair of functions."""
    return Transform(*tx) if type(tx) is tuple else tx


def wrapped_transform(tx: Any) -> Transform:
    """The transform to be wrapped by one of funcga's, called as optax's combinators call theirs:
    with further arguments, which a transform of optax may ignore.
    """
    read, optax = read_transform(tx), optax_if_used()
    if optax is not None and isinstance(read, optax.GradientTransformation):
        read = optax.with_extra_args_support(read)
    return read


def optax_if_used() -> Any:
    """optax, the library of transforms that users of JAX have, if JAX is imported and it is
    installed.
    """
    if sys.modules.get("jax") is None:
        return None
    try:
        return import_module("optax")
    except ModuleNotFoundError:
        return None
