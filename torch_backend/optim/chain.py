"""Clipping of gradients, and chains of transforms."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import utils

from funcga._backend.prefixes import leaf_paths
from funcga._transform import (
    DonatingTransform,
    Traits,
    Transform,
    UpdateFunction,
    read_transform,
    traits_of,
)
from funcga._transform.apply import applied
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.arrays import without_overlap
from torch_backend.dtensor import is_dtensor
from torch_backend.modules.checks import check_not_differentiated
from torch_backend.parameters import apart


def chain(*transforms: object) -> DonatingTransform:
    """Chains transforms: each gets the output of the one before it, as in optax.chain.

    What is passed between two of them is not kept, so the next one may work in its memory, and
    nothing is copied twice.

    Args:
        *transforms: Transforms of torch_backend, pairs (init, update), or other chains. Extra
            arguments of update are passed to those that have parameters for them.

    Returns:
        The transform. Its state is the tuple of their states.

    Raises:
        FuncgaError: If an argument is not a transform, is one of optax, or would get scaled
            gradients. The functions raise it for a state of another length.

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
                f"transforms[{index}] is one of optax, which takes JAX's arrays. Let it run on "
                "tensors: torch_backend.chain(torch_backend.from_optax(tx), ...)."
            )
        if index > 0 and traits_of(link).scales:
            raise FuncgaError(
                f"transforms[{index}] is a loss_scaled, and those before it would see gradients "
                "that are scaled: clipping would leave next to nothing of them. Put it around: "
                "funcga.transforms.loss_scaled(torch_backend.chain("
                "torch_backend.clip_grad_norm(1.0), adamw))."
            )
    if not links:
        raise FuncgaError(
            "chain() was given no transform. Write chain(torch_backend.clip_grad_norm(1.0), tx)."
        )
    functions = _Chain(tuple(links))
    return DonatingTransform(functions.init, functions, functions.donated)


@dataclass(frozen=True)
class _Chain(UpdateFunction):
    """The functions of a chain; calling it is `update`."""

    links: tuple[Transform, ...]

    @property
    def traits(self) -> Traits:
        """What it says of itself."""
        traits = [*map(traits_of, self.links)]
        return Traits(
            scales=traits[0].scales,
            takes_weight=any(link_traits.takes_weight for link_traits in traits),
        )

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
        if into is None:
            grads, states, _ = self._through(self._linked(state), owned, grads, params, extra)
            return grads, tuple(states)
        *first, (last, before_last) = self._linked(state)
        grads, states, owns_grads = self._through(first, owned, grads, params, extra)
        if owned and not owns_grads:
            leaves, structure = trees.flatten(grads)
            grads = trees.unflatten(structure, [*map(_clone, leaves)])
        if owned and not all(isinstance(link, DonatingTransform) for link, _ in first):
            params = apart(params, states)  # transforms of others may keep the params
        params, after = applied(last, owned, grads, before_last, params, _accepted(last, extra))
        return params, (*states, after)

    def _linked(self, state: Tree) -> list[tuple[Transform, Tree]]:
        """Each link, with its state."""
        if not isinstance(state, tuple) or len(state) != len(self.links):
            raise FuncgaError(
                f"state is not the tuple of {len(self.links)} that this chain has: state = "
                "tx.init(params); updates, state = tx.update(grads, state, params)."
            )
        return [*zip(self.links, state, strict=True)]

    def _through(
        self,
        linked: list[tuple[Transform, Tree]],
        owned: bool,
        grads: Tree,
        params: Tree,
        extra: dict[str, object],
    ) -> tuple[Tree, list[Tree], bool]:
        """(the gradients after these links, their states, whether nobody else has the gradients'
        memory).

        If `owned`, the gradients and the states may be written to.
        """
        states, owns_grads = list[Tree](), owned
        for link, before in linked:
            # A link may write to the gradients if nobody else has their memory, and if it would not
            # write to a state that is another's, as clipping never does.
            may_write = owns_grads and (owned or _is_clipping(link) or not trees.flatten(before)[0])
            function = (
                link.donated if may_write and isinstance(link, DonatingTransform) else link.update
            )
            grads, after = function(grads, before, params, **_accepted(link, extra))
            states.append(after)
            owns_grads = _returns_new_memory(link)
        return grads, states, owns_grads


def _clone(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _accepted(link: Transform, extra: dict[str, object]) -> dict[str, object]:
    """The extra arguments that a transform has parameters for."""
    if not extra:
        return extra
    parameters = inspect.signature(link.update).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return extra
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in extra.items() if name in names}


def _returns_new_memory(link: Transform) -> bool:
    """Whether the gradients that it returns are in memory that nobody else has."""
    # Transforms of others may return their argument, or keep what they return.
    update: object = link.update
    return (
        _returns_new_memory(update.links[-1])
        if isinstance(update, _Chain)
        else isinstance(link, DonatingTransform)
    )


# ----------------------------------------------------------------------------------------- clipping


def _is_clipping(link: Transform) -> bool:
    return isinstance(link.update, partial) and link.update.func is _clipped


Clip = Callable[[list[torch.Tensor]], torch.Tensor | None]
"""A function of torch.nn.utils, which writes to the `.grad`s of parameters, and may return their
norm before that.
"""


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
    _check_limit("max_norm", max_norm)
    _check_norm(norm_type)
    clip = partial(
        utils.clip_grad_norm_,
        max_norm=max_norm,
        norm_type=norm_type,
        error_if_nonfinite=error_if_nonfinite,
    )
    return _clipping(_no_norm_yet, clip)


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
    _check_limit("clip_value", clip_value)
    return _clipping(_no_state, partial(utils.clip_grad_value_, clip_value=clip_value))


def _check_limit(name: str, limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise FuncgaError(f"{name} is {limit!r}, and must be a number, at least 0: {name}=1.0.")


def _check_norm(norm_type: object) -> None:
    # "inf" is a number to float() and to torch; NaN is none, as it is not equal to itself.
    try:
        is_number = not isinstance(norm_type, bool) and float(norm_type) == float(norm_type)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise FuncgaError(
            f'norm_type is {norm_type!r}, and must be a number, or "inf": norm_type=2.0.'
        )


def _clipping(init: Callable[[Tree], Tree], clip: Clip) -> DonatingTransform:
    """The transform of a function that clips the `.grad`s of parameters in place."""
    return DonatingTransform(init, partial(_clipped, clip, False), partial(_clipped, clip, True))


def _no_state(params: Tree) -> tuple[()]:
    return ()


def _no_norm_yet(params: Tree) -> ClipNormState:
    tensors = [leaf for leaf in trees.flatten(params)[0] if isinstance(leaf, torch.Tensor)]
    has_64_bits = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    dtype = torch.float64 if has_64_bits else torch.float32
    return ClipNormState(
        torch.full((), torch.nan, dtype=dtype, device=tensors[0].device if tensors else None)
    )


def _state_of(norm: torch.Tensor, before: Tree) -> ClipNormState:
    """The state with the norm that torch returned, in the dtype of the state before."""
    # The norm of shards is a sum over them that is still to be done. Nothing here makes the host
    # wait for a device.
    whole: torch.Tensor = norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]
    dtype = (
        before.norm.dtype
        if isinstance(before, ClipNormState)
        else torch.promote_types(whole.dtype, torch.float32)
    )
    return ClipNormState(whole.to(dtype))


def _clipped(
    clip: Clip, owned: bool, /, grads: Tree, state: Tree, params: Tree = None, **extra: object
) -> tuple[Tree, Tree]:
    """The clipped gradients, in their own memory if they are `owned`, and the new state."""
    # Before graphs are switched off, which would hide a loss around it.
    check_not_differentiated("clipping", grads)
    leaves, structure = trees.flatten(grads)
    for index, leaf in enumerate(leaves):
        _check_gradient(leaf, index, grads)
    with torch.no_grad():
        plain = [None if leaf is None else leaf.detach() for leaf in leaves]
        clipped = (
            without_overlap(plain)
            if owned
            else [None if grad is None else grad.clone() for grad in plain]
        )
        # torch clips the `.grad`s of parameters in place, so each copy is the `.grad` of a tensor
        # made for it.
        norm = clip([_holder(grad) for grad in clipped if grad is not None])
        after = state if norm is None else _state_of(norm, state)
    return trees.unflatten(structure, clipped), after


def _check_gradient(leaf: object, leaf_index: int, grads: Tree) -> None:
    if leaf is None or (isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided):
        return
    path = leaf_paths(grads, trees)[leaf_index]
    if not isinstance(leaf, torch.Tensor):
        raise FuncgaError(
            f"`grads{path}` is {arrays.describe(leaf)}. Give a tensor, or None where there is none."
        )
    raise FuncgaError(
        f"`grads{path}` is a sparse tensor {arrays.describe(leaf)}, which torch does not clip. "
        "Give a dense one: grad.to_dense(), or nn.Embedding(..., sparse=False)."
    )


def _holder(grad: torch.Tensor) -> torch.Tensor:
    """A tensor whose `.grad` is the gradient."""
    holder = grad.detach()
    holder.grad = grad
    return holder
