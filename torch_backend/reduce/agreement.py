"""The agreement of the replicas: before the first reduction of a structure they compare what they fold.

It takes two collectives more, once for each structure. In later windows the header says by a digest which structure a
replica folds.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from funcga._fold.leaf import LeafFold
from funcga._fold.outputs import Outputs
from funcga._replicas import Step, steps_made
from funcga._types import Structure, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import Spec, is_dtensor, local, ranks_with_other_shards, spec_of
from torch_backend.engine.buffers import Layout
from torch_backend.reduce.channel import Channel, Report, check_alike, digest_of
from torch_backend.reduce.wire import Plan, planned
from torch_backend.replicas import Replicas

_KEPT = 16  # structures that a step is known to have

# Makes what the others fold of a tree's structure: the Outputs, and leaves like theirs.
Rebuild = Callable[[Structure], tuple[Outputs, list[Any]]]


class LeafKind(NamedTuple):
    """What it takes to make a leaf like this one."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_dtensor: bool


@dataclass(eq=False)
class Agreement:
    """What every replica folds, and how it travels.

    `key` tells it from other structures of the same step on this replica, `digest` on all of them: it is one of
    `description`, which has a text for each path. `specs` are those of the reduced leaves that are DTensors. `steps`
    are digests of the Steps that the replicas take, in their order; empty until all of them have agreed.
    """

    key: tuple[object, ...]
    outputs: Outputs
    kinds: list[LeafKind | None]
    plan: Plan
    specs: dict[int, Spec]
    description: dict[str, str]
    digest: int
    steps: list[float] = field(default_factory=list)


@dataclass(eq=False)
class History:
    """The windows of one step over one group, as this replica has seen them.

    `communicates` says that the loss itself calls collectives of the group.
    """

    step: Step | None
    begun: int = 0
    finished: int = 0
    communicates: bool = False
    agreements: list[Agreement] = field(default_factory=list)

    @property
    def step_digest(self) -> int:
        """A number that is another for any other step; 0 without a Step."""
        return 0 if self.step is None else digest_of(tuple(self.step))

    @property
    def has_agreed(self) -> bool:
        """Whether the replicas have agreed on any structure."""
        return any(agreement.steps for agreement in self.agreements)

    def recalled(self, digest: float) -> Agreement | None:
        """The Agreement on the structure that has this digest."""
        return next((known for known in self.agreements if known.digest == digest and known.steps), None)

    def keep(self, agreement: Agreement) -> Agreement:
        """The Agreement, which is kept beside the last ones."""
        self.agreements = [*self.agreements, agreement][-_KEPT:]
        return agreement


@dataclass(eq=False)
class Progress:
    """How far a step has come on this replica, kept from one of its windows to the next."""

    step: Step | None
    groups: dict[dist.ProcessGroup, History] = field(default_factory=dict)

    def over(self, group: dist.ProcessGroup) -> History:
        """The windows that are merged over a group."""
        return self.groups.setdefault(group, History(self.step))


# ------------------------------------------------------------------------------------------- what a replica proposes


def proposed(
    history: History, outputs: Outputs, leaves: Sequence[Any], layout: Layout, replicas: Replicas
) -> Agreement:
    """The Agreement on outputs like these: one that there is, or one that the others have yet to agree to.

    `leaves` are those of grad_fn's output, or what they are like; None for one that is reduced elsewhere.
    """
    known = [known for known in history.agreements if known.outputs is outputs]
    if known:
        return known[-1]
    key = _key(outputs, leaves)
    known = [known for known in history.agreements if known.key == key]
    if known:
        return known[-1]
    summed_by_autograd = {*layout.given_scaled, *layout.given_plain}
    likes = [
        None if fold is None or leaf is None else _like(leaf, leaf_index in summed_by_autograd)
        for leaf_index, (fold, leaf) in enumerate(zip(outputs.folds, leaves, strict=True))
    ]
    return history.keep(_proposal(key, outputs, likes, layout, replicas))


def _key(outputs: Outputs, leaves: Sequence[Any]) -> tuple[object, ...]:
    shapes = [_shape(outputs, leaf_index) for leaf_index in range(len(outputs.shapes))]
    specs = {
        leaf_index: spec_of(leaves[leaf_index]) for leaf_index in outputs.reduced if is_dtensor(leaves[leaf_index])
    }
    return outputs.structure, outputs.dtypes, outputs.threads, shapes, specs


def _shape(outputs: Outputs, leaf_index: int) -> tuple[int | str, ...] | None:
    """The shape of a leaf, without the number of rows of one that is collected."""
    fold, shape = outputs.folds[leaf_index], outputs.shapes[leaf_index]
    if fold is None or shape is None:
        return None
    axis = fold.fold.reducer.monoid.axis
    if axis is None:
        return tuple(shape)
    return *shape[: axis % len(shape)], "rows", *shape[axis % len(shape) + 1 :]


def _like(leaf: Any, is_summed_by_autograd: bool) -> torch.Tensor:
    """A leaf in the strides that its accumulator has: autograd keeps those of a parameter, other sums have none."""
    array = arrays.as_array(leaf)
    if is_dtensor(array) or array.is_contiguous():
        return array
    if is_summed_by_autograd:
        return torch.empty_like(array)
    return torch.empty(array.shape, dtype=array.dtype, device=array.device)


def _proposal(
    key: tuple[object, ...], outputs: Outputs, likes: Sequence[torch.Tensor | None], layout: Layout, replicas: Replicas
) -> Agreement:
    reduced = {index: like for index, i in enumerate(outputs.reduced) if (like := likes[i]) is not None}
    specs = {index: spec_of(like) for index, like in reduced.items() if is_dtensor(like)}
    for spec in specs.values():
        _check_copies(spec, replicas)
    plan = _planned(layout, {index: local(like) for index, like in reduced.items()}, replicas)
    description = _description(outputs, likes, replicas)
    kinds = [
        None if like is None else LeafKind(like.shape, local(like).stride(), like.dtype, is_dtensor(like))
        for like in likes
    ]
    return Agreement(key, outputs, kinds, plan, specs, description, digest_of([*description.items()]))


def _check_copies(spec: Spec, replicas: Replicas) -> None:
    """Raises FuncgaError if the replicas hold different shards of one tensor, which would be added to each other."""
    ranks = ranks_with_other_shards(spec, dist.get_process_group_ranks(replicas.group))
    if ranks:
        raise FuncgaError(
            f"across= names ranks {ranks}, which hold different parts of one DTensor, {list(spec.placements)} on "
            f"{spec.device_mesh}: merging would add one part to another. A DTensor is reduced over its own mesh "
            f"without across=; name the axis of the mesh that copies lie on: across=mesh['dp']."
        )


def _planned(layout: Layout, likes: Mapping[int, torch.Tensor], replicas: Replicas) -> Plan:
    sums = [index for index, like in likes.items() if index in layout.sums or _is_sum(layout.folds[index], like)]
    return planned(layout.folds, likes, sums, replicas.bucket_bytes, replicas.wire_dtype)


def _is_sum(fold: LeafFold, like: torch.Tensor) -> bool:
    """Whether a fold that is not added in place holds one array of the leaf's shape, and is merged by adding it."""
    if fold.fold.reducer.monoid.collective != "sum":
        return False
    identity = fold.identity(torch.zeros_like(like, requires_grad=False))
    if not isinstance(identity, torch.Tensor):
        return False
    return (identity.shape, identity.dtype) == (like.shape, fold.accumulator_dtype)


def _description(outputs: Outputs, likes: Sequence[torch.Tensor | None], replicas: Replicas) -> dict[str, str]:
    """What must be alike on all replicas, by path."""
    sent = f"sent in buckets of {replicas.bucket_bytes} bytes as {replicas.wire_dtype or 'accumulated'}"
    return {"across": sent} | {
        path: _description_of_leaf(outputs, leaf_index, like)
        for leaf_index, (path, like) in enumerate(zip(outputs.paths, likes, strict=True))
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
    strided = "" if like.is_contiguous() else f" strided {like.stride()}"
    return f"{dtype}[{shape}]{strided}{summed} ({fold.fold.name})"


# ----------------------------------------------------------------------------------------------- what all agree on


def agreed(
    history: History, mine: Agreement | None, rebuild: Rebuild | None, reports: list[Report], replicas: Replicas
) -> Agreement:
    """The Agreement of all replicas after these reports.

    `mine` is what this replica proposes; None if it has nothing to fold. `rebuild` then makes what the others propose.
    Raises FuncgaError on every replica if two of them take different steps, or fold different structures.
    """
    digests = [report.digest for report in reports]
    digest = next(filter(None, digests))
    steps = [report.step for report in reports]
    if {*digests} - {0} == {digest} and all(report.agreed for report in reports):
        known = history.recalled(digest) if mine is None else mine
        assert known is not None  # as all replicas agree in the same windows
        if known.steps != steps:
            raise _mixed_up([_spelled(step) for step in steps])
        return known
    _check_steps(history.step, replicas.channel)
    check_alike(None if mine is None else mine.description, replicas.channel, "fold different structures", digests)
    agreement = mine if 0 not in digests else _shared(history, mine, rebuild, replicas)
    assert agreement is not None
    agreement.steps = steps
    return agreement


def _spelled(digest: float) -> str:
    """The step that has this digest, if this replica has made it too."""
    steps = [Step(name, number) for name, count in steps_made().items() for number in range(count)]
    return next((str(step) for step in steps if digest_of(tuple(step)) == digest), "another step")


def _check_steps(step: Step | None, channel: Channel) -> None:
    """Raises FuncgaError if two replicas take different steps of which both have made both."""
    said: list[tuple[Step | None, dict[str, int]]] = channel.gathered((step, steps_made()))
    for here, made_here in said:
        for there, made_there in said:
            if here is None or there is None or here == there:
                continue
            if made_here.get(there.name, 0) > there.number and made_there.get(here.name, 0) > here.number:
                raise _mixed_up([str(each) for each, _ in said])


def _mixed_up(steps: list[str]) -> FuncgaError:
    spelled = "; ".join(f"rank {rank} {step}" for rank, step in enumerate(steps[:8]))
    return FuncgaError(
        f"the replicas call different steps at the same time: {spelled}. What they fold would be added up all the "
        f"same. Make and call the steps in one order on every rank, from a list rather than a set."
    )


# ------------------------------------------------------------- a first window in which a replica has nothing to fold


def _shared(history: History, mine: Agreement | None, rebuild: Rebuild | None, replicas: Replicas) -> Agreement:
    """The Agreement, where some replicas have nothing to fold and have to be told what the others fold."""
    sent = None
    if mine is not None:
        # a tree of numbers, as a tree's structure alone does not pickle well
        sent = _pickled((mine.outputs.structure_of(range(len(mine.kinds))), mine.kinds))
    said: bytes | str = next(theirs for theirs in replicas.channel.gathered(sent) if theirs is not None)
    problem = said if isinstance(said, str) else None
    if mine is None and rebuild is not None and isinstance(said, bytes):
        try:
            outputs, leaves = rebuild(pickle.loads(said))
            layout = Layout(outputs)
            mine = history.keep(_proposal(_key(outputs, leaves), outputs, leaves, layout, replicas))
        except Exception as error:  # whatever the user's class raises
            problem = f"{type(error).__name__}: {error}"
    problems = [theirs for theirs in replicas.channel.gathered(problem) if theirs is not None]
    if problems:
        raise FuncgaError(
            f"a replica has nothing to fold in its first window, and cannot be told what the others fold "
            f"({problems[0]}). Give every replica a micro-batch in the first window, later ones may have none; or "
            f"return dicts, tuples and lists of arrays."
        )
    assert mine is not None
    check_alike(mine.description, replicas.channel, "fold different structures")
    return mine


def _pickled(structure: Structure) -> bytes | str:
    """The structure as bytes; if that cannot be, a text that says why."""
    try:
        data = pickle.dumps(structure)
        pickle.loads(data)
    except Exception as error:  # whatever the user's class raises
        return f"{type(error).__name__}: {error}"
    return data


def rebuilt(structure: Structure, device: torch.device) -> tuple[Tree, list[torch.Tensor | None]]:
    """A value like those of the others, of numbers that mean nothing, and its leaves."""
    skeleton, kinds = structure
    if any(kind is not None and kind.is_dtensor for kind in kinds):
        raise FuncgaError("it lies on the devices of a mesh")
    leaves = [
        None if kind is None else torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=device)
        for kind in kinds
    ]
    return trees.unflatten(trees.flatten(skeleton)[1], leaves), leaves
