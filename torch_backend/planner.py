"""The memory of a window, found without running it: the window is folded on tensors that have shapes and no numbers.

The engine runs as it always does. Each storage that it makes is followed from its allocation to its end, those of the
backward pass too, so that the peak is that of the real window to the byte.
"""

import bisect
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from funcga._backend import Backend
from funcga._call import Program, owner_of
from funcga._call.arguments import groups, starts
from funcga._grad import GradientFunction
from funcga._replicas import Memory
from funcga._types import Tree
from funcga.errors import FuncgaError
from funcga.folds import Fold
from torch_backend import _private, trees
from torch_backend.modules.checks import ModuleLoss
from torch_backend.replicas import PLANNED, Channel
from torch_backend.wrapped.gradient import ModuleGradient

_CUDA_BLOCK = 512  # bytes, of which torch's allocator gives whole blocks
_ENOUGH = 2  # micro-batches: the third does what the second did


def is_shape(leaf: Any) -> bool:
    """Whether the leaf only stands for an array of this framework: it has a shape and a dtype, and no numbers."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"


def rows(program: Program, args: tuple[Tree, ...], backend: Backend) -> int:
    """How many rows the arguments of a call have."""
    return program.read(args, backend).rows()


def nbytes(tree: Tree) -> int:
    """The bytes that the arrays of a tree take; memory that several of them share is counted once."""
    return sum(_sizes(trees.flatten(tree)[0]).values())


def free_memory(tree: Tree) -> int | None:
    """The bytes that are free on the device of these arrays; None if that is the host."""
    devices = {leaf.device for leaf in trees.flatten(tree)[0] if isinstance(leaf, torch.Tensor)}
    free = [_free_on(device) for device in devices if device.type == "cuda"]
    return min(free) if free else None


def _free_on(device: torch.device) -> int:
    # What the allocator has reserved and does not use is as good as free.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def peak(
    program: Program,
    window: Callable[[Program], Callable[..., Any]],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    backend: Backend,
) -> dict[str, int]:
    """What `window(program)(args, kwargs)` holds when it holds most, in bytes, by what it is."""
    mode = _mode(program)
    fakes = _Fakes(mode)
    args, kwargs = fakes.of((args, kwargs))
    with fakes.in_modules(_modules(program)) as of_modules:
        arguments = program.read(args, backend)
        batch = _sizes([leaf for leaf, _ in arguments])
        params = _sizes(trees.flatten(([part.value for part in arguments.parts if not part.axes], kwargs))[0])
        args, n = _first(program, args, backend)
        follower = _Follower({**params, **batch})
        step = window(replace(program, n=n, microbatch_size=None, memory=Memory(program.memory.step)))
        try:
            with torch.random.fork_rng(devices=[]), _nothing_sent(), mode, follower:
                result = step(args, kwargs)
        except RuntimeError as error:
            if not _private.is_for_lack_of_numbers(error):
                raise
            raise _reads_numbers(error) from error
        at_peak = follower.at_peak()
        del result
        # A module also has parameters that the arguments stand in for. What it uses of its own counts.
        used = {key: size for key, size in _sizes(of_modules).items() if key in follower.outside}
        params |= {key: follower.outside.pop(key) for key in used}
        closed_over = sum(follower.outside.values())
    parts = {"parameters": sum(params.values()), "batch": sum(batch.values()), **at_peak}
    return {**parts, "closed over": closed_over} if closed_over else parts


def _mode(program: Program) -> Any:
    """A mode in which tensors have no numbers. Raises FuncgaError for what cannot be planned."""
    owner = owner_of(program.grad_fn)
    # Those of modules that are wrapped, and of pipelines, are other classes.
    if owner is not None and type(owner) is not ModuleGradient:
        raise FuncgaError(
            "the plan of a step that a wrapper of the module merges over replicas was asked for, and a plan runs in "
            "one process, where nobody answers. Plan the step with the module that was wrapped, and across=group."
        )
    mode = _private.fake_mode()
    if mode is None:
        raise FuncgaError(
            "this version of torch has no FakeTensorMode, and nothing can be planned without it. Let the step try "
            'sizes when it runs: n="auto".'
        )
    return mode


@contextmanager
def _nothing_sent() -> Iterator[None]:
    """A context in which all replicas are as this one, and nothing travels between them."""
    token = PLANNED.set(_Echo)
    try:
        yield
    finally:
        PLANNED.reset(token)


class _Echo(Channel):
    """A channel on which every replica says what this one says. It is the carrier of arrays, too."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__(group, [])

    def carrier(self, device: torch.device, group: dist.ProcessGroup) -> Any:
        """What arrays travel over."""
        return self

    def exchange(self, mine: list[float]) -> Any:
        """The numbers of all."""
        return _Told([mine] * self.count)

    def gathered(self, mine: object) -> list[Any]:
        """What each replica says."""
        return [mine] * self.count

    def is_marked(self, mark: torch.Tensor) -> bool:
        """Whether a replica has failed: none does."""
        return False

    def allreduce(self, tensors: list[torch.Tensor]) -> "_Told":
        """A sum, of numbers that mean nothing."""
        return _Told([])

    def allgather(self, received: list[list[torch.Tensor]], sent: list[torch.Tensor]) -> "_Told":
        """What all have, which stays empty here."""
        return _Told([])

    def broadcast(self, data: torch.Tensor, source: int) -> "_Told":
        """What one has, which stays empty here."""
        return _Told([])


@dataclass(frozen=True)
class _Told:
    """What is over as soon as it begins."""

    of_all: list[list[float]]
    done = True

    def rows(self) -> list[list[float]]:
        """The numbers of all."""
        return self.of_all

    def wait(self) -> None:
        """There is nothing to wait for."""


def _modules(program: Program) -> list[torch.nn.Module]:
    """The modules whose tensors the gradient function is seen to use."""
    owner, grad_fn = owner_of(program.grad_fn), program.grad_fn
    loss = grad_fn.loss_fn if isinstance(grad_fn, GradientFunction) else None
    modules = [owner.module] if isinstance(owner, ModuleGradient) else []
    return [*modules, loss.module] if isinstance(loss, ModuleLoss) else modules


def _first(program: Program, args: tuple[Tree, ...], backend: Backend) -> tuple[tuple[Tree, ...], int | None]:
    """The arguments of the first micro-batches, after which every one is like the last; and how many these are."""
    arguments, n = program.read(args, backend), program.n
    folds = [fold for fold in trees.flatten(program.fold)[0] if isinstance(fold, Fold)]
    # What collects or threads may hold more with each micro-batch.
    grows = arguments.state or any(fold.reducer.monoid.collective is None for fold in folds)
    if n is None or n <= _ENOUGH or grows or program.totals is not None:
        return args, n
    sizes = [size for _, size in starts(groups(arguments.rows(), n, None))]
    return arguments.cut(0, sum(sizes[:_ENOUGH]), []), _ENOUGH


def _reads_numbers(error: BaseException) -> FuncgaError:
    return FuncgaError(
        f"the step asks for numbers that are computed ({' '.join(str(error).split())}), as .item(), float(tensor) and "
        f"x[mask] do, and while planning nothing is computed. Write it with tensors alone, as torch.where does; or let "
        f'the step try sizes when it runs: n="auto".'
    )


class _Fakes:
    """Tensors that have shapes and no numbers, one for each real one. What shares memory shares it here."""

    def __init__(self, mode: Any):
        self.mode = mode

    def of(self, tree: Tree) -> Any:
        """The tree with these in place of its tensors."""
        leaves, structure = trees.flatten(tree)
        return trees.unflatten(structure, [*map(self.of_leaf, leaves)])

    def of_leaf(self, leaf: Any) -> Any:
        """The stand-in of a tensor; anything else as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if is_shape(leaf):
            with self.mode:
                fake = torch.empty_strided(
                    leaf.shape, leaf.stride(), dtype=leaf.dtype, device=torch.get_default_device()
                )
            return torch.nn.Parameter(fake, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else fake
        return self.mode.from_tensor(leaf if leaf.is_leaf else leaf.detach())

    @contextmanager
    def in_modules(self, modules: Sequence[torch.nn.Module]) -> Iterator[list[torch.Tensor]]:
        """A context in which the modules have such parameters and buffers; these."""
        parts = {id(part): part for module in modules for part in module.modules()}.values()
        tables = [part.__dict__[kind] for part in parts for kind in (_private.PARAMETERS, _private.BUFFERS)]
        before = [(table, dict(table)) for table in tables]
        fakes: dict[int, Any] = {}
        try:
            for table, tensors in before:
                for name, tensor in tensors.items():
                    table[name] = fakes[id(tensor)] = fakes.get(id(tensor), self.of_leaf(tensor))
            yield [fake for fake in fakes.values() if fake is not None]
        finally:
            for table, tensors in before:
                table.clear()
                table.update(tensors)


@dataclass(eq=False)
class _Block:
    """Memory that was allocated: when, and when it was freed."""

    size: int
    in_backward: bool
    born: int
    died: float = math.inf


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that is made while it is entered, from its allocation to its end."""

    def __init__(self, known: dict[int, int]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {*known}
        self.live: set[int] = set()
        self.outside: dict[int, int] = {}  # what is used, and was there before
        self.blocks: list[_Block] = []
        self.deltas: list[int] = []  # of every allocation, and of every end
        self.ends: list[int] = []  # when backward passes ended
        self.in_backward = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = _private.in_backward()
        if self.in_backward and not in_backward:
            self.ends.append(len(self.deltas))
        self.in_backward = in_backward
        given = _storages(_tensors((args, kwargs)))
        for tensor, storage in given:
            if id(storage) not in self.live and id(storage) not in self.known and id(storage) not in self.outside:
                self.outside[id(storage)] = _size(storage, tensor)
                weakref.finalize(storage, self.outside.pop, id(storage), None).atexit = False
        out = op(*args, **(kwargs or {}))
        for tensor, storage in _storages(_tensors(out)):
            if not any(id(storage) in known for known in (self.live, self.known, self.outside)):
                self._allocated(storage, _size(storage, tensor))
        return out

    def _allocated(self, storage: Any, size: int) -> None:
        block = _Block(size, self.in_backward, len(self.deltas))
        self.live.add(id(storage))
        self.blocks.append(block)
        self.deltas.append(size)
        weakref.finalize(storage, self._freed, id(storage), block).atexit = False

    def _freed(self, key: int, block: _Block) -> None:
        self.live.discard(key)
        block.died = len(self.deltas)
        self.deltas.append(-block.size)

    def at_peak(self) -> dict[str, int]:
        """The bytes of every kind when most are held."""
        self.ends.append(len(self.deltas))
        totals = [*itertools.accumulate(self.deltas)]
        when = max(range(len(totals)), key=totals.__getitem__, default=0)
        held = {"sums": 0, "activations": 0, "gradients": 0}
        for block in self.blocks:
            if block.born <= when < block.died:
                # What outlives the backward pass is the sums and the results.
                end = self.ends[bisect.bisect_right(self.ends, block.born)] if block.born < self.ends[-1] else math.inf
                kind = "sums" if block.died > end else "gradients" if block.in_backward else "activations"
                held[kind] += block.size
        return held


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in _private.pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storages(leaves: Sequence[Any]) -> list[tuple[torch.Tensor, Any]]:
    """(tensor, its storage) of every plain tensor among the leaves."""
    return [
        (leaf, leaf.untyped_storage())
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


def _sizes(leaves: Sequence[Any]) -> dict[int, int]:
    """The bytes of every storage that the leaves lie in."""
    return {id(storage): _size(storage, leaf) for leaf, storage in _storages(leaves)}


def _size(storage: Any, tensor: torch.Tensor) -> int:
    size = int(storage.nbytes())
    return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK if tensor.device.type == "cuda" else size
