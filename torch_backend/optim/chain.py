"""Transforms in a chain: each is given what the one before it made of the gradients.

Only torch has this file: optax has optax.chain.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcga._transform.transform import DonatingTransform, Transform, is_scaled, read_transform
from funcga.errors import FuncgaError
from torch_backend import trees


def chain(*transforms: Any) -> DonatingTransform:
    """The transform that applies these, one after the other, as optax.chain does; its state is the tuple of theirs.

    transforms: those of torch_backend, pairs (init, update), or other chains. Extra arguments are given to each that
        has parameters for them.

    What one hands to the next is not kept, so that the next may work in its memory: nothing is copied twice. Raises
    FuncgaError for what is no transform, and for a state that is not of as many.

    >>> adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=1e-3)
    >>> tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw)
    >>> updates, state = tx.update(grads, tx.init(params), params)
    """
    links = [_Link(read_transform(tx, f"transforms[{i}]")) for i, tx in enumerate(transforms)]
    for i, link in enumerate(links):
        if type(link.tx).__module__.split(".")[0] == "optax":
            raise FuncgaError(
                f"transforms[{i}] is one of optax, which takes JAX's arrays. Let it run on tensors: "
                f"torch_backend.chain(torch_backend.from_optax(tx), ...)."
            )
    for i, link in enumerate(links[1:], 1):
        if is_scaled(link.tx):
            raise FuncgaError(
                f"transforms[{i}] is a loss_scaled, and those before it would see gradients that are scaled: clipping "
                f"would leave next to nothing of them. Put it around: "
                f"funcga.loss_scaled(torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw))."
            )
    if not links:
        raise FuncgaError("chain() was given no transform. Write chain(torch_backend.clip_grad_norm(1.0), tx).")

    functions = _Functions(tuple(links))
    return DonatingTransform(functions.init, functions.update, functions.donated)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Functions:
    """The functions of the transform."""

    links: tuple["_Link", ...]

    @property
    def scales(self) -> bool:
        """Whether the gradients come multiplied by a loss scale."""
        return is_scaled(self.links[0].tx)

    def init(self, params: Any) -> tuple[Any, ...]:
        """The state before the first update."""
        return tuple([link.tx.init(params) for link in self.links])

    def update(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """What the last link makes of the gradients, and the states of all."""
        return _through(self.links, grads, state, params, extra, owned=False)

    def donated(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """The same, which may write to the gradients and the state."""
        return _through(self.links, grads, state, params, extra, owned=True)


@dataclass(frozen=True)
class _Link:
    tx: Transform

    @property
    def donated(self) -> Callable[..., Any] | None:
        """Its function that may write to what it is given, if it has one."""
        return getattr(self.tx, "donated", None)

    @property
    def owns(self) -> bool:
        """Whether nobody else has the memory of what it returns; others may return what they were given or keep it."""
        functions = getattr(self.tx.update, "__self__", None)
        chained = functions.links[-1].owns if isinstance(functions, _Functions) else True
        return self.donated is not None and chained

    def known(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Of extra arguments, those that it has parameters for."""
        if not extra:
            return extra
        parameters = inspect.signature(self.tx.update).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return extra
        return {name: value for name, value in extra.items() if name in {p.name for p in parameters}}


def _through(links: tuple[_Link, ...], grads: Any, state: Any, params: Any, extra: dict[str, Any], owned: bool) -> Any:
    if not isinstance(state, tuple) or len(state) != len(links):
        raise FuncgaError(
            f"state is not the tuple of {len(links)} that this chain has: state = tx.init(params); "
            f"updates, state = tx.update(grads, state, params)."
        )
    states, owned_state = [], owned
    for link, before in zip(links, state, strict=True):
        writes = owned and (owned_state or not trees.flatten(before)[0])
        function = link.donated if writes and link.donated is not None else link.tx.update
        grads, after = function(grads, before, params, **link.known(extra))
        states.append(after)
        owned = link.owns
    return grads, tuple(states)
