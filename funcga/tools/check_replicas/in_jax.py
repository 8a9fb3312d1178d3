"""Whether the copies of an array on the devices of a mesh are the same: hashes are compared."""

from hashlib import blake2b

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from funcga._backend.prefixes import leaf_paths
from funcga._types import Tree
from funcga.errors import FuncgaError
from jax_backend import arrays, trees
from jax_backend.replicas import Across, listed, read_across


def check_replicas(params: Tree, across: Across) -> None:
    """Raises FuncgaError, which names the leaf, if an array is not the same on every replica."""
    names = read_across(across).names
    pairs = zip(leaf_paths(params, trees, "params"), trees.flatten(params)[0], strict=True)
    leaves = {path: leaf for path, leaf in pairs if isinstance(leaf, jax.Array)}
    is_on_mesh = [isinstance(leaf.sharding, NamedSharding) for leaf in leaves.values()]
    if jax.process_count() == 1 and not any(is_on_mesh):
        raise FuncgaError(
            "none of the arrays in params lies on a mesh, so there is nothing to compare along "
            f"{listed(names)}. Put them on the mesh first: jax.device_put(params, "
            "NamedSharding(mesh, P()))."
        )
    # A column for each device: the hash of which part of an array it has, and that of the numbers,
    # of 64 bits each. A process fills its own, and the sum over processes has all.
    devices = [*dict.fromkeys([*jax.devices(), *jax.devices("cpu")])]
    table = np.zeros((len(leaves), len(devices), 4), np.uint32)
    for row, leaf in zip(table, leaves.values(), strict=True):
        coordinates = _coordinates(leaf, names)
        for shard in leaf.addressable_shards:
            part = repr((shard.index, coordinates.get(shard.device)))
            data = np.asarray(arrays.stored(shard.data)).tobytes()
            digests = [blake2b(each, digest_size=8).digest() for each in (part.encode(), data)]
            row[devices.index(shard.device)] = np.frombuffer(b"".join(digests), np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(table))
    table = gathered.reshape(-1, *table.shape).sum(axis=0)
    for row, path in zip(table.tolist(), leaves, strict=True):
        firsts: dict[object, tuple[jax.Device, object]] = {}
        for device, (*part, high, low) in zip(devices, row, strict=True):
            first, numbers = firsts.setdefault(tuple(part), (device, (high, low)))
            if numbers != (high, low):
                raise FuncgaError(
                    f"`{path}` is not the same on all replicas: {first} and {device} hold "
                    f"different values along {listed(names)}. What is averaged would belong to no "
                    "parameters at all. Give every replica the same: params = "
                    "jax.device_put(params, jax.NamedSharding(mesh, P()))."
                )


def _coordinates(leaf: jax.Array, names: tuple[str, ...]) -> dict[jax.Device, list[int]]:
    """For every device its coordinates along the other axes of the mesh, along which copies may
    differ; none of an array that is a process's own.
    """
    is_own = leaf.is_fully_addressable and jax.process_count() > 1
    if is_own or not isinstance(leaf.sharding, NamedSharding):
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
        device: [where[axis] for axis in others] for where, device in np.ndenumerate(mesh.devices)
    }
