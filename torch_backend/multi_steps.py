"""What a fold that is spread over calls needs of this framework: its branch, and how replicas join their windows."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from funcga._fold.outputs import Outputs
from funcga._fold.tally import Tally
from funcga._replicas import MergeMemory
from funcga._transform.window import Window
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import is_dtensor, local
from torch_backend.engine.buffers import Buffers, Layout
from torch_backend.reduce.agreement import Progress
from torch_backend.reduce.reduction import Reduction
from torch_backend.replicas import Replicas

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def widened(params: Tree) -> Tree:
    """The params as a wrapped transform sees them: arrays in no graph, and floats in at least 32 bits."""
    tracked = arrays.in_transform()  # what is differentiated from outside stays in its graph
    leaves, structure = trees.flatten(params)
    return trees.unflatten(structure, [_wide(leaf, tracked) for leaf in leaves])


def _wide(leaf: object, tracked: bool) -> object:
    if isinstance(leaf, int | float | complex):
        leaf = torch.as_tensor(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf if tracked or not leaf.requires_grad else leaf.detach()
    return leaf if leaf.dtype is torch.float32 else leaf.to(_dtype_of_update(leaf))


def when(
    predicate: Scalar,
    emit: Callable[..., tuple[Tree, Tree]],
    state: Tree,
    operands: Tree,
    like: Tree,
    donate: bool = False,
) -> tuple[Tree, Tree, Scalar]:
    """`emit(state, operands)`, which is (updates, state), if the predicate holds; else zeros and the state.

    Zeros are like other updates in memory of their own. Where memory is donated, to save it, they are views of a 0.
    """
    if predicate:
        return *emit(state, operands), True
    leaves, structure = trees.flatten(like)
    zeros = _views_of_zero if donate else _zeros
    nothing = [zeros(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return trees.unflatten(structure, nothing), state, False


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


def finite(leaves: Sequence[Array]) -> torch.Tensor:
    """Whether every number is finite: a 0-d array."""
    there = [leaf for leaf in leaves if leaf is not None]
    parts = [part for part in (local(leaf).detach() for leaf in there) if part.numel()]
    parts = [part if part.layout is torch.strided else part.to_dense() for part in parts]
    extremes = [extreme.to(parts[0].device, torch.float64) for extreme in _extremes(parts)]
    all_finite = torch.stack(extremes).isfinite().all() if extremes else torch.tensor(True)
    meshes = {leaf.device_mesh for leaf in there if is_dtensor(leaf)}
    return _everywhere(all_finite, meshes) if meshes else all_finite


def _extremes(leaves: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Numbers of which one is not finite if any of the leaves' is not: one pass, and no mask."""
    real = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    on_host = [leaf for leaf in real if leaf.is_cpu]
    for leaf in on_host:
        yield from torch.aminmax(leaf)  # a norm is twenty times slower there
    if len(on_host) < len(real):
        yield from torch._foreach_norm([leaf for leaf in real if not leaf.is_cpu], float("inf"))


def _everywhere(condition: torch.Tensor, meshes: set["DeviceMesh"]) -> torch.Tensor:
    """Whether it holds on all devices of some meshes, of which each has a part of the numbers."""
    in_order = sorted(meshes, key=lambda mesh: str(mesh.mesh.tolist()))  # the same on all devices
    for mesh in in_order * len(meshes):  # where meshes cross, it takes a pass for each to come everywhere
        for group in mesh.get_all_groups():
            flag = condition.to(mesh.device_type, torch.int32)
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
            condition = flag.bool()
    return condition


def check_merged(leaves: Sequence[Array], paths: Callable[[], list[str]], replicas: Replicas | None) -> None:
    """Raises FuncgaError for gradients that nothing would merge over the replicas, or that are merged already."""
    # a tensor does not say whether other processes have it too


def merged(
    outputs: Outputs, accumulators: Sequence[Reduced], tally: Tally, replicas: Replicas, memory: MergeMemory
) -> tuple[list[Reduced], Tally]:
    """What all replicas hold together."""
    if not isinstance(memory.progress, Progress):
        memory.progress = Progress(memory.step)
    reduction = Reduction(memory.progress, replicas)
    leaves = [
        max(accumulator, key=lambda part: part.ndim) if isinstance(accumulator, tuple) else accumulator
        for accumulator in accumulators
    ]
    buffers = Buffers(Layout(outputs))
    buffers.unit, buffers.reduced = 1.0, [_copied(accumulators[leaf_index]) for leaf_index in outputs.reduced]
    limbs, steps = [arrays.scalar(limb) for limb in tally.weight], arrays.scalar(tally.steps)
    if any(isinstance(part, torch.Tensor) for part in (*limbs, steps)):
        buffers.counted = Tally((sum(limb.to(torch.float64) for limb in tally.weight),), tally.steps)
    else:
        buffers.weight, buffers.steps = sum(limbs), steps
    reduction.begin(buffers, leaves)
    reduction.finish([])
    together = [*accumulators]
    for leaf_index, leaf in zip(outputs.reduced, buffers.reduced, strict=True):
        together[leaf_index] = leaf
    return together, buffers.tally


def _copied(accumulator: Reduced) -> Reduced:
    return tuple(part.clone() for part in accumulator) if isinstance(accumulator, tuple) else accumulator.clone()


def summed(number: Scalar, accumulators: Sequence[Reduced], replicas: Replicas) -> Scalar:
    """The sum of a scalar over the replicas, which hold these."""
    device = next(
        (accumulator.device for accumulator in accumulators if isinstance(accumulator, torch.Tensor)),
        torch.device("cpu"),
    )
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


def rejoined(windows: Sequence[Window]) -> Window:
    """A window of all replicas, and empty ones for the others, as the state has them that each goes on from."""
    return windows[0]._replace(part=torch.zeros(2, dtype=torch.int32, device="cpu"))


def _part(window: Window) -> tuple[int, int]:
    """(replica, replicas) whose part it is; (0, 0) for one of all replicas, or of a transform that has none."""
    if isinstance(window.part, tuple):
        return 0, 0
    rank, count = window.part.tolist()
    return rank, count


def _beside(window: Window, first: Window) -> Window:
    """The window where the first one lies, as each was on a device of its own."""
    leaves, structure = trees.flatten(window)
    pairs = zip(leaves, trees.flatten(first)[0], strict=True)
    return trees.unflatten(structure, [a.to(b.device) if arrays.is_array(a) else a for a, b in pairs])  # type: ignore[no-any-return]
