"""Replicas: what across= names, and whether a step merges over them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from funcga._backend.prefixes import mapped
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import arrays, trees
from jax_backend.arrays import axis_names

Across: TypeAlias = Union[str, tuple[str, ...], "Replicas"]
"""What `across=` may be in JAX: the names of axes, or Replicas."""


@dataclass(frozen=True)
class Replicas:
    """For `across=`: the replicas along an axis of the mesh, and which results are left scattered
    over them.

    Args:
        axis: The name of a mesh axis, or a tuple of names.
        scatter: A tree prefix over grad_fn's output. Where it has an int, the merged leaf is left
            in equal parts, one a replica, along that axis of the leaf: a reduce-scatter in place of
            the all-reduce. Where it has None, every replica gets the whole leaf.

    Raises:
        FuncgaError: The axis is no name, or is named twice.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> across = jax_backend.Replicas("data", scatter=(None, 0))  # of (loss, grads)
        >>> grad_fn = jax.value_and_grad(lambda w, x: (x @ w).mean())
        >>> step = funcga.accumulate(grad_fn, 2, across=across)
        >>> out_specs = (jax.P(), jax.P("data"))
        >>> step = jax_backend.replicated(step, mesh, out_specs=out_specs)
        >>> loss, grads = step(jnp.ones(8), jnp.ones((8, 8)))
        >>> grads.sharding.is_fully_replicated
        False
    """

    axis: str | tuple[str, ...]
    scatter: Tree = None

    def __post_init__(self) -> None:
        names = self.names
        are_names = names and all(isinstance(name, str) for name in names)
        if not are_names or len({*names}) < len(names):
            raise FuncgaError(
                f"across is {self.axis!r:.60}, and in JAX replicas are named by an axis of the "
                'mesh, which is that of all leaves. Write the name, across="data", or a tuple of '
                "names, each once, and call the step inside jax.shard_map or through "
                "jax_backend.replicated(step, mesh)."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return axis_names(self.axis)


# -- what a step merges over


@dataclass
class _Step:
    """A step that `replicated` traces: the axes that it runs over, and whether a fold in it had
    an across=.
    """

    names: tuple[str, ...]
    merges: bool = False


REPLICATED: ContextVar[_Step | None] = ContextVar("REPLICATED", default=None)


@contextmanager
def requiring_across(names: tuple[str, ...]) -> Iterator[None]:
    """A context in which a fold needs an across=, for these axes."""
    token = REPLICATED.set(_Step(names) if names else None)
    try:
        yield
    finally:
        REPLICATED.reset(token)


@contextmanager
def merging_over(across: Across | None) -> Iterator[Replicas | None]:
    """A context for a fold over the replicas that `across=` names, in which a fold inside of
    grad_fn needs none.
    """
    if across is None and REPLICATED.get() is None:
        yield None
        return
    replicas = replicas_of(across)
    with requiring_across(()):
        yield replicas


def replicas_of(across: Across | None) -> Replicas | None:
    """The replicas that `across=` names; FuncgaError if it names none."""
    step = REPLICATED.get()
    if across is None and step is not None:
        raise FuncgaError(
            f"the step runs on every device along {listed(step.names)}, in jax_backend.replicated, "
            "and has no across=: each device would have the fold of its own rows. Write "
            f"across={spelled(step.names)}; or across=() if the step merges in another way."
        )
    # An empty tuple asks for no merge, which counts as an across=.
    if step is not None:
        step.merges = True
    if across is None or across == ():
        return None
    replicas = read_across(across)
    for name in replicas.names:
        # Only bound inside of a shard_map or vmap over this axis.
        try:
            lax.axis_size(name)
        except NameError:
            manual = listed(jax.sharding.get_abstract_mesh().manual_axes) or "no axis"
            raise FuncgaError(
                f'across="{name}" merges over an axis of a mesh, which has replicas only inside of '
                f"jax.shard_map, where it is manual, and here {manual} is. Wrap the step, "
                f'jax_backend.replicated(step, mesh, axis="{name}"), or call it inside '
                f'jax.shard_map(..., axis_names={{"{name}"}}).'
            ) from None
    return replicas


def read_across(across: Across) -> Replicas:
    """The replicas that `across=` names, also outside of shard_map; FuncgaError if it names
    none.
    """
    return across if isinstance(across, Replicas) else Replicas(across)


def summed(number: Scalar, across: Across) -> Scalar:
    """The sum of a scalar over the replicas that `across=` names."""
    replicas = replicas_of(across)
    names = () if replicas is None else replicas.names
    return lax.psum(arrays.as_varying(jnp.asarray(number), names), names)


def check_step_merges() -> None:
    """Raises FuncgaError inside of `replicated` if no fold had an across=."""
    step = REPLICATED.get()
    if step is not None and not step.merges:
        replicas_of(None)


def spelled(names: tuple[str, ...]) -> str:
    """The names of axes as Python code."""
    return repr(names[0] if len(names) == 1 else names).replace("'", '"')


def listed(names: Iterable[str]) -> str:
    """The names of axes in a sentence."""
    return " and ".join(f'"{name}"' for name in names)


def varying(tree: Tree, replicas: Replicas) -> Tree:
    """The tree with its arrays marked as varying over the replicas, as JAX sums gradients of
    arrays that do not vary. Python floats become arrays, as they may be differentiated; all else
    stays.
    """

    # Else gradients would be summed over the devices at every micro-batch.
    def mark(leaf: Array) -> Array:
        if isinstance(leaf, float | complex) or (
            isinstance(leaf, np.ndarray | np.generic) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ):
            leaf = jnp.asarray(leaf)
        return arrays.as_varying(leaf, replicas.names) if isinstance(leaf, jax.Array) else leaf

    return mapped(mark, trees, tree)
