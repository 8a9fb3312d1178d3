"""Replicas: what across= names, and whether they hold the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from funcga._backend.prefixes import leaf_paths
from funcga._types import Array, Tree
from funcga.errors import FuncgaError
from jax_backend import _private, trees
from jax_backend.arrays import as_varying

Across: TypeAlias = Union[str, tuple[str, ...], "Replicas"]
"""What `across=` may be in JAX."""


@dataclass(frozen=True)
class Replicas:
    """For `across=`: the replicas along an axis of the mesh, and which results are left scattered over them.

    axis: the name of a mesh axis, or a tuple of names. scatter: a tree prefix over grad_fn's output. Where it has an
    int, the merged leaf is left in equal parts, one a replica, along that axis of the leaf: a reduce-scatter in place
    of the all-reduce. Where it has None, every replica gets the whole leaf.

    >>> across = jax_backend.Replicas("data", scatter=(None, 0))  # (loss, grads)
    """

    axis: str | tuple[str, ...]
    scatter: Any = None

    def __post_init__(self) -> None:
        if not self.names or not all(isinstance(name, str) for name in self.names):
            raise _no_axis(self.axis)
        if len({*self.names}) < len(self.names):
            raise FuncgaError(f"across={self.axis!r} names an axis twice. Name each once.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)


def _no_axis(across: Any) -> FuncgaError:
    names = across.axis_names if isinstance(across, Mesh | AbstractMesh) else ()
    found = f"of type {type(across).__name__}" if hasattr(across, "__dict__") else repr(across)
    return FuncgaError(
        f"across is {found}, and in JAX replicas are named by an axis of the mesh. Write the name, "
        f'across="{names[0] if names else "data"}", or a tuple of names, and call the step inside jax.shard_map or '
        f"through jax_backend.replicated(step, mesh)."
    )


# -- what a step merges over


@dataclass
class _Step:
    """A step while `replicated` traces it: the axes along which it runs, and whether a fold in it had an across=."""

    names: tuple[str, ...]
    merges: bool = False


_STEP: ContextVar[_Step | None] = ContextVar("_STEP", default=None)


@contextmanager
def unmerged(names: tuple[str, ...]) -> Iterator[None]:
    """A context in which a fold has to say whether it merges over these axes."""
    token = _STEP.set(_Step(names) if names else None)
    try:
        yield
    finally:
        _STEP.reset(token)


def is_merged(across: Across | None) -> bool:
    """Whether a fold with this across= merges over replicas, or has to say so."""
    return across is not None or _STEP.get() is not None


@contextmanager
def merging(across: Across | None) -> "Iterator[Replicas | None]":
    """The replicas that `across=` names, in a context in which a fold inside of grad_fn need not say so again."""
    replicas = replicas_of(across)
    with unmerged(()):
        yield replicas


def replicas_of(across: Across | None) -> Replicas | None:
    """The replicas that `across=` names, as the loop takes them; FuncgaError for what names none."""
    step = _STEP.get()
    if across is None and step is not None:
        raise FuncgaError(
            f"the step runs on every device along {listed(step.names)}, in jax_backend.replicated, and has no across=: "
            f"each device would have the fold of its own rows. Write across={spelled(step.names)}; or across=() if the "
            f"step merges in another way."
        )
    if step is not None:
        step.merges = True
    if across is None or across == ():
        return None
    replicas = across if isinstance(across, Replicas) else Replicas(across)
    for name in replicas.names:
        try:
            lax.axis_size(name)
        except NameError:
            raise _unbound(name) from None
    return replicas


def _unbound(name: str) -> FuncgaError:
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return FuncgaError(
            f'across="{name}" merges over a mesh axis, and this call is outside of jax.shard_map, where an axis has no '
            f"replicas. Wrap the step, step = jax_backend.replicated(step, mesh), or call it inside jax.shard_map."
        )
    if name in mesh.axis_names:
        return FuncgaError(
            f'across="{name}" merges over a mesh axis that this jax.shard_map leaves to the compiler: only '
            f'{listed(mesh.manual_axes)} is manual in it. Name it there, axis_names={{..., "{name}"}}; in '
            f'jax_backend.replicated it is axis=(..., "{name}").'
        )
    return FuncgaError(
        f'across="{name}" is no axis of the mesh of this jax.shard_map, which has {listed(mesh.axis_names)}. Write '
        f'across="{mesh.manual_axes[0]}".'
    )


def check_step_merges() -> None:
    """Raises FuncgaError where `replicated` runs a step in which nothing has an across=."""
    step = _STEP.get()
    if step is not None and not step.merges:
        replicas_of(None)


def spelled(names: tuple[str, ...]) -> str:
    """The names of axes as they are written in code."""
    return repr(names[0] if len(names) == 1 else names).replace("'", '"')


def listed(names: Any) -> str:
    """The names of axes as they are read out."""
    return " and ".join(f'"{name}"' for name in names)


def varying(tree: Tree, replicas: Replicas | None) -> Tree:
    """The tree with its arrays marked as differing between replicas: JAX itself sums gradients of what does not differ.

    A Python float becomes an array, as it may be what is differentiated; ints, and what is no number, stay.
    """
    if replicas is None:
        return tree

    def mark(leaf: Array) -> Array:
        if isinstance(leaf, float | complex) or (
            isinstance(leaf, np.ndarray | np.generic) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        ):
            leaf = jnp.asarray(leaf)
        return as_varying(leaf, replicas.names) if isinstance(leaf, jax.Array) else leaf

    leaves, structure = trees.flatten(tree)
    return trees.unflatten(structure, [*map(mark, leaves)])


# -- whether they hold the same


def check_replicas(params: Any, across: Any) -> None:
    """Raises FuncgaError, which names the leaf, if an array is not the same on every replica."""
    replicas = across if isinstance(across, Replicas) else Replicas(across)
    leaves, _ = trees.flatten(params)
    paths = leaf_paths(params, trees, "params")
    if any(_private.is_traced(leaf) for leaf in leaves):
        raise FuncgaError(
            "check_replicas compares what lies on the devices, and was called in a program that is being compiled, "
            "where nothing lies anywhere yet. Call it outside of jax.jit and jax.shard_map."
        )
    if jax.process_count() > 1:
        differing = _differing_processes(leaves, paths, replicas.names)
    else:
        pairs = zip(paths, leaves, strict=True)
        pieces = [(path, leaf) for path, leaf in pairs if isinstance(leaf, jax.Array)]
        differing = [(path, *apart[0]) for path, leaf in pieces if (apart := list(_differences(leaf, replicas.names)))]
    if jax.process_count() == 1 and not any(map(_is_on_mesh, leaves)):
        raise FuncgaError(
            f"none of the arrays in params lies on a mesh, so there is nothing to compare along "
            f"{listed(replicas.names)}. Put them on the mesh first: jax.device_put(params, NamedSharding(mesh, P()))."
        )
    if differing:
        raise _apart(differing, replicas)


def _is_on_mesh(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and (isinstance(leaf.sharding, NamedSharding) or len(leaf.devices()) > 1)


def _differences(leaf: jax.Array, names: tuple[str, ...]) -> Iterator[tuple[Any, Any, Any]]:
    """(index, device, device) of copies that should be the same along these axes of the mesh and are not."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    first: dict[Any, tuple[Any, bytes]] = {}
    places = _places(leaf, names)
    for shard in leaf.addressable_shards if len(leaf.sharding.device_set) > 1 else ():
        key = str(shard.index), places.get(shard.device)
        bits = np.asarray(shard.data).tobytes()
        device, expected = first.setdefault(key, (shard.device, bits))
        if bits != expected:
            yield shard.index, device, shard.device


def _places(leaf: jax.Array, names: tuple[str, ...]) -> dict[Any, Any]:
    """For every device of the leaf's mesh its place along the axes that are not named."""
    if not isinstance(leaf.sharding, NamedSharding) or not isinstance(leaf.sharding.mesh, Mesh):
        return {}
    mesh = leaf.sharding.mesh
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise FuncgaError(
            f'across="{missing[0]}" is no axis of the mesh that params lie on, which has {listed(mesh.axis_names)}. '
            f'Write across="{mesh.axis_names[0]}".'
        )
    others = [i for i, name in enumerate(mesh.axis_names) if name not in names]
    return {device: tuple(place[i] for i in others) for place, device in np.ndenumerate(mesh.devices)}


def _differing_processes(leaves: list[Any], paths: list[str], names: tuple[str, ...]) -> list[Any]:
    """What `_differences` finds where the copies lie on devices of other processes, with the leaf's path before it."""
    places = {device: place for place, device in enumerate(jax.devices())}
    digests = np.zeros((len(leaves), len(places), 2), np.uint32)
    for leaf, row in zip(leaves, digests, strict=True):
        for shard in leaf.addressable_shards if isinstance(leaf, jax.Array) else ():
            row[places[shard.device]] = np.frombuffer(_digest(shard.data), np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(digests)).sum(axis=0)  # a device is of one process
    return [
        (path, *apart)
        for path, leaf, row in zip(paths, leaves, gathered, strict=True)
        if isinstance(leaf, jax.Array) and (apart := _first_difference(leaf, row, places, names))
    ]


def _first_difference(leaf: jax.Array, row: Any, places: dict[Any, int], names: tuple[str, ...]) -> Any:
    """(index, device, device) of two copies with other digests; None if there are none."""
    others, first = _places(leaf, names), dict[Any, Any]()
    held: list[Any] = [(index, device) for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()]
    if leaf.is_fully_addressable:  # every process has an array of its own, which is compared if it is whole
        held = [(..., device) for device, place in places.items() if row[place].any() and leaf.is_fully_replicated]
        others = {}
    for index, device in held:
        one = first.setdefault((str(index), others.get(device)), device)
        if (row[places[one]] != row[places[device]]).any():
            return index, one, device
    return None


def _digest(piece: jax.Array) -> bytes:
    from hashlib import blake2b

    if jnp.issubdtype(piece.dtype, jax.dtypes.prng_key):
        piece = jax.random.key_data(piece)
    return blake2b(np.asarray(piece).tobytes(), digest_size=8).digest()


def _apart(differing: list[tuple[str, Any, Any, Any]], replicas: Replicas) -> FuncgaError:
    path, _, one, other = differing[0]
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return FuncgaError(
        f"`{path}`{more} is not the same on all replicas: {one} and {other} hold different values along "
        f"{listed(replicas.names)}. What is averaged would belong to no parameters at all. Give every replica the "
        f"same: params = jax.device_put(params, jax.NamedSharding(mesh, P()))."
    )
