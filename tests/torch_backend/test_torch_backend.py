"""What the torch backend promises of any grad_fn, beyond the shared properties: memory, graphs, compilation, devices."""

import torch
from torch.func import grad

import funcga
from tests import problems
from tests.kits import Unseen
from tests.torch_backend.engine.test_engine import deep, peak


def test_peak_memory_is_two_gradients_and_a_leaf():
    """And one more where the host does not see the weight: each leaf is masked on its way in, one at a time."""
    params, x, loss = deep(rows=8)
    size = sum(p.nbytes for p in params.values())
    leaf = size // len(params)
    activations = 8 * 256 * 4 * 32  # some 32 of them: small beside a leaf
    assert activations <= leaf
    assert peak(funcga.accumulate(grad(loss), 8), params, x) <= 2 * size + leaf
    weight = lambda x: (x > 0).sum().as_subclass(Unseen)
    step = funcga.accumulate(grad(loss), 4, weight=weight)
    assert peak(step, params, x) <= 2 * size + 2 * leaf + 256  # the weight, as scalars


def test_state_may_be_anything_and_is_matched_by_key():
    step = funcga.accumulate(
        lambda s, x: (x.sum(), {"b": s["b"] * 2, "a": s["a"] + 1, "name": s["name"]}), 3,
        in_axes=(funcga.CARRY, 0), fold=(funcga.sum(), funcga.carry()),
    )  # fmt: skip
    _, state = step({"a": 0, "b": torch.tensor(1.0), "name": "any"}, torch.ones(6))
    assert state == {"a": 3, "b": 8, "name": "any"}


def test_a_step_on_the_meta_device():
    """No value is ever looked at, so that a fold can be planned without data."""
    params, batch, loss = problems.regression()
    meta = lambda tree: torch.utils._pytree.tree_map(lambda a: torch.from_numpy(a).to("meta"), tree)
    for weight in (None, lambda x, y: (x > 0).sum()):
        value, grads = funcga.accumulate(funcga.value_and_grad(loss), 5, weight=weight)(meta(params), *meta(batch))
        assert (value.shape, grads["w"].shape, grads["w"].device.type) == ((), (3, 2), "meta")
