"""The agreement of the replicas: before the first reduction of a structure they compare what they
fold.

This takes two more collectives, once for each structure. In later windows a digest in the header
names the structure.
"""

import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from funcga._call import Memory
from funcga._fold import LeafFold
from funcga._fold.outputs import Outputs
from funcga._replicas import Step, steps_made
from funcga._types import Array, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays
from torch_backend.dtensor import Spec, is_dtensor, local, ranks_with_other_shards, spec_of
from torch_backend.engine.sums import Folding
from torch_backend.reduce.header import ROOM, Report, digest_of
from torch_backend.reduce.wire import Form, Plan, plan_of
from torch_backend.replicas import Replicas, check_alike

# Makes the Outputs of a tree, and leaves like its own, from the tree of their numbers and the shape
# and dtype of each.
Rebuild = Callable[[Tree, list[Form | None]], tuple[Outputs, list[Any]]]


@dataclass(eq=False)
class Agreement:
    """What every replica folds, and how it travels.

    `key` tells it from other structures of the same step on this replica, `digest` on all of them:
    it is one of `description`, which has a text for each path. `forms` are the shapes and dtypes of
    the leaves of the outputs as this process holds them; None for a leaf that is not an array, or
    that is reduced elsewhere. `specs` are those of the reduced leaves that are DTensors. `steps`
    are digests of the Steps that the replicas take, in their order; empty until all of them have
    agreed.
    """

    key: tuple[object, ...]
    outputs: Outputs
    forms: list[Form | None]
    plan: Plan
    specs: dict[int, Spec]
    description: dict[str, str]
    digest: int
    steps: list[float] = field(default_factory=list)


@dataclass(eq=False)
class History:
    """The windows of one step over one group, as this replica has seen them."""

    step: Step | None
    options: Mapping[str, str] = field(default_factory=dict)
    begun: int = 0
    finished: int = 0
    # On the last structures.
    agreements: deque[Agreement] = field(default_factory=lambda: deque(maxlen=16))

    def recalled(self, digest: float = 0) -> Agreement | None:
        """The last Agreement of all replicas on the structure that has this digest, or on any."""
        known = [each for each in self.agreements if each.steps and digest in (0, each.digest)]
        return known[-1] if known else None


class GivesUp(Protocol):
    """What merges a window, and can tell other replicas that it has ended here."""

    differs: bool

    def give_up(self) -> None:
        """Unblocks the other replicas."""
        ...


@dataclass(eq=False)
class Progress:
    """How far a step has come on this replica, kept from one of its windows to the next."""

    step: Step | None
    options: Mapping[str, str] = field(default_factory=dict)
    groups: dict[dist.ProcessGroup, History] = field(default_factory=dict)
    # What merges the windows of the call that is under way; None outside of a call.
    of_call: list[Callable[[], "GivesUp | None"]] | None = None

    def over(self, group: dist.ProcessGroup) -> History:
        """The windows that are merged over a group."""
        return self.groups.setdefault(group, History(self.step, self.options))


def progress_of(memory: Memory) -> Progress:
    """How far the step with this memory has come."""
    return memory.keep(Progress, memory.step, memory.options)


# -------------------------------------------------------------------------- what a replica proposes


def propose(
    history: History, folding: Folding, leaves: Sequence[Array], replicas: Replicas
) -> Agreement:
    """The Agreement on outputs that are folded so: one that there is, or one that the others have
    yet to agree to.

    `leaves` are those of grad_fn's output, or what they are like; None for one that is reduced
    elsewhere.
    """
    # A plan has one Outputs for all windows of a structure, so no key has to be made. Any other
    # gradient function has a new one for each window.
    outputs = folding.outputs
    known = next((each for each in history.agreements if each.outputs is outputs), None)
    key = _key(outputs, leaves) if known is None else known.key
    known = known or next((each for each in history.agreements if each.key == key), None)
    if known is not None:
        return known
    likes = [
        None if fold is None or leaf is None else arrays.as_array(leaf)
        for fold, leaf in zip(outputs.folds, leaves, strict=True)
    ]
    history.agreements.append(_proposal(key, folding, likes, replicas))
    return history.agreements[-1]


def _key(outputs: Outputs, leaves: Sequence[Array]) -> tuple[object, ...]:
    shapes = [_shape(outputs, leaf_index) for leaf_index in range(len(outputs.shapes))]
    specs = {
        leaf_index: spec_of(leaves[leaf_index])
        for leaf_index in outputs.reduced
        if is_dtensor(leaves[leaf_index])
    }
    return outputs.structure, outputs.dtypes, outputs.threads, shapes, specs


def _shape(outputs: Outputs, leaf_index: int) -> tuple[int | str, ...] | None:
    """The shape of a leaf, without the number of rows of one that is collected."""
    fold, shape = outputs.folds[leaf_index], outputs.shapes[leaf_index]
    if fold is None or shape is None:
        return None
    axis = fold.axis
    if axis is None:
        return tuple(shape)
    return *shape[: axis % len(shape)], "rows", *shape[axis % len(shape) + 1 :]


def _proposal(
    key: tuple[object, ...],
    folding: Folding,
    likes: Sequence[torch.Tensor | None],
    replicas: Replicas,
) -> Agreement:
    outputs = folding.outputs
    folds = dict(zip(outputs.reduced, outputs.reduced_folds, strict=True))
    reduced = {leaf: like for leaf in outputs.reduced if (like := likes[leaf]) is not None}
    specs = {index: spec_of(like) for index, like in reduced.items() if is_dtensor(like)}
    for spec in specs.values():
        _check_copies(spec, replicas)
    shards = {index: local(like) for index, like in reduced.items()}
    added = [
        index
        for index, like in shards.items()
        if folding.kinds[index] is not None or _is_sum(folds[index], like)
    ]
    # What travels in the header has no mark of an error, which has to be read before the exchanges
    # that these take.
    may_be_numbers = not (specs or outputs.collected or outputs.threads)
    description = _description(outputs, likes, replicas)
    return Agreement(
        key=key,
        outputs=outputs,
        forms=[*map(_form_of, likes)],
        plan=plan_of(
            folds,
            shards,
            added,
            replicas.bucket_bytes,
            replicas.wire_dtype,
            ROOM if may_be_numbers else 0,
        ),
        specs=specs,
        description=description,
        digest=digest_of([*description.items()]),
    )


def _form_of(like: torch.Tensor | None) -> Form | None:
    return None if like is None else (tuple(like.shape), like.dtype)


def _check_copies(spec: Spec, replicas: Replicas) -> None:
    """Raises FuncgaError if the replicas hold different shards of one tensor, which would be
    added to each other.
    """
    ranks = ranks_with_other_shards(spec, dist.get_process_group_ranks(replicas.group))
    if ranks:
        raise FuncgaError(
            f"across= names ranks {ranks}, which hold different parts of one DTensor, "
            f"{list(spec.placements)} on {spec.device_mesh}: merging would add one part to "
            "another. A DTensor is reduced over its own mesh without across=; name the axis of the "
            "mesh that copies lie on: across=mesh['dp']."
        )


def _is_sum(fold: LeafFold, like: torch.Tensor) -> bool:
    """Whether a fold that is not added in place holds one array of the leaf's shape, and is
    merged by adding it.
    """
    if fold.fold.reducer.monoid.collective != "sum":
        return False
    identity = fold.identity(torch.zeros_like(like, requires_grad=False))
    if not isinstance(identity, torch.Tensor):
        return False
    return (identity.shape, identity.dtype) == (like.shape, fold.accumulator_dtype)


def _description(
    outputs: Outputs, likes: Sequence[torch.Tensor | None], replicas: Replicas
) -> dict[str, str]:
    """What must be the same on all replicas, as a text for each path."""
    sent = (
        f"sent in buckets of {replicas.bucket_bytes} bytes as "
        f"{replicas.wire_dtype or 'accumulated'}"
    )
    return {"across": sent} | {
        path: _description_of_leaf(outputs, leaf_index, like)
        for leaf_index, (path, like) in enumerate(zip(outputs.paths(), likes, strict=True))
    }


def _description_of_leaf(outputs: Outputs, leaf_index: int, like: torch.Tensor | None) -> str:
    fold = outputs.folds[leaf_index]
    if fold is None:
        return "an object" if leaf_index in outputs.threads else "None"
    if like is None:
        return f"reduced by the module's wrapper ({fold.fold.name})"
    shape = ", ".join(map(str, _shape(outputs, leaf_index) or ()))
    dtypes = outputs.dtypes[leaf_index], fold.accumulator_dtype, fold.result_dtype
    dtype, accumulator, result = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    summed = "" if dtype == accumulator == result else f" summed as {accumulator} to {result}"
    return f"{dtype}[{shape}]{summed} ({fold.fold.name})"


# -------------------------------------------------------------------------------- what all agree on


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
    # match. Usually the headers have said everything, and nothing more is sent.
    steps, known = [report.step for report in reports], _known(history, mine, reports)
    if known is not None and known.steps == steps:
        return known
    said: list[_Statement] = replicas.channel.all_gather(_statement_of(history.step, mine, reports))
    if known is not None or _are_mixed_up(said):
        raise _mixed_up(said)
    check_alike([each.description for each in said], "fold different structures")
    structure = next((each.structure for each in said if each.structure is not None), None)
    if structure is not None:
        mine = _adopt(history, mine, structure, rebuild, replicas)
    assert mine is not None
    mine.steps = steps
    return mine


def check_options(history: History, replicas: Replicas) -> None:
    """Raises FuncgaError on replicas that were given other options, by their headers. These come
    before anything that depends on an option.
    """
    said: list[_Statement] = replicas.channel.all_gather(
        _Statement(history.step, steps_made(), {**history.options})
    )
    if _are_mixed_up(said):
        raise _mixed_up(said)
    check_alike(
        [each.description for each in said],
        "were given different options",
        "With other options they send each other other messages: give every rank the same.",
    )


def _mixed_up(said: list[_Statement]) -> FuncgaError:
    spelled = "; ".join(
        f"rank {rank} {each.step or 'another step'}" for rank, each in enumerate(said[:8])
    )
    return FuncgaError(
        f"the replicas call different steps at the same time: {spelled}. What they fold would be "
        "added up all the same. Make and call the steps in one order on every rank, from a list "
        "rather than a set."
    )


def _known(history: History, mine: Agreement | None, reports: list[Report]) -> Agreement | None:
    """The Agreement that all replicas have made before, if everything that they fold now has one
    digest.
    """
    # A digest of 0 is that of a replica that has nothing to fold: it goes with any other.
    digests = {report.digest for report in reports} - {0}
    if len(digests) > 1 or not all(report.agreed for report in reports):
        return None
    return history.recalled(digests.pop()) if mine is None else mine


def _statement_of(step: Step | None, mine: Agreement | None, reports: list[Report]) -> _Statement:
    if mine is None:
        return _Statement(step, steps_made())
    # Descriptions are long, so they are sent only where digests differ; and the structure only
    # where a replica has nothing to fold, and so cannot know it.
    digests = {report.digest for report in reports}
    description = mine.description if len(digests - {0}) > 1 else None
    structure = _pickled(mine) if 0 in digests else None
    return _Statement(step, steps_made(), description, structure)


# -------------------------------------------- a first window in which a replica has nothing to fold


def _pickled(mine: Agreement) -> bytes | str:
    """The structure of what this replica folds, for others to make values like it: a tree of the
    numbers of its leaves, and the shape and dtype of each. Pickled; a text if that cannot be.
    """
    if mine.specs:
        return "it lies on the devices of a mesh"
    try:
        # Torch's own description of a structure does not pickle well.
        numbers = mine.outputs.structure_of(range(len(mine.forms)))
        data = pickle.dumps((numbers, mine.forms))
        pickle.loads(data)
    except Exception as error:  # whatever the user's class raises
        return f"{type(error).__name__}: {error}"
    return data


def _adopt(
    history: History,
    mine: Agreement | None,
    structure: bytes | str,
    rebuild: Rebuild | None,
    replicas: Replicas,
) -> Agreement:
    """The Agreement where some replicas have nothing to fold, and adopt the structure of what the
    others fold.

    Raises FuncgaError, on all of them, if one cannot.
    """
    problem = structure if isinstance(structure, str) else ""
    if mine is None and isinstance(structure, bytes):
        assert rebuild is not None
        try:
            outputs, leaves = rebuild(*pickle.loads(structure))
            mine = propose(history, Folding(outputs), leaves, replicas)
        except Exception as error:  # whatever the user's class raises
            problem = f"{type(error).__name__}: {error}"
    # All replicas say what they would fold, or why they cannot. If one cannot, all of them raise:
    # none is left waiting.
    said: list[dict[str, str] | str] = replicas.channel.all_gather(
        problem if mine is None else mine.description
    )
    problems = [each for each in said if isinstance(each, str)]
    if mine is None or problems:
        raise FuncgaError(
            "a replica has nothing to fold in its first window, and cannot be told what the others "
            f"fold ({problems[0]}). Give every replica a micro-batch in the first window, later "
            "ones may have none; or return dicts, tuples and lists of arrays."
        )
    check_alike([each for each in said if isinstance(each, dict)], "fold different structures")
    return mine


def _are_mixed_up(said: list[_Statement]) -> bool:
    """Whether two replicas take different steps, although each of them has made both steps."""
    # A step that only one of two replicas has made is no mistake: each may have a loss of its own.
    taken = [(each.step, each.steps_made) for each in said if each.step is not None]
    return any(
        here != there
        and made_here.get(there.name, 0) > there.number
        and made_there.get(here.name, 0) > here.number
        for here, made_here in taken
        for there, made_there in taken
    )
