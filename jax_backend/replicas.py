"""Replicas: what across= names, and whether they have the same parameters."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeAlias, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from funcga._backend.prefixes import leaf_paths, named_by_leaf
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from jax_backend import _private, arrays, trees
from jax_backend.arrays import axis_names

Across: TypeAlias = Union[str, tuple[str, ...], "Replicas", Tree]
"""What `across=` may be in JAX: the names of axes, Replicas, or a tree or a function that names
axes for each leaf.
"""

WRITE_LEAVES = (
    'across=["data", {"dense": ("data", "expert"), "experts": "data"}] for a grad_fn that returns '
    "(loss, grads)"
)


@dataclass(frozen=True)
class Replicas:
    """For `across=`: the replicas along an axis of the mesh, and which results are left scattered
    over them.

    Args:
        axis: The name of a mesh axis, or a tuple of names.
        scatter: A tree prefix over grad_fn's output. Where it has an int, the merged leaf is left
            in equal parts, one a replica, along that axis of the leaf: a reduce-scatter in place of
            the all-reduce. Where it has None, every replica gets the whole leaf.
        leaves: Where leaves of grad_fn's output are merged over fewer axes: a tree prefix of names,
            and of tuples of names, over that output, or a function of a leaf's dotted path, such as
            `"1.experts.weight"`, that returns them; `()` for a leaf that is not merged. Weights are
            counted over all of `axis`. An `across=` that is such a tree itself counts them over all
            axes that it names, and one that is a function over all of shard_map.

    Raises:
        FuncgaError: The axis is no name, or is named twice, or `leaves` name one that is not among
            them.

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
    leaves: Tree = None

    def __post_init__(self) -> None:
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise _no_axis(self.axis)
        if len({*self.names}) < len(self.names):
            raise FuncgaError(f"across={self.axis!r} names an axis twice. Name each once.")
        for named in () if self.leaves is None or callable(self.leaves) else _names_in(self.leaves):
            self.check_part(named)

    def check_part(self, names: tuple[str, ...]) -> None:
        """Raises FuncgaError if a leaf is merged over an axis that weights are not counted over."""
        beyond = [name for name in names if name not in self.names]
        if beyond:
            raise FuncgaError(
                f"a leaf is to be merged over {listed(names)}, and the window over "
                f"{listed(self.names)}: what lies along {listed(beyond)} would be summed, and its "
                "weights not counted. Name all axes along which micro-batches differ: "
                "across=jax_backend.Replicas((...), leaves=...)."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return axis_names(self.axis)


def _no_axis(across: object) -> FuncgaError:
    names = across.axis_names if isinstance(across, Mesh | AbstractMesh) else ()
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


def is_names(value: object) -> bool:
    """Whether this names axes: a name, or a tuple of names alone."""
    return isinstance(value, str) or (
        type(value) is tuple and all(isinstance(name, str) for name in value)
    )


def _names_in(leaves: Tree) -> list[tuple[str, ...]]:
    """The names at all leaves of a tree."""
    named = jax.tree.leaves(leaves, is_leaf=is_names)
    for each in named:
        if not is_names(each):
            raise FuncgaError(
                f"across= has {each!r} for some leaves. Name the axes of every leaf, "
                f"{WRITE_LEAVES}."
            )
    return [*map(axis_names, named)]


def read_across(across: Across) -> Replicas:
    """The replicas that `across=` names, also outside of shard_map; FuncgaError if it names
    none.
    """
    if isinstance(across, Replicas):
        return across
    if not names_leaves(across):
        return Replicas(across)
    if callable(across):
        names = jax.sharding.get_abstract_mesh().manual_axes
        if not names:
            raise FuncgaError(
                "across= is a function, and outside of jax.shard_map nobody knows over which axes "
                "weights are counted. "
                'Name them: across=jax_backend.Replicas(("data", "expert"), leaves=function).'
            )
        return Replicas(names, leaves=across)
    all_names = dict.fromkeys(name for named in _names_in(across) for name in named)
    if not all_names:
        raise _no_axis(across)
    return Replicas(tuple(all_names), leaves=across)


def of_window(across: Across) -> Across:
    """`across=` without the replicas of single leaves: those that weights are counted over."""
    return replace(read_across(across), leaves=None) if names_leaves(across) else across


def names_leaves(across: Across | None) -> bool:
    """Whether `across=` names replicas for each leaf."""
    if isinstance(across, Replicas):
        return across.leaves is not None
    is_function = callable(across) and not isinstance(across, type | Mesh | AbstractMesh)
    return (
        across is not None
        and not is_names(across)
        and (is_function or bool(trees.children(across)))
    )


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
    names = [replicas.names] * len(leaves)
    if replicas.leaves is not None:
        named = named_by_leaf(replicas.leaves, params, is_names, trees, "params", WRITE_LEAVES)
        names = [*map(axis_names, named)]
    differences = [
        (path, difference)
        for path, leaf, own, digests in zip(paths, leaves, names, _digests(leaves), strict=True)
        if (difference := _difference(leaf, own, digests))
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
