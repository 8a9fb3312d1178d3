"""The transforms from a loss to its gradient, updates applied to parameters, and the types of
optax.
"""

import importlib
from functools import cache
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from funcga._transform import Transform
from funcga._transform.multi_steps import MultiSteps
from funcga._types import Array, GradFn, LossFn, Tree
from funcga.errors import FuncgaError
from jax_backend import _private, arrays, trees


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
            f"an update is {arrays.describe(update)}, and its parameter {arrays.describe(param)}. "
            "Give what tx.update(grads, state, params) returned for these params."
        )
    # Even if the user forbids implicit promotion, as the result is cast back.
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(param.dtype, update.dtype)
    return (param.astype(wide) + update.astype(wide)).astype(param.dtype)


# -- optax, the library of transforms that JAX's users have: its types, where it is installed


def _optax() -> ModuleType | None:
    """optax, imported if it is installed, so that all transforms fit into its chains."""
    try:
        return importlib.import_module("optax")
    except ModuleNotFoundError:
        return None


def imported(tx: Transform) -> Transform:
    """A transform as the library's own combinators would call it, with extra arguments that it
    may ignore.
    """
    optax = _optax()
    if optax is None or not isinstance(tx, optax.GradientTransformation):
        return tx
    wrapped: Transform = optax.with_extra_args_support(tx)
    return wrapped


def exported(tx: MultiSteps) -> MultiSteps:
    """A transform of funcga's in the type that the library's combinators take."""
    optax = _optax()
    return tx if optax is None else _both_types(optax.GradientTransformationExtraArgs)(*tx)


@cache
def _both_types(base: type) -> type[MultiSteps]:
    """MultiSteps as a subclass of the type that optax.chain looks for."""
    # Not at import, as optax may not be installed.
    members = {"__doc__": MultiSteps.__doc__, "__slots__": (), "__reduce__": _reduced}
    return type("MultiSteps", (MultiSteps, base), members)


def _reduced(tx: MultiSteps) -> tuple[object, ...]:
    """How it is pickled: the type is made again where it is loaded."""
    # pickle looks up classes by name, and this one is in no module.
    return _exported_pair, (tx.init, tx.update)


def _exported_pair(init: object, update: object) -> MultiSteps:
    return exported(MultiSteps(init, update))  # type: ignore[arg-type]
