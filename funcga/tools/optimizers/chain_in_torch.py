"""Chains of transforms."""

import inspect
from dataclasses import dataclass
from typing import Any

from funcga._transform import DonatingTransform, Traits, Transform, read_transform
from funcga._transform.apply import UpdateFunction, traits_of, updated
from funcga._types import Kwargs, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.transforms import apart


def chain(*transforms: object) -> DonatingTransform:
    """Chains transforms: each gets the output of the one before it, as in optax.chain.

    What is passed between two of them is not kept, so where the arguments are given away, the next
    one works in its memory, and nothing is copied twice.

    Args:
        *transforms: Transforms of torch_backend, pairs (init, update), or other chains. Extra
            arguments of update are passed to those that have parameters for them.

    Returns:
        The transform. Its state is the tuple of their states.

    Raises:
        FuncgaError: If an argument is not a transform, or would get scaled gradients.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([30.0, 40.0])}
        >>> sgd = torch_backend.from_optimizer(torch.optim.SGD, lr=1.0)
        >>> tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0), sgd)
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.6000, -0.8000])}
    """
    # Pairs of functions become transforms. What is wrong with a link is said with its position.
    links = [*map(read_transform, transforms)]
    for index, link in enumerate(links[1:], 1):
        if traits_of(link).scales:
            raise FuncgaError(
                f"transforms[{index}] is a loss_scaled, and those before it would see gradients "
                "that are scaled: clipping would leave next to nothing of them. Put it around: "
                "funcga.transforms.loss_scaled(torch_backend.chain("
                "torch_backend.clip_grad_norm(1.0), adamw))."
            )
    functions = _Chain(tuple(links))
    return DonatingTransform(functions.init, functions)


@dataclass(frozen=True)
class _Chain(UpdateFunction[Any]):
    """The functions of a chain; calling it is `update`."""

    links: tuple[Transform, ...]

    @property
    def traits(self) -> Traits:
        """What it says of itself."""
        traits = [*map(traits_of, self.links)]
        return Traits(traits[0].scales, any(each.takes_weight for each in traits))

    def init(self, params: Tree) -> tuple[Tree, ...]:
        """The state before the first update."""
        return tuple([link.init(params) for link in self.links])

    def stepped(
        self,
        owned: bool,
        into: bool | None,
        grads: Tree,
        state: Any,
        params: Tree,
        extra: Kwargs,
    ) -> tuple[Tree, Tree]:
        """The updates of the last link, or the new parameters, and the states of all links."""
        states = list[Tree]()
        owned = owned and not arrays.in_transform()  # there nothing is written to
        for number, (link, before) in enumerate(zip(self.links, state, strict=True), 1):
            into_here = into if number == len(self.links) else None
            is_foreign = not isinstance(link.update, UpdateFunction)
            accepted = _accepted(link, extra) if extra and is_foreign else extra
            grads, after = updated(link, owned, into_here, grads, before, params, accepted)
            states.append(after)
            if owned and into_here is None and is_foreign:
                # It may keep what it returns, or the params, or return these.
                grads = apart(grads, [states, params])
                params = apart(params, states) if into else params
        return grads, tuple(states)


def _accepted(link: Transform, extra: Kwargs) -> Kwargs:
    """The extra arguments that a transform has parameters for."""
    parameters = inspect.signature(link.update).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return extra
    return {name: extra[name] for name in extra if name in parameters}
