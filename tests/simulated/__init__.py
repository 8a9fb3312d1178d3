"""A simulated CUDA device: what makes code wrong or slow on a GPU, seen on a machine without one.

    python -m pytest --device simulated      # the tests that need a device, and every feature against the host
    python -m tests.simulated                # launches and waits of each feature, into docs/reference/launches.md

`install()` gives a build of torch without CUDA two devices, `cuda:0` and `cuda:1`. Their memory is the host's and their
kernels are the host's (device.cpp); everything else is as a program meets it on a GPU:

- Tensors of two devices do not mix, except that a number (a tensor without dimensions) may be the host's.
- Autograd has a thread for each device, and random numbers come from the device's own generator.
- Autocast takes the dtypes of CUDA. `_foreach_` operators take CUDA's fast route where CUDA would.
- An allocator keeps what is freed, says how much it has, and may have a limit, at which it raises OutOfMemoryError.
- `torch.cuda.set_sync_debug_mode("error")` raises where the host would wait for the device.
- Processes of `tests.processes` are joined by a group that takes tensors of the device alone, as NCCL does (group.py).

`Events` counts what happens in a block:

- `launches`: the kernels. One for each operator, which for nearly all of them is right. Some operators launch several
  (a sort, a sum of many rows) or one of a library with another one before it (cuDNN's): only differences between two
  programs with the same model mean something.
- `waits`: where the host would wait for the device: `.item()`, `bool(tensor)`, copies to the host, blocking copies from
  it, masks as indices, results whose shape depends on numbers. `sites` says which line of funcga waited.
- `copies` between the host and the device, `generator` states that are read or set, `reserved` bytes that were new.

What it cannot see:

- Time. It says how much is launched, not how long that takes, nor what overlaps.
- Races. Everything runs in the order of the program, and all streams are one: a missing `wait_stream` or `record_stream`
  goes unnoticed. Tests of that are marked `gpu`.
- CUDA graphs. What a graph may not have can be counted (test_capture.py), but nothing is captured: marked `gpu` as well.
- Pinned memory, Triton (so nothing that inductor compiles for a device), and the rounding of CUDA's kernels.
- Fragments of memory: a block is used again for tensors of its own size only.
"""

import ctypes
import traceback
from collections import Counter
from contextlib import contextmanager
from typing import Self

import torch

from tests.simulated import cuda, group
from tests.simulated.build import built, compiler

_library: ctypes.CDLL | None = None
_operators: object = None


def install():
    """Gives torch the devices, in this process; the library is compiled if it has not been."""
    global _library, _operators
    if _library is not None:
        return
    if torch.version.cuda is not None:
        raise RuntimeError("this torch is built with CUDA; --device simulated needs a build without it")
    path = built()
    _library = ctypes.CDLL(str(path))
    _library.simulated_counts.restype = ctypes.c_char_p
    _library.simulated_wait.restype = _library.simulated_may_wait.restype = ctypes.c_bool
    for name in ("live", "peak", "reserved", "limit"):
        getattr(_library, f"simulated_{name}").restype = ctypes.c_int64
    group.register()
    cuda.replace(_library)
    _operators = cuda.add_operators()


def install_if_possible():
    """`install`, on a machine that has a compiler."""
    if compiler() is not None:
        install()


def is_installed():
    return _library is not None


@contextmanager
def limit(bytes, device=0):
    """A context in which a device has no more than so many bytes."""
    before = _library.simulated_limit(device)
    _library.simulated_set_limit(device, ctypes.c_int64(bytes))
    try:
        yield
    finally:
        _library.simulated_set_limit(device, ctypes.c_int64(before))


class Events:
    """What happens on the simulated devices in a `with` block."""

    def __enter__(self) -> Self:
        self.sites = Counter()
        self._listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._note)
        _library.simulated_on_wait(self._listener)
        self._reserved = self._bytes_reserved()
        _library.simulated_start()
        return self

    def __exit__(self, *error) -> None:
        _library.simulated_stop()
        _library.simulated_on_wait(None)
        self.reserved = self._bytes_reserved() - self._reserved
        kinds = {kind: Counter() for kind in ("launch", "wait", "copy", "generator")}
        for line in _library.simulated_counts().decode().splitlines():
            event, times = line.split("\t")
            kind, name = event.split(" ", 1)
            kinds[kind][name] = int(times)
        self.launched, self.waited, self.copied, self.generator = kinds.values()

    @property
    def launches(self) -> int:
        return self.launched.total()

    @property
    def waits(self) -> int:
        return self.waited.total()

    def _bytes_reserved(self):
        return sum(_library.simulated_reserved(device) for device in range(torch.cuda.device_count()))

    def _note(self, name):
        """Notes which line has waited: the innermost one of the library, or of the test."""
        frames = [frame for frame in traceback.extract_stack() if "/simulated/__init__" not in frame.filename]
        ours = [frame for frame in frames if "/funcga/" in frame.filename or "/torch_backend/" in frame.filename]
        # autograd's thread of a device has no frame of Python
        site = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in (ours or frames)[-1:]]
        self.sites[f"{name.decode()} in {site[0] if site else 'a thread of autograd'}"] += 1
