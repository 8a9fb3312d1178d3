"""The library of device.cpp, compiled once for a version of torch, into the user's cache."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("device.cpp")


def compiler():
    """The name of a C++ compiler; None if this machine has none."""
    return next(filter(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))), None)


def built():
    """The path of the library for this torch."""
    source = SOURCE.read_bytes() + repr([torch.__version__, *_options()]).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "funcga-tests"
    library = cache / f"simulated-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        mine = library.with_suffix(f".{os.getpid()}")  # two processes may compile at once
        subprocess.run([compiler(), str(SOURCE), *_options(), "-o", str(mine)], check=True)
        mine.rename(library)
    return library


def _options():
    libraries = library_paths()
    return [
        *("-std=c++20", "-O1", "-fPIC", "-shared"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in include_paths()),
        *(f"-L{path}" for path in libraries),
        *(f"-Wl,-rpath,{path}" for path in libraries),
        *("-ltorch_cpu", "-lc10"),
    ]
