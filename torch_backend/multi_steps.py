"""What a fold that is spread over calls needs of this framework: its branch, and how replicas join their windows."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from funcga._fold import Tally, largest
from funcga._fold.outputs import Outputs
from funcga._replicas import Memory
from funcga._transform.window import Window
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.dtensor import is_dtensor, local
from torch_backend.engine.buffers import Buffers
from torch_backend.engine.layout import Layout
from torch_backend.optim.parameters import added as added
from torch_backend.optim.parameters import narrowed as narrowed
from torch_backend.reduce import Reduction
from torch_backend.reduce.agreement import Progress
from torch_backend.replicas import Replicas

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def widened(params: Tree, copy: bool = False) -> Tree:
    """The params as a wrapped transform sees them: arrays in no graph, and floats in at least 32 bits.

    If `copy`, in memory of their own.
    """
    tracked = arrays.in_transform()  # what is differentiated from outside stays in its graph
    leaves, structure = trees.flatten(params)
    for leaf_index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor | int | float | complex):
            continue
        array = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf)
        if array.requires_grad and not tracked:
            array = array.detach()
        wide = array if array.dtype is torch.float32 else array.to(_dtype_of_update(array))
        leaves[leaf_index] = wide.clone() if copy and wide is array else wide
    return trees.unflatten(structure, leaves)


def when(
    predicate: Scalar,
    emit: Callable[..., tuple[Tree, Tree]],
    state: Tree,
    operands: Tree,
    like: Tree,
    donate: bool = False,
) -> tuple[Tree, Tree, Scalar]:
    """`emit(state, operands)`, which is (updates, state), if the predicate holds; else zeros and the state.

    The zeros have memory of their own, as other updates do. Where memory is donated, in order to save it, they are
    views of a single 0.
    """
    if predicate:
        return *emit(state, operands), True
    leaves, structure = trees.flatten(like)
    zeros = partial(_view_of_zero, {}) if donate else _zeros
    nothing = [zeros(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return trees.unflatten(structure, nothing), state, False


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of an update."""
    if like.layout is not torch.strided:
        return torch.zeros(like.shape, dtype=_dtype_of_update(like), device=like.device)
    return torch.zeros_like(like, dtype=_dtype_of_update(like), requires_grad=False)


def _view_of_zero(zeros: dict[object, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of an update, all of them one element in memory, so that nobody can write to them.

    `zeros`: the element of each dtype and device that there is so far.
    """
    if type(like) not in (torch.Tensor, torch.nn.Parameter) or like.numel() < 2:
        return _zeros(like)
    kind = like.dtype, like.device
    if kind not in zeros:
        zeros[kind] = torch.zeros((), dtype=_dtype_of_update(like), device=like.device)
    return zeros[kind].expand(like.shape)


def _dtype_of_update(like: torch.Tensor) -> torch.dtype:
    return arrays.accumulator_dtype(like.dtype) if arrays.kind(like.dtype) in ("float", "complex") else like.dtype


def finite(leaves: Sequence[Array]) -> torch.Tensor:
    """Whether every number is finite: a 0-d array."""
    present = [leaf for leaf in leaves if leaf is not None]
    shards = [shard for shard in (local(leaf).detach() for leaf in present) if shard.numel()]
    shards = [shard if shard.layout is torch.strided else shard.to_dense() for shard in shards]
    # The numbers of all leaves are checked in one kernel, on one device. Nothing waits for the result here.
    extremes = [*_extremes(shards)]
    if len({(extreme.device, extreme.dtype) for extreme in extremes}) > 1:
        extremes = [extreme.to(shards[0].device, torch.float64) for extreme in extremes]
    all_finite = torch.stack(extremes).isfinite().all() if extremes else torch.tensor(True)
    meshes = {leaf.device_mesh for leaf in present if is_dtensor(leaf)}
    return _everywhere(all_finite, meshes) if meshes else all_finite


def _extremes(leaves: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """A few numbers, not all of them finite if any number of the leaves is not. One pass, without a mask in memory."""
    real = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    on_host = [leaf for leaf in real if leaf.is_cpu]
    # On the CPU a norm is twenty times slower than minimum and maximum. On a device it is one kernel for all leaves.
    for leaf in on_host:
        yield from torch.aminmax(leaf)
    if len(on_host) < len(real):
        yield from torch._foreach_norm([leaf for leaf in real if not leaf.is_cpu], float("inf"))


def _everywhere(condition: torch.Tensor, meshes: set["DeviceMesh"]) -> torch.Tensor:
    """Whether a condition holds on all devices of these meshes, each of which has a shard of the numbers."""
    # All processes go through the meshes in one order, as their collectives must match. Where meshes cross, a False
    # travels along one of them in each round, so there are as many rounds as meshes.
    meshes_in_order = sorted(meshes, key=lambda mesh: str(mesh.mesh.tolist()))
    for mesh in meshes_in_order * len(meshes):
        for group in mesh.get_all_groups():
            flag = condition.to(mesh.device_type, torch.int32)
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
            condition = flag.bool()
    return condition


def check_merged(leaves: Sequence[Array], paths: Callable[[], list[str]], replicas: Replicas | None) -> None:
    """Raises FuncgaError for gradients that nothing would merge over the replicas, or that are merged already."""
    # In torch nothing can be checked: a tensor does not say whether other processes have it too.


def merged(
    outputs: Outputs, accumulators: Sequence[Reduced], tally: Tally, replicas: Replicas, memory: Memory
) -> tuple[list[Reduced], Tally]:
    """What all replicas hold together."""
    reduction = Reduction(memory.keep(Progress, memory.step), replicas)
    leaves = [*map(largest, accumulators)]
    # The merge of a window of one call does the rest: these accumulators become its buffers. They are copied, because
    # it works in place.
    buffers = Buffers(Layout(outputs))
    buffers.unit, buffers.reduced = 1.0, [_copied(accumulators[leaf_index]) for leaf_index in outputs.reduced]
    limbs, steps = [arrays.scalar(limb) for limb in tally.weight], arrays.scalar(tally.steps)
    if any(isinstance(part, torch.Tensor) for part in (*limbs, steps)):
        buffers.counted = Tally((sum(limb.to(torch.float64) for limb in tally.weight),), tally.steps)
    else:
        buffers.weight, buffers.steps = sum(limbs), steps
    reduction.begin(buffers, leaves)
    reduction.finish([])
    merged_accumulators = [*accumulators]
    for leaf_index, accumulator in zip(outputs.reduced, buffers.reduced, strict=True):
        merged_accumulators[leaf_index] = accumulator
    return merged_accumulators, buffers.tally


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

    A window of all replicas is continued by the first one. Raises FuncgaError if it is another replica's part.
    """
    saved, here = _part(window), (0, 0) if replicas is None else (replicas.rank, replicas.count)
    if saved == (0, 0):
        # An empty window is the same for everybody.
        is_first = here[0] == 0 or not (int(window.tally.steps) or int(window.rejected))
        return [window] if is_first else []
    if saved != here:
        this = "this transform has no across=" if replicas is None else f"this is replica {here[0]} of {here[1]}"
        raise FuncgaError(
            f"the state was saved in the middle of a window, as the part of replica {saved[0]} of {saved[1]}, and "
            f"{this}: an update would lack what the others have folded. Merge the states of all replicas, "
            f"state = tx.merge(states), and load that one on every replica, whatever their number."
        )
    return [window]


def parted(window: Window, replicas: Replicas, is_empty: bool) -> Window:
    """A window as a state has it where replicas fold apart."""
    part = (0, 0) if is_empty else (replicas.rank, replicas.count)
    return window._replace(part=torch.tensor(part, dtype=torch.int32, device="cpu"))


def in_order(windows: Sequence[Window]) -> list[Window]:
    """The parts of one window, in the order of the replicas. Raises FuncgaError if one is missing."""
    marks = [_part(window) for window in windows]
    if len(windows) > 1 and any(isinstance(window.part, tuple) for window in windows):
        raise FuncgaError(
            f"{len(windows)} states were given to merge, and multi_steps was made without across=: each is a window of "
            f"its own. Pass across= on every replica; or save one state, tx.merge([state])."
        )
    # Each of them is already the window of all replicas.
    if {*marks} == {(0, 0)}:
        return [*windows[:1]]
    count = max(count for _, count in marks)
    if sorted(marks) != [(rank, count) for rank in range(count)]:
        listed = ", ".join("all" if count == 0 else f"{rank} of {count}" for rank, count in marks)
        raise FuncgaError(
            f"the states to merge are those of the replicas {listed}, and a window is made of the state of every "
            f"replica, each once. Gather them when you save: torch.distributed.all_gather_object(states, state)."
        )
    first, *others = [windows[marks.index((rank, count))] for rank in range(count)]
    return [first, *(_beside(window, first) for window in others)]


def rejoined(windows: Sequence[Window]) -> Window:
    """A window of all replicas, and empty ones for the others, as the state has them that each goes on from."""
    return windows[0]._replace(part=torch.zeros(2, dtype=torch.int32, device="cpu"))


def _part(window: Window) -> tuple[int, int]:
    """(rank, count) of the replica whose part it is; (0, 0) for a window of all replicas, or without any."""
    if isinstance(window.part, tuple):
        return 0, 0
    rank, count = window.part.tolist()
    return rank, count


def _beside(window: Window, first: Window) -> Window:
    """The window on the devices of the first one: each replica has saved its window on its own device."""
    leaves, structure = trees.flatten(window)
    pairs = zip(leaves, trees.flatten(first)[0], strict=True)
    return trees.unflatten(structure, [a.to(b.device) if arrays.is_array(a) else a for a, b in pairs])  # type: ignore[no-any-return]
