"""The transforms: from a loss to its gradient, and what `multi_steps` needs of this framework."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from funcga._backend.prefixes import mapped
from funcga._fold import accumulator_dtype, describe
from funcga._types import Array, GradFn, LossFn, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import _private, arrays, trees

# -- gradients


def value_and_grad(loss_fn: LossFn, arg_indices: tuple[int, ...]) -> GradFn:
    """A function that returns ((value, aux), grads) of one that returns (value, aux); grads has
    a tree an index.
    """
    transform = jax.value_and_grad(loss_fn, argnums=arg_indices, has_aux=True)
    checks = trees.nnx()
    if checks is None:
        return transform

    def of_trained(*args: Tree, **kwargs: Tree) -> Tree:
        checks.check_trained([args[arg_index] for arg_index in arg_indices])
        return transform(*args, **kwargs)

    return of_trained


def depends(loss: jax.Array) -> bool | None:
    """Whether a loss depends on the inputs of the innermost of these transforms."""
    tangents_seen = []

    # The tangent of a constant is a symbolic zero in this rule.
    @jax.custom_jvp
    def seen(x: jax.Array) -> jax.Array:
        return x

    def rule(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        tangents_seen.append(not isinstance(tangents[0], SymbolicZero))
        return primals[0], tangents[0]

    seen.defjvp(rule, symbolic_zeros=True)
    seen(loss)
    # A constant 0 or NaN may come from a fully masked micro-batch.
    if any(tangents_seen):
        return True
    return False if _private.is_traced(loss) or abs(float(loss)) > 0 else None


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds what `tx.update` returned to the parameters. Unlike `funcga.transforms.apply`, it runs
    no optimizer.

    It is `optax.apply_updates` for code that does without optax, and takes updates of another dtype
    than the parameter's: the sum is computed in the wider of both.

    Args:
        params: A tree of arrays. Where it has None, it stays None.
        updates: A tree of the same structure, as `tx.update` returns it. Where it has None, the
            parameter stays.

    Returns:
        A tree like params.

    Raises:
        ValueError: The two have different structures, or an update has another shape than its
            parameter.

    Example:
        >>> jax_backend.apply_updates({"w": jnp.ones(2)}, {"w": jnp.full(2, -0.5)})
        {'w': Array([0.5, 0.5], dtype=float32)}
    """
    return jax.tree.map(_applied, params, updates, is_leaf=lambda leaf: leaf is None)


def _applied(param: Array, update: Array) -> Array:
    if param is None or update is None:
        return param
    param, update = jnp.asarray(param), jnp.asarray(update)
    if param.shape != update.shape:  # else it would be broadcast
        raise FuncgaError(
            f"an update is {describe(update)}, and its parameter {describe(param)}. "
            "Give what tx.update(grads, state, params) returned for these params."
        )
    # Even if the user forbids implicit promotion, as the result is cast back.
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(param.dtype, update.dtype)
    return (param.astype(wide) + update.astype(wide)).astype(param.dtype)


# -- a conditional update, and its dtypes

Emit: TypeAlias = Callable[..., tuple[Tree, Tree]]
"""Makes (updates, state) of a state and operands."""


def widened(
    params: Tree, copies: bool = False, donate: bool = False
) -> tuple[Tree, Callable[[Tree], Tree]]:
    """The params as a wrapped transform sees them, in no graph and in at least 32 bits, and the way
    back.

    Nothing is ever written to, so there are neither copies nor memory that is donated.
    """
    return mapped(_wide, trees, params), partial(jax.tree.map, _in_dtype_of, params)


def _wide(leaf: Array) -> Array:
    leaf = arrays.as_array(leaf) if isinstance(leaf, int | float | complex) else leaf
    if not arrays.is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    wide = accumulator_dtype(leaf.dtype, arrays)
    return leaf if leaf.dtype == wide else arrays.as_array(leaf, wide)


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
