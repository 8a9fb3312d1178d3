"""What a test needs of a framework, so that one test serves both."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcga
import jax_backend
import torch_backend
from tests import simulated

needs_cuda = pytest.mark.cuda


@dataclass(frozen=True)
class Kit:
    name: str
    arrays: Callable[[Any], Any]  # a NumPy tree to the framework's
    xp: Any
    backend: Any

    def numpy(self, tree):
        return funcga.to_numpy(tree)

    def leaves(self, tree):
        """The array leaves as NumPy float64, in the framework's order, whatever they were."""
        leaves = self.backend.trees.flatten(tree)[0]
        return [
            np.asarray(funcga.to_numpy(x)).astype("complex128" if "complex" in str(x.dtype) else "float64")
            for x in leaves
            if self.backend.arrays.is_array(x)
        ]

    def cast(self, x, dtype):
        return self.backend.arrays.as_array(x, self.backend.arrays.as_dtype(dtype))


class Unseen(torch.Tensor):
    """A weight that the host does not see, as one on a device."""


def arrays_of_torch(tree):
    """On the device of this run."""
    return funcga.to_torch(tree, device="cuda" if simulated.is_installed() else None)


TORCH = Kit("torch", arrays_of_torch, torch, torch_backend.BACKEND)
JAX = Kit("jax", funcga.to_jax, jnp, jax_backend.BACKEND)


def difference(kit, left, right):
    """The largest difference of two trees, relative to the largest element of the right one."""
    pairs = list(zip(kit.leaves(left), kit.leaves(right), strict=True))
    assert pairs
    for a, b in pairs:
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        assert np.isfinite(b).all()
    scale = max(np.abs(b).max(initial=0) for _, b in pairs)
    return max(np.abs(a - b).max(initial=0) for a, b in pairs) / (scale or 1)


LIMITS = {"float32": 2e-6, "float64": 1e-13}


def dtypes(kit, tree):
    return [str(x.dtype).removeprefix("torch.") for x in kit.backend.trees.flatten(tree)[0]]


def counted(function):
    """The function, and the list that grows with every call of it."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    return wrapped, calls


@contextmanager
def no_synchronisation():
    """A context in which whatever makes the host wait for a CUDA device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
