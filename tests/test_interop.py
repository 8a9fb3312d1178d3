"""Trees from one framework to another: values and dtypes are kept, memory is not shared."""

from collections import namedtuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import funcga

Pair = namedtuple("Pair", "a b")
DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "int8", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(dtype):
    native = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(native)
    for there in (funcga.to_torch, funcga.to_jax):
        moved = there(array)
        assert str(moved.dtype).removeprefix("torch.") == dtype
        for other in (funcga.to_torch, funcga.to_jax):
            back = funcga.to_numpy(other(moved))
            assert back.dtype == array.dtype
            np.testing.assert_array_equal(back.astype("complex128"), array.astype("complex128"))


def test_64_bits_go_to_torch(x64):
    for dtype in ("float64", "int64"):
        array = np.arange(3).astype(dtype)
        assert str(funcga.to_torch(array).dtype) == f"torch.{dtype}"
        assert str(funcga.to_jax(funcga.to_torch(array)).dtype) == dtype


def test_trees_keep_their_form():
    tree = {"z": Pair(np.ones(2, "float32"), None), "a": ["name", 3, np.zeros((), "int32")]}
    moved = funcga.to_torch(tree)
    assert list(moved) == ["z", "a"]
    assert isinstance(moved["z"], Pair)
    assert moved["z"].b is None
    assert moved["a"][:2] == ["name", 3]
    assert funcga.to_jax(moved)["z"].a.shape == (2,)


def test_copies_and_gradients():
    p = torch.ones(3, requires_grad=True)
    arrays = [funcga.to_numpy(p), funcga.to_jax(p), funcga.to_torch(p)]
    assert not arrays[2].requires_grad
    with torch.no_grad():
        p.mul_(5)
    assert [float(a[0]) for a in arrays] == [1, 1, 1]
    source = np.ones(3, "float32")
    moved = [funcga.to_jax(source), funcga.to_torch(source)]
    source[:] = 7
    assert [float(a[0]) for a in moved] == [1, 1]


def test_layouts():
    strided = torch.arange(6.0).reshape(2, 3).T
    np.testing.assert_array_equal(funcga.to_jax(strided), strided.numpy())
    lazy = torch.tensor([1 + 2j]).conj()
    np.testing.assert_array_equal(funcga.to_numpy(lazy), [1 - 2j])


def test_without_arrays():
    assert funcga.to_numpy({"a": 1}) == {"a": 1}
    assert funcga.to_torch([1, "b"]) == [1, "b"]
    assert float(funcga.to_jax({"a": jnp.ones(())})["a"]) == 1


def test_a_tree_of_both():
    mixed = {"a": jnp.ones(2), "b": torch.ones(2), "c": np.ones(2, "float32")}
    assert {type(leaf) for leaf in funcga.to_torch(mixed).values()} == {torch.Tensor}
    assert all(isinstance(leaf, jnp.ndarray) for leaf in funcga.to_jax(mixed).values())


def test_bytes_in_another_order():
    np.testing.assert_array_equal(funcga.to_torch(np.arange(3, dtype=">f4")), [0, 1, 2])
    np.testing.assert_array_equal(funcga.to_jax(np.arange(3, dtype=">i4")), [0, 1, 2])
