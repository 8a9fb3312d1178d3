"""What `multi_steps` needs of this framework: its conditional, and the dtypes of an update."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from funcga._backend.prefixes import leaf_paths
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import _private, arrays, trees
from jax_backend.gradients import apply_updates

Emit: TypeAlias = Callable[..., tuple[Tree, Tree]]
"""Makes (updates, state) of a state and operands."""


def widened(
    params: Tree, copies: bool = False, donate: bool = False
) -> tuple[Tree, Callable[[Tree], Tree]]:
    """The params as a wrapped transform sees them, in no graph and in at least 32 bits, and the way
    back.

    Nothing is ever written to, so there are neither copies nor memory that is donated.
    """
    leaves, structure = trees.flatten(params)
    wide = trees.unflatten(structure, [*map(_wide, leaves)])
    return wide, partial(jax.tree.map, _in_dtype_of, params)


def _wide(leaf: Array) -> Array:
    leaf = arrays.as_array(leaf) if isinstance(leaf, int | float | complex) else leaf
    if not arrays.is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    wide = arrays.accumulator_dtype(leaf.dtype)
    return leaf if leaf.dtype == wide else arrays.cast(leaf, wide)


def added(params: Tree, updates: Tree, state: Tree, donate: bool) -> Tree:
    """The params with the updates added; in place if they are donated and share no memory with
    the state.
    """
    return apply_updates(params, updates)


def when(
    predicate: Scalar,
    emit: Emit,
    state: Tree,
    operands: Tree,
    like: Tree,
    donate: bool = False,
) -> tuple[Tree, Tree, Scalar]:
    """`emit(state, operands)`, which is (updates, state), if the predicate holds; else zeros and
    the state.

    The state comes back in the dtypes that it has. `donate` is for torch: here the program that
    calls this function says what it gives away.
    """

    def run(state: Tree, operands: Tree) -> tuple[Tree, Tree]:
        updates, after = emit(state, operands)
        return updates, _in_dtypes_of(state, after)

    # A conditional in a compiled program, Python's `if` where the host sees the predicate.
    if _private.is_traced(predicate):
        return *_branch(predicate, run, state, operands), predicate
    if predicate:
        return *run(state, operands), predicate
    return _zero_updates(emit, state, operands, like), state, predicate


def _in_dtypes_of(before: Tree, after: Tree) -> Tree:
    """The state after an update, in the dtypes of the one before. Raises FuncgaError if the
    structure differs.
    """
    if trees.flatten(after)[1] != trees.flatten(before)[1]:
        missing, new = (set(leaf_paths(tree, trees, "state")) for tree in (before, after))
        raise FuncgaError(
            "the wrapped transform returned a state of another structure than it was given: "
            f"missing {sorted(missing - new) or 'nothing'}, new "
            f"{sorted(new - missing) or 'nothing'}. A state keeps its structure from init on, or "
            "it does not pass through jit."
        )
    return jax.tree.map(_in_dtype_of, before, after)


def _in_dtype_of(before: Array, after: Array) -> Array:
    before, after = arrays.as_array(before), arrays.as_array(after)
    return after if after.dtype == before.dtype else lax.convert_element_type(after, before.dtype)


def _branch(predicate: jax.Array, run: Emit, state: Tree, operands: Tree) -> tuple[Tree, Tree]:
    """`run(state, operands)` or zeros and the state, in a compiled program."""
    # Only arrays can be operands; all else, such as a flag, is closed over.
    static, arguments = trees.partition(operands)

    def run_arrays(state: Tree, arguments: list[Array]) -> tuple[Tree, Tree]:
        return run(state, static.tree(arguments))

    state, (_, updates) = arrays.settle_types(
        lambda state: run_arrays(state, arguments)[::-1],
        jax.tree.map(arrays.without_weak_type, state),
    )
    # Captured tracers, such as a learning rate, become operands, too.
    closed, captured = jax.closure_convert(run_arrays, state, arguments)
    # A while loop has no reverse-mode derivative: a cond is used for that.
    branch = jax.custom_jvp(partial(_as_loop, closed, updates))
    branch.defjvp(
        lambda primals, tangents: jax.jvp(partial(_as_cond, closed, updates), primals, tangents)
    )
    return branch(predicate, state, [arguments, *captured])


def _zero_updates(emit: Emit, state: Tree, operands: Tree, like: Tree) -> Tree:
    """Zeros like the updates of `emit`, sharded like `like`."""
    # Only types are computed.
    types = jax.eval_shape(lambda state: emit(state, operands)[0], state)
    if trees.flatten(types)[1] != trees.flatten(like)[1]:
        like = types
    return jax.tree.map(
        lambda a, b: jnp.zeros_like(b if jnp.shape(b) == a.shape else a, dtype=a.dtype), types, like
    )


def _as_loop(
    run: Emit,
    updates: Tree,
    predicate: jax.Array,
    state: Tree,
    operands: list[Tree],
) -> tuple[Tree, Tree]:
    """The branch as a loop of at most one iteration, whose body XLA runs in place; a cond would
    copy.
    """

    # The predicate is the condition of the loop, False after one iteration.
    def body(carry: tuple[jax.Array, Tree, Tree]) -> tuple[jax.Array, Tree, Tree]:
        return jnp.zeros_like(carry[0]), *_typed(run(carry[2], *operands), carry[1:])

    _, updates, state = lax.while_loop(
        lambda carry: carry[0], body, (predicate, _zeros(updates), state)
    )
    return updates, state


def _as_cond(
    run: Emit,
    updates: Tree,
    predicate: jax.Array,
    state: Tree,
    operands: list[Tree],
) -> tuple[Tree, Tree]:
    """The same as a cond, which can be differentiated in reverse."""
    # Both branches of a cond need the same types.
    untaken = _zeros(updates), state
    taken = lambda state: _typed(run(state, *operands), untaken)
    updates, state = lax.cond(predicate, taken, lambda state: untaken, state)
    return updates, state


def _zeros(types: Tree) -> Tree:
    return jax.tree.map(arrays.zeros, types)


def _typed(tree: Tree, like: Tree) -> Tree:
    """The tree sharded and varying as another one is, or as types say."""
    types = jax.tree.map(lambda b: jax.typeof(b) if isinstance(b, jax.Array) else b, like)
    return jax.tree.map(arrays.typed, tree, types)


def unknown(compute: Callable[[], Tree]) -> Tree:
    """The tree of arrays that `compute` returns, with NaN in place of each number.

    Under jax_debug_nans a state with NaN could not be passed to a jitted function: then it is 0.
    """
    config: Any = jax.config
    fill = 0.0 if config.jax_debug_nans else float("nan")
    # Only types are computed, as observers of nothing may divide by 0.
    types = jax.eval_shape(compute)
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, fill, leaf.dtype), types)
