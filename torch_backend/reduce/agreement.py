"""The agreement of the replicas: before the first reduction of a structure they compare what they
fold.

This takes two more collectives, once for each structure. In later windows a digest in the header
names the structure.
"""

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from funcga._call import Memory
from funcga._fold.outputs import Outputs
from funcga._replicas import Step, steps_made
from funcga._types import Array, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import Spec, is_dtensor, local, ranks_with_other_shards, spec_of
from torch_backend.reduce.header import Report, digest_of
from torch_backend.reduce.wire import Route, route_of
from torch_backend.replicas import Replicas, check_alike
from torch_backend.sums import Folding

# Makes the Outputs and the leaves of a value here that is like one of others, without memory.
Rebuild = Callable[[Tree], tuple[Outputs, Sequence[Array]]]


@dataclass(eq=False)
class Agreement:
    """What every replica folds, and how it travels.

    `key` tells it from other structures of the same step on this replica, `digest` on all of them:
    it is one of `description`, which has a text for each path. `likes` are tensors without memory
    that are like the leaves of the outputs; None for a leaf that is not an array, or that is
    reduced elsewhere. `specs` are those of the reduced leaves that are DTensors. `steps`
    are digests of the Steps that the replicas take, in their order; empty until all of them have
    agreed.
    """

    key: tuple[object, ...]
    outputs: Outputs
    likes: list[torch.Tensor | None]
    route: Route
    specs: dict[int, Spec]
    description: dict[str, str]
    digest: int
    steps: list[float] = field(default_factory=list)


@dataclass(eq=False)
class History:
    """The windows of one step over one group, as this replica has seen them."""

    step: Step | None
    options: Mapping[str, str]
    begun: int = 0
    finished: int = 0
    running: Any = None  # the Reduction that has begun and is not over
    # Whether the replicas were given other options, and so may have other windows in a call.
    differs: bool = False
    # On the last structures.
    agreements: deque[Agreement] = field(default_factory=lambda: deque(maxlen=16))

    @cached_property
    def digests(self) -> tuple[int, int]:
        """Those of the step, 0 if it has none, and of the options."""
        step = 0 if self.step is None else digest_of(tuple(self.step))
        return step, digest_of([*self.options.items()])

    def agreed(self, digest: float = 0) -> list[Agreement]:
        """What all replicas have agreed on, of the structure that has this digest, or of any."""
        return [each for each in self.agreements if each.steps and digest in (0, each.digest)]


@dataclass(eq=False)
class Progress:
    """How far a step has come on this replica, kept from one of its windows to the next."""

    step: Step | None
    options: Mapping[str, str]
    groups: dict[dist.ProcessGroup, History] = field(default_factory=dict)

    @property
    def begun(self) -> int:
        """How many windows have begun."""
        return sum([history.begun for history in self.groups.values()])


def progress_of(memory: Memory) -> Progress:
    """How far the step with this memory has come."""
    return memory.keep(Progress, memory.step, memory.options)


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
    key = _key(outputs, leaves)
    for known in history.agreements:
        if known.key == key:
            return known
    likes = [
        None if fold is None or leaf is None else arrays.as_array(leaf)
        for fold, leaf in zip(outputs.folds, leaves, strict=True)
    ]
    history.agreements.append(_proposal(key, folding, likes, replicas))
    return history.agreements[-1]


def _proposal(
    key: tuple[object, ...],
    folding: Folding,
    likes: Sequence[torch.Tensor | None],
    replicas: Replicas,
) -> Agreement:
    outputs = folding.outputs
    reduced = {leaf: like for leaf in outputs.reduced if (like := likes[leaf]) is not None}
    specs = {leaf: spec_of(like) for leaf, like in reduced.items() if is_dtensor(like)}
    for spec in specs.values():
        ranks = ranks_with_other_shards(spec, replicas.ranks)
        if ranks:  # which would be added to each other
            raise FuncgaError(
                f"across= names ranks {ranks}, which hold different parts of one DTensor, "
                f"{list(spec.placements)} on {spec.device_mesh}: merging would add one part to "
                "another. A DTensor is reduced over its own mesh without across=; name the axis of "
                "the mesh that copies lie on: across=mesh['dp']."
            )
    # What travels in the header has no mark of an error, which has to be read before the exchanges
    # that these take.
    may_be_numbers = not (specs or outputs.collected or outputs.threads)
    shards = {leaf: local(like) for leaf, like in reduced.items()}
    route = route_of(folding, shards, replicas, may_be_numbers)
    sent = f"sent in buckets of {replicas.bucket_bytes} bytes as "
    description = {"across": sent + str(replicas.wire_dtype or "accumulated")}
    for index, (path, like) in enumerate(zip(outputs.paths(), likes, strict=True)):
        description[path] = _description(outputs, index, like)
    metas = [
        like if like is None else torch.empty(like.shape, dtype=like.dtype, device="meta")
        for like in likes
    ]
    digest = digest_of([*description.items()])
    return Agreement(key, outputs, metas, route, specs, description, digest)


def _key(outputs: Outputs, leaves: Sequence[Array]) -> tuple[object, ...]:
    shapes = [_shape(outputs, leaf_index) for leaf_index in range(len(leaves))]
    reduced = [(leaf_index, leaves[leaf_index]) for leaf_index in outputs.reduced]
    specs = {leaf_index: spec_of(leaf) for leaf_index, leaf in reduced if is_dtensor(leaf)}
    return outputs.structure, outputs.dtypes, outputs.threads, shapes, specs


def _shape(outputs: Outputs, leaf_index: int) -> list[int | str]:
    """The shape of a leaf, without the number of rows of one that is collected."""
    fold = outputs.folds[leaf_index]
    if fold is None:
        return []
    shape: list[int | str] = [*(outputs.shapes[leaf_index] or ())]
    if fold.axis is not None:
        shape[fold.axis] = "rows"
    return shape


def _description(outputs: Outputs, leaf_index: int, like: torch.Tensor | None) -> str:
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
    return f"{dtype}[{shape}]{summed} ({fold.fold.name})"


# --- what all agree on


class _Statement(NamedTuple):
    """What a replica says where the replicas have not agreed before; the description is None where
    nobody needs it.
    """

    step: Step | None
    steps_made: dict[str, int]
    description: dict[str, str] | None = None
    structure: bytes | str | None = None  # pickled; a text says why it cannot be


def agree(
    history: History,
    mine: Agreement | None,
    rebuild: Rebuild | None,
    reports: list[Report],
    replicas: Replicas,
) -> Agreement:
    """The Agreement of all replicas after these reports.

    `mine` is what this replica proposes; None if it has nothing to fold, and then `rebuild` makes
    it of what the others fold. Raises FuncgaError on every replica if two of them take different
    steps, or fold different structures.
    """
    # All replicas see the same reports, so they take the same branches, and their collectives
    # match. Usually the headers have said everything, and nothing more is sent. A digest of 0 is
    # that of a replica that has nothing to fold: it goes with any other.
    steps, digests = [report.step for report in reports], {report.digest for report in reports}
    are_alike = len(digests - {0}) == 1
    is_known = are_alike and all(report.agreed for report in reports)
    if is_known:
        mine = mine or history.agreed(max(digests))[-1]
        if mine.steps == steps:
            return mine
    statement = _statement_of(history.step, mine, digests)
    said = _compare(replicas, statement, _STRUCTURES, is_mixed_up=is_known)
    structures = [each.structure for each in said if each.structure is not None]
    if structures:
        found = mine or _rebuilt(history, structures[0], rebuild, replicas)
        mine = _of_all(found, replicas)
    assert mine is not None
    mine.steps = steps
    return mine


_STRUCTURES = "fold different structures"


def _statement_of(step: Step | None, mine: Agreement | None, digests: set[float]) -> _Statement:
    if mine is None:
        return _Statement(step, steps_made())
    # Descriptions are long, so they are sent only where digests differ; and the structure only
    # where a replica has nothing to fold, and so cannot know it.
    description = mine.description if len(digests - {0}) > 1 else None
    return _Statement(step, steps_made(), description, _pickled(mine) if 0 in digests else None)


def check_options(history: History, replicas: Replicas) -> None:
    """Raises FuncgaError on replicas that were given other options, by their headers. These come
    before anything that depends on an option.
    """
    statement = _Statement(history.step, steps_made(), {**history.options})
    remedy = "With other options they send each other other messages: give every rank the same."
    _compare(replicas, statement, "were given different options", remedy)


def _compare(
    replicas: Replicas, mine: _Statement, problem: str, *remedy: str, is_mixed_up: bool = False
) -> list[_Statement]:
    """What all replicas say. Raises FuncgaError, on all of them, if it differs."""
    said: list[_Statement] = replicas.channel.all_gather(mine)
    # A step that only one of two replicas has made is no mistake: each may have a loss of its own.
    taken = [(each.step, each.steps_made) for each in said if each.step is not None]
    for here, made_here in taken:
        for there, made_there in taken:
            is_made_by_both = (
                made_here.get(there.name, 0) > there.number
                and made_there.get(here.name, 0) > here.number
            )
            is_mixed_up |= here != there and is_made_by_both
    if is_mixed_up:
        spelled = "; ".join(
            f"rank {rank} {each.step or 'another step'}" for rank, each in enumerate(said[:8])
        )
        raise FuncgaError(
            f"the replicas call different steps at the same time: {spelled}. What they fold would "
            "be added up all the same. Make and call the steps in one order on every rank, from a "
            "list rather than a set."
        )
    check_alike([each.description for each in said], problem, *remedy)
    return said


# --- a first window in which a replica has nothing to fold


def _pickled(mine: Agreement) -> bytes | str:
    """The structure of what this replica folds, for others to make values like it: a value without
    memory, and which of its leaves are DTensors. Pickled; a text if that cannot be.
    """
    try:
        data = pickle.dumps((mine.outputs.structure_of(mine.likes), [*mine.specs]))
        pickle.loads(data)
    except Exception as error:  # whatever the user's class raises
        return f"{type(error).__name__}: {error}"
    return data


def _rebuilt(
    history: History, structure: bytes | str, rebuild: Rebuild | None, replicas: Replicas
) -> Agreement | str:
    """What a replica with nothing to fold makes of the structure of the others; a text if it
    cannot.
    """
    if isinstance(structure, str):
        return structure
    assert rebuild is not None
    try:
        value, on_meshes = pickle.loads(structure)
        outputs, leaves = rebuild(value)
        mine = propose(history, Folding(outputs), leaves, replicas)
    except Exception as error:  # whatever the user's class raises
        return f"{type(error).__name__}: {error}"
    return mine if [*mine.specs] == on_meshes else "it lies on the devices of a mesh"


def _of_all(mine: Agreement | str, replicas: Replicas) -> Agreement:
    """The Agreement of this replica, if all say that they fold the same.

    Raises FuncgaError, on all of them, if one cannot fold that: none is left waiting.
    """
    said = replicas.channel.all_gather(mine if isinstance(mine, str) else mine.description)
    problems = [each for each in said if isinstance(each, str)]
    if isinstance(mine, str) or problems:
        raise FuncgaError(
            "a replica has nothing to fold in its first window, and cannot be told what the others "
            f"fold ({problems[0]}). Give every replica a micro-batch in the first window, later "
            "ones may have none; or return dicts, tuples and lists of arrays."
        )
    check_alike(said, _STRUCTURES)
    return mine
