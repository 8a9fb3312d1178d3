"""Replicas: what across= names, and whether they have the same parameters."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from funcga._backend.prefixes import leaf_paths
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import _private, arrays, trees
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
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise _no_axis(self.axis)
        if len({*self.names}) < len(self.names):
            raise FuncgaError(f"across={self.axis!r} names an axis twice. Name each once.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return axis_names(self.axis)


def _no_axis(across: object) -> FuncgaError:
    names = across.axis_names if isinstance(across, Mesh | AbstractMesh) else ()
    if trees.children(across) and not isinstance(across, str):
        return FuncgaError(
            "across= names axes for each leaf, and all leaves of a step are merged over the same "
            "ones. Fold sums with across=(), and reduce each leaf after the step over the axes "
            'along which it differs: jax.lax.psum(grads["experts"], "data") '
            "(docs/howto/experts.md)."
        )
    described = f"of type {type(across).__name__}" if hasattr(across, "__dict__") else repr(across)
    return FuncgaError(
        f"across is {described}, and in JAX replicas are named by an axis of the mesh. Write the "
        "name, "
        f'across="{names[0] if names else "data"}", or a tuple of names, and call the step inside '
        "jax.shard_map or "
        "through jax_backend.replicated(step, mesh)."
    )


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
            raise _unbound(name) from None
    return replicas


def read_across(across: Across) -> Replicas:
    """The replicas that `across=` names, also outside of shard_map; FuncgaError if it names
    none.
    """
    return across if isinstance(across, Replicas) else Replicas(across)


def _unbound(name: str) -> FuncgaError:
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return FuncgaError(
            f'across="{name}" merges over a mesh axis, and this call is outside of jax.shard_map, '
            "where an axis has no "
            "replicas. Wrap the step, step = jax_backend.replicated(step, mesh), or call it inside "
            "jax.shard_map."
        )
    if name in mesh.axis_names:
        return FuncgaError(
            f'across="{name}" merges over a mesh axis that this jax.shard_map leaves to the '
            f"compiler: only {listed(mesh.manual_axes)} is manual in it. Name it there, "
            f'axis_names={{..., "{name}"}}; in jax_backend.replicated it is axis=(..., "{name}").'
        )
    return FuncgaError(
        f'across="{name}" is no axis of the mesh of this jax.shard_map, which has '
        f'{listed(mesh.axis_names)}. Write across="{mesh.manual_axes[0]}".'
    )


def summed(number: Scalar, accumulators: Sequence[Reduced], replicas: Replicas) -> Scalar:
    """The sum of a scalar over the replicas, which have these accumulators."""
    return lax.psum(arrays.as_varying(jnp.asarray(number), replicas.names), replicas.names)


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


def varying(tree: Tree, replicas: Replicas | None) -> Tree:
    """The tree with its arrays marked as varying over the replicas, as JAX sums gradients of
    arrays that do not vary. Python floats become arrays, as they may be differentiated; all else
    stays.
    """
    if replicas is None:
        return tree

    # Else gradients would be summed over the devices at every micro-batch.
    def mark(leaf: Array) -> Array:
        if isinstance(leaf, float | complex) or (
            isinstance(leaf, np.ndarray | np.generic) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ):
            leaf = jnp.asarray(leaf)
        return arrays.as_varying(leaf, replicas.names) if isinstance(leaf, jax.Array) else leaf

    leaves, structure = trees.flatten(tree)
    return trees.unflatten(structure, [*map(mark, leaves)])


# -- whether replicas are the same

Digest: TypeAlias = tuple[int, int]  # of 32 bits each, without jax_enable_x64


def check_replicas(params: Tree, across: Across) -> None:
    """Raises FuncgaError, which names the leaf, if an array is not the same on every replica."""
    replicas = read_across(across)
    leaves, _ = trees.flatten(params)
    paths = leaf_paths(params, trees, "params")
    if any(_private.is_traced(leaf) for leaf in leaves):
        raise FuncgaError(
            "check_replicas compares what lies on the devices, and was called in a program that is "
            "being compiled, where nothing lies anywhere yet. Call it outside of jax.jit and "
            "jax.shard_map."
        )
    if jax.process_count() == 1 and not any(map(_is_on_mesh, leaves)):
        raise FuncgaError(
            "none of the arrays in params lies on a mesh, so there is nothing to compare along "
            f"{listed(replicas.names)}. Put them on the mesh first: jax.device_put(params, "
            "NamedSharding(mesh, P()))."
        )
    differences = [
        (path, difference)
        for path, leaf, digests in zip(paths, leaves, _digests(leaves), strict=True)
        if (difference := _difference(leaf, replicas.names, digests))
    ]
    if differences:
        path, (one, other) = differences[0]
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise FuncgaError(
            f"`{path}`{more} is not the same on all replicas: {one} and {other} hold different "
            f"values along {listed(replicas.names)}. What is averaged would belong to no "
            "parameters at all. Give every replica the same: params = jax.device_put(params, "
            "jax.NamedSharding(mesh, P()))."
        )


def _is_on_mesh(leaf: Tree) -> bool:
    return isinstance(leaf, jax.Array) and (
        isinstance(leaf.sharding, NamedSharding) or len(leaf.devices()) > 1
    )


def _digests(leaves: Sequence[Tree]) -> list[dict[jax.Device, Digest]]:
    """For every leaf a digest of each device's shard, also of other processes."""
    own = [
        {shard.device: _digest(shard.data) for shard in leaf.addressable_shards}
        if isinstance(leaf, jax.Array)
        else {}
        for leaf in leaves
    ]
    if jax.process_count() == 1:
        return own
    # A column for each device. A process fills its own, and the sum over processes has all.
    table = [[digests.get(device, (0, 0)) for device in jax.devices()] for digests in own]
    tables = multihost_utils.process_allgather(np.asarray(table, np.uint32))
    return [
        {device: (int(a), int(b)) for device, (a, b) in zip(jax.devices(), row, strict=True)}
        for row in np.asarray(tables).sum(axis=0)
    ]


def _digest(piece: jax.Array) -> Digest:
    data = blake2b(np.asarray(arrays.stored(piece)).tobytes(), digest_size=8).digest()
    return int.from_bytes(data[:4]), int.from_bytes(data[4:])


def _difference(
    leaf: Tree, names: tuple[str, ...], digests: dict[jax.Device, Digest]
) -> tuple[jax.Device, jax.Device] | None:
    """Two devices whose copies differ along these axes of the mesh, if there are any."""
    if not isinstance(leaf, jax.Array):
        return None
    # Copies of the same part of the array, at the same coordinates, have to be equal.
    coordinates = _coordinates(leaf, names)
    parts = leaf.sharding.devices_indices_map(leaf.shape).items()
    copies = [(device, (str(index), coordinates.get(device))) for device, index in parts]
    if leaf.is_fully_addressable and jax.process_count() > 1:
        # Each process has its own array, compared if it is replicated.
        copies = [
            (device, ("", None))
            for device, digest in digests.items()
            if any(digest) and leaf.is_fully_replicated
        ]
    first_copies: dict[object, jax.Device] = {}
    for device, part in copies:
        first_device = first_copies.setdefault(part, device)
        if digests[first_device] != digests[device]:
            return first_device, device
    return None


def _coordinates(leaf: jax.Array, names: tuple[str, ...]) -> dict[jax.Device, tuple[int, ...]]:
    """For every device its coordinates along the other axes of the mesh, along which copies may
    differ.
    """
    if not isinstance(leaf.sharding, NamedSharding) or not isinstance(leaf.sharding.mesh, Mesh):
        return {}
    mesh = leaf.sharding.mesh
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise FuncgaError(
            f'across="{missing[0]}" is no axis of the mesh that params lie on, which has '
            f'{listed(mesh.axis_names)}. Write across="{mesh.axis_names[0]}".'
        )
    others = [axis for axis, name in enumerate(mesh.axis_names) if name not in names]
    return {
        device: tuple(where[axis] for axis in others)
        for where, device in np.ndenumerate(mesh.devices)
    }
