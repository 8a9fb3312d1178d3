"""What `multi_steps` needs of this framework: its conditional, and windows over replicas."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from funcga._call import Memory
from funcga._fold import largest
from funcga._fold.accumulator import Accumulation
from funcga._transform.window import Window
from funcga._types import Array, Reduced, Scalar, Tree
from funcga.errors import FuncgaError
from torch_backend import arrays, trees
from torch_backend.engine.sums import Folding, Sums
from torch_backend.loop import untraced
from torch_backend.parameters import added as added
from torch_backend.parameters import narrowed
from torch_backend.reduce import Reduction
from torch_backend.reduce.agreement import Progress, progress_of
from torch_backend.reduce.telling import telling as telling_windows
from torch_backend.replicas import Replicas, are_processes, replicas_of


def widened(
    params: Tree, copies: bool = False, donate: bool = False
) -> tuple[Tree, Callable[[Tree], Tree]]:
    """The params as a wrapped transform sees them, in no graph and in at least 32 bits, and the way
    back.

    `copies`: they have memory of their own. The way back is a function of such params after an
    update: they come in the dtypes of the params, and in the memory of these if that is donated.
    """
    tracked = arrays.in_transform()  # what is differentiated from outside stays in its graph
    leaves, structure = trees.flatten(params)
    for leaf_index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor | int | float | complex):
            continue
        array = arrays.as_array(leaf)
        if array.requires_grad and not tracked:
            array = array.detach()
        wide = array if array.dtype is torch.float32 else array.to(_dtype_of_update(array))
        leaves[leaf_index] = wide.clone() if copies and wide is array else wide
    return trees.unflatten(structure, leaves), lambda after: narrowed(after, params, donate)


def when(
    predicate: Scalar,
    emit: Callable[..., tuple[Tree, Tree]],
    state: Tree,
    operands: Tree,
    like: Tree,
    donate: bool = False,
) -> tuple[Tree, Tree, Scalar]:
    """`emit(state, operands)`, which is (updates, state), if the predicate holds; else zeros and
    the state.

    The zeros have memory of their own, as other updates do. Where memory is donated, in order to
    save it, they are views of a single 0.
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
    """Zeros in the shape of an update, all of them one element in memory, so that nobody can write
    to them.

    `zeros`: the element of each dtype and device that there is so far.
    """
    if type(like) not in (torch.Tensor, torch.nn.Parameter) or like.numel() < 2:
        return _zeros(like)
    kind = like.dtype, like.device
    if kind not in zeros:
        zeros[kind] = torch.zeros((), dtype=_dtype_of_update(like), device=like.device)
    return zeros[kind].expand(like.shape)


def _dtype_of_update(like: torch.Tensor) -> torch.dtype:
    return (
        arrays.accumulator_dtype(like.dtype)
        if arrays.kind(like.dtype) in ("float", "complex")
        else like.dtype
    )


def unknown(compute: Callable[[], Tree]) -> Tree:
    """The tree of arrays that `compute` returns, with NaN in place of each number."""
    leaves, structure = trees.flatten(compute())
    return trees.unflatten(structure, [torch.full_like(leaf, float("nan")) for leaf in leaves])


def check_gradients(
    leaves: Sequence[Array],
    accumulators: Sequence[Reduced],
    paths: Callable[[], list[str]],
    replicas: Replicas | None,
) -> None:
    """Raises FuncgaError for gradients that cannot be added to these accumulators, or merged
    over the replicas.
    """
    # Where they have been merged before cannot be seen: a tensor does not say whether other
    # processes have it, too.
    for leaf_index, (leaf, accumulator) in enumerate(zip(leaves, accumulators, strict=True)):
        if type(accumulator) is torch.Tensor and accumulator.device != leaf.device:
            raise FuncgaError(
                f"`{paths()[leaf_index]}`, {arrays.describe(leaf)}, is on {leaf.device}, and the "
                f"state was made for params on {accumulator.device}. Move it: "
                f"grad.to({str(accumulator.device)!r}); or make a state where the params are now."
            )


def telling(across: Any, memory: Memory) -> AbstractContextManager[object] | None:
    """The context of a call that ends a window, in which other processes are told of an error;
    None if `across` names none of this framework.
    """
    if not are_processes(across):
        return None
    progress = progress_of(memory)
    begin = partial(_window_without_result, progress, across)
    context: AbstractContextManager[object] = untraced(telling_windows)([(progress, begin)])
    return context


@contextmanager
def _window_without_result(progress: Progress, across: Any) -> Iterator[None]:
    """A window that is counted, and given up at the end."""
    reduction = Reduction(progress, replicas_of(across))
    try:
        yield
    finally:
        reduction.abort()


def merged(
    window: Accumulation, replicas: Replicas, memory: Memory, updates: Array
) -> Accumulation:
    """The window merged over all replicas, whose states have made so many `updates`."""
    reduction = Reduction(progress_of(memory), replicas)
    reduction.updates = arrays.scalar(updates)
    if memory.failed:
        # The others have made the last update, and this replica has not: its header says so.
        reduction.history.finished -= 1
        memory.failed = False
    total, unit, steps = window.total, arrays.scalar(window.unit), arrays.scalar(window.tally.steps)
    # What merges has all weighted sums in one unit, which the host knows.
    if isinstance(unit, torch.Tensor) or any(
        fold.adds == "weighted" and not fold.is_mean for fold in window.outputs.reduced_folds
    ):
        window, unit = window.in_unit(1.0), 1.0
    # The merge of a window of one call does the rest: these accumulators become its sums. They are
    # copied, because it works in place.
    accumulators = window.accumulators if window.owned else map(_copied, window.accumulators)
    sums = Sums(Folding(window.outputs))
    sums.of.update(enumerate(accumulators))
    sums.total, sums.steps = total, steps
    sums.unit = unit if isinstance(steps, torch.Tensor) or steps else None
    if isinstance(total, torch.Tensor) or isinstance(steps, torch.Tensor):
        sums.total = sum(limb.to(torch.float64) for limb in window.tally.weight)
        sums.steps = window.tally.steps
    reduction.propose(sums, [*map(largest, sums.of.values())])
    reduction.merge([])
    return window._replace(accumulators=[*sums.of.values()], tally=sums.tally, unit=sums.unit)


def _copied(accumulator: Reduced) -> Reduced:
    if isinstance(accumulator, tuple):
        return tuple([part.clone() for part in accumulator])
    return accumulator if accumulator is None else accumulator.clone()


def own_parts(windows: Sequence[Window], replicas: Replicas | None) -> list[Window]:
    """The parts of a state's window that belong to this replica; without replicas all, of
    several states.

    Raises FuncgaError if a part is missing, or is another replica's.
    """
    saved = [_part(window) for window in windows]
    if any(isinstance(window.part, tuple) for window in windows[1:]):
        raise FuncgaError(
            f"{len(windows)} states were given to merge, and multi_steps was made without "
            "across=: each is a window of its own. Pass across= on every replica; or save one "
            "state, tx.merge([state])."
        )
    if {*saved} == {_WHOLE}:
        # It is continued by the first replica; an empty one is the same for everybody.
        is_empty = not (int(windows[0].tally.steps) or int(windows[0].rejected))
        return [*windows[:1]] if replicas is None or replicas.rank == 0 or is_empty else []
    if replicas is not None:
        if saved != [(replicas.rank, replicas.count)]:
            raise _incomplete(saved, f"this is replica {replicas.rank} of {replicas.count}")
        return [*windows]
    return _parts_of_all(windows, saved)


def _parts_of_all(windows: Sequence[Window], saved: Sequence[tuple[int, int]]) -> list[Window]:
    """The parts that the states of all replicas have, in the order of these, on the devices of the
    first: each has saved its window on its own.
    """
    parts = {mark: window for mark, window in zip(saved, windows, strict=True) if mark != _WHOLE}
    count = max(count for _, count in parts)
    # A replica that has added nothing to the window still has what all began with. The first
    # replica goes on from that, so it is counted once, unless the part of the first has it.
    began_with = [window for mark, window in zip(saved, windows, strict=True) if mark == _WHOLE]
    if (
        len(windows) != count
        or len(parts) + len(began_with) != count
        or {*parts} - {(rank, count) for rank in range(count)}
    ):
        raise _incomplete(saved, "an update takes the state of every replica, each once")
    if (0, count) not in parts:
        parts[0, count] = began_with[0]
    first, *others = [parts[mark] for mark in sorted(parts)]
    return [first, *(_beside(window, first) for window in others)]


_WHOLE = (0, 0)


def _incomplete(saved: Sequence[tuple[int, int]], instead: str) -> FuncgaError:
    listed = ", ".join("all" if mark == _WHOLE else f"{mark[0]} of {mark[1]}" for mark in saved)
    return FuncgaError(
        f"the state was saved in the middle of a window, as the part of replica {listed}, and "
        f"{instead}: it would lack what the others have folded. Merge the states of all replicas, "
        "state = tx.merge(states), and load that one on every replica, whatever their number. "
        "Gather them when you save: torch.distributed.all_gather_object(states, state)."
    )


def as_part(windows: Sequence[Window], replicas: Replicas | None, is_empty: bool) -> Window:
    """A window as this replica's part of a state; without replicas the whole of all parts."""
    part = _WHOLE if is_empty or replicas is None else (replicas.rank, replicas.count)
    return windows[0]._replace(part=torch.tensor(part, dtype=torch.int32, device="cpu"))


def _part(window: Window) -> tuple[int, int]:
    """(rank, count) of the replica whose part it is; _WHOLE for a window of all replicas, or
    without any.
    """
    if isinstance(window.part, tuple):
        return _WHOLE
    rank, count = window.part.tolist()
    return rank, count


def _beside(window: Window, first: Window) -> Window:
    """The window on the devices of the first one."""
    leaves, structure = trees.flatten(window)
    pairs = zip(leaves, trees.flatten(first)[0], strict=True)
    beside = [a.to(b.device) if arrays.is_array(a) else a for a, b in pairs]
    return trees.unflatten(structure, beside)  # type: ignore[no-any-return]
