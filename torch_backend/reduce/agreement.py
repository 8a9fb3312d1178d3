"""The agreement of the replicas: before the first reduction of a structure they compare what they
fold.

A digest in the header names the structure. Where digests differ, or a replica cannot know the
structure as it has nothing to fold, more is told.
"""

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

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
    reduced elsewhere. `specs` are those of the reduced leaves that are DTensors. `is_agreed`:
    whether all replicas have said that they fold this.
    """

    key: tuple[object, ...]
    outputs: Outputs
    likes: list[torch.Tensor | None]
    route: Route
    specs: dict[int, Spec]
    description: dict[str, str]
    digest: int
    is_agreed: bool = False


@dataclass(eq=False)
class History:
    """The windows of one step over one group, as this replica has seen them."""

    progress: "Progress"
    begun: int = 0
    finished: int = 0
    # Digests of the different steps that replicas may take, as each has a loss of its own.
    steps: list[float] | None = None
    running: Any = None  # the Reduction that has begun and is not over
    # Whether the replicas were given other options, and so may have other windows in a call.
    differs: bool = False
    # On the last structures.
    agreements: deque[Agreement] = field(default_factory=lambda: deque(maxlen=16))


@dataclass(eq=False)
class Progress:
    """How far a step has come on this replica, kept from one of its windows to the next."""

    step: Step | None
    options: Mapping[str, str]
    groups: dict[dist.ProcessGroup, History] = field(default_factory=dict)

    @cached_property
    def digests(self) -> tuple[int, int]:
        """Those of the step, 0 if it has none, and of the options."""
        step = 0 if self.step is None else digest_of(tuple(self.step))
        return step, digest_of([*self.options.items()])

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
    digests = {report.digest for report in reports}
    if len(digests - {0}) > 1:
        said = replicas.channel.all_gather(None if mine is None else mine.description)
        check_alike(said, _STRUCTURES)
    is_known = all(report.agreed for report in reports if report.digest)
    if 0 in digests and not is_known:
        mine = _agreed_with_all(history, mine, rebuild, replicas)
    if mine is None:
        mine = next(each for each in history.agreements if each.digest == max(digests))
    mine.is_agreed = True
    return mine


_STRUCTURES = "fold different structures"


def check_steps(history: History, reports: list[Report], replicas: Replicas) -> None:
    """Raises FuncgaError, on all replicas, if they call different steps, or were given other
    options, by their headers.
    """
    steps = [report.step for report in reports]
    if len({*steps}) > 1 and steps != history.steps:
        said = replicas.channel.all_gather((history.progress.step, steps_made()))
        # A step that only one of two replicas has made is no mistake: each may have a loss of its
        # own.
        for (here, made_here), (there, made_there) in combinations(said, 2):
            if here is None or there is None or here == there:
                continue
            is_made_here = made_here.get(there.name, 0) > there.number
            if is_made_here and made_there.get(here.name, 0) > here.number:
                spelled = "; ".join(
                    f"rank {rank} {step or 'another step'}"
                    for rank, (step, _) in enumerate(said[:8])
                )
                raise FuncgaError(
                    f"the replicas call different steps at the same time: {spelled}. What they "
                    "fold would be added up all the same. Make and call the steps in one order on "
                    "every rank, from a list rather than a set."
                )
        history.steps = steps
    if history.differs:
        remedy = "With other options they send each other other messages: give every rank the same."
        said = replicas.channel.all_gather({**history.progress.options})
        check_alike(said, "were given different options", remedy)


# --- a first window in which a replica has nothing to fold


def _agreed_with_all(
    history: History, mine: Agreement | None, rebuild: Rebuild | None, replicas: Replicas
) -> Agreement:
    """The Agreement of all replicas, of which those that have nothing to fold are told what the
    others fold: a value without memory, pickled.

    Raises FuncgaError, on all of them, if one cannot tell, or cannot fold that: none is left
    waiting.
    """
    channel = replicas.channel
    structures = channel.all_gather(None if mine is None else _pickled(mine))
    structure: bytes | str = next(each for each in structures if each is not None)
    answer: Agreement | str | None = mine
    if isinstance(structure, str):
        answer = structure
    elif mine is None:
        answer = _rebuilt(history, structure, rebuild, replicas)
    said = channel.all_gather(answer.description if isinstance(answer, Agreement) else answer)
    problems = [each for each in said if isinstance(each, str)]
    if problems or not isinstance(answer, Agreement):
        raise FuncgaError(
            "a replica has nothing to fold in its first window, and cannot be told what the others "
            f"fold ({problems[0]}). Give every replica a micro-batch in the first window, later "
            "ones may have none; or return dicts, tuples and lists of arrays."
        )
    check_alike(said, _STRUCTURES)
    return answer


def _rebuilt(
    history: History, structure: bytes, rebuild: Rebuild | None, replicas: Replicas
) -> Agreement | str:
    """What a replica with nothing to fold makes of the structure of the others; a text if it
    cannot.
    """
    assert rebuild is not None
    try:
        value, on_meshes = pickle.loads(structure)
        outputs, leaves = rebuild(value)
        mine = propose(history, Folding(outputs), leaves, replicas)
    except Exception as error:  # whatever the user's class raises
        return f"{type(error).__name__}: {error}"
    return mine if [*mine.specs] == on_meshes else "it lies on the devices of a mesh"


def _pickled(mine: Agreement) -> bytes | str:
    """The structure of what this replica folds, and which of its leaves are DTensors; a text if
    that cannot be pickled.
    """
    try:
        data = pickle.dumps((mine.outputs.structure_of(mine.likes), [*mine.specs]))
        pickle.loads(data)
    except Exception as error:  # whatever the user's class raises
        return f"{type(error).__name__}: {error}"
    return data
