"""What `multi_steps` needs of this framework: its conditional, and the dtypes of an update."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from funcga._types import Array, Scalar, Tree
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
        return updates, jax.tree.map(_in_dtype_of, state, after)

    # A conditional in a compiled program, Python's `if` where the host sees the predicate.
    if _private.is_traced(predicate):
        return *_branch(predicate, run, state, operands), predicate
    if predicate:
        return *run(state, operands), predicate
    return _zero_updates(emit, state, operands, like), state, predicate


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
    types = updates, jax.tree.map(jax.typeof, state)
    # Captured tracers, such as a learning rate, become operands, too.
    closed, captured = jax.closure_convert(run_arrays, state, arguments)

    def taken(state: Tree, operands: list[Tree]) -> tuple[Tree, Tree]:
        """(updates, state), sharded and varying as the zeros and the state are."""
        result: tuple[Tree, Tree] = jax.tree.map(arrays.typed, closed(state, *operands), types)
        return result

    def untaken(state: Tree, operands: list[Tree]) -> tuple[Tree, Tree]:
        return jax.tree.map(arrays.zeros, updates), state

    @jax.custom_jvp
    def branch(predicate: jax.Array, state: Tree, operands: list[Tree]) -> tuple[Tree, Tree]:
        """A loop of at most one turn, whose body XLA runs in place; a cond would copy."""
        body = lambda carry: (jnp.zeros_like(carry[0]), *taken(carry[2], operands))
        start = predicate, *untaken(state, operands)
        _, updates, state = lax.while_loop(lambda carry: carry[0], body, start)
        return updates, state

    # A while loop has no reverse-mode derivative: a cond is used for that.
    as_cond = lambda predicate, *operands: lax.cond(predicate, taken, untaken, *operands)
    branch.defjvp(lambda primals, tangents: jax.jvp(as_cond, primals, tangents))
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
