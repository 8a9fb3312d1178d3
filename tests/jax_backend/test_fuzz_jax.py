"""Generated JAX programs and calls of them, held against a loop by hand in NumPy's float64.

What is drawn: how the micro-batches come (cut from a batch, streamed, updated one by one), folds, weights, threaded
state, random keys, models (dicts, flax.nnx, equinox), 64-bit types on and off, values that are closed over inside of
the caller's own trace, donated arguments. Every program is called several times, with other numbers.
`FUNCGA_FUZZ=N` makes N programs.
"""

import os
import random
from contextlib import ExitStack
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import funcga
import jax_backend

nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")

CASES = int(os.environ.get("FUNCGA_FUZZ", "14"))
CALLS = 4
LIMITS = {"float32": 2e-5, "float64": 1e-12}


class NnxModel(nnx.Module):
    def __init__(self, w, b):
        self.w, self.b = nnx.Param(w), nnx.Param(b)

    def __call__(self, x):
        return x @ self.w[...] + self.b[...]


class EqxModel(eqx.Module):
    w: jax.Array
    b: jax.Array
    name: str = eqx.field(static=True, default="linear")

    def __call__(self, x):
        return x @ self.w + self.b


def dict_model(w, b):
    return {"w": w, "b": b}


MODELS = {
    "dict": (dict_model, jax.value_and_grad, lambda m, x: x @ m["w"] + m["b"], lambda g: (g["w"], g["b"])),
    "funcga": (dict_model, funcga.value_and_grad, lambda m, x: x @ m["w"] + m["b"], lambda g: (g["w"], g["b"])),
    "nnx": (NnxModel, nnx.value_and_grad, lambda m, x: m(x), lambda g: (g["w"][...], g["b"][...])),
    "equinox": (EqxModel, eqx.filter_value_and_grad, lambda m, x: m(x), lambda g: (g.w, g.b)),
}


class Case:
    """A program: what is fixed when it is made."""

    def __init__(self, seed):
        choose = random.Random(seed)
        self.seed = seed
        self.dtype = choose.choice(["float32", "float64"])
        self.model = choose.choice([*MODELS])
        self.form = choose.choice(["n", "microbatch_size", "stream", "stream", "accumulator"])
        self.sizes = choose.choice([[8], [3, 3, 2], [2, 2, 2, 2], [4, 4], [1, 5, 2], [7, 1]])
        self.where = choose.choice(["eager", "eager", "jit", "closed over", "closed over tracer", "donated"])
        self.fold = choose.choice(["mean", "per_weight", "sum"])
        self.weigh = choose.choice(["rows", "mask", "mask", "fraction"])
        self.state = choose.random() < 0.5 and self.form != "accumulator"
        self.noise = choose.choice([None, None, "threefry2x32", "rbg", "unsafe_rbg"])
        if self.form in ("n", "microbatch_size"):
            self.sizes = choose.choice([[3, 3, 2], [2, 2, 2, 2], [4, 4], [8]])
        self.numpy_batch = choose.random() < 0.3 and self.where != "donated"

    def __repr__(self):
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())


def numbers(case, call):
    """The arguments of a call, as NumPy's: (w, b, scale, x, y, mask)."""
    rng = np.random.default_rng([case.seed, call])
    draw = lambda *shape: rng.standard_normal(shape).astype(case.dtype)
    mask = rng.random(8) < (0.0 if call == 3 and case.weigh == "mask" else 0.7)  # all masked: zeros
    return draw(3, 2), draw(2), float(case.dtype == "float64") + call + 0.5, draw(8, 3), draw(8, 2), mask


def program(case, box):
    """grad_fn(model, [state,] keys, x, y, mask) -> results by name; `box` has the scale that it closes over."""
    _, transform, apply, parts = MODELS[case.model]

    def loss(model, ema, keys, x, y, mask):
        seen = apply(model, x)
        if case.noise:
            seen = seen + jax_backend.sampled(partial(jax.random.normal, dtype=x.dtype), keys, (2,))
        seen = seen * jnp.asarray(box[0], x.dtype) * (1 + ema / 8)
        errors = jnp.where(mask, ((seen - y) ** 2).sum(1), 0)
        total = errors.sum() if case.fold != "mean" else errors.sum() / jnp.maximum(mask.sum(), 1).astype(x.dtype)
        return total, seen

    def results(model, ema, keys, x, y, mask):
        (value, seen), grads = transform(loss, has_aux=True)(model, ema, keys, x, y, mask)
        return {
            "loss": value, "grads": parts(grads), "seen": seen, "kept": mask.sum(), "largest": seen.max(0), "spread": value,
            "exponentials": jax.nn.logsumexp(seen, 0),
        }  # fmt: skip

    if not case.state:
        return lambda model, keys, x, y, mask: results(model, jnp.zeros((), x.dtype), keys, x, y, mask)

    def threaded(model, state, keys, x, y, mask):
        key, use = jax.random.split(state["key"])
        ema = (state["ema"] + jax.random.uniform(use, dtype=x.dtype)) / 2
        return results(model, ema, keys, x, y, mask), {"key": key, "ema": ema, "count": state["count"] + 1}

    return threaded


def folds(case):
    own = getattr(funcga, case.fold)()
    by_name = {
        "loss": own, "grads": own, "seen": funcga.concat(), "kept": funcga.sum(), "largest": funcga.max(),
        "spread": funcga.moments(), "exponentials": funcga.logsumexp(),
    }  # fmt: skip
    return (by_name, funcga.carry()) if case.state else by_name


def weight_of(case):
    if case.weigh == "rows":
        return None
    return lambda keys, x, y, mask: mask.sum() if case.weigh == "mask" else mask.sum().astype(x.dtype) / 4


def step_of(case, box):
    """f(model, *state, batch) over all micro-batches."""
    grad_fn, weigh = program(case, box), weight_of(case)
    whole = (None, funcga.CARRY) if case.state else (None,)
    options = {"fold": folds(case), "weight": weigh, "in_axes": (*whole, 0, 0, 0, 0)}
    if case.form == "n":
        step = funcga.accumulate(grad_fn, len(case.sizes), **options)
    elif case.form == "microbatch_size":
        step = funcga.accumulate(grad_fn, microbatch_size=case.sizes[0], **options)
    elif case.form == "stream":
        stream = funcga.stream(grad_fn, **options)
        return lambda *args: stream(*args[:-1], cut(args[-1], case.sizes))
    else:
        return partial(updated, case, grad_fn, weigh)
    return lambda *args: step(*args[:-1], *args[-1])


def updated(case, grad_fn, weigh, model, batch):
    """The loop that a user of Accumulator writes, in two halves that are merged."""
    accumulator, states = funcga.Accumulator(folds(case)), []
    for k, item in enumerate(cut(batch, case.sizes)):
        value = grad_fn(model, *item)
        if k < 2:
            states.append(accumulator.init(value))
        amount = len(item[1]) if weigh is None else weigh(*item)
        states[-1] = accumulator.update(states[-1], value, weight=amount)
    return accumulator.finalize(accumulator.merge(*states) if len(states) > 1 else states[0])


def cut(batch, sizes):
    ends = np.cumsum(sizes)
    return [tuple(leaf[end - size : end] for leaf in batch) for size, end in zip(sizes, ends, strict=True)]


def call_of(case, box):
    """f(scale, model, *state, batch), as the caller has it: inside of a trace of his own, or not."""
    step = step_of(case, box)

    def closed(scale, *args):
        box[0] = scale
        return step(*args)

    if case.where == "closed over tracer":
        return jax.jit(closed)
    if case.where == "closed over":  # each trace sees the value of its time
        return lambda scale, *args: jax.jit(lambda *args: closed(scale, *args))(*args)
    donated = tuple(range(1 + case.state))  # the model and the state, of whose shapes the results are
    run = {"eager": lambda f: f, "jit": jax.jit, "donated": partial(jax.jit, donate_argnums=donated)}[case.where](step)
    return lambda scale, *args: run(*args)


def by_hand(case, scale, w, b, x, y, mask, noise, emas):
    """The same in NumPy's float64, with gradients as one derives them."""
    w, b, x, y = (leaf.astype("float64") for leaf in (w, b, x, y))
    parts, amounts = [], []
    ends = np.cumsum(case.sizes)
    for k, (size, end) in enumerate(zip(case.sizes, ends, strict=True)):
        rows = slice(end - size, end)
        factor = scale * (1 + emas[k] / 8)
        seen = (x[rows] @ w + b + noise[rows]) * factor
        error = np.where(mask[rows, None], seen - y[rows], 0)
        divisor = max(mask[rows].sum(), 1) if case.fold == "mean" else 1
        slope = 2 * error * factor / divisor
        parts.append(((error**2).sum() / divisor, x[rows].T @ slope, slope.sum(0), seen))
        amounts.append({"rows": size, "mask": mask[rows].sum(), "fraction": mask[rows].sum() / 4}[case.weigh])
    total = sum(amounts)
    factors = amounts if case.fold == "mean" else [1.0] * len(parts)
    divide = (lambda v: v) if case.fold == "sum" else (lambda v: v / total if total else np.zeros_like(v))
    loss, dw, db = (divide(sum(f * part[i] for f, part in zip(factors, parts, strict=True))) for i in range(3))
    losses = np.array([part[0] for part in parts])
    mean = (losses * amounts).sum() / total if total else 0.0
    variance = ((losses - mean) ** 2 * amounts).sum() / total if total else 0.0
    seen = np.concatenate([part[3] for part in parts])
    return {
        "loss": loss, "grads": (dw, db), "seen": seen, "kept": mask.sum(), "largest": seen.max(0), "spread": (mean, variance),
        "exponentials": np.logaddexp.reduce(seen),
    }  # fmt: skip


def run(case):
    box = [1.5]
    make = MODELS[case.model][0]
    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(case.dtype == "float64"))
        if case.model != "dict":
            stack.enter_context(jax.numpy_dtype_promotion("standard"))  # as these libraries need it
        call = call_of(case, box)
        for k in range(2 if case.where == "closed over" else CALLS):  # which compiles in each call
            w, b, scale, x, y, mask = numbers(case, k)
            if case.where in ("eager", "jit", "donated"):
                scale = 1.5  # part of the program, as of any under jit
            base = jax.random.key(k, impl=case.noise or "threefry2x32")
            keys = jax_backend.example_keys(base, jnp.arange(8))
            draw = partial(jax.random.normal, shape=(2,), dtype=case.dtype)
            noise = np.stack([draw(key) for key in keys]) if case.noise else np.zeros((8, 2))
            state, emas, after = threaded(case, k)
            arrays = (x, y, mask) if case.numpy_batch else tuple(map(jnp.asarray, (x, y, mask)))
            model = make(jnp.asarray(w), jnp.asarray(b))
            found = call(scale, model, *state, (keys, *arrays))
            if case.state:
                found, (new,) = found[0], found[1:]
                assert int(new["count"]) == len(case.sizes)
                assert (new["key"] == after).all()
                np.testing.assert_allclose(new["ema"], emas[-1], rtol=1e-6)
            check(case, found, by_hand(case, scale, w, b, x, y, mask, noise, emas))


def threaded(case, call):
    """The state that a call begins with, its average in every micro-batch, and the key that is left."""
    if not case.state:
        return (), [0.0] * len(case.sizes), None
    key, ema, emas = jax.random.key(100 + call), 0.25, []
    state = {"key": jnp.copy(key), "ema": jnp.asarray(ema, case.dtype), "count": jnp.int32(0)}
    for _ in case.sizes:
        key, use = jax.random.split(key)
        ema = (ema + float(jax.random.uniform(use, dtype=case.dtype))) / 2
        emas.append(ema)
    return (state,), emas, key


def check(case, found, expected):
    found = funcga.to_numpy(found)
    assert found["kept"] == expected["kept"]
    for name in ("loss", "seen", "largest", "exponentials"):
        close(case, name, found[name], expected[name])
    for a, b in zip(found["grads"], expected["grads"], strict=True):
        close(case, "grads", a, b)
    for a, b in zip(found["spread"], expected["spread"], strict=True):
        close(case, "spread", a, b, by=abs(expected["loss"]) ** 2 + expected["spread"][1])


def close(case, name, found, expected, by=0.0):
    assert str(found.dtype) == case.dtype, (name, case)
    limit = LIMITS[case.dtype] * max(np.abs(expected).max(initial=0), by, 1)
    assert np.abs(found - expected).max(initial=0) <= limit, (name, found, expected, case)


@pytest.mark.parametrize("seed", range(CASES))
def test_a_program_and_its_calls(seed):
    run(Case(seed))


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_can_fail(seed):
    """Results of another scale do not pass."""
    case = Case(seed)
    drawn = numbers(case, 0)
    right, stale = (by_hand(case, s, *drawn[:2], *drawn[3:], np.zeros((8, 2)), [0.0] * 8) for s in (1.5, 1.6))
    cast = lambda tree: {**jax.tree.map(lambda a: np.asarray(a, case.dtype), tree), "kept": right["kept"]}
    check(case, cast(right), right)
    with pytest.raises(AssertionError):
        check(case, cast(stale), right)
