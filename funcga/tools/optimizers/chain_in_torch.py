"""Chains of transforms, and clipping."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch.nn import utils

from funcga._transform import DonatingTransform, Traits, Transform, read_transform
from funcga._transform.apply import UpdateFunction, traits_of, updated
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend._private import pytree
from torch_backend.arrays import without_overlap
from torch_backend.dtensor import is_dtensor
from torch_backend.transforms import added, apart


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
class _Chain(UpdateFunction):
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
        extra: dict[str, Any],
    ) -> tuple[Tree, Tree]:
        """The updates of the last link, or the new parameters, and the states of all links."""
        states = list[Tree]()
        for number, (link, before) in enumerate(zip(self.links, state, strict=True), 1):
            into_here = into if number == len(self.links) else None
            accepted = _accepted(link, extra)
            grads, after = updated(link, owned, into_here, grads, before, params, accepted)
            states.append(after)
            if owned and into_here is None and not isinstance(link.update, UpdateFunction):
                # One of others may return its argument, or keep what it returns, or the params.
                leaves, structure = trees.flatten(grads)
                copied = pytree.tree_map_only(torch.Tensor, torch.clone, leaves)
                grads = trees.unflatten(structure, copied)
                params = apart(params, states) if into else params
        return grads, tuple(states)


def _accepted(link: Transform, extra: dict[str, Any]) -> dict[str, Any]:
    """The extra arguments that a transform has parameters for."""
    if not extra or isinstance(link.update, UpdateFunction):
        return extra
    parameters = inspect.signature(link.update).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in extra.items() if takes_all or name in parameters}


# ----------------------------------------------------------------------------------------- clipping


class ClipNormState(NamedTuple):
    """The state of `clip_grad_norm`.

    Attributes:
        norm: The norm of the last gradients before they were clipped, NaN before the first update;
            a 0-d tensor on the device of the gradients, float32, or float64 if a parameter has 64
            bits.
    """

    norm: torch.Tensor


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
    return _clipping(_no_norm_yet, clip, "max_norm", max_norm)


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
    return _clipping(_no_state, utils.clip_grad_value_, "clip_value", clip_value)


def _clipping(
    init: Callable[[Tree], Tree], clip: Callable[..., Any], name: str, limit: float
) -> DonatingTransform:
    """The transform of a function that clips the `.grad`s of tensors in place to a limit."""
    if not limit >= 0:  # as NaN is not
        raise FuncgaError(f"{name} is {limit!r}, and must be a number, at least 0: {name}=1.0.")
    return DonatingTransform(init, _Clipping(partial(clip, **{name: limit})))


def _no_state(params: Tree) -> tuple[()]:
    return ()


def _no_norm_yet(params: Tree) -> ClipNormState:
    tensors = [leaf for leaf in trees.flatten(params)[0] if leaf is not None]
    dtypes = [tensor.dtype.to_real() for tensor in tensors]
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    device = tensors[0].device if tensors else None
    return ClipNormState(torch.full((), torch.nan, dtype=dtype, device=device))


@dataclass(frozen=True)
class _Clipping(UpdateFunction):
    """The update of a transform that clips."""

    clip: Callable[..., Any]

    def stepped(
        self,
        owned: bool,
        into: bool | None,
        grads: Tree,
        state: Any,
        params: Tree,
        extra: dict[str, Any],
    ) -> tuple[Tree, Tree]:
        """The clipped gradients, in their own memory if they are `owned`, and the new state."""
        # Before graphs are switched off, which would hide a loss around it.
        check_not_differentiated("clipping", grads)
        leaves, structure = trees.flatten(grads)
        with torch.no_grad():
            detached = [None if leaf is None else leaf.detach() for leaf in leaves]
            clipped = without_overlap(detached) if owned else copies(detached)
            holders = []  # torch clips the `.grad`s of parameters: these are made for that
            for grad in clipped:
                if grad is not None:
                    holders.append(grad.detach())
                    holders[-1].grad = grad
            norm = self.clip(holders)
        if norm is not None:
            # The norm of shards is a sum over them that is still to be done. Nothing here makes
            # the host wait for a device.
            whole = norm.full_tensor() if is_dtensor(norm) else norm
            state = ClipNormState(whole.to(torch.promote_types(whole.dtype, torch.float32)))
        clipped = trees.unflatten(structure, clipped)
        return clipped if into is None else added(params, clipped, state, into), state


def check_not_differentiated(name: str, tree: Tree) -> None:
    """Raises FuncgaError if these are differentiated from outside: the result of `name` has no
    derivative.
    """
    leaves = trees.flatten(tree)[0] if arrays.in_transform() else ()
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
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
        copied.append(torch.empty_like(value) if is_plain else deepcopy(value))
        if is_plain:
            by_device[value.device].append((copied[-1], value))
    for pairs in by_device.values():
        new, old = zip(*pairs, strict=True)
        torch._foreach_copy_(new, old)
    return copied
