"""Transforms of optax on tensors of torch: the bits that JAX gives, in the same memory, and no argument touched."""

import copy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import funcga
import torch_backend
from tests.test_errors import check_refused

CASES = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=lambda count: 0.1 / (1 + count)),
    "multi": lambda: optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"w": "a", "deep": ["b", "a"]}),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "deep": [False, True]}),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "identity": lambda: optax.identity(),
}
pytestmark = pytest.mark.usefixtures("as_users_write_it")


def problem(dtype="float32", updates=4):
    r = np.random.default_rng(0)
    draw = lambda: {
        "w": r.normal(size=(16, 8)).astype(dtype),
        "deep": [r.normal(size=8).astype(dtype), r.normal(size=()).astype(dtype)],
    }
    return draw(), [draw() for _ in range(updates)]


def tensors(tree):
    return [leaf for leaf in torch_backend.trees.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def bits(tree):
    """What the leaves are, whatever framework's: dtypes, shapes and bytes, in JAX's order."""
    plain = lambda leaf: (
        jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
    )
    leaves = [funcga.to_numpy(plain(leaf)) for leaf in jax.tree.leaves(tree)]
    return [(leaf.dtype.name, leaf.shape, leaf.tobytes()) for leaf in leaves]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "float32") for case in CASES), ("adafactor", "float64"), ("hyperparameters", "float64")],
)
def test_the_bits_are_those_of_optax(case, dtype):
    """64 bits stay 64 bits, though JAX has them switched off."""
    assert not jax.config.jax_enable_x64
    optimizer = CASES[case]()
    params, grads = problem(dtype)
    tx, ours = torch_backend.from_optax(optimizer), funcga.to_torch(params)
    with jax.enable_x64(dtype == "float64"):
        theirs, update = jax.tree.map(jnp.asarray, params), jax.jit(optimizer.update)
        state, expected = tx.init(ours), jax.jit(optimizer.init)(theirs)
        assert bits(state) == bits(expected)
        for grad in grads:
            wanted, expected = update(jax.tree.map(jnp.asarray, grad), expected, theirs)
            theirs = optax.apply_updates(theirs, wanted)
            with jax.enable_x64(False):
                updates, state = tx.update(funcga.to_torch(grad), state, ours)
            assert bits(updates) == bits(wanted)
            assert bits(state) == bits(expected)
            assert list(updates) == list(ours)
            ours = funcga.to_torch(theirs)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert all(isinstance(leaf, torch.Tensor) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("case", ["momentum", "noise", "identity"])
def test_nothing_is_mutated_or_aliased(case):
    params, (grad, *_) = funcga.to_torch(problem())
    tx = torch_backend.from_optax(CASES[case]())
    state = tx.init(params)
    before = bits((grad, state, params))
    updates, after = tx.update(grad, state, params)
    assert bits((grad, state, params)) == before
    given, returned = tensors((grad, state, params)), tensors((updates, after))
    assert not {t.data_ptr() for t in given} & {t.data_ptr() for t in returned}
    assert len({t.data_ptr() for t in returned}) == len(returned)
    kept = copy.deepcopy((updates, after))
    for t in given:  # the memory is the caller's again
        t.zero_()
    assert bits((updates, after)) == bits(kept)


def test_none_is_no_parameter_or_a_gradient_of_zeros_and_params_may_be_left_out():
    traces = []
    momentum = optax.sgd(0.5, momentum=0.5)
    optimizer = optax.GradientTransformation(momentum.init, lambda *a: traces.append(1) or momentum.update(*a))
    tx = torch_backend.from_optax(optimizer)
    params, grads = {"b": torch.ones(2), "a": None}, {"a": None, "b": torch.ones(2)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert list(updates) == ["b", "a"]
    assert updates["a"] is None
    updates, _ = tx.update({"a": None, "b": None}, state, params)
    assert torch.equal(updates["b"], torch.full((2,), -0.25))
    assert len(traces) == 1  # it is compiled once
    alone, _ = tx.update(grads, tx.init(params))
    assert torch.equal(alone["b"], torch.full((2,), -0.5))
    adamw = torch_backend.from_optax(optax.adamw(0.1))
    with pytest.raises(ValueError, match="not passing `params`"):
        adamw.update([torch.ones(2)], adamw.init([torch.ones(2)]))


def test_memory_is_handed_over():
    memory, seen = torch.randn(144), []
    grads = memory[-memory.data_ptr() // 4 % 16 :][:128]  # it begins at a multiple of 64 bytes

    def look(given):
        result = given["grads"] + 1
        seen.extend([given["grads"].unsafe_buffer_pointer(), result.unsafe_buffer_pointer()])
        return result

    adapter = sys.modules[torch_backend.from_optax.__module__]
    result = adapter.in_jax(look, {"grads": grads})
    assert seen == [grads.data_ptr(), result.data_ptr()]
    assert torch.equal(result, grads + 1)
    assert adapter.in_jax(lambda given: given["grads"], {"grads": grads}).data_ptr() != grads.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_other_dtypes_and_layouts(dtype):
    params = {"w": torch.nn.Parameter(torch.randn(4, 6, dtype=dtype).t()), "s": torch.ones((), dtype=dtype)}
    grads = {"w": torch.ones(6, 8, dtype=dtype)[:, ::2], "s": torch.ones((), dtype=dtype)}
    tx = torch_backend.from_optax(optax.sgd(0.5))
    updates, _ = tx.update(grads, tx.init(params), params)
    assert all(torch.equal(updates[k], -0.5 * grads[k]) for k in grads)
    assert not any(t.requires_grad for t in tensors(updates))


def test_extra_arguments_reach_the_transform():
    given = []

    def update(grads, state, params=None, *, value, function, nothing, deep, **extra):
        given.append((sorted(extra), nothing))
        return jax.tree.map(lambda g: function(g) * value + deep["x"][0], grads), state

    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx, function = torch_backend.from_optax(optimizer), lambda x: 2 * x
    for value in (torch.tensor(3.0), 3.0):
        extra = {"value": value, "function": function, "nothing": None, "deep": {"x": [torch.ones(())]}, "other": 1}
        updates, _ = tx.update([torch.ones(2)], (), None, **extra)
        assert torch.equal(updates[0], torch.full((2,), 7.0))
    tx.update([torch.ones(2)], (), None, **{**extra, "value": 4.0})
    assert given == [(["other"], None)] * 2  # compiled once for a tensor and once for a number
    plain = torch_backend.from_optax(optax.sgd(0.5))
    plain.update([torch.ones(2)], plain.init([torch.ones(2)]), value=3, function=function)


def test_a_state_goes_on_in_the_other_framework():
    params, grads = problem()
    optimizer = CASES["hyperparameters"]()
    tx, update = torch_backend.from_optax(optimizer), jax.jit(optimizer.update)
    state = tx.init(funcga.to_torch(params))
    for grad in grads[:2]:
        _, state = tx.update(funcga.to_torch(grad), state, funcga.to_torch(params))
    moved = funcga.to_jax(state)
    assert jax.tree.structure(moved) == jax.tree.structure(optimizer.init(funcga.to_jax(params)))
    left, state = tx.update(funcga.to_torch(grads[2]), state, funcga.to_torch(params))
    right, moved = update(funcga.to_jax(grads[2]), moved, funcga.to_jax(params))
    assert bits((left, state)) == bits((right, moved))
    back = funcga.to_torch(moved)
    left = tx.update(funcga.to_torch(grads[3]), back, funcga.to_torch(params))
    assert bits(left) == bits(update(funcga.to_jax(grads[3]), moved, funcga.to_jax(params)))


def test_what_is_no_transform_of_optax():
    with pytest.raises(AttributeError, match="init"):
        torch_backend.from_optax(optax.adamw)
    sgd = torch_backend.from_optax(optax.sgd(0.1))
    check_refused("`grads` has another structure than it should: missing `['b']`, new `['a']`.",
                  sgd.update, {"a": torch.ones(1)}, (), {"b": torch.ones(1)})  # fmt: skip
    check_refused("`grads['a']` is float32[1], which cannot be converted: ",
                  sgd.update, {"a": torch.ones(1, device="meta")}, ())  # fmt: skip
    check_refused("`params` is float32[2], which cannot be converted: Cannot copy out of meta tensor; no data!",
                  sgd.init, torch.ones(2, device="meta"))  # fmt: skip


def test_dtensors_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        params = {"w": distribute_tensor(torch.ones(4), dist.init_device_mesh("cpu", (1,)), [Shard(0)])}
        check_refused(
            "`params['w']` is float32[4], which cannot be converted: it is a DTensor, which lies on several devices",
            torch_backend.from_optax(optax.sgd(0.1)).init,
            params,
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_on_a_device():
    params, grads = funcga.to_torch(problem())
    on_device = lambda tree: jax.tree.map(lambda t: t.cuda(), tree)
    tx = torch_backend.from_optax(optax.adamw(0.1))
    updates, _ = tx.update(on_device(grads[0]), tx.init(on_device(params)), on_device(params))
    expected, _ = tx.update(grads[0], tx.init(params), params)
    for a, b in zip(tensors(updates), tensors(expected), strict=True):
        assert a.is_cuda
        torch.testing.assert_close(a.cpu(), b)
