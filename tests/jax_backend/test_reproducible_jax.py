"""Exact sums over devices: the same bits on any number of them, from vmap's replicas, and as in torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import funcga
from jax_backend import Replicas, collectives

COUNT, WIDTH = 24, 300


def rows():
    r = np.random.default_rng(0)
    return (r.normal(size=(COUNT, WIDTH)) * 2.0 ** r.integers(-20, 5, (COUNT, WIDTH))).astype("float32")


def weight(row):
    return (abs(row[0, 0]) * 100 // 1 + 1).astype("int32")


def step_of(fold, across=None):
    """Micro-batches of one row, with its sum and the row itself as gradients."""
    gradient = lambda row: (row.sum(), row[0])
    return funcga.accumulate(gradient, microbatch_size=1, in_axes=0, fold=fold, weight=weight, across=across)


def over(devices, fold, batch, **choices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(step_of(fold, "data"), mesh=mesh, in_specs=P("data"), out_specs=P(), **choices)
    return jax.jit(step), batch


FOLDS = {name: funcga.reproducible(getattr(funcga, name)()) for name in ("mean", "sum")}


@pytest.mark.parametrize("name", FOLDS)
def test_any_number_of_devices_has_the_same_bits(name):
    batch = rows()
    expected = step_of(FOLDS[name])(jnp.asarray(batch))
    r = np.random.default_rng(1)
    for devices in (3,) if name == "mean" else (2,):
        step, _ = over(devices, FOLDS[name], batch)
        for ours, theirs in zip(step(jnp.asarray(r.permutation(batch))), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    # Eight replicas, along an axis of vmap.
    step = jax.jit(jax.vmap(step_of(FOLDS[name], "data"), axis_name="data", axis_size=8))
    for ours, theirs in zip(step(jnp.asarray(batch).reshape(8, 3, WIDTH)), expected, strict=True):
        np.testing.assert_array_equal(ours, np.broadcast_to(theirs, ours.shape))
    in_torch = funcga.accumulate(
        lambda row: (row.sum(), row[0]), microbatch_size=1, in_axes=0, fold=FOLDS[name],
        weight=lambda row: (row[0, 0].abs() * 100 // 1 + 1).to(torch.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(in_torch(torch.from_numpy(batch))[1], expected[1])


def test_the_pieces_travel_once_after_the_loop():
    batch = rows()
    step, _ = over(4, FOLDS["mean"], batch)
    found = collectives(step, jnp.asarray(batch))
    assert {(each.kind, each.depth) for each in found} == {("all-reduce", 0)}
    assert len(found) <= 2  # one of floats, and one of integers


def test_a_scattered_sum():
    batch = rows()[:, :296]
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    step = step_of(FOLDS["mean"], Replicas("data", scatter=(None, 0)))
    scattered = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")))
    expected = step_of(FOLDS["mean"])(jnp.asarray(batch))
    for ours, theirs in zip(jax.jit(scattered)(jnp.asarray(batch)), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
