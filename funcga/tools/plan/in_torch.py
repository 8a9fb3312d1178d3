"""The memory of a window in torch: the window runs on fake tensors, which have shapes but no data.

The engine runs as usual. Every storage is recorded from its allocation to its end, also in the
backward pass, so the peak is exactly that of the real window.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcga._backend import Backend
from funcga._call import Program, owner_of
from funcga._call.arguments import Arguments, Split
from funcga._types import Args, Kwargs, Tree, TreeFn
from funcga.errors import FuncgaError
from funcga.tools.plan import private_in_torch
from funcga.tools.plan.wrapped_in_torch import OF_WRAPPER, Held, Unwrapped
from torch_backend import _private, trees
from torch_backend.dtensor import as_dtensor, is_dtensor, local, local_tensors
from torch_backend.modules import PureLoss
from torch_backend.replicas import PLANNED, Channel
from torch_backend.wrapped.gradient import ModuleGradient
from torch_backend.wrapped.window import WrappedGradient


def is_shape(leaf: Any) -> bool:
    """Whether the leaf is a shape without numbers: a meta tensor, or a ShapeDtypeStruct."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"


def rows(program: Program, args: Args, backend: Backend, on_each: Any) -> int:
    """The number of rows of the arguments of a call."""
    return program.read(args, backend).rows()


def nbytes(tree: Tree) -> int:
    """The bytes of the arrays of a tree; shared memory is counted once."""
    return sum(_sizes(trees.flatten(tree)[0]).values())


def free_memory(leaves: Sequence[Any]) -> int | None:
    """The free bytes on the device of these arrays; None for the host."""
    devices = {tensor.device for tensor in trees.tensors_in(leaves)}
    memory, free = torch.accelerator, []
    for device in devices:
        if device.type not in ("cpu", "meta"):
            # What the allocator has reserved and does not use is as good as free.
            unused = memory.memory_reserved(device) - memory.memory_allocated(device)
            free.append(memory.get_memory_info(device)[0] + unused)
    return min(free, default=None)


is_compiling = torch.compiler.is_compiling
"""Whether the call belongs to a program that is being compiled."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (
        "DefaultCPUAllocator: can't allocate memory",
        "out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def peak(
    program: Program,
    window: Callable[[Program], TreeFn],
    args: Args,
    kwargs: Kwargs,
    backend: Backend,
) -> dict[str, int]:
    """The peak memory of `window(program)(args, kwargs)`, in bytes by what they are."""
    owner = owner_of(program.grad_fn)
    # The tool is known by name alone, as it may be taken away.
    if type(owner).__name__ == "PipelineGradient":
        raise FuncgaError(
            "the plan of a step of a pipeline was asked for, whose stages wait for each other, and "
            "a plan runs in one process, where nobody answers. Plan the step of one stage, as a "
            "module."
        )
    wrapper, enough = Unwrapped(), 2
    if isinstance(owner, WrappedGradient):
        wrapper, enough = OF_WRAPPER[type(owner.wrapper).__name__](owner.wrapper), 4
    mode = private_in_torch.fake_mode()
    fakes = _Fakes(mode)
    leaves, structure = trees.flatten((args, kwargs))
    leaves = [*map(fakes.of_leaf, leaves)]
    args, kwargs = trees.unflatten(structure, leaves)
    with fakes.in_place_of_tensors([*_modules(program), *wrapper.holders()]):
        with mode:
            wrapper.begin()
        arguments = program.read(args, backend)
        args, n = _first(program, arguments, args, enough)
        step, follower = (
            window(replace(program, split=Split(n))),
            _Follower(_sizes(leaves), wrapper.held),
        )
        try:
            with _planning(), mode, follower:
                result = step(args, kwargs)
        except RuntimeError as error:
            if not private_in_torch.is_for_lack_of_numbers(error):
                raise
            raise FuncgaError(
                "the step asks for numbers that are computed "
                f"({' '.join(str(error).split())}), as .item(), float(tensor) and x[mask] do, and "
                "while planning nothing is computed. Write it with tensors alone, as torch.where "
                'does; or let the step try sizes when it runs: n="auto".'
            ) from error
        del result
        parts = {"parameters": 0, "batch": 0, **follower.at_peak()}
        # What was there before: a wrapper holds some of it. Parameters are whole arguments, and
        # what modules use of their own.
        names = {key: name for name, held in wrapper.held().items() for key in _sizes(held)}
        names |= dict.fromkeys(_sizes([fake for _, fake in fakes.made.values()]), "parameters")
        names |= dict.fromkeys(_sizes([leaf for leaf, axis in arguments]), "batch")
    for key, size in [*follower.before.items()]:
        name = names.get(key, "closed over")
        parts[name] = parts.get(name, 0) + size
    return parts


@contextmanager
def _planning() -> Iterator[None]:
    """A context in which all replicas are like this one, without communication or compilation, and
    which leaves random numbers as they are.
    """
    token = PLANNED.set(_Echo)
    try:
        # What torch.compile sees in such a mode it would leave as it is in real steps, too.
        with (
            torch.compiler.set_stance("force_eager"),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            # FSDP1 compares the addresses of tensors. These have none, and it goes on as if all
            # was the same.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        PLANNED.reset(token)


class _Echo(Channel):
    """A channel on which all replicas send what this one sends, also for arrays."""

    def carrier(self, device: torch.device) -> Any:
        """What arrays travel over."""
        return self

    def owe(self, send: Callable[[], None]) -> None:
        """Nothing: nobody waits."""

    def send_owed(self) -> None:
        """Nothing: what real steps owe is sent by the next one of them."""

    def gather(self, mine: Any) -> Any:
        """What all have: the same."""
        return lambda: [mine] * self.count

    exchange = gather

    def all_gather(self, mine: object) -> list[Any]:
        """What each replica says."""
        return [mine] * self.count

    def broadcast_from(self, source: int, mine: object) -> object:
        """What one replica says."""
        return mine

    def is_marked(self, mark: torch.Tensor) -> bool:
        """Whether a replica has failed: none does."""
        return False

    def allreduce(self, tensors: list[torch.Tensor]) -> "_Echo":
        """A sum, of numbers that mean nothing."""
        return self

    def wait(self) -> None:
        """There is nothing to wait for: what is sent is over as soon as it begins."""


def _modules(program: Program) -> list[torch.nn.Module]:
    """The module that the gradient function is known to use, and those inside of it."""
    owner, loss = owner_of(program.grad_fn), getattr(program.grad_fn, "loss_fn", None)
    if isinstance(owner, ModuleGradient):
        return [*owner.module.modules()]
    return [*loss.module.modules()] if isinstance(loss, PureLoss) else []


def _first(
    program: Program, arguments: Arguments, args: Args, enough: int
) -> tuple[Args, int | None]:
    """The arguments of `enough` micro-batches, 2 or 4, and their number: of the first ones, and of
    4 the last one.

    All others are like the second one, or the third one if the module is wrapped.
    """
    n = program.split.n
    folds = trees.flatten(program.fold)[0]
    # What collects or threads may hold more with each micro-batch.
    grows = arguments.state or any(fold.reducer.monoid.collective is None for fold in folds)
    if n is None or n <= enough or grows:
        return args, n
    # The first micro-batches have the rows that are left over, one each, as when these are cut.
    size, left_over = divmod(arguments.rows(), n)
    return arguments.cut(0, enough * size + min(left_over, enough, 3), []), enough


class _Fakes:
    """A fake tensor for each real one. Tensors that share memory have fakes that share memory."""

    def __init__(self, mode: Any):
        self.mode = mode
        # Each tensor and its stand-in, by the id of the tensor.
        self.made: dict[int, tuple[Any, Any]] = {}

    def of_leaf(self, leaf: Any) -> Any:
        """The stand-in of a tensor; anything else as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self.made:
            fake = self._new(leaf)
            self.made[id(leaf)] = leaf, fake
            # What others have set on a parameter they look for on its stand-in.
            for name, value in vars(leaf).items() if isinstance(leaf, torch.nn.Parameter) else ():
                is_list = type(value) in (list, tuple)
                attribute = [*map(self.of_leaf, value)] if is_list else self.of_leaf(value)
                vars(fake).setdefault(name, attribute)
        return self.made[id(leaf)][1]

    def _new(self, leaf: Any) -> Any:
        is_parameter = isinstance(leaf, torch.nn.Parameter)
        if not is_shape(leaf):
            # A tensor that is computed is detached by `.data`, which asks nothing of its graph.
            return self.mode.from_tensor(leaf if is_parameter else leaf.data)
        if is_dtensor(leaf):
            fake = as_dtensor(self.of_leaf(local(leaf)), leaf)
        else:
            with self.mode:  # on the default device
                fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
        return torch.nn.Parameter(fake, leaf.requires_grad) if is_parameter else fake

    @contextmanager
    def in_place_of_tensors(self, holders: Iterable[object]) -> Iterator[None]:
        """A context in which the tensors in the attributes of these objects, and in lists and dicts
        there, are fakes.

        Afterwards attributes, lists and dicts are as before.
        """
        tables = [
            table
            for attributes in map(vars, holders)
            for table in (attributes, *attributes.values())
            if isinstance(table, dict | list)
        ]
        before = [(table, table.copy()) for table in tables]
        try:
            for table, saved in before:
                for key, value in saved.items() if isinstance(saved, dict) else enumerate(saved):
                    if isinstance(value, torch.Tensor):
                        table[key] = self.of_leaf(value)
            yield
        finally:
            for table, saved in before:
                table.clear()
                (table.update if isinstance(table, dict) else table.extend)(saved)


@dataclass(eq=False)
class _Block:
    """Memory that was allocated: its bytes now, and what they are."""

    size: int
    kind: str


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that is allocated while it is entered, until it is freed.

    `arguments` has the bytes of the arguments' storages; `held()` returns the tensors that a
    wrapper holds, by their names in a plan.
    """

    def __init__(self, arguments: dict[int, int], held: Callable[[], Held]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = held
        self.before = {**arguments}  # the bytes of storages that are used, and were there before
        # What is allocated now, its bytes, and what was when most bytes were.
        self.live: dict[int, _Block] = {}
        self.now = self.most = 0
        self.blocks_at_peak: list[tuple[_Block, int]] = []
        self.in_backward = False

    def __enter__(self) -> "_Follower":
        # FSDP frees memory by resizing storages, which no mode is told of.
        own = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = own(storage, size)
            if storage.device.type == "meta" and id(storage) not in self.before:
                self._follow(storage, storage.nbytes())
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        del torch.UntypedStorage.resize_  # then it is that of the base class again
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = _private.graph_task() != -1
        if self.in_backward and not in_backward:
            self._name_sums()
        self.in_backward = in_backward
        for tensor, storage in _storages((args, kwargs)):
            if self._is_new(storage):
                self.before[id(storage)] = _bytes(tensor)
                weakref.finalize(storage, self.before.pop, id(storage), None).atexit = False
        out = op(*args, **(kwargs or {}))
        for tensor, storage in _storages(out):
            if self._is_new(storage):
                self._follow(storage, _bytes(tensor))
        return out

    def _is_new(self, storage: Any) -> bool:
        return id(storage) not in self.live and id(storage) not in self.before

    def _follow(self, storage: Any, size: int) -> None:
        """Notes the size of a storage that is new, or has another size than before."""
        key = id(storage)
        if key not in self.live:
            weakref.finalize(storage, self._freed, key).atexit = False
            self.live[key] = _Block(0, "gradients" if self.in_backward else "activations")
        block = self.live[key]
        self.now += size - block.size
        block.size = size
        if self.now > self.most:
            self.most = self.now
            self.blocks_at_peak = [(block, block.size) for block in self.live.values()]

    def _freed(self, key: int) -> None:
        self.now -= self.live.pop(key).size

    def _name_sums(self) -> None:
        """Notes what is held at the end of a backward pass: it is the sums and the results, and
        what a wrapper holds.
        """
        names = {key: name for name, tensors in self.held().items() for key in _sizes(tensors)}
        for key, block in self.live.items():
            block.kind = names.get(key, "sums")

    def at_peak(self) -> dict[str, int]:
        """The bytes of every kind when most are held."""
        self._name_sums()
        bytes_of = dict.fromkeys(("sums", "activations", "gradients", *self.held()), 0)
        for block, size in self.blocks_at_peak:
            bytes_of[block.kind] += size
        return bytes_of


def _storages(tree: Any) -> list[tuple[torch.Tensor, Any]]:
    """(tensor, its storage) of every plain tensor in a tree, and of the shards of DTensors."""
    tensors = local_tensors(trees.tensors_in(tree))
    return [(leaf, leaf.untyped_storage()) for leaf in tensors if leaf.layout is torch.strided]


def _sizes(leaves: Sequence[Any]) -> dict[int, int]:
    """The bytes of every storage that the leaves lie in."""
    return {id(storage): _bytes(leaf) for leaf, storage in _storages(leaves)}


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of the storage of a tensor, of which torch's allocator gives whole blocks on a
    device.
    """
    block = 1 if tensor.device.type in ("cpu", "meta") else 512
    return -(-tensor.untyped_storage().nbytes() // block) * block
