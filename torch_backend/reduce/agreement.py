"""The agreement of the replicas: before the first reduction of a structure they compare what they fold.

Only torch has this file: in JAX one program describes all replicas.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from funcga._fold.leaf import LeafFold
from funcga._fold.outputs import Outputs
from funcga._replicas import Step, steps_made
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import Place, is_placed, local, place_of, ranks_apart
from torch_backend.engine.buffers import Layout
from torch_backend.reduce.buckets import Plan, planned
from torch_backend.reduce.comparison import check_alike, digest_of
from torch_backend.reduce.header import Report
from torch_backend.replicas import Replicas

_KEPT = 16  # structures that a step is known to have


@dataclass(eq=False)
class Agreement:
    """What every replica folds, and how it travels.

    `kinds` are the shape and the strides of what a process holds of each leaf, by their places among what is reduced;
    `placed` says where those lie that lie on several devices. `description` has a text for each path, `digest` tells
    them from any others, and `leaves` is what it takes to make leaves like these. `steps` are digests of the Steps that
    the replicas take, in their order; None until all of them have agreed.
    """

    outputs: Outputs
    plan: Plan
    kinds: dict[int, tuple[Any, Any]]
    placed: dict[int, Place]
    description: dict[str, str]
    digest: int
    leaves: list[Any]
    steps: tuple[int, ...] | None = None


@dataclass(eq=False)
class Progress:
    """How far a step has come on this replica, kept from one of its windows to the next.

    `windows` have begun, and all replicas have been told of the one numbered `announced`. For each process group,
    `finished` is the number of the last window that was merged over it, and `agreed` has the Agreements of the last
    few structures. `communicates`: whether the loss has called collectives of the group that gradients travel over.
    """

    step: Step | None
    windows: int = 0
    announced: int = 0
    finished: dict[dist.ProcessGroup, int] = field(default_factory=dict)
    agreed: dict[dist.ProcessGroup, list[Agreement]] = field(default_factory=dict)
    communicates: bool = False


def step_digest(progress: Progress) -> int:
    """A number that is another for any other step."""
    return 0 if progress.step is None else digest_of(tuple(progress.step))


def proposed(
    progress: Progress, outputs: Outputs, leaves: Sequence[Any], layout: Layout, replicas: Replicas
) -> Agreement:
    """The Agreement on outputs like these: one that there is, or one that the others have yet to agree to.

    `leaves` are those of grad_fn's output, or what they are like; None for one that is reduced elsewhere.
    """
    for known in reversed(_kept(progress, replicas)):
        if outputs is known.outputs or _same(outputs, leaves, known):
            return known
    given = {*layout.given_scaled, *layout.given_plain}
    pairs = zip(outputs.folds, leaves, strict=True)
    likes = [None if f is None or leaf is None else _like(leaf, i in given) for i, (f, leaf) in enumerate(pairs)]
    return _added(progress, outputs, likes, layout, replicas)


def recalled(progress: Progress, digest: int, replicas: Replicas) -> Agreement | None:
    """The Agreement on the structure that has this digest."""
    found = (known for known in _kept(progress, replicas) if known.digest == digest and known.steps is not None)
    return next(found, None)


def has_agreed(progress: Progress, replicas: Replicas) -> bool:
    """Whether there is any Agreement of these replicas."""
    return any(known.steps is not None for known in _kept(progress, replicas))


def _kept(progress: Progress, replicas: Replicas) -> list[Agreement]:
    return progress.agreed.setdefault(replicas.group, [])


def agree(
    progress: Progress, mine: Agreement | None, like: Callable[[Any], tuple[Outputs, list[Any]]] | None,
    reports: list[Report], replicas: Replicas,
) -> Agreement:  # fmt: skip
    """The Agreement of all replicas after these reports.

    `mine` is what this replica proposes; None if it has nothing to fold. `like(structure)` then makes what the others
    propose. Raises FuncgaError on every replica if two of them take different steps, or fold different structures.
    """
    digests = [report.digest or None for report in reports]
    digest = next(filter(None, digests))
    steps = tuple([report.step for report in reports])
    if {*digests} - {None} == {digest} and all(report.known for report in reports):
        known = recalled(progress, digest, replicas) if mine is None else mine
        assert known is not None  # as all replicas agree in the same windows
        _check_recalled(known, steps)
        return known
    _check_steps(progress, replicas)
    description = None if mine is None else mine.description
    check_alike(description, replicas.channel, "fold different structures", digests)
    if None in digests:
        mine = _shared(progress, mine, like, replicas)
    assert mine is not None
    mine.steps = steps
    return mine


def _check_recalled(known: Agreement, steps: tuple[int, ...]) -> None:
    """Raises FuncgaError if a replica takes another step than when this one was agreed on."""
    if known.steps != steps:
        made = {digest_of((name, k)): Step(name, k) for name, count in steps_made().items() for k in range(count)}
        raise _mixed_up([str(made.get(step, "another step")) for step in steps])


def _check_steps(progress: Progress, replicas: Replicas) -> None:
    """Raises FuncgaError if two replicas take different steps of which both have made both."""
    said = replicas.channel.gathered((progress.step, steps_made()))
    for mine, made_here in said:
        for other, made_there in said:
            both = mine is not None and other is not None and mine != other
            if both and made_here.get(other.name, 0) > other.number and made_there.get(mine.name, 0) > mine.number:
                raise _mixed_up([str(step) for step, _ in said])


def _mixed_up(steps: list[str]) -> FuncgaError:
    spelled = "; ".join(f"rank {rank} {step}" for rank, step in enumerate(steps[:8]))
    return FuncgaError(
        f"the replicas call different steps at the same time: {spelled}. What they fold would be added up all the "
        f"same. Make and call the steps in one order on every rank, from a list rather than a set."
    )


def _shared(
    progress: Progress, mine: Agreement | None, like: Callable[[Any], tuple[Outputs, list[Any]]] | None,
    replicas: Replicas,
) -> Agreement:  # fmt: skip
    """The Agreement, where some replicas have nothing to fold and have to be told what the others fold."""
    sent = None
    if mine is not None:
        # a tree of numbers, as a tree's structure alone does not pickle well
        sent = _pickled((mine.outputs.structure_of(range(len(mine.leaves))), mine.leaves))
    said = next(theirs for theirs in replicas.channel.gathered(sent) if theirs is not None)
    problem = said if isinstance(said, str) else None
    if problem is None and mine is None and like is not None:
        try:
            outputs, leaves = like(pickle.loads(said))
            mine = _added(progress, outputs, leaves, Layout(outputs), replicas)
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


def built(structure: Any, device: torch.device) -> tuple[Any, list[Any]]:
    """A value like those of the others, of numbers that mean nothing, and its leaves."""
    skeleton, kinds = structure
    if any(kind is not None and kind[3] for kind in kinds):
        raise FuncgaError("it lies on the devices of a mesh")
    leaves = [None if kind is None else torch.empty_strided(*kind[:2], dtype=kind[2], device=device) for kind in kinds]
    return trees.unflatten(trees.flatten(skeleton)[1], leaves), leaves


def _pickled(structure: Any) -> bytes | str:
    """The structure as bytes; if that cannot be, a text that says why."""
    try:
        data = pickle.dumps(structure)
        pickle.loads(data)
    except Exception as error:  # whatever the user's class raises
        return f"{type(error).__name__}: {error}"
    return data


def _added(progress: Progress, outputs: Outputs, likes: list[Any], layout: Layout, replicas: Replicas) -> Agreement:
    """An Agreement on outputs with leaves like these, that the others have yet to agree to."""
    description = _description(outputs, likes, replicas)
    kinds = [None if x is None else (x.shape, local(x).stride(), x.dtype, is_placed(x)) for x in likes]
    reduced: dict[int, Any] = {k: likes[i] for k, i in enumerate(outputs.reduced) if likes[i] is not None}
    placed = {k: place_of(like) for k, like in reduced.items() if is_placed(like)}
    for place in placed.values():
        _check_parts(place, replicas)
    reduced = {k: local(like) for k, like in reduced.items()}
    # a scalar, as the loss, is not rounded to what is sent for gradients
    exact = {k for k, like in reduced.items() if replicas.wire_dtype is not None and like.ndim == 0}
    sums = {k for k, like in reduced.items() if k in layout.sums or _is_sum(layout.folds[k], like)} - exact
    plan = planned(layout, reduced, sums, replicas.bucket_bytes)
    own = {k: (tuple(like.shape), like.stride()) for k, like in reduced.items()}
    made = Agreement(outputs, plan, own, placed, description, digest_of([*description.items()]), kinds)
    kept = _kept(progress, replicas)
    kept[:] = [*kept, made][-_KEPT:]
    return made


def _check_parts(place: Place, replicas: Replicas) -> None:
    """Raises FuncgaError if the replicas hold different parts of one tensor, which would be added to each other."""
    apart = ranks_apart(place, dist.get_process_group_ranks(replicas.group))
    if apart:
        raise FuncgaError(
            f"across= names ranks {apart}, which hold different parts of one DTensor, {list(place.placements)} on "
            f"{place.device_mesh}: merging would add one part to another. A DTensor is reduced over its own mesh "
            f"without across=; name the axis of the mesh that copies lie on: across=mesh['dp']."
        )


def _is_sum(fold: LeafFold, like: torch.Tensor) -> bool:
    """Whether what the fold holds of such a leaf is one array of its shape, and merged by adding it."""
    if fold.fold.reducer.monoid.collective != "sum":
        return False
    held = fold.identity(torch.zeros_like(like, requires_grad=False))
    return isinstance(held, torch.Tensor) and (held.shape, held.dtype) == (like.shape, fold.accumulator_dtype)


def _like(leaf: Any, given: bool) -> Any:
    """A leaf, or what has its shape: the strides that an accumulator keeps are those of parameters alone."""
    leaf = arrays.as_array(leaf)
    if is_placed(leaf) or leaf.is_contiguous():
        return leaf
    return torch.empty_like(leaf) if given else torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def _same(outputs: Outputs, leaves: Sequence[Any], known: Agreement) -> bool:
    a, b = outputs, known.outputs
    alike = a.structure == b.structure and a.dtypes == b.dtypes and a.threads == b.threads
    if not alike or any(_shape(a, i) != _shape(b, i) for i in range(len(a.shapes))):
        return False
    places = {k: place_of(leaves[i]) for k, i in enumerate(a.reduced) if is_placed(leaves[i])}
    return places == known.placed


def _shape(outputs: Outputs, i: int) -> Any:
    """The shape of a leaf, without the rows of one that is collected."""
    fold, shape = outputs.folds[i], outputs.shapes[i]
    axis = None if fold is None else fold.fold.reducer.monoid.axis
    if axis is None or shape is None:
        return shape
    return *shape[: axis % len(shape)], "rows", *shape[axis % len(shape) + 1 :]


def _description(outputs: Outputs, likes: Sequence[Any], replicas: Replicas) -> dict[str, str]:
    found = {"across": f"sent in buckets of {replicas.bucket_bytes} bytes as {replicas.wire_dtype or 'accumulated'}"}
    for i, (path, fold) in enumerate(zip(outputs.paths, outputs.folds, strict=True)):
        if fold is None:
            found[path] = "None" if i not in outputs.threads else "an object"
        if fold is not None and likes[i] is None:
            found[path] = f"reduced by the module's wrapper ({fold.fold.name})"
        if fold is None or likes[i] is None:
            continue
        shape = ", ".join(map(str, _shape(outputs, i) or ()))
        dtypes = [str(d).removeprefix("torch.") for d in (outputs.dtypes[i], fold.accumulator_dtype, fold.result_dtype)]
        summed = "" if dtypes[0] == dtypes[1] == dtypes[2] else f" summed as {dtypes[1]} to {dtypes[2]}"
        strided = "" if likes[i].is_contiguous() else f" strided {likes[i].stride()}"
        found[path] = f"{dtypes[0]}[{shape}]{strided}{summed} ({fold.fold.name})"
    return found
