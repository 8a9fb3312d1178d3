"""Replicas: what across= names, and whether they hold the same."""

import ctypes
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from funcga._backend.prefixes import leaf_paths
from funcga._types import Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import is_dtensor, local, ranks_with_other_shards
from torch_backend.reduce.channel import Channel, channel_of, check_alike
from torch_backend.reduce.wire import as_bytes

_WRITE = "across=torch.distributed.group.WORLD, or a 1-D device mesh such as mesh['dp']"


@dataclass(frozen=True)
class Replicas:
    """The processes to merge over, and how gradients travel between them: pass it as `across=`.

    Args:
        group: A process group or a 1-D DeviceMesh.
        bucket_bytes: The bytes of one all_reduce. It is launched while the last micro-batch's backward pass still runs.
        wire_dtype: What gradients are sent as, such as torch.bfloat16, which halves the traffic and rounds what each
            replica contributes to 8 bits. By default they are sent as they are accumulated. Counts, weights and
            scalars, such as losses, are never rounded.

    Raises:
        FuncgaError: If `group` is no group of which this process is a member.

    Example:
        >>> across = torch_backend.Replicas(dist.group.WORLD, wire_dtype=torch.bfloat16)
        >>> step = funcga.accumulate(funcga.grad(lambda w, x: (w * x).mean()), 2, across=across)
        >>> step(torch.tensor(1.0), torch.ones(4))
        tensor(1.)
    """

    group: Any
    bucket_bytes: int = 4 * 2**20
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", _group(self.group))
        if type(self.bucket_bytes) is not int or self.bucket_bytes < 1:
            raise FuncgaError(f"bucket_bytes is {self.bucket_bytes!r}: it must be an int >= 1, such as 4 * 2**20.")
        if self.wire_dtype not in (None, torch.float32, torch.bfloat16, torch.float64):
            raise FuncgaError(
                f"wire_dtype is {self.wire_dtype!r}: gradients can be sent as torch.float32, torch.float64 or "
                f"torch.bfloat16; None sends them as they are accumulated."
            )

    @property
    def channel(self) -> Channel:
        """What the replicas exchange messages over. Making it is a collective, so all must first ask together."""
        return channel_of(self.group)

    @property
    def count(self) -> int:
        """How many replicas there are."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which of the replicas this process is."""
        return dist.get_rank(self.group)


def _group(across: Any) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise FuncgaError(
            "across= was given, and torch.distributed is not initialised. Start the processes with torchrun and call "
            "torch.distributed.init_process_group() first; on one replica leave across out."
        )
    if isinstance(across, DeviceMesh):
        if across.ndim != 1:
            raise FuncgaError(
                f"across= is a device mesh of {across.ndim} dimensions, {across.mesh_dim_names}. Name the one to merge "
                f"over: across=mesh['dp']; or make one of several: mesh['dp', 'cp']._flatten()."
            )
        return across.get_group()
    if type(across) is int and across == dist.GroupMember.NON_GROUP_MEMBER:
        raise FuncgaError("across= is a process group that this process is no member of: it has no part in the fold.")
    if not isinstance(across, dist.ProcessGroup):
        raise FuncgaError(
            f"across= is {across!r}, and the arrays of the call are torch tensors. Give a process group, {_WRITE}."
        )
    return across


def replicas_of(across: Any) -> Replicas:
    """The replicas that `across=` names, as the loop takes them; FuncgaError for what names none."""
    return across if isinstance(across, Replicas) else Replicas(across)


def check_replicas(params: Tree, across: Any) -> None:
    """Raises FuncgaError, which names the leaf, if an array is not the same on every replica."""
    replicas = replicas_of(across)
    # Messages that an earlier window still owes come first, or replicas would read them as this one's.
    replicas.channel.settle()
    # First the structure and the kinds of leaves are compared, then the numbers in them: these need equal paths.
    leaves = dict(zip(leaf_paths(params, trees, "params"), trees.flatten(params)[0], strict=True))
    kinds = {path: arrays.describe(leaf) if arrays.is_array(leaf) else repr(leaf) for path, leaf in leaves.items()}
    check_alike(replicas.channel.gathered(kinds), "have different parameters")
    whole = {path: leaf for path, leaf in leaves.items() if arrays.is_array(leaf) and not _is_cut(leaf, replicas.group)}
    if whole:
        _check_same(whole, replicas)


def _is_cut(leaf: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a tensor is cut over these replicas, so that each of them should have another shard."""
    return is_dtensor(leaf) and bool(ranks_with_other_shards(leaf, dist.get_process_group_ranks(group)))


def _check_same(leaves: dict[str, torch.Tensor], replicas: Replicas) -> None:
    # Only hashes travel, however large the arrays are.
    digests_of_ranks = replicas.channel.gathered([_digest(leaf) for leaf in leaves.values()])
    differing = []
    for path, digests in zip(leaves, zip(*digests_of_ranks, strict=True), strict=True):
        ranks = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
        if ranks:
            differing.append(f"`{path}` of rank {', '.join(ranks[:8])}{', ...' if ranks[8:] else ''}")
    if differing:
        more = f"; and {len(differing) - 4} more" if differing[4:] else ""
        raise FuncgaError(
            f"the replicas start from different parameters: not as on rank 0 {'are' if differing[1:] else 'is'} "
            f"{'; '.join(differing[:4])}{more}. Send them around once before training: "
            f"for p in params.values(): torch.distributed.broadcast(p, src=0, group=group)."
        )


# So many bytes are copied to the host at a time, so that it needs no room for a whole array.
_CHUNK = 2**24


@torch.no_grad()
def _digest(leaf: torch.Tensor) -> bytes:
    """A hash of the bits of an array, 16 bytes."""
    shard = local(leaf)
    data = as_bytes(shard if shard.layout is torch.strided else shard.to_dense())
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, data.numel(), _CHUNK):
        chunk = data[start : start + _CHUNK].cpu()
        digest.update(ctypes.string_at(chunk.data_ptr(), chunk.numel()))
    return digest.digest()
