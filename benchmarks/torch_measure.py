"""What one call in torch makes and sends: counted, not sampled."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """`with Watch() as seen: f()`: the storages that f created, the operators that it called and what it sent.

    `bytes` is the peak of the storages that were created inside and live at the same time, `allocations` how many there
    were, `kept` the bytes of those that were there before and that operators are given (parameters and the batch too),
    `ops` the number of operators (views and those of the backward pass are among them), `collectives` their names, and
    `wire_bytes` what they were given: of an all-gather the whole. Eager code only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.allocations = self.ops = self.wire_bytes = self._live = 0
        self.collectives: list[str] = []
        self._seen: dict[int, int] = {}  # the bytes of each
        self._kept: dict[int, int] = {}
        self._resize, self._thread = torch.UntypedStorage.resize_, threading.get_ident()

    @property
    def kept(self) -> int:
        """What was there before."""
        return sum(self._kept.values())

    def __enter__(self) -> "Watch":
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            before, done = storage.nbytes(), self._resize(storage, size)
            if (key := storage._cdata) in self._seen:
                self._count(storage.nbytes() - before)
                self._seen[key] = storage.nbytes()
            elif not before:
                self._follow(storage)
            return done

        # FSDP frees memory by resizing storages, of which no operator tells.
        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() != self._thread and not any(t.is_cuda for t in _tensors((args, kwargs))):
            return op(*args, **(kwargs or {}))  # gloo copies what it sends, in threads of its own
        given = {(s := t.untyped_storage())._cdata: s.nbytes() for t in _tensors((args, kwargs))}
        self._kept |= {key: size for key, size in given.items() if key not in self._seen}
        out = op(*args, **(kwargs or {}))
        if op.namespace == "c10d":
            self._sent(op, args)
        else:
            self.ops += 1
        for tensor in _tensors(out):
            self._created(tensor, given)
        return out

    def _sent(self, op: Any, args: Any) -> None:
        if (name := op.overloadpacket.__name__) != "barrier":
            self.collectives.append(name)
            self.wire_bytes += max(sum(t.nbytes for t in _tensors(arg)) for arg in args)

    def _created(self, tensor: torch.Tensor, given: dict[int, int]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen and storage._cdata not in given:
            self._follow(storage)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        self._seen[storage._cdata] = storage.nbytes()
        self.allocations += 1
        self._count(storage.nbytes())
        weakref.finalize(storage, self._freed, storage._cdata)

    def _count(self, size: int) -> None:
        self._live += size
        self.bytes = max(self.bytes, self._live)

    def _freed(self, key: int) -> None:
        self._count(-self._seen.pop(key))


def _tensors(tree: Any) -> list[Any]:
    leaves = [leaf for leaf in _pytree.tree_leaves(tree) if hasattr(leaf, "untyped_storage")]
    return [leaf._local_tensor if hasattr(leaf, "_local_tensor") else leaf for leaf in leaves]  # of a DTensor the shard


def allocator_peak(step: Callable[[], Any]) -> tuple[int, int]:
    """(peak bytes, allocations) that step makes on the CPU, by its allocator's own record: compiled code too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, sum(event.nbytes() > 0 for event in events)


def cuda_peak(step: Callable[[], Any]) -> tuple[int, int]:
    """The same of what step makes on the GPU, whose allocator rounds each allocation up to 512 bytes."""
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    step()
    after = torch.cuda.memory_stats()
    live, count = "allocated_bytes.all", "allocation.all.allocated"
    return after[f"{live}.peak"] - before[f"{live}.current"], after[count] - before[count]
