"""Comparison: what each replica says, and that all of them describe alike what they have.

Only torch has this file: in JAX one program describes all replicas.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from funcga.errors import FuncgaError


def gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What each replica has said, in their order: any objects that can be pickled."""
    said: list[Any] = [None] * dist.get_world_size(group)
    with explained():
        dist.all_gather_object(said, mine, group=group)
    return said


def digest_of(description: dict[str, str]) -> str:
    """A short text that is another for any other description."""
    return hashlib.sha256(repr([*description.items()]).encode()).hexdigest()


def check_alike(
    mine: dict[str, str] | None, group: dist.ProcessGroup, problem: str, digests: list[str | None] | None = None
) -> None:
    """Raises FuncgaError on every replica if two of them describe differently what stands at a path.

    `mine` has a description for every path; it is None on a replica that has nothing to say. `digests` are those of
    all replicas, if they are known already.
    """
    if digests is None:
        digests = gathered(None if mine is None else digest_of(mine), group)
    if len({*digests} - {None}) <= 1:
        return
    speakers = [(rank, theirs) for rank, theirs in enumerate(gathered(mine, group)) if theirs is not None]
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


@contextmanager
def explained() -> Iterator[None]:
    """A context that says of an error in a collective what it means."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            "funcga: the replicas could not be merged. One of them has died, has raised an error of its own, or did "
            "not call the step within the group's timeout; see what the other processes say."
        )
        raise
