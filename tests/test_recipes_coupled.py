"""The recipes of examples/ for losses that couple the rows of a batch, against the loss of the whole batch."""

import jax
import numpy as np
import pytest

import funcga
import jax_backend
from benchmarks.torch_measure import Watch
from tests.kits import JAX, TORCH, difference
from tests.programs import example

pytestmark = pytest.mark.usefixtures("as_users_write_it")


def test_tiles(kit, x64):
    """The exponential of a similarity of 1,000 is infinite, and of -1,000 it is 0: in float32 for these embeddings."""
    ours, (a, b) = example(f"contrastive_tiles_{kit.name}"), np.random.default_rng(0).normal(size=(2, 20, 6))
    for dtype, scale, limit, tiles in (
        ("float64", 1.5, 1e-14, 3),
        ("float64", 1.5, 1e-14, 20),
        ("float32", 6, 1e-6, 7),
    ):
        cast = lambda array, dtype=dtype: np.asarray(array, dtype)
        args = kit.arrays(({"scale": cast(scale)}, {"a": cast(a), "b": cast(a + b)}))
        whole, found = (
            funcga.accumulate(funcga.value_and_grad(loss_fn, argnums=(0, 1)), 1)(*args)
            for loss_fn in (ours.at_once, ours.in_tiles(tiles))
        )
        assert difference(kit, found, whole) <= limit


def views(rows=31):
    """Parameters, and two views of rows whose means are not 0, as NumPy arrays."""
    random = np.random.default_rng(0)
    params = {"v": random.normal(size=(16, 4)) / 4, "w": random.normal(size=(6, 16)) / 2}
    x = 0.5 + random.normal(size=(rows, 6))
    return params, x + random.normal(size=x.shape), x + random.normal(size=x.shape)


def test_statistics_take_no_more_memory_for_more_rows(kit, x64):
    """Of a hundred micro-batches as much as of ten: each leaves no more than D x D behind."""
    ours, peaks = example(f"vicreg_{kit.name}"), []
    step = funcga.coupled(ours.summary_fn, ours.vicreg, microbatch_size=50, fold=ours.FOLD)
    for rows in (500, 5000):
        problem = kit.arrays(views(rows))
        if kit is JAX:
            peaks.append(jax.jit(step).lower(*problem).compile().memory_analysis().temp_size_in_bytes)
            continue
        step(*problem)
        with Watch() as watch:
            step(*problem)
        peaks.append(watch.bytes)
    assert peaks[1] <= 1.02 * peaks[0]


def recipes(framework, **options):
    """A step of each recipe, in three micro-batches."""
    statistics, tiles = example(f"vicreg_{framework}"), example(f"contrastive_tiles_{framework}")
    coupled = lambda *args, **fold: funcga.coupled(*args, n=3, **fold, **options)
    return [
        *[coupled(statistics.summary_fn, loss_fn, fold=statistics.FOLD) for loss_fn, _ in statistics.LOSSES.values()],
        coupled(tiles.summary_fn, tiles.in_tiles(4)),
    ]


def test_recipes_over_a_mesh_and_in_both_frameworks(x64):
    """Eight rows a device. The summaries are merged once and the gradients once, and nothing inside of a loop."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x, y = views(32)
    given = {**params, "a": params["w"], "b": 1 - params["w"], "scale": np.array(1.5)}, x, y
    problem, specs = JAX.arrays(given), (jax.P(), jax.P("data"), jax.P("data"))
    for in_torch, alone, step in zip(recipes("torch"), recipes("jax"), recipes("jax", across="data"), strict=True):
        merged = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P())
        expected = alone(*problem)
        assert difference(JAX, jax.jit(merged)(*problem), expected) <= 1e-13
        assert difference(JAX, funcga.to_jax(in_torch(*TORCH.arrays(given))), expected) <= 1e-13
        found = jax_backend.collectives(merged, *problem)
        assert {collective.depth for collective in found} == {0}
        # the number of rows, an integer, is added by itself where the loss uses it
        assert len([collective for collective in found if collective.bytes > 4]) == 2
