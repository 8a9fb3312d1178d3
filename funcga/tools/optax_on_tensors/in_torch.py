"""The tool that runs optax transforms on torch tensors, computed by JAX in the same memory.

    tx = torch_backend.from_optax(optax.adamw(1e-3))

This file alone imports JAX in this package, inside of functions, for those who call them. It stands
on the trees of two frameworks (`funcga.tools.trees`); nothing stands on it.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from funcga._transform import Transform
from funcga._types import Tree, TreeFn
from funcga.tools.optimizers.in_torch import check_not_differentiated
from funcga.tools.trees import converted, in_torch
from torch_backend import trees
from torch_backend.parameters import matched

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped]


def from_optax(tx: "optax.GradientTransformation") -> Transform:
    """Turns an optax transform into one on torch tensors: two pure functions, `(init, update)`.

    JAX compiles the transform once per tree structure, and runs it on the memory of the tensors, by
    DLPack. Only tensors that are not contiguous or not aligned to 64 bytes are copied, and results
    that would share memory with an argument. 64-bit tensors stay 64-bit, whatever JAX is set to.

    The state has optax's containers with tensors as leaves: `funcga.to_jax(state)` continues in
    JAX, and `funcga.to_torch` of an optax state continues here. A typed PRNG key is stored as its
    key_data: to continue in JAX, replace it by `jax.random.wrap_key_data(key)` after to_jax;
    from_state_dict does not fill a typed key from it.

    If params are given, a gradient that is None counts as zeros. Extra arguments of update are
    passed to the transform, if it takes any: tensors, numbers, None and trees of these. A function
    among them gets JAX arrays, and is compiled anew if it is another one.

    Args:
        tx: An optax transform, such as optax.adamw(1e-3).

    Returns:
        A transform like those of `from_optimizer`.

    Raises:
        FuncgaError: The functions raise it for DTensors, and structures that differ.

    Example:
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([30.0, 40.0])}
        >>> chain = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        >>> tx = torch_backend.from_optax(chain)
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.6000, -0.8000])}
    """
    import optax

    # With extra arguments a transform that takes none ignores them.
    compiled_init, compiled_update = _compiled(optax.with_extra_args_support(tx))

    def init(params: Tree) -> Tree:
        return in_jax(lambda arguments: compiled_init(arguments["params"]), {"params": params})

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        check_not_differentiated("a transform of optax", (grads, params))
        # JAX compiles anew for another function, and not for other arrays and numbers.
        functions = {name: value for name, value in extra.items() if callable(value)}
        others = {name: value for name, value in extra.items() if name not in functions}
        filled = grads if params is None else _filled(grads, params)
        arguments = {"grads": filled, "state": state, "params": params, "extra": others}
        compute = lambda arguments: compiled_update(arguments, tuple(functions.items()))
        updates, after = in_jax(compute, arguments)
        leaves = matched(updates, filled, "updates")
        return trees.unflatten(trees.flatten(filled)[1], leaves), after

    return Transform(init, update)


def _filled(grads: Tree, params: Tree) -> Tree:
    """The gradients in the structure of the parameters, with zeros for None."""
    leaves, structure = trees.flatten(params)
    filled = [
        torch.zeros_like(leaf) if grad is None and isinstance(leaf, torch.Tensor) else grad
        for grad, leaf in zip(matched(grads, params, "grads"), leaves, strict=True)
    ]
    return trees.unflatten(structure, filled)


def _compiled(
    tx: "optax.GradientTransformationExtraArgs",
) -> tuple[TreeFn, TreeFn]:
    """`init(params)` and `update(arguments, functions)` of a transform, compiled by JAX.

    Torch has no typed PRNG keys, so outside of these functions a key is its data.
    """
    import jax
    import jax.numpy as jnp

    def is_key(leaf: object) -> bool:
        return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))

    def without_keys(tree: Tree) -> Tree:
        return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)

    def with_keys(state: Tree, params: Tree) -> Tree:
        if not any(leaf.dtype == jnp.uint32 for leaf in jax.tree.leaves(state)):
            return state
        # The first state says where the keys are. It is traced, and not computed.
        wrap = lambda key, leaf: (
            jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(key)) if is_key(key) else leaf
        )
        return jax.tree.map(wrap, tx.init(params), state)

    def init(params: Tree) -> Tree:
        return without_keys(tx.init(params))

    def update(
        arguments: dict[str, Tree], functions: tuple[tuple[str, object], ...]
    ) -> tuple[Tree, Tree]:
        grads, params = arguments["grads"], arguments["params"]
        state = with_keys(arguments["state"], grads if params is None else params)
        # A tuple of pairs can be hashed, as static arguments must be.
        updates, after = tx.update(grads, state, params, **arguments["extra"], **dict(functions))
        return updates, without_keys(after)

    return jax.jit(init), jax.jit(update, static_argnums=1)


def in_jax(function: Callable[[dict[str, Tree]], Tree], arguments: dict[str, Tree]) -> Tree:
    """Calls a function of JAX arrays with trees of tensors, without copies, and returns tensors.

    The trees keep their containers, which both frameworks must know. No result shares memory with
    an argument or another result. Raises FuncgaError for tensors that JAX does not support.
    """
    import jax

    tensors = trees.tensors_in(arguments)
    is_wide = any(tensor.dtype in _WIDE for tensor in tensors)
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        jax_arguments = {
            name: converted(tree, "jax", copy=None, platforms={"cpu"}, name=name)
            for name, tree in arguments.items()
        }
        leaves, structure = jax.tree.flatten(function(jax_arguments))
        if any(tensor.device.type == "cpu" for tensor in tensors):
            # The caller may write to the tensors when this returns. A device keeps the order
            # itself.
            jax.block_until_ready(leaves)
        imports = [*map(in_torch.import_array, leaves)]
    # JAX may return an argument as it is, and one array in two places.
    results, addresses = [], {tensor.data_ptr() for tensor in tensors}
    for tensor in imports:
        results.append(tensor.clone() if tensor.data_ptr() in addresses else tensor)
        addresses.add(results[-1].data_ptr())
    return jax.tree.unflatten(structure, results)


_WIDE = (torch.float64, torch.int64, torch.uint64, torch.complex128)
