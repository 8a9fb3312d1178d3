"""Whether the copies of an array on the devices of a mesh are the same: hashes are compared."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from funcga._backend.prefixes import leaf_paths
from funcga._types import Tree
from funcga.errors import FuncgaError
from jax_backend import arrays, trees
from jax_backend.replicas import Across, listed, read_across

Digest: TypeAlias = tuple[int, int]  # of 32 bits each, without jax_enable_x64


def check_replicas(params: Tree, across: Across) -> None:
    """Raises FuncgaError, which names the leaf, if an array is not the same on every replica."""
    replicas = read_across(across)
    leaves, _ = trees.flatten(params)
    paths = leaf_paths(params, trees, "params")
    if jax.process_count() == 1 and not any(map(_is_on_mesh, leaves)):
        raise FuncgaError(
            "none of the arrays in params lies on a mesh, so there is nothing to compare along "
            f"{listed(replicas.names)}. Put them on the mesh first: jax.device_put(params, "
            "NamedSharding(mesh, P()))."
        )
    for path, leaf, digests in zip(paths, leaves, _digests(leaves), strict=True):
        for one, other in _differences(leaf, replicas.names, digests):
            raise FuncgaError(
                f"`{path}` is not the same on all replicas: {one} and {other} hold different "
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


def _differences(
    leaf: Tree, names: tuple[str, ...], digests: dict[jax.Device, Digest]
) -> Iterator[tuple[jax.Device, jax.Device]]:
    """Pairs of devices whose copies differ along these axes of the mesh."""
    if not isinstance(leaf, jax.Array):
        return
    # Copies of the same part of the array, at the same coordinates, have to be equal.
    coordinates = _coordinates(leaf, names)
    parts: dict[jax.Device, object] = {
        device: (str(index), coordinates.get(device))
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
    }
    if leaf.is_fully_addressable and jax.process_count() > 1:
        # Each process has its own array, compared if it is replicated.
        parts = {
            d: None for d, digest in digests.items() if any(digest) and leaf.is_fully_replicated
        }
    first_copies: dict[object, jax.Device] = {}
    for device, part in parts.items():
        first_device = first_copies.setdefault(part, device)
        if digests[first_device] != digests[device]:
            yield first_device, device


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
