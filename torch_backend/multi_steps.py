"""What a fold that is spread over calls needs of this framework: its branch, sums that go on, and its own types."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from funcga._fold.leaf import LeafFold
from funcga._fold.outputs import Outputs
from funcga._fold.tally import Tally
from funcga._transform.window import Window
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import is_placed, local
from torch_backend.engine import window as engine
from torch_backend.engine.buffers import Buffers, Layout
from torch_backend.reduce.agreement import Progress
from torch_backend.reduce.reduction import count_window
from torch_backend.reduce.reduction import merged as merged_buffers
from torch_backend.replicas import Replicas
from torch_backend.strides import apart


def _untracked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which records no graph; but in a torch.func transform, which would see nothing of it."""

    @wraps(function)
    def run(*args: Any) -> Any:
        with nullcontext() if arrays.in_transform() else torch.no_grad():
            return function(*args)

    return run


def detached(tree: Any) -> Any:
    """The tree without the graphs that its arrays are in."""
    return engine.detached(tree)


def imported(tx: Any) -> Any:
    """A transform as the framework's own combinators would call it, with extra arguments that it may ignore."""
    return tx


def exported(made: Any) -> Any:
    """A transform of funcga's in the type that the framework's own combinators take."""
    return made


def when(predicate: Any, emit: Callable[..., Any], state: Any, operands: Any, like: Any, donate: bool = False) -> Any:
    """`emit(state, operands)`, which is (updates, state), if the predicate holds; else zeros and the state.

    Zeros are like other updates in memory of their own. Where memory is donated, to save it, they are views of a 0.
    """
    if predicate:
        return emit(state, operands)
    leaves, structure = trees.flatten(like)
    zeros = _views_of_zero if donate else _zeros
    return trees.unflatten(structure, [zeros(leaf) if arrays.is_array(leaf) else leaf for leaf in leaves]), state


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of an update."""
    if like.layout is not torch.strided:
        return torch.zeros(like.shape, dtype=_dtype_of_update(like), device=like.device)
    return torch.zeros_like(like, dtype=_dtype_of_update(like), requires_grad=False)


def _views_of_zero(like: torch.Tensor) -> torch.Tensor:
    """The same without memory for each element, so that they cannot be written to."""
    if type(like) not in (torch.Tensor, torch.nn.Parameter) or like.numel() < 2:
        return _zeros(like)
    return torch.zeros((), dtype=_dtype_of_update(like), device=like.device).expand(like.shape)


def _dtype_of_update(like: torch.Tensor) -> torch.dtype:
    return arrays.accumulator_dtype(like.dtype) if arrays.kind(like.dtype) in ("float", "complex") else like.dtype


def finite(leaves: list[Any]) -> Any:
    """Whether every number is finite: a 0-d array."""
    given = [leaf for leaf in leaves if leaf is not None]
    found = [leaf for leaf in (local(leaf).detach() for leaf in given) if leaf.numel()]
    found = [leaf if leaf.layout is torch.strided else leaf.to_dense() for leaf in found]
    extremes = [extreme.to(found[0].device, torch.float64) for extreme in _extremes(found)]
    kept = torch.stack(extremes).isfinite().all() if extremes else torch.tensor(True)
    meshes = {leaf.device_mesh for leaf in given if is_placed(leaf)}
    return _everywhere(kept, meshes) if meshes else kept


def _everywhere(kept: torch.Tensor, meshes: set[Any]) -> torch.Tensor:
    """Whether it holds on all devices of some meshes, of which each has a part of the numbers."""
    in_order = sorted(meshes, key=lambda mesh: str(mesh.mesh.tolist()))  # the same on all devices
    for mesh in in_order * len(meshes):  # where meshes cross, it takes a pass for each to come everywhere
        for group in mesh.get_all_groups():
            flag = kept.to(mesh.device_type, torch.int32)
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
            kept = flag.bool()
    return kept


def _extremes(leaves: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Numbers of which one is not finite if any of the leaves' is not: one pass, and no mask."""
    real = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    on_host = [leaf for leaf in real if leaf.device.type == "cpu"]
    for leaf in on_host:
        yield from torch.aminmax(leaf)  # a norm is twenty times slower there
    if len(on_host) < len(real):
        yield from torch._foreach_norm([leaf for leaf in real if leaf.device.type != "cpu"], float("inf"))


@_untracked
def unscaled(leaves: list[Any], scale: Any, donate: bool) -> list[Any]:
    """The leaves divided by a loss scale, in at least 32 bits; in the same memory if that is donated."""
    factor, donate = 1.0 / arrays.scalar(scale), donate and not arrays.in_transform()
    wide = [leaf if leaf is None else leaf.to(arrays.accumulator_dtype(leaf.dtype)) for leaf in leaves]
    found = apart(wide) if donate else wide
    given = [leaf for leaf in found if leaf is not None]
    if donate and given:
        torch._foreach_mul_(given, factor)
        return found
    products = iter(torch._foreach_mul(given, factor) if given else ())
    return [leaf if leaf is None else next(products) for leaf in found]


def check_merged(leaves: list[Any], paths: Callable[[], list[str]], replicas: Any) -> None:
    """Raises FuncgaError for gradients that nothing would merge over the replicas, or that are merged already."""
    # a tensor does not say whether other processes have it too


@_untracked
def add(
    folds: Sequence[LeafFold | None], held: list[Any], leaves: list[Any], weight: Any, donate: bool
) -> tuple[list[Any], bool]:
    """What is held of each leaf with one more value of this weight, and whether nobody else has that memory."""
    _check_devices(held, leaves)
    factors = {id(fold): fold for fold in folds}  # there are few kinds of leaves, and many of each
    factors = {key: _factor(fold, weight) for key, fold in factors.items()}
    places: dict[Any, list[int]] = {}
    for i, (fold, h, leaf) in enumerate(zip(folds, held, leaves, strict=True)):
        if type(h) is type(leaf) is torch.Tensor and leaf.layout is torch.strided and _holds(h.dtype, leaf.dtype):
            places.setdefault(factors[id(fold)], []).append(i)
    places.pop(None, None)
    added: dict[int, Any] = {}
    for factor, chosen in places.items():
        sums = _sums([held[i] for i in chosen], [leaves[i] for i in chosen], factor, donate)
        added |= zip(chosen, sums, strict=True)
    owned = donate or (0 not in places and len(added) == sum(fold is not None for fold in folds))
    return [
        added[i] if i in added else None if fold is None else fold.combine(held[i], fold.lift(leaves[i], weight))
        for i, fold in enumerate(folds)
    ], owned


def _check_devices(held: list[Any], leaves: list[Any]) -> None:
    for h, leaf in zip(held, leaves, strict=True):
        if type(h) is torch.Tensor and isinstance(leaf, torch.Tensor) and h.device != leaf.device:
            raise FuncgaError(
                f"a gradient, {arrays.describe(leaf)}, is on {leaf.device}, and the state was made for params on "
                f"{h.device}. Move it: grad.to({str(h.device)!r}); or make a state where the params are now."
            )


def _factor(fold: LeafFold | None, weight: Any) -> Any:
    """What a leaf is multiplied by before it is added; None if the fold does not add, or the host does not know it."""
    if fold is None or not fold.fold.reducer.additive or arrays.in_transform():
        return None
    if fold.fold.reducer.unweighted:
        return 1
    return None if isinstance(weight, torch.Tensor) else weight


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a sum in one dtype stays in it when the other is added."""
    return dtype is other or torch.promote_types(dtype, other) is dtype


def _sums(held: list[torch.Tensor], leaves: list[torch.Tensor], factor: float, donate: bool) -> Sequence[torch.Tensor]:
    if not held or not factor:  # a weight of 0 adds nothing, not even a NaN
        return held
    if donate:
        torch._foreach_add_(held, leaves, alpha=factor)
        return held
    return torch._foreach_add(held, leaves, alpha=factor)


@_untracked
def finish(folds: Sequence[LeafFold | None], held: list[Any], tally: Tally, donate: bool) -> list[Any]:
    """The normalised leaves; in the same memory if that is donated."""
    total = tally.weight[0] if len(tally.weight) == 1 else None
    places = [i for i, fold in enumerate(folds) if _divides(fold, held[i]) and type(total) in (int, float)]
    divided = dict(zip(places, _quotients([held[i] for i in places], total, donate), strict=True))
    return [
        None if fold is None else divided[i] if i in divided else _owned(fold.normalize(held[i], tally), held[i])
        for i, fold in enumerate(folds)
    ]


def _divides(fold: LeafFold | None, held: Any) -> bool:
    return (
        fold is not None
        and not arrays.in_transform()
        and fold.fold.normalizer.divides_by == "weight"
        and type(held) is torch.Tensor
        and held.dtype == fold.result_dtype
    )


def _quotients(held: list[torch.Tensor], total: Any, donate: bool) -> Sequence[torch.Tensor]:
    if not total:
        return [torch.zeros_like(h) for h in held]
    if donate and held:
        torch._foreach_div_(held, float(total))
        return held
    return torch._foreach_div(held, float(total)) if held else held


def _owned(result: Any, held: Any) -> Any:
    """The result in memory of its own, as what is held may be the caller's."""
    return result.clone() if result is held else result


def restore(folds: Sequence[LeafFold | None], held: list[Any], tally: Tally) -> None:
    """Takes back what `finish` has done to memory that was donated, to rounding."""
    total = tally.weight[0]
    chosen = [h for fold, h in zip(folds, held, strict=True) if _divides(fold, h)]
    if chosen and total and not isinstance(total, torch.Tensor):
        torch._foreach_mul_(chosen, float(total))


@_untracked
def emptied(folds: Sequence[LeafFold | None], held: list[Any], donate: bool, taken: Any) -> list[Any]:
    """What is held of each leaf when nothing is folded; in the same memory if that is donated and not taken."""
    donate = donate and not arrays.in_transform()
    kept = set(_storages(taken)) if donate else set()
    zeroed = [h for fold, h in zip(folds, held, strict=True) if donate and _is_zeroed(fold, h, kept)]
    if zeroed:
        torch._foreach_zero_(zeroed)
    known = {id(h) for h in zeroed}
    return [
        h if id(h) in known else None if fold is None else fold.fold.reducer.monoid.identity(torch, h)
        for fold, h in zip(folds, held, strict=True)
    ]


def _storages(tree: Any) -> Iterator[Any]:
    """The memory of the tensors in a tree; the usual containers without the detour of a flattened one."""
    if isinstance(tree, torch.Tensor):
        yield _storage(tree)
    elif isinstance(tree, dict):
        for child in tree.values():
            yield from _storages(child)
    elif isinstance(tree, tuple | list):
        for child in tree:
            yield from _storages(child)
    elif tree is not None and trees.children(tree) is not None:
        for leaf in trees.flatten(tree)[0]:
            yield _storage(leaf)


def _is_zeroed(fold: LeafFold | None, held: Any, taken: set[Any]) -> bool:
    adds = fold is not None and fold.fold.reducer.monoid.collective == "sum"
    return adds and type(held) is torch.Tensor and _storage(held) not in taken


def _storage(leaf: Any) -> Any:
    held = local(leaf) if isinstance(leaf, torch.Tensor) else None
    return held.untyped_storage().data_ptr() if held is not None and held.layout is torch.strided else None


def merged(
    outputs: Outputs, held: list[Any], tally: Tally, replicas: Replicas, known: dict[Any, Any]
) -> tuple[list[Any], Tally]:
    """What all replicas hold together; `known` is what a backend works out once."""
    progress = known.setdefault("progress", Progress(known.get("step")))
    count_window(progress)
    leaves = [max(h, key=lambda part: part.ndim) if isinstance(h, tuple) else h for h in held]
    buffers = Buffers(Layout(outputs))
    buffers.unit, buffers.reduced = 1.0, [_copied(held[i]) for i in outputs.reduced]
    limbs, steps = [arrays.scalar(limb) for limb in tally.weight], arrays.scalar(tally.steps)
    if any(isinstance(part, torch.Tensor) for part in (*limbs, steps)):
        buffers.counted = Tally((sum(map(_double, tally.weight)),), tally.steps)
    else:
        buffers.weight, buffers.steps = sum(limbs), steps
    merged_buffers(progress, buffers, leaves, [], [replicas])
    together = [*held]
    for i, leaf in zip(outputs.reduced, buffers.reduced, strict=True):
        together[i] = leaf
    return together, buffers.tally


def _double(limb: torch.Tensor) -> torch.Tensor:
    return limb.to(torch.float64)


def _copied(held: Any) -> Any:
    return tuple(part.clone() for part in held) if isinstance(held, tuple) else held.clone()


def summed(number: Any, held: list[Any], replicas: Replicas) -> Any:
    """The sum of a scalar over the replicas, which hold these."""
    device = next((h.device for h in held if isinstance(h, torch.Tensor)), torch.device("cpu"))
    total = torch.as_tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=replicas.group)
    return arrays.scalar(total)


def parts(window: Window, replicas: Replicas | None) -> list[Window]:
    """The parts that are this replica's, of a window as a state has it where replicas fold apart.

    One of all replicas is the first one's. Raises FuncgaError if it is the part of another one.
    """
    found, own = _part(window), (0, 0) if replicas is None else (replicas.rank, replicas.count)
    if found == (0, 0):
        is_first = own[0] == 0 or not (int(window.tally.steps) or int(window.rejected))
        return [window] if is_first else []
    if found != own:
        here = "this transform has no across=" if replicas is None else f"this is replica {own[0]} of {own[1]}"
        raise FuncgaError(
            f"the state was saved in the middle of a window, as the part of replica {found[0]} of {found[1]}, and "
            f"{here}: an update would lack what the others have folded. Merge the states of all replicas, "
            f"state = tx.merge(states), and load that one on every replica, whatever their number."
        )
    return [window]


def parted(window: Window, replicas: Replicas, is_empty: bool) -> Window:
    """A window as a state has it where replicas fold apart."""
    part = (0, 0) if is_empty else (replicas.rank, replicas.count)
    return window._replace(part=torch.tensor(part, dtype=torch.int32, device="cpu"))


def in_order(windows: Sequence[Window]) -> list[Window]:
    """The parts of one window, in the order of the replicas. Raises FuncgaError if one is missing."""
    found = [_part(window) for window in windows]
    if {*found} == {(0, 0)}:  # each of them is that of all replicas already
        return [*windows[:1]]
    count = max(count for _, count in found)
    if sorted(found) != [(rank, count) for rank in range(count)]:
        listed = ", ".join("all" if count == 0 else f"{rank} of {count}" for rank, count in found)
        raise FuncgaError(
            f"the states to merge are those of the replicas {listed}, and a window is made of the state of every "
            f"replica, each once. Gather them when you save: torch.distributed.all_gather_object(states, state)."
        )
    first, *others = [windows[found.index((rank, count))] for rank in range(count)]
    return [first, *(_beside(window, first) for window in others)]


def unparted(windows: Sequence[Window]) -> Window:
    """A window of all replicas, and empty ones for the others, as the state has them that each goes on from."""
    return windows[0]._replace(part=torch.zeros(2, dtype=torch.int32, device="cpu"))


def _part(window: Window) -> tuple[int, int]:
    """(replica, replicas) whose part it is; (0, 0) for one of all replicas, or of a transform that has none."""
    rank, count = (0, 0) if type(window.part) is tuple else window.part.tolist()
    return rank, count


def _beside(window: Window, first: Window) -> Window:
    """The window where the first one lies, as each was on a device of its own."""
    leaves, structure = trees.flatten(window)
    pairs = zip(leaves, trees.flatten(first)[0], strict=True)
    return trees.unflatten(structure, [a.to(b.device) if arrays.is_array(a) else a for a, b in pairs])  # type: ignore[no-any-return]


def alike(state: Any, like: Any) -> Any:
    """The state in the dtypes that it came in."""
    return state
