"""Whether processes have the same parameters: they exchange hashes."""

import ctypes
import hashlib
from typing import Any

import torch

from funcga._backend.prefixes import leaf_paths
from funcga._types import Tree
from torch_backend import arrays, trees
from torch_backend.dtensor import is_dtensor, local, ranks_with_other_shards
from torch_backend.replicas import Replicas, as_bytes, check_alike, explained, replicas_of


def check_replicas(params: Tree, across: Any) -> None:
    """Raises FuncgaError, which names the leaf, if an array is not the same on every replica."""
    replicas = replicas_of(across)
    paths, leaves = leaf_paths(params, trees, "params"), trees.flatten(params)[0]
    mine = {path: _described(leaf, replicas) for path, leaf in zip(paths, leaves, strict=True)}
    # Messages that an earlier window still owes come first, or replicas would read them as this
    # one's.
    replicas.channel.send_owed()
    with explained():
        said = replicas.channel.all_gather(mine)
    # All replicas see all of it, and all raise.
    check_alike(
        said,
        "have different parameters",
        "Send them around once before training: for p in params.values(): "
        f"torch.distributed.broadcast(p, src={replicas.ranks[0]}, group=group).",
    )


def _described(leaf: Any, replicas: Replicas) -> str:
    """The type of a leaf, and a hash of its bits, unless each of these replicas should have another
    shard of it.
    """
    if not arrays.is_array(leaf):
        return repr(leaf)
    if is_dtensor(leaf) and ranks_with_other_shards(leaf, replicas.ranks):
        return arrays.describe(leaf)
    shard = local(leaf.detach())
    data = as_bytes(shard if shard.layout is torch.strided else shard.to_dense())
    digest = hashlib.blake2b(digest_size=8)
    # So many bytes are copied to the host at a time, so that it needs no room for a whole array.
    for chunk in torch.split(data, 2**24):
        on_host = chunk.cpu()
        digest.update(ctypes.string_at(on_host.data_ptr(), on_host.numel()))
    return f"{arrays.describe(leaf)} with the hash {digest.hexdigest()}"
