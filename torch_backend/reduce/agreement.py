"""The agreement of the replicas: before the first reduction of a structure they compare what they
fold.

A digest in the header names the structure. Where digests differ, or a replica cannot know the
structure as it has nothing to fold, more is told.
"""

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from funcga._call import Memory
from funcga._fold.outputs import Outputs
from funcga._replicas import steps_made
from funcga._types import Array, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import as_dtensor, is_dtensor, local, ranks_with_other_shards, spec_of
from torch_backend.reduce.header import ROOM, Report, digest_of
from torch_backend.replicas import Channel, Replicas, check_alike
from torch_backend.sums import Folding

# Makes the Outputs and the leaves of a value here that is like one of others, without memory.
Rebuild = Callable[[Tree], tuple[Outputs, Sequence[Array]]]


@dataclass(eq=False)
class Agreement:
    """What every replica folds, and how it travels.

    `key` tells it from other structures of the same step on this replica, `digest` on all of them:
    it is one of `description`, which has a text for each path. `likes` are zeros without memory
    where the leaves of the outputs lie; None for one that is not an array, or that is reduced
    elsewhere. `is_agreed`: whether all replicas have said that they fold this.

    Leaves are `summed`, or `gathered`. If all are `numbers` on the host, and few, they travel in
    the header, and nothing else is sent; else that is None. It follows from what is folded, so it
    is the same on every replica.
    """

    key: tuple[object, ...]
    outputs: Outputs
    likes: list[Any]
    description: dict[str, str]
    digest: int
    summed: list[int]
    gathered: list[int]
    numbers: list[int] | None
    is_agreed: bool = False

    @property
    def device(self) -> torch.device:
        """Where anything travels from that is no sum."""
        return next((local(like).device for like in self.likes if like is not None), _HOST)


_HOST = torch.device("cpu")
# So few elements are not worth a message of their own.
_FEW = 8


@dataclass(eq=False)
class History:
    """The windows of one step over one group, as this replica has seen them."""

    begun: int = 0
    finished: int = 0
    # The Reduction that has begun, until it is merged, or given up here, or all replicas raise.
    running: Any = None
    # Digests of the different steps that replicas may take, as each has a loss of its own.
    steps: list[float] | None = None
    # Whether the replicas were given other options, and so may have other windows in a call.
    differs: bool = False
    # On the last structures.
    agreements: deque[Agreement] = field(default_factory=lambda: deque(maxlen=16))


class Histories(dict[dist.ProcessGroup, History]):
    """The History of a step over each of its groups, kept from one of its windows to the next."""

    begun = 0  # windows of the call that runs; counted by each Reduction


# --- what a replica proposes


def propose(
    history: History, folding: Folding, leaves: Sequence[Array], replicas: Replicas
) -> Agreement:
    """The Agreement on outputs that are folded so: one that there is, or one that the others have
    yet to agree to.

    `leaves` are those of grad_fn's output, or what they are like; None for one that is reduced
    elsewhere.
    """
    # The plan of a step has one Outputs for all windows of a structure, so no key has to be made.
    # Where outputs may differ, as an aux may, and of any other function, each window has its own.
    outputs = folding.outputs
    for known in history.agreements:
        if known.outputs is outputs:
            return known
    shapes = [_shape(outputs, index) for index in range(len(leaves))]
    specs = [*map(spec_of, leaves)]
    key = outputs.structure, outputs.dtypes, outputs.threads, shapes, specs
    for known in history.agreements:
        if known.key == key:
            return known
    likes: list[Any] = [
        None if fold is None or leaf is None else _like(leaf)
        for fold, leaf in zip(outputs.folds, leaves, strict=True)
    ]
    for like in likes:
        ranks = [] if like is None else ranks_with_other_shards(like, replicas.ranks)
        if ranks:  # which would be added to each other
            raise FuncgaError(
                f"across= names ranks {ranks}, which hold different parts of one DTensor, "
                f"{list(like.placements)} on {like.device_mesh}: merging would add one part to "
                "another. A DTensor is reduced over its own mesh without across=; name the axis of "
                "the mesh that copies lie on: across=mesh['dp']."
            )
    sent = f"sent in buckets of {replicas.bucket_bytes} bytes as "
    description = {"across": sent + str(replicas.wire_dtype or "accumulated")}
    for index, (path, like) in enumerate(zip(outputs.paths(), likes, strict=True)):
        description[path] = _description(outputs, index, like)
    digest = digest_of([*description.items()])
    ways = _ways(folding, likes)
    history.agreements.append(Agreement(key, outputs, likes, description, digest, *ways))
    return history.agreements[-1]


def _ways(folding: Folding, likes: list[Any]) -> tuple[list[int], list[int], list[int] | None]:
    """(leaves that are summed, leaves that are gathered, the numbers in the header)."""
    outputs, folds = folding.outputs, folding.folds
    leaves = [leaf for leaf in outputs.reduced if likes[leaf] is not None]
    is_number = lambda leaf: (
        likes[leaf].is_cpu
        and likes[leaf].ndim == 0
        and folding.kinds[leaf] is not None
        and folds[leaf].accumulator_dtype.is_floating_point
    )
    # What travels in the header has no mark of an error, which has to be read before the exchanges
    # that these take.
    takes_more = outputs.collected or outputs.threads or any(map(is_dtensor, likes))
    if not takes_more and len(leaves) <= ROOM and all(map(is_number, leaves)):
        return [], [], leaves
    reducers = {leaf: folds[leaf].fold.reducer for leaf in leaves}
    gathered = {leaf for leaf in leaves if reducers[leaf].monoid.collective != "sum"}
    # In a dtype of their own few counts would be one collective more, where others are gathered.
    if gathered:
        counts = [leaf for leaf in leaves if reducers[leaf].unweighted]
        gathered.update([leaf for leaf in counts if likes[leaf].numel() <= _FEW])
    # Complex numbers come first: a view of pairs has to begin at an even element.
    order = lambda leaf: (not likes[leaf].dtype.is_complex, leaf)
    return sorted({*leaves} - gathered, key=order), sorted(gathered), None


def _like(leaf: Array) -> torch.Tensor:
    """Zeros without memory like a leaf, where it lies."""
    leaf = arrays.as_array(leaf)
    shard = local(leaf)
    zero = torch.zeros((), dtype=leaf.dtype, device=shard.device)
    like: torch.Tensor = as_dtensor(zero.expand(shard.shape), spec_of(leaf))
    return like


def _shape(outputs: Outputs, leaf_index: int) -> list[int | str]:
    """The shape of a leaf, without the number of rows of one that is collected."""
    fold = outputs.folds[leaf_index]
    if fold is None:
        return []
    shape: list[int | str] = [*(outputs.shapes[leaf_index] or ())]
    if fold.axis is not None:
        shape[fold.axis] = "rows"
    return shape


def _description(outputs: Outputs, leaf_index: int, like: Any) -> str:
    """A text for what must be the same on all replicas."""
    fold = outputs.folds[leaf_index]
    if fold is None:
        return "an object" if leaf_index in outputs.threads else "None"
    if like is None:
        return f"reduced by the module's wrapper ({fold.fold.name})"
    shape = ", ".join(map(str, _shape(outputs, leaf_index)))
    dtypes = outputs.dtypes[leaf_index], fold.accumulator_dtype, fold.result_dtype
    dtype, accumulator, result = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    summed = "" if dtype == accumulator == result else f" summed as {accumulator} to {result}"
    where = f" on a mesh, {like.placements}" if is_dtensor(like) else ""
    return f"{dtype}[{shape}]{where}{summed} ({fold.fold.name})"


# --- what all agree on


def check_steps(history: History, memory: Memory, reports: list[Report], channel: Channel) -> None:
    """Raises FuncgaError, on all replicas, if they call different steps, or were given other
    options.
    """
    digests = [report.step for report in reports]
    history.differs = False
    if len({*digests}) == 1 or digests == history.steps:
        return
    said = channel.all_gather((memory.step, steps_made(), {**memory.options}))
    options = [given for *_, given in said]
    history.differs = any(given != options[0] for given in options)
    remedy = "With other options they send each other other messages: give every rank the same."
    check_alike(options, "were given different options", remedy)
    # A step that only one of two replicas has made is no mistake: each may have a loss of its own.
    for (here, made_here, _), (there, made_there, _) in combinations(said, 2):
        if here is None or there is None or here == there:
            continue
        is_made_here = made_here.get(there.name, 0) > there.number
        if is_made_here and made_there.get(here.name, 0) > here.number:
            steps = [step for step, *_ in said[:8]]
            spelled = [f"rank {rank} {step or 'another step'}" for rank, step in enumerate(steps)]
            raise FuncgaError(
                f"the replicas call different steps at the same time: {'; '.join(spelled)}. "
                "What they fold would be added up all the same. Make and call the steps in one "
                "order on every rank, from a list rather than a set."
            )
    history.steps = digests


def agree(
    history: History,
    mine: Agreement | None,
    rebuild: Rebuild | None,
    reports: list[Report],
    replicas: Replicas,
) -> Agreement:
    """The Agreement of all replicas after these reports.

    `mine` is what this replica proposes; None if it has nothing to fold, and then `rebuild` makes
    it of what the others fold. Raises FuncgaError on every replica if two of them fold different
    structures.
    """
    # All replicas see the same reports, so they take the same branches, and their collectives
    # match. Usually the headers have said everything, and nothing more is sent. A digest of 0 is
    # that of a replica that has nothing to fold: it goes with any other.
    digests = [report.digest for report in reports]
    answer: Any = mine
    is_new = 0 in digests and not all(report.agreed for report in reports if report.digest)
    if is_new:
        answer = _told(history, mine, rebuild, digests.index(max(digests)), replicas)
    if is_new or len({*digests} - {0}) > 1:
        said = replicas.channel.all_gather(getattr(answer, "description", answer))
        problems = [each for each in said if isinstance(each, str)]
        if problems:
            raise FuncgaError(
                "a replica has nothing to fold in its first window, and cannot be told what the "
                f"others fold ({problems[0]}). Give every replica a micro-batch in the first "
                "window, later ones may have none; or return dicts, tuples and lists of arrays."
            )
        check_alike(
            said,
            "fold different structures",
            "They are merged leaf by leaf: build the model, the batch and the fold alike on every "
            "rank. On a mesh give every replica a micro-batch in its first window.",
        )
    known = [each for each in history.agreements if each.digest == max(digests)]
    agreement: Agreement = known[0] if answer is None else answer
    agreement.is_agreed = True
    return agreement


def _told(
    history: History,
    mine: Agreement | None,
    rebuild: Rebuild | None,
    teller: int,
    replicas: Replicas,
) -> Any:
    """What this replica folds; if that is nothing, what another one tells it to: a value without
    memory, pickled. A text if it cannot tell, or cannot fold that: none is left waiting.
    """
    channel, told = replicas.channel, None
    if mine is not None and channel.rank == teller:
        told = _or_text(lambda: _pickled(mine))
    told = channel.broadcast_from(teller, told)
    if isinstance(told, str):
        return told
    if mine is not None:
        return mine

    def rebuilt() -> Agreement:
        assert rebuild is not None
        outputs, leaves = rebuild(pickle.loads(told))
        return propose(history, Folding(outputs), leaves, replicas)

    return _or_text(rebuilt)


def _or_text(make: Callable[[], Any]) -> Any:
    """What a function makes; the text of its error, whatever a class of the user's raises."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _pickled(mine: Agreement) -> bytes:
    """The value that this replica folds, with arrays that have no place and no memory."""
    likes = [
        like if like is None else torch.empty(like.shape, dtype=like.dtype, device="meta")
        for like in mine.likes
    ]
    return pickle.dumps(mine.outputs.structure_of(likes))
