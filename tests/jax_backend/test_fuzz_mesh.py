"""Generated folds over meshes, against NumPy in float64: meshes, specs, folds, weights and rows are drawn by a seed.

FUNCGA_FUZZ=200 draws so many programs of each kind; each of them runs on several batches.
"""

import os
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend

PROGRAMS, BATCHES, WIDTH = int(os.environ.get("FUNCGA_FUZZ", "6")), 4, 4
LIMITS = {"float32": 2e-5, "float64": 1e-12}


@dataclass(frozen=True)
class Case:
    """A mesh of these sizes and kinds of axes, and what is folded on it."""

    sizes: tuple[int, ...]
    kinds: tuple[AxisType, ...]
    specs: dict[str, P]
    dtype: str
    rows: int  # of a device, or of all together where the batch is whole
    n: int
    weighted: bool
    jitted: bool
    check_vma: bool
    way: str

    @property
    def mesh(self):
        return jax.make_mesh(self.sizes, ("data", "model")[: len(self.sizes)], axis_types=self.kinds)


def drawn(seed, ways):
    r = np.random.default_rng(seed)
    sizes = [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1)][r.integers(7)]
    kinds = tuple([AxisType.Auto, AxisType.Explicit][r.integers(2)] for _ in sizes)
    names = ("data", "model")[: len(sizes)]
    spec = lambda rank: P(*[r.choice([None, *names]) if axis == rank - 1 else None for axis in range(rank)])
    specs = {"w": spec(2), "b": spec(1)}
    for name, entries in specs.items():  # 4 columns do not divide among 3 devices
        specs[name] = P() if sizes == (3,) else P(*[None if e is None else str(e) for e in entries])
    rows = int(r.integers(1, 6))
    pick = lambda: bool(r.integers(2))
    n = int(r.integers(1, rows + 1))
    return Case(sizes, kinds, specs, r.choice([*LIMITS]), rows, n, pick(), pick(), pick(), str(r.choice(ways)))


def batch_of(case, rows, seed):
    """Parameters, rows, and a number of tokens for each; sometimes there are none."""
    r = np.random.default_rng(seed)
    params = {"w": r.normal(size=(3, WIDTH)), "b": r.normal(size=WIDTH)}
    tokens = r.integers(0, 4, size=rows) * r.integers(0, 2, size=rows) if seed % 4 else np.zeros(rows, int)
    return params, r.normal(size=(rows, 3)), tokens if case.weighted else np.ones(rows, int)


def gathered(array):
    """The parameter whole on every device, as a loss has to write it for Explicit axes."""
    mesh = jax.typeof(array).sharding.mesh
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(array, NamedSharding(mesh, P())) if explicit else array


def summed_loss(params, x, tokens):
    squares = (jnp.tanh(x @ gathered(params["w"]) + gathered(params["b"])) ** 2).sum(1)
    return (squares * tokens.astype(x.dtype)).sum()


def folded(params, x, tokens):
    """Of rows that count as often as they have tokens."""
    value, grads = jax.value_and_grad(summed_loss)(params, x, tokens)
    rows = tokens.sum().astype(x.dtype)
    mean = jax.tree.map(lambda leaf: jnp.where(rows > 0, leaf / jnp.where(rows > 0, rows, 1), jnp.nan), grads)
    extremes = {"max": x.max(0), "min": x.min(0), "max32": tokens.max()}
    return {"value": value, "grads": grads, "mean": mean, "total": grads, "count": tokens.sum(), **extremes}, x * 2


FOLDS = (
    {
        "value": funcga.per_weight(),
        "grads": funcga.per_weight(),
        "mean": funcga.mean(),
        "total": funcga.sum(),
        "count": funcga.sum(),
        "max": funcga.max(),
        "min": funcga.min(),
        "max32": funcga.max(),
    },
    funcga.concat(),
)


def oracle(params, x, tokens):
    """The same of all rows at once, by hand."""
    hidden = np.tanh(x @ params["w"] + params["b"])
    total = int(tokens.sum())
    outer = 2 * hidden * (1 - hidden**2) * tokens[:, None]
    sums = {"b": outer.sum(0), "w": x.T @ outer}
    over = lambda leaf: leaf / total if total else np.zeros_like(leaf)
    value = over(((hidden**2).sum(1) * tokens).sum())
    means = {name: over(leaf) for name, leaf in sums.items()}
    extremes = {"max": x.max(0), "min": x.min(0), "max32": tokens.max()}
    return {"value": value, "grads": means, "mean": means, "total": sums, "count": total, **extremes}, x * 2


def check(case, found, expected):
    for (path, leaf), own in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        leaf, own = np.asarray(leaf, "float64"), np.asarray(own, "float64")
        assert leaf.shape == own.shape, (path, case)
        assert np.abs(leaf - own).max() <= LIMITS[case.dtype] * max(1, np.abs(own).max()), (path, case)


def run(case, rows, make, by_hand=oracle):
    """The program that make(case) returns, for some batches, against one by hand: params, x, tokens -> a tree."""
    with jax.enable_x64(case.dtype == "float64"):
        program = make(case)
        for seed in range(BATCHES):
            params, x, tokens = batch_of(case, rows, seed)
            arrays = {name: jnp.asarray(leaf, case.dtype) for name, leaf in params.items()}, jnp.asarray(x, case.dtype)
            check(case, program(*arrays, jnp.asarray(tokens, "int32")), by_hand(params, x, tokens))


def weight(x, tokens):
    return tokens.sum()


def placed(case, params):
    return {name: jax.device_put(leaf, NamedSharding(case.mesh, case.specs[name])) for name, leaf in params.items()}


# -- replicas: each folds its own rows


def over_replicas(case):
    fold, names = partial(funcga.accumulate, folded, case.n), case.mesh.axis_names
    across = names[0] if len(names) == 1 else names
    if case.way == "stream":
        split = lambda x: [x[: case.rows // 2], x[case.rows // 2 :]] if case.rows > 1 else [x]
        stream = funcga.stream(folded, fold=FOLDS, weight=weight, across=across)
        step = lambda params, x, tokens: stream(params, list(zip(split(x), split(tokens), strict=True)))
    else:
        step = fold(fold=FOLDS, weight=weight, across=across)
    if case.way == "shard_map":
        cut = P(across)
        step = jax.shard_map(
            step, mesh=case.mesh, in_specs=(P(), cut, cut), out_specs=P(), check_vma=case.check_vma,
        )  # fmt: skip
        everywhere, own = NamedSharding(case.mesh, P()), NamedSharding(case.mesh, cut)
        return lambda params, x, tokens: jax.jit(step)(
            jax.device_put(params, everywhere), jax.device_put(x, own), jax.device_put(tokens, own)
        )
    step = jax_backend.replicated(step, case.mesh, axis=across, check_vma=case.check_vma)
    return jax.jit(step) if case.jitted else step


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_replicas(seed):
    case = drawn(seed, ["accumulate", "stream", "shard_map"])
    run(case, case.rows * int(np.prod(case.sizes)), over_replicas)


# -- parameters that are sharded, and a batch that may be


def over_sharded(case):
    cut = NamedSharding(case.mesh, P("data"))
    step = funcga.accumulate(folded, case.n, fold=FOLDS, weight=weight)
    stream = funcga.stream(folded, fold=FOLDS, weight=weight)
    step = jax.jit(step) if case.jitted else step

    def program(params, x, tokens):
        params = placed(case, params)
        if case.way == "stream":
            parts = np.split(np.arange(len(x)), np.cumsum([case.sizes[0]] * (case.rows - 1)))
            items = [(jax.device_put(x[part], cut), jax.device_put(tokens[part], cut)) for part in parts]
            return stream(params, items)
        if case.way == "cut":
            x, tokens = jax.device_put((x, tokens), cut)
        return step(params, *everywhere(case, (x, tokens)) if case.way == "whole" else (x, tokens))

    return program


def everywhere(case, tree):
    return jax.device_put(tree, NamedSharding(case.mesh, P()))


@pytest.mark.parametrize("seed", range(1000, 1000 + PROGRAMS))
def test_sharded_parameters(seed):
    case = drawn(seed, ["whole", "cut", "stream"])
    run(case, case.rows * case.sizes[0], over_sharded)


# -- windows of multi_steps, whose replicas fold other rows and weights


def over_windows(case):
    names = case.mesh.axis_names
    across = names[0] if len(names) == 1 else names
    tx = funcga.multi_steps(optax.identity(), case.n, across=across, fold=funcga.per_weight())
    specs, over = jax_backend.state_specs(tx), partial(jax.shard_map, mesh=case.mesh, check_vma=case.check_vma)

    def window(params, x, tokens):
        state = tx.init(params)
        own = lax.pcast(params, names, to="varying")
        updates = None
        for rows, counts in zip(jnp.array_split(x, case.n), jnp.array_split(tokens, case.n), strict=True):
            grads = jax.grad(summed_loss)(own, rows, counts)
            updates, state = tx.update(grads, state, params, weight=counts.sum())
        return updates, state

    window = jax.jit(over(window, in_specs=(P(), P(across), P(across)), out_specs=(P(), specs)))

    def program(params, x, tokens):
        x, tokens = jax.device_put((x, tokens), NamedSharding(case.mesh, P(across)))
        updates, state = window(everywhere(case, params), x, tokens)
        assert int(state.updates) == 1
        return updates

    return program


@pytest.mark.parametrize("seed", range(2000, 2000 + PROGRAMS))
def test_windows(seed):
    case = drawn(seed, ["multi_steps"])
    with jax.numpy_dtype_promotion("standard"):
        run(case, case.rows * int(np.prod(case.sizes)), over_windows, lambda *args: oracle(*args)[0]["grads"])
