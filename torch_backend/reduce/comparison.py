"""Comparison: whether all replicas describe alike what they have.

Only torch has this file: in JAX one program describes all replicas.
"""

import hashlib
from typing import Any

from funcga.errors import FuncgaError
from torch_backend.reduce.channel import Channel


def digest_of(description: Any) -> int:
    """A number of 64 bits that is another for any other description, and never 0."""
    return int.from_bytes(hashlib.sha256(repr(description).encode()).digest()[:8], "little", signed=True) or 1


def check_alike(
    mine: dict[str, str] | None, channel: Channel, problem: str, digests: list[int | None] | None = None
) -> None:
    """Raises FuncgaError on every replica if two of them describe differently what stands at a path.

    `mine` has a description for every path; it is None on a replica that has nothing to say. `digests` are those of
    all replicas, if they are known already.
    """
    if digests is None:
        digests = channel.gathered(None if mine is None else digest_of([*mine.items()]))
    if len({*digests} - {None}) <= 1:
        return
    speakers = [(rank, theirs) for rank, theirs in enumerate(channel.gathered(mine)) if theirs is not None]
    first, like = speakers[0]
    for rank, theirs in speakers[1:]:
        differ = [path for path in {**like, **theirs} if like.get(path) != theirs.get(path)]
        if not differ and [*like] == [*theirs]:
            continue
        listed = [
            f"`{path}` is {like.get(path, 'missing')} on rank {first} and {theirs.get(path, 'missing')} on rank {rank}"
            for path in differ
        ] or [f"rank {rank} has the leaves of rank {first} in another order"]
        raise FuncgaError(
            f"the replicas {problem}: {'; '.join(listed[:4])}{f'; and {len(listed) - 4} more' if listed[4:] else ''}. "
            f"They are merged leaf by leaf: build the model, the batch and the fold alike on every rank."
        )
