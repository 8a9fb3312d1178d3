"""Transforms in a chain: each is given what the one before it made of the gradients."""

import inspect
from dataclasses import dataclass

from funcga._transform import DonatingTransform, Transform, UpdateFunction, is_scaled, read_transform
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import trees


def chain(*transforms: object) -> DonatingTransform:
    """Chains transforms: each gets what the one before it made of the gradients, as in optax.chain.

    What one hands to the next is not kept, so that the next may work in its memory: nothing is copied twice.

    Args:
        *transforms: Those of torch_backend, pairs (init, update), or other chains. Extra arguments of update are given
            to each that has parameters for them.

    Returns:
        The transform. Its state is the tuple of theirs.

    Raises:
        FuncgaError: An argument is no transform, is one of optax, or would see scaled gradients. The functions raise it
            for a state that is not of as many.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([30.0, 40.0])}
        >>> sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=1.0)
        >>> tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), sgd)
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.6000, -0.8000])}
    """
    # Pairs of functions become transforms. What is wrong with a link is said with its position.
    links = [read_transform(tx, f"transforms[{index}]") for index, tx in enumerate(transforms)]
    for index, link in enumerate(links):
        if type(link).__module__.split(".")[0] == "optax":
            raise FuncgaError(
                f"transforms[{index}] is one of optax, which takes JAX's arrays. Let it run on tensors: "
                f"torch_backend.chain(torch_backend.from_optax(tx), ...)."
            )
        if index > 0 and is_scaled(link):
            raise FuncgaError(
                f"transforms[{index}] is a loss_scaled, and those before it would see gradients that are scaled: "
                f"clipping would leave next to nothing of them. Put it around: "
                f"funcga.loss_scaled(torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw))."
            )
    if not links:
        raise FuncgaError("chain() was given no transform. Write chain(torch_backend.clip_grad_norm(1.0), tx).")
    functions = _Chain(tuple(links))
    return DonatingTransform(functions.init, functions, functions.donated)


@dataclass(frozen=True)
class _Chain(UpdateFunction):
    """The `update` of a chain, with its links and its other functions."""

    links: tuple[Transform, ...]

    @property
    def scales(self) -> bool:
        """Whether the gradients come multiplied by a loss scale."""
        return is_scaled(self.links[0])

    def init(self, params: Tree) -> tuple[Tree, ...]:
        """The state before the first update."""
        return tuple([link.init(params) for link in self.links])

    def __call__(self, grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        """What the last link makes of the gradients, and the states of all."""
        return self._through(grads, state, params, extra, owned=False)

    def donated(self, grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        """The same, which may write to the gradients and the state."""
        return self._through(grads, state, params, extra, owned=True)

    def _through(
        self, grads: Tree, state: Tree, params: Tree, extra: dict[str, object], owned: bool
    ) -> tuple[Tree, Tree]:
        if not isinstance(state, tuple) or len(state) != len(self.links):
            raise FuncgaError(
                f"state is not the tuple of {len(self.links)} that this chain has: state = tx.init(params); "
                f"updates, state = tx.update(grads, state, params)."
            )
        # The first link gets the caller's gradients, the others what nobody else looks at any more.
        states, owns_state, owns_grads = [], owned, owned
        for link, before in zip(self.links, state, strict=True):
            # A link may write to the gradients if nobody else has their memory, and it has no state that is another's.
            may_write = owns_grads and (owns_state or not trees.flatten(before)[0])
            function = link.donated if may_write and isinstance(link, DonatingTransform) else link.update
            grads, after = function(grads, before, params, **_accepted(link, extra))
            states.append(after)
            owns_grads = _returns_new_memory(link)
        return grads, tuple(states)


def _accepted(link: Transform, extra: dict[str, object]) -> dict[str, object]:
    """Of the extra arguments, those that a transform has parameters for."""
    if not extra:
        return extra
    parameters = inspect.signature(link.update).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return extra
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in extra.items() if name in names}


def _returns_new_memory(link: Transform) -> bool:
    """Whether nobody else has the memory of the gradients that it returns."""
    # Transforms of others may return their argument, or keep what they return.
    update: object = link.update
    return _returns_new_memory(update.links[-1]) if isinstance(update, _Chain) else isinstance(link, DonatingTransform)
