"""`grad` and `value_and_grad`: one spelling and one order of results."""

import jax
import numpy as np
import pytest
import torch

import funcga
from tests import problems
from tests.kits import LIMITS, difference


def test_value_first_in_both(kit):
    params, batch, loss = problems.regression()
    params, batch = kit.arrays(params), kit.arrays(batch)
    value, grads = funcga.value_and_grad(loss)(params, *batch)
    assert float(value) == float(loss(params, *batch))
    reference = torch.func.grad(loss) if kit.name == "torch" else jax.grad(loss)
    assert difference(kit, grads, reference(params, *batch)) == 0
    assert difference(kit, funcga.grad(loss)(params, *batch), grads) == 0


def test_aux_and_argnums(kit):
    params, (x, y), loss = problems.regression()
    params, x, y = kit.arrays(params), kit.arrays(x), kit.arrays(y)
    with_aux = lambda p, x, y: (loss(p, x, y), {"mean": x.mean()})
    (value, aux), grads = funcga.value_and_grad(with_aux, has_aux=True)(params, x, y)
    assert float(aux["mean"]) == float(x.mean())
    alone, same = funcga.grad(with_aux, has_aux=True)(params, x, y)
    assert float(same["mean"]) == float(x.mean())
    assert difference(kit, alone, grads) == 0
    of_y = funcga.grad(loss, argnums=2)(params, x, y)
    both = funcga.grad(loss, argnums=(0, 2))(params, x, y)
    assert difference(kit, both, (grads, of_y)) == 0
    step = funcga.accumulate(funcga.value_and_grad(with_aux, has_aux=True), 5)
    assert difference(kit, step(params, x, y), ((value, aux), grads)) <= LIMITS["float32"]
    parts = funcga.accumulate(
        funcga.grad(lambda p, q, x: ((x * p * q["w"]) ** 2).sum(), (0, 1)),
        3,
        in_axes=(None, None, 0),
        fold=funcga.sum(),
    )
    one = kit.arrays(np.float32(2))
    got = parts(one, {"w": one}, y)
    assert float(got[0]) == pytest.approx(float(got[1]["w"]))


def test_keyword_arguments(kit):
    x = kit.arrays(np.arange(3, dtype="float32"))
    assert float(funcga.grad(lambda p, x, *, scale: (p * x * scale).sum())(x[1], x, scale=2)) == 6


def test_it_nests(kit):
    x = kit.arrays(np.float32(2))
    second = funcga.grad(lambda p: funcga.grad(lambda q: q**3)(p))
    assert float(second(x)) == 12


def test_without_arrays():
    with pytest.raises(funcga.FuncgaError, match="no array was found in `w`"):
        funcga.grad(lambda w: w)(1.0)
