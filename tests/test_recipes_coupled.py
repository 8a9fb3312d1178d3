"""The recipes of examples/ for losses that couple the rows of a batch, against the loss of the whole batch in float64."""

from functools import partial

import jax
import numpy as np
import pytest
import torch

import funcga
import jax_backend
from benchmarks.torch_measure import Watch
from tests.kits import JAX, TORCH, difference
from tests.processes import processes
from tests.programs import example


@pytest.fixture(autouse=True)
def users_promotion():
    """Examples are written for JAX as it comes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def embeddings(rows=20, features=6):
    """Parameters and summaries, as NumPy arrays."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, rows, features))
    return {"scale": np.array(1.5)}, {"a": a, "b": a + b}


# --- similarities in tiles


def of_loss(kit, loss_fn, params, s):
    """The loss and its gradients by both arguments, in funcga's own gradient."""
    return funcga.accumulate(funcga.value_and_grad(loss_fn, argnums=(0, 1)), 1)(params, s)


@pytest.mark.parametrize("tiles", [1, 3, 7, 20])
def test_tiles_are_exact(kit, x64, tiles):
    ours = example(f"contrastive_tiles_{kit.name}")
    params, s = kit.arrays(embeddings())
    whole = of_loss(kit, ours.at_once, params, s)
    assert difference(kit, of_loss(kit, ours.in_tiles(tiles), params, s), whole) <= 1e-14


def test_tiles_in_torch_and_in_jax(x64):
    in_torch, in_jax = (
        of_loss(kit, example(f"contrastive_tiles_{kit.name}").in_tiles(3), *kit.arrays(embeddings()))
        for kit in (TORCH, JAX)
    )
    assert difference(TORCH, funcga.to_torch(in_jax), in_torch) <= 1e-14


def test_embeddings_that_are_far_apart(kit):
    """The exponential of a similarity of 1,000 is infinite, and of -1,000 it is 0."""
    ours = example(f"contrastive_tiles_{kit.name}")
    params, s = embeddings()
    cast = lambda array: np.asarray(array, "float32")
    params, s = kit.arrays(({"scale": cast(6.0)}, {name: cast(array) for name, array in s.items()}))
    whole = of_loss(kit, ours.at_once, params, s)
    assert difference(kit, of_loss(kit, ours.in_tiles(7), params, s), whole) <= 1e-6


def test_tiles_never_hold_all_similarities(kit):
    """Not even once, where the loss at once takes several times as much."""
    ours, rows = example(f"contrastive_tiles_{kit.name}"), 1024
    torch.manual_seed(0)
    params, *batch = ours.problem(rows, 16)
    all_similarities = 4 * rows * rows
    whole, most = ours.gradients(ours.at_once, params, *batch)
    found, peak = ours.gradients(ours.in_tiles(16), params, *batch)
    funcga.compare(found, whole).assert_close()
    assert most > 3 * all_similarities
    assert peak < 0.6 * all_similarities


def test_without_the_checkpoint_all_tiles_are_kept(kit, monkeypatch):
    """What the count of bytes would show."""
    ours, rows = example(f"contrastive_tiles_{kit.name}"), 512
    if kit.name == "torch":
        monkeypatch.setattr(ours, "checkpoint", lambda function, *args, use_reentrant: function(*args))
    else:
        monkeypatch.setattr(jax, "checkpoint", lambda function: function)
    torch.manual_seed(0)
    assert ours.gradients(ours.in_tiles(16), *ours.problem(rows, 16))[1] > 4 * rows * rows


# --- statistics of the whole batch


def of_rows(kit, loss_fn, params, *batch):
    """The loss of the whole batch and its gradient, by the framework alone."""
    if kit.name == "jax":
        return jax.jit(jax.value_and_grad(loss_fn))(params, *batch)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = loss_fn(leaves, *batch)
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True))


def views(rows=31):
    """Parameters, and two views of rows whose means are not 0, as NumPy arrays."""
    random = np.random.default_rng(0)
    params = {"v": random.normal(size=(16, 4)) / 4, "w": random.normal(size=(6, 16)) / 2}
    x = 0.5 + random.normal(size=(rows, 6))
    return params, x + random.normal(size=x.shape), x + random.normal(size=x.shape)


@pytest.mark.parametrize("split", [{"n": 1}, {"n": 3}, {"n": 7}], ids=str)
@pytest.mark.parametrize("name", ["VICReg", "Barlow Twins"])
def test_statistics_of_the_batch_are_exact(kit, x64, name, split):
    ours, problem = example(f"vicreg_{kit.name}"), kit.arrays(views())
    of_summary, loss_of_rows = ours.LOSSES[name]
    whole = of_rows(kit, loss_of_rows, *problem)
    found = funcga.coupled(ours.summary_fn, of_summary, fold=ours.FOLD, **split)(*problem)
    assert difference(kit, found, whole) <= 1e-13
    usual = funcga.accumulate(funcga.value_and_grad(loss_of_rows), **split)(*problem)
    assert split == {"n": 1} or difference(kit, usual[1], whole[1]) > 0.05


@pytest.mark.parametrize("name", ["VICReg", "Barlow Twins"])
def test_statistics_in_torch_and_in_jax(x64, name):
    found = []
    for kit in (TORCH, JAX):
        ours = example(f"vicreg_{kit.name}")
        step = funcga.coupled(ours.summary_fn, ours.LOSSES[name][0], n=7, fold=ours.FOLD)
        found.append(step(*kit.arrays(views())))
    assert difference(TORCH, funcga.to_torch(found[1]), found[0]) <= 1e-13


def test_statistics_take_no_more_memory_for_more_rows():
    """Of a hundred micro-batches as much as of ten: each leaves no more than D x D behind."""
    ours, peaks = example("vicreg_torch"), []
    step = funcga.coupled(ours.summary_fn, ours.vicreg, microbatch_size=50, fold=ours.FOLD)
    for rows in (500, 5000):
        problem = TORCH.arrays(views(rows))
        step(*problem)
        with Watch() as watch:
            step(*problem)
        peaks.append(watch.bytes)
    assert peaks[1] <= 1.02 * peaks[0]


def test_statistics_take_no_more_memory_for_more_rows_in_jax(x64):
    ours, peaks = example("vicreg_jax"), []
    step = funcga.coupled(ours.summary_fn, ours.vicreg, microbatch_size=50, fold=ours.FOLD)
    for rows in (500, 5000):
        peaks.append(jax.jit(step).lower(*JAX.arrays(views(rows))).compile().memory_analysis().temp_size_in_bytes)
    assert peaks[1] <= 1.02 * peaks[0]


# --- over replicas


def recipes(framework, **options):
    """A step of each recipe, in three micro-batches."""
    statistics, tiles = example(f"vicreg_{framework}"), example(f"contrastive_tiles_{framework}")
    coupled = partial(funcga.coupled, n=3, **options)
    return [
        *[coupled(statistics.summary_fn, loss_fn, fold=statistics.FOLD) for loss_fn, _ in statistics.LOSSES.values()],
        coupled(tiles.summary_fn, tiles.in_tiles(4)),
    ]


def arguments(rows):
    """Parameters for all recipes, and two views of the rows."""
    params, x, y = views(rows)
    return {**params, "a": params["w"], "b": 1 - params["w"], "scale": np.array(1.5)}, x, y


def over_processes(group, bounds):
    """(loss, gradients) of each recipe in torch: this replica has the rows between two bounds."""
    rank = torch.distributed.get_rank(group)
    params, *batch = TORCH.arrays(arguments(31))
    own = [x[bounds[rank] : bounds[rank + 1]] for x in batch]
    return [step(params, *own) for step in recipes("torch", across=group)]


@pytest.mark.parametrize("bounds", [[0, 11, 31], [0, 5, 5, 31]], ids=len)
def test_recipes_over_uneven_replicas(bounds):
    """One of three has no rows. All have the loss and the gradients of the whole batch."""
    expected = [step(*TORCH.arrays(arguments(31))) for step in recipes("torch")]
    for found in processes().run(over_processes, bounds, size=len(bounds) - 1):
        assert difference(TORCH, found, expected) <= 1e-13


def test_recipes_over_a_mesh(x64):
    """Eight rows a device. The summaries are merged once and the gradients once, and nothing inside of a loop."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    problem = JAX.arrays(arguments(32))
    specs = jax.P(), jax.P("data"), jax.P("data")
    for alone, step in zip(recipes("jax"), recipes("jax", across="data"), strict=True):
        merged = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P())
        assert difference(JAX, jax.jit(merged)(*problem), alone(*problem)) <= 1e-13
        found = jax_backend.collectives(merged, *problem)
        assert {collective.depth for collective in found} == {0}
        # the number of rows, an integer, is added by itself where the loss uses it
        assert len([collective for collective in found if collective.bytes > 4]) == 2
