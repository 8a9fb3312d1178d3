"""The agreement of the replicas: before the first reduction they compare what they fold.

Only torch has this file: in JAX one program describes all replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from funcga.errors import FuncgaError
from funcga.leaves import LeafFold
from funcga.outputs import Outputs
from funcga.program import Program
from torch_backend import arrays, trees
from torch_backend.buckets import Plan, planned
from torch_backend.buffers import Layout, power_below
from torch_backend.comparison import check_alike, digest_of, gathered
from torch_backend.placements import Place, is_placed, local, place_of, ranks_apart
from torch_backend.replicas import Replicas


class Agreement(NamedTuple):
    """What every replica folds, how it travels, and the unit that weighted sums travel in.

    `kinds` are the shape and the strides of what a process holds of each leaf, by their places among what is reduced;
    `placed` says where those lie that lie on several devices.
    """

    outputs: Outputs
    plan: Plan
    unit: float
    kinds: dict[int, tuple[Any, Any]]
    placed: dict[int, Place]


def agree(
    program: Program, outputs: Outputs, leaves: Sequence[Any], weight: Any, layout: Layout, replicas: Replicas
) -> Agreement:
    """The Agreement on outputs like these, made once for each structure.

    `leaves` are those of grad_fn's output, or what they are like; None for one that is reduced elsewhere. Raises
    FuncgaError on every replica if they differ.
    """
    known = last_agreement(program, replicas)
    if known is not None and (outputs is known.outputs or _same(outputs, leaves, known)):
        return known
    given = {*layout.given_scaled, *layout.given_plain}
    pairs = zip(outputs.folds, leaves, strict=True)
    likes = [None if f is None or leaf is None else _like(leaf, i in given) for i, (f, leaf) in enumerate(pairs)]
    # a tree of numbers, as a tree's structure alone does not pickle well
    kinds = [
        None if like is None else (like.shape, local(like).stride(), like.dtype, is_placed(like)) for like in likes
    ]
    structure = outputs.structure_of(range(len(likes))), kinds
    unit = _compare(_description(outputs, likes, replicas), weight, structure, replicas)[0]
    return _remembered(program, outputs, likes, unit, layout, replicas)


def last_agreement(program: Program, replicas: Replicas) -> Agreement | None:
    """The last Agreement of these replicas, if there is one."""
    known: Agreement | None = program.compiled.get(("agreed", replicas.group))
    return known


def join(program: Program, like: Callable[[Any], Outputs], device: torch.device, replicas: Replicas) -> Agreement:
    """The Agreement of the others, for a replica that has nothing to fold; `like(value)` binds values like theirs."""
    known = last_agreement(program, replicas)
    if known is not None:
        return known
    unit, structure = _compare(None, 0, None, replicas)
    skeleton, kinds = structure
    leaves = [None if k is None else torch.empty_strided(*k[:2], dtype=k[2], device=device) for k in kinds]
    outputs = like(trees.unflatten(trees.flatten(skeleton)[1], leaves))
    return _remembered(program, outputs, leaves, unit, Layout(outputs), replicas)


def _remembered(
    program: Program, outputs: Outputs, leaves: Sequence[Any], unit: float, layout: Layout, replicas: Replicas
) -> Agreement:
    likes = {k: leaves[i] for k, i in enumerate(outputs.reduced) if leaves[i] is not None}
    placed = {k: place_of(like) for k, like in likes.items() if is_placed(like)}
    for place in placed.values():
        _check_parts(place, replicas)
    likes = {k: local(like) for k, like in likes.items()}
    # a scalar, as the loss, is not rounded to what is sent for gradients
    exact = {k for k, like in likes.items() if replicas.wire_dtype is not None and like.ndim == 0}
    sums = {k for k, like in likes.items() if k in layout.sums or _is_sum(layout.folds[k], like)} - exact
    plan = planned(layout, likes, sums, replicas.bucket_bytes)
    kinds = {k: (tuple(like.shape), like.stride()) for k, like in likes.items()}
    agreement = Agreement(outputs, plan, unit, kinds, placed)
    program.compiled["agreed", replicas.group] = agreement
    return agreement


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


def _compare(description: Any, weight: Any, structure: Any, replicas: Replicas) -> tuple[float, Any]:
    """The unit to travel in, and the structure of the first that has one, which is sent where one has none."""
    unit = 1.0 if isinstance(weight, torch.Tensor) else float(weight)
    said = gathered(None if description is None else (unit, digest_of(description)), replicas.group)
    speakers = [rank for rank, theirs in enumerate(said) if theirs is not None]
    if not speakers:
        raise FuncgaError(
            "no replica has a micro-batch to fold, and so nobody knows the structure to return. Check the loaders, or "
            "that a generator was not used up before."
        )
    digests = [None if theirs is None else theirs[1] for theirs in said]
    check_alike(description, replicas.group, "fold different structures", digests)
    if len(speakers) < replicas.count:
        sent = [structure]
        source = dist.get_global_rank(replicas.group, speakers[0])
        dist.broadcast_object_list(sent, src=source, group=replicas.group)
        structure = sent[0]
        if any(kind is not None and kind[3] for kind in structure[1]):
            raise FuncgaError(
                "a replica has nothing to fold in its first window, and what the others fold lies on the devices of a "
                "mesh, which it cannot know of. Give every replica a micro-batch in the first window; later ones may "
                "have none."
            )
    units = {theirs[0] for theirs in said if theirs is not None and theirs[0]}
    return (units.pop() if len(units) == 1 else power_below(max(units)) if units else 1.0), structure


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
