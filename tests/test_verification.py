"""`verify` names every planted mistake, and accuses no right loss."""

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import funcga
from tests import mistakes
from tests.kits import JAX, TORCH

CASES = [(kit, name) for name, (kits, *_) in mistakes.MISTAKES.items() for kit in kits]
RIGHT = [(kit, name) for name, (kits, _) in mistakes.RIGHT.items() for kit in kits]


def verified(kit, made):
    grad_fn, args, options = made(kit)
    few = {"n": 2} if kit.name == "jax" else {}  # each n is compiled
    return funcga.verify(grad_fn, *args, **few | options)


@pytest.mark.parametrize(("kit", "name"), CASES, ids=[f"{kit.name}-{name}" for kit, name in CASES])
def test_a_mistake_is_named(kit, name):
    _, made, names, fix = mistakes.MISTAKES[name]
    verdict = verified(kit, made)
    assert [cause.name for cause in verdict.causes] == names, str(verdict)
    assert fix in verdict.causes[0].fix
    assert not verdict.ok


@pytest.mark.parametrize(("kit", "name"), RIGHT, ids=[f"{kit.name}-{name}" for kit, name in RIGHT])
def test_a_right_loss_is_not_accused(kit, name):
    verdict = verified(kit, mistakes.RIGHT[name][1])
    assert verdict.ok, str(verdict)
    assert not verdict.causes


def activated(h, kind):
    return {"linear": h, "rational": h / (1 + h**2), "square": h**2}[kind]


@st.composite
def right_losses(draw):
    """(loss, params, batch, options) of NumPy arrays: a loss of some terms under the fold that is right for it."""
    rows, length, width = draw(st.integers(2, 17)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    depth = draw(st.integers(1, 3))
    r = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    floats = lambda *shape: r.normal(size=shape).astype(dtype)
    params = {f"w{i}": floats(width, width) for i in range(depth)} | {"bias": floats(width), "unused": floats(2)}
    lengths = r.integers(0, length + 1, rows)
    lengths[r.integers(rows)] = length
    batch = {
        "x": floats(rows, length, width) * draw(st.sampled_from([1e-3, 1, 1e2])),
        "y": floats(rows, length),
        "mask": (np.arange(length) < lengths[:, None]).astype(dtype),
        "side": floats(rows, width),
    }
    kinds = [draw(st.sampled_from(["linear", "rational", "square"])) for _ in range(depth)]
    kind = draw(st.sampled_from(["row mean", "token mean", "token sum", "row sum", "sum"]))
    scale = draw(st.sampled_from([1, 0.5, 0.25, 3, 1 / 3]))
    temperature = draw(st.sampled_from([1, 2, 4, 0.1]))
    penalty, side = draw(st.sampled_from([0, 1e-2, 10])), draw(st.booleans())

    def loss(params, batch):
        h = batch["x"]
        for i, kind_of in enumerate(kinds):
            h = activated(h @ params[f"w{i}"] + params["bias"], kind_of)
        each = ((h.sum(2) / temperature - batch["y"]) ** 2 * batch["mask"]).sum(1)
        if side and "token" not in kind:
            each = each + ((batch["side"] @ params["w0"]) ** 2).sum(1)
        if "sum" in kind:
            return scale * each.sum()
        total = each.sum() / (batch["mask"].sum() if kind == "token mean" else len(each))
        return scale * total + penalty * (params["w0"] ** 2).sum()

    count = lambda batch: batch["mask"].sum()
    options = {
        "row mean": {},
        "token mean": {"weight": count},
        "token sum": {"fold": funcga.per_weight(), "weight": count},
        "row sum": {"fold": funcga.per_weight()},
        "sum": {"fold": funcga.sum()},
    }[kind]
    n = draw(st.sampled_from([None, 2, 3, 4, rows, (2, rows)]))
    within = n if n is None or isinstance(n, tuple) else min(n, rows)
    return loss, params, batch, {**options, "n": within, "seed": draw(st.integers(0, 99))}


def check_right(kit, right, gradient):
    loss, params, batch, options = right
    if kit is JAX:
        options = options | {"n": 2}
    verdict = funcga.verify(gradient(loss), kit.arrays(params), kit.arrays(batch), **options)
    assert verdict.ok, str(verdict)
    assert not verdict.causes


QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@given(right_losses(), st.sampled_from([funcga.grad, funcga.value_and_grad]))
@settings(max_examples=220, **QUIET)
def test_no_right_loss_is_accused_in_torch(right, gradient):
    check_right(TORCH, right, gradient)


@pytest.mark.usefixtures("x64")
@given(right_losses(), st.sampled_from([funcga.grad, funcga.value_and_grad]))
@settings(max_examples=6, phases=[Phase.generate], **QUIET)
def test_no_right_loss_is_accused_in_jax(right, gradient):
    check_right(JAX, right, gradient)
