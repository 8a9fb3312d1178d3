"""Programs as tests run them: examples in the test's own process, which afterwards is as it was; and a training loop."""

import gc
import importlib
import random
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@contextmanager
def as_a_program():
    """What runs inside finds what a program finds that was just started, and leaves nothing behind but imports."""
    wide, dtype = jax.config.jax_enable_x64, torch.get_default_dtype()
    states, arguments = (random.getstate(), np.random.get_state()), sys.argv[1:]
    sys.argv[1:] = []  # those of pytest
    gc.freeze()  # what a program does not have takes it no time to collect
    try:
        with (
            beside_the_examples(),
            warnings.catch_warnings(),
            torch.random.fork_rng([]),
            jax.numpy_dtype_promotion("standard"),
        ):
            warnings.simplefilter("default")
            yield
    finally:
        gc.unfreeze()
        sys.argv[1:] = arguments
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_default_dtype(dtype)
        jax.config.update("jax_enable_x64", wide)


@contextmanager
def beside_the_examples():
    """What runs inside imports what lies beside the examples; no other module is called `sentences` afterwards."""
    path, modules = sys.path[:], set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == EXAMPLES:
                del sys.modules[name]


def example(name):
    """The module of an example, made anew, whose functions a test calls."""
    with beside_the_examples():
        return importlib.import_module(name)


# A training loop as people write it, whose micro-batches have as many rows as its arguments say.
TRAIN = """
import sys, torch, torch.nn.functional as F
model = torch.nn.Linear(6, 5)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
lengths = [int(each) for each in sys.argv[1:]]
for _ in range(2):
    for n in lengths:
        (F.cross_entropy(model(torch.randn(n, 6)), torch.randint(5, (n,))) / len(lengths)).backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(7)
"""
