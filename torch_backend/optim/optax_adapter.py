"""A bridge to optax: its transforms on tensors of torch, computed by JAX in the same memory.

This file and `crossing` are the ones of this package that import JAX, inside of functions, for those who call them.
Only torch has them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from funcga._transform.transform import Transform
from funcga.errors import FuncgaError
from torch_backend import trees
from torch_backend.modules.checks import check_not_differentiated
from torch_backend.optim.jax_arrays import Crossing
from torch_backend.optim.match import matched


def from_optax(tx: Any) -> Transform:
    """`(init, update)`, both pure, on tensors of torch, of any transform of optax.

    JAX computes it, compiled once for trees of one structure, on the tensors' own memory: what goes there and comes
    back is handed over by DLPack. Copied are tensors that are not contiguous or not aligned to 64 bytes, and results
    that would be in an argument's memory. 64-bit tensors are computed with in 64 bits, whatever JAX is set to.

    The state has optax's own containers with tensors for leaves, so that `funcga.to_jax(state)` goes on in JAX, and
    `funcga.to_torch` of a state of optax here. A typed PRNG key in it is its key_data: to go on in JAX, put
    `jax.random.wrap_key_data(key)` in its place after to_jax; from_state_dict does not fill a typed key from it.

    A gradient that is None is one of zeros, as JAX has it, if params are given. Extra arguments are the transform's
    own, if it takes any: tensors, numbers, None and trees of these; a function is one of JAX arrays, and each new one
    is compiled anew.

    Raises FuncgaError for what is no transform of optax, DTensors, structures that differ, and where JAX or optax is
    not installed.

    >>> tx = torch_backend.from_optax(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    >>> updates, state = tx.update(grads, tx.init(params), params)
    """
    try:
        import jax  # noqa: F401
        import optax  # type: ignore[import-untyped]
    except ImportError as error:
        raise FuncgaError(
            f"from_optax computes with JAX, and {error.name} is not installed: pip install 'funcga[jax]'."
        ) from error
    if not isinstance(tx, optax.GradientTransformation):
        raise FuncgaError(
            f"tx is {tx!r}, which is no transform of optax. Pass one, such as optax.adamw(1e-3); a transform of torch "
            f"functions is one here as it is, and one of torch.optim is made by torch_backend.from_optimizer."
        )
    functions = _Functions(optax.with_extra_args_support(tx))
    return Transform(functions.init, functions.update)


@dataclass(frozen=True, eq=False)
class _Functions:
    """The functions of the transform."""

    tx: Any

    def init(self, params: Any) -> Any:
        """The state before the first update."""
        crossing = Crossing({"params": params})
        return crossing(lambda given: self._init(given["params"]))

    def update(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """What is added to the parameters, and the state after it."""
        check_not_differentiated("a transform of optax", (grads, params))
        static = tuple([(name, value) for name, value in extra.items() if callable(value)])
        others = {name: value for name, value in extra.items() if not callable(value)}
        given = grads if params is None else _filled(grads, params)
        crossing = Crossing({"grads": given, "state": state, "params": params, "extra": others})
        updates, after = crossing(lambda over: self._update(over, static))
        leaves = matched(updates, given, "updates", "grads")
        return trees.unflatten(trees.flatten(given)[1], leaves), after

    @cached_property
    def _init(self) -> Callable[..., Any]:
        import jax

        return jax.jit(lambda params: _without_keys(self.tx.init(params)))

    @cached_property
    def _update(self) -> Callable[..., Any]:
        import jax

        def update(given: dict[str, Any], static: Any) -> Any:
            grads, params = given["grads"], given["params"]
            state = _with_keys(given["state"], self.tx, grads if params is None else params)
            updates, after = self.tx.update(grads, state, params, **given["extra"], **dict(static))
            return updates, _without_keys(after)

        return jax.jit(update, static_argnums=1)


def _filled(grads: Any, params: Any) -> Any:
    """The gradients in the structure of the parameters, with zeros for None."""
    leaves, structure = trees.flatten(params)
    pairs = zip(matched(grads, params, "grads"), leaves, strict=True)
    return trees.unflatten(
        structure,
        [torch.zeros_like(p) if grad is None and isinstance(p, torch.Tensor) else grad for grad, p in pairs],
    )


def _without_keys(tree: Any) -> Any:
    """The tree with the data of the typed PRNG keys in it."""
    import jax

    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def _with_keys(state: Any, tx: Any, params: Any) -> Any:
    """The state with typed PRNG keys where the transform begins with such."""
    import jax
    import jax.numpy as jnp

    if not any(leaf.dtype == jnp.uint32 for leaf in jax.tree.leaves(state)):
        return state
    first = tx.init(params)  # traced, and not computed
    wrap = lambda key, leaf: jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(key)) if _is_key(key) else leaf
    return jax.tree.map(wrap, first, state)


def _is_key(leaf: Any) -> bool:
    import jax
    import jax.numpy as jnp

    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
