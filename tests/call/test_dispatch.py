"""Which framework owns a call, and what funcga says about arrays of neither."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from funcga._backend import Backend
from funcga._backend.dispatch import backend_of, load
from funcga.errors import FuncgaError


def owner(*trees):
    return backend_of(trees, lambda: [f"arg{i}" for i in range(len(trees))]).name


def test_the_owner_of_the_arrays():
    assert owner(torch.ones(1), 3, "a") == "torch"
    assert owner({"a": [jnp.ones(1)]}, None) == "jax"
    assert owner(torch.nn.Parameter(torch.ones(1))) == "torch"


def test_numpy_joins_the_others():
    assert owner(np.ones(1), torch.ones(1)) == "torch"
    assert owner(np.ones(1), jnp.ones(1)) == "jax"
    assert owner(np.ones(1), [np.float32(1)]) == "jax"


def test_two_owners_and_none():
    with pytest.raises(FuncgaError, match="`arg0` is a torch tensor and `arg1` is a JAX array"):
        owner(torch.ones(1), jnp.ones(1))
    with pytest.raises(FuncgaError, match="no array was found in `arg0`"):
        owner(1.0)


def test_load():
    assert isinstance(load("torch"), Backend)
    assert load("jax").name == "jax"


def test_kinds_and_names(kit):
    arrays = kit.backend.arrays
    for name, kind in {
        "bool": "bool",
        "int32": "int",
        "bfloat16": "float",
        "float8_e4m3fn": "float",
        "complex64": "complex",
    }.items():
        assert arrays.kind(arrays.as_dtype(name)) == kind
    wide = {
        "bfloat16": "float32",
        "float16": "float32",
        "float32": "float32",
        "int8": None,
        "int32": "int32",
        "complex64": "complex64",
    }
    for name, accumulator in wide.items():
        found = str(arrays.accumulator_dtype(arrays.as_dtype(name))).removeprefix("torch.")
        assert found == (accumulator or {"torch": "int64", "jax": "int32"}[kit.name])
    assert arrays.describe(kit.arrays(np.ones((2, 3), "float32"))) == "float32[2, 3]"
    assert arrays.describe(None) == "None"
