"""The agreement of the replicas: before the first reduction of a structure they compare what they
fold.

A digest in the header names the structure. Where digests differ, or a replica cannot know the
structure as it has nothing to fold, more is told.
"""

import pickle
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from torch_backend.replicas import Replicas, check_alike
from torch_backend.sums import Folding

# Makes how a value here is folded that is like one of others, and its leaves, without memory.
Rebuild = Callable[[Tree], tuple[Folding, Mapping[int, Array]]]


@dataclass(eq=False)
class Agreement:
    """What every replica folds, and how it travels.

    `key` tells it from other structures of the same step on this replica, `digest` on all of them:
    it is one of `description`, which has a text for each path. `likes` are zeros without memory
    where the leaves lie that are arrays, and are reduced here. `is_agreed`: whether all replicas
    have said that they fold this.

    Scalars on the host, the first few, are `numbers` in the header; all others are `summed`, or
    `gathered`. It follows from what is folded, so it is the same on every replica.
    """

    key: tuple[object, ...]
    outputs: Outputs
    likes: dict[int, Any]
    description: dict[str, str]
    digest: int
    numbers: list[int]
    summed: list[int]
    gathered: list[int]
    is_agreed: bool = False

    @property
    def device(self) -> torch.device:
        """Where anything travels from that is no sum."""
        host = torch.device("cpu")
        return next((local(like).device for like in self.likes.values()), host)


class History:
    """The windows of one step over one group, as this replica has seen them, and what the replicas
    have agreed on.
    """

    begun = 0  # how many windows; counted by each Reduction
    # How many of these have ended, here as on the others: set when one is merged. Taken back by
    # `telling` if an error ends its call after that, and where others have made more updates.
    finished = 0
    # The Reduction that has begun, until it is merged, or given up here, or all replicas raise.
    running: Any = None
    # Digests of the different steps that replicas may take, as each has a loss of its own; set by
    # `check_steps`, as is whether they were given other options, and so may have other windows in
    # a call.
    steps: list[float] | None = None
    differs = False

    def __init__(self, memory: Memory, replicas: Replicas):
        self.step, self.options, self.replicas = memory.step, memory.options, replicas
        # Goes into every header: hashed once, as no option is set after the first window.
        self.digest = digest_of((self.step, [*self.options.items()]))
        self.agreements: deque[Agreement] = deque(maxlen=16)  # on the last structures

    def agreement_on(self, folding: Folding, leaves: Mapping[int, Array]) -> Agreement:
        """The Agreement on outputs that are folded so: one that there is, or one that the others
        have yet to agree to.

        `leaves` are those of grad_fn's output that are reduced here, or what they are like.
        """
        # The plan of a step has one Outputs for all windows of a structure, so no key has to be
        # made. Where outputs may differ, as an aux may, and of any other function, each window has
        # its own.
        outputs, replicas = folding.outputs, self.replicas
        for known in self.agreements:
            if known.outputs is outputs:
                return known
        shapes = [_shape(outputs, index) for index in range(len(outputs.folds))]
        specs = {index: spec_of(leaf) for index, leaf in leaves.items()}
        key = outputs.structure, outputs.dtypes, outputs.threads, shapes, specs
        for known in self.agreements:
            if known.key == key:
                return known
        wire = replicas.wire_dtype or "accumulated"
        description = {"across": f"sent in buckets of {replicas.bucket_bytes} bytes as {wire}"}
        likes = dict[int, Any]()
        for index, path in enumerate(outputs.paths()):
            leaf = leaves.get(index)
            if outputs.folds[index] is not None and leaf is not None:
                likes[index] = _like(leaf, replicas)
            description[path] = _description(outputs, index, shapes[index], likes.get(index))
        digest, ways = digest_of([*description.items()]), _ways(folding, likes)
        agreement = Agreement(key, outputs, likes, description, digest, *ways)
        self.agreements.append(agreement)
        return agreement

    def check_steps(self, reports: list[Report]) -> None:
        """Raises FuncgaError, on all replicas, if they call different steps, or were given other
        options.
        """
        digests = [report.step for report in reports]
        self.differs = False
        if len({*digests}) == 1 or digests == self.steps:
            return
        said = self.replicas.channel.all_gather((self.step, steps_made(), {**self.options}))
        options = [given for *_, given in said]
        self.differs = any(given != options[0] for given in options)
        remedy = "With other options they send each other other messages: give every rank the same."
        check_alike(options, "were given different options", remedy)
        for (one, made, _), (other, made_there, _) in combinations(said, 2):
            # A step that only one of two replicas has made is no mistake: each may have a loss of
            # its own.
            are_named = one and other and one != other and made.get(other.name, 0) > other.number
            if are_named and made_there.get(one.name, 0) > one.number:
                steps = [
                    f"rank {rank} {step or 'another step'}" for rank, (step, *_) in enumerate(said)
                ]
                raise FuncgaError(
                    f"the replicas call different steps at the same time: {'; '.join(steps[:8])}. "
                    "What they fold would be added up all the same. Make and call the steps in one "
                    "order on every rank, from a list rather than a set."
                )
        self.steps = digests

    def agreement_of_all(
        self, mine: Agreement | None, rebuild: Any, reports: list[Report]
    ) -> Agreement:
        """The Agreement of all replicas after these reports.

        `mine` is what this replica proposes; None if it has nothing to fold, and then `rebuild`, a
        Rebuild, makes it of what the others fold. Raises FuncgaError on every replica if two of
        them fold different structures.
        """
        # All replicas see the same reports, so they take the same branches, and their collectives
        # match. Usually the headers have said everything, and nothing more is sent. A digest of 0
        # is that of a replica that has nothing to fold: it goes with any other.
        digests = [report.digest for report in reports]
        channel = self.replicas.channel
        answer: Any = mine
        is_new = 0 in digests and not all(report.agreed for report in reports if report.digest)
        if is_new:
            teller = digests.index(max(digests))
            told = channel.broadcast_from(teller, _or_text(lambda: _pickled(mine)))
            rebuilt = lambda: self.agreement_on(*rebuild(pickle.loads(told)))
            # A text if that one cannot tell, or this one cannot fold it: none is left waiting.
            answer = told if isinstance(told, str) else mine or _or_text(rebuilt)
        if is_new or len({*digests} - {0}) > 1:
            said = channel.all_gather(getattr(answer, "description", answer))
            problems = [each for each in said if isinstance(each, str)]
            if problems:
                raise FuncgaError(
                    "a replica has nothing to fold in its first window, and cannot be told what "
                    f"the others fold ({problems[0]}). Give every replica a micro-batch in the "
                    "first window, later ones may have none; or return dicts, tuples and lists of "
                    "arrays."
                )
            check_alike(
                said,
                "fold different structures",
                "They are merged leaf by leaf: build the model, the batch and the fold alike on "
                "every rank. On a mesh give every replica a micro-batch in its first window.",
            )
        known = {each.digest: each for each in self.agreements}
        agreement: Agreement = answer or known[int(max(digests))]
        agreement.is_agreed = True
        return agreement


class Histories(dict[dist.ProcessGroup, History]):
    """The History of a step over each of its groups, kept from one of its windows to the next."""

    begun = 0  # windows of the call that runs; counted by each Reduction


def _like(leaf: Array, replicas: Replicas) -> torch.Tensor:
    """Zeros without memory like a leaf, where it lies. Raises FuncgaError if the replicas hold
    different parts of it.
    """
    ranks = ranks_with_other_shards(leaf, replicas.ranks)
    if ranks:  # which would be added to each other
        raise FuncgaError(
            f"across= names ranks {ranks}, which hold different parts of one DTensor, "
            f"{list(leaf.placements)} on {leaf.device_mesh}: merging would add one part to "
            "another. A DTensor is reduced over its own mesh without across=; name the axis of "
            "the mesh that copies lie on: across=mesh['dp']."
        )
    leaf = arrays.as_array(leaf)
    shard = local(leaf)
    zero = torch.zeros((), dtype=leaf.dtype, device=shard.device)
    like: torch.Tensor = as_dtensor(zero.expand(shard.shape), spec_of(leaf))
    return like


def _ways(folding: Folding, likes: dict[int, Any]) -> tuple[list[int], list[int], list[int]]:
    """(numbers in the header, leaves that are summed, leaves that are gathered), of those that are
    reduced here.
    """
    numbers, summed, gathered = list[int](), list[int](), list[int]()
    for leaf, fold in folding.folds.items():
        like, is_sum = likes.get(leaf), fold.fold.reducer.monoid.collective == "sum"
        is_number = type(like) is torch.Tensor and like.is_cpu and like.ndim == 0
        # A float64 holds a sum of floats.
        is_float = folding.adds[leaf] is not None and fold.accumulator_dtype.is_floating_point
        if is_number and is_float and len(numbers) < ROOM:
            numbers.append(leaf)
        elif like is not None:
            (summed if is_sum else gathered).append(leaf)
    return numbers, summed, gathered


def _shape(outputs: Outputs, leaf_index: int) -> list[int | str]:
    """The shape of a leaf, without the number of rows of one that is collected."""
    fold, shape = outputs.folds[leaf_index], list[int | str](outputs.shapes[leaf_index] or ())
    if fold is not None and fold.axis is not None:
        shape[fold.axis] = "rows"
    return shape


def _description(outputs: Outputs, leaf_index: int, shape: list[int | str], like: Any) -> str:
    """A text for what must be the same on all replicas."""
    fold = outputs.folds[leaf_index]
    if fold is None:
        return "an object" if leaf_index in outputs.threads else "None"
    if like is None:
        return f"reduced by the module's wrapper ({fold.fold.name})"
    dtypes = outputs.dtypes[leaf_index], fold.accumulator_dtype, fold.result_dtype
    dtype, accumulator, result = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    summed = "" if dtype == accumulator == result else f" summed as {accumulator} to {result}"
    where = f" on a mesh, {like.placements}" if is_dtensor(like) else ""
    return f"{dtype}[{', '.join(map(str, shape))}]{where}{summed} ({fold.fold.name})"


def _or_text(make: Callable[[], Any]) -> Any:
    """What a function makes; the text of its error, whatever a class of the user's raises."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _pickled(mine: Any) -> bytes:
    """The value of an Agreement, with arrays that have no place and no memory."""
    leaves: list[Any] = [None] * len(mine.outputs.folds)
    for index, like in mine.likes.items():
        leaves[index] = torch.empty(like.shape, dtype=like.dtype, device="meta")
    return pickle.dumps(mine.outputs.structure_of(leaves))
