"""totals=: losses with several denominators are those of the whole batch, however it is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcga
import torch_backend
from tests import objectives
from tests.kits import JAX, TORCH, difference, needs_cuda, no_synchronisation
from tests.test_errors import check_refused

# Sums of some hundred numbers in float64, in another order.
LIMIT = 1e-12
pytestmark = pytest.mark.usefixtures("x64", "as_users_write_it")


def problem(kit, rows=11):
    params, batch = objectives.rollouts(rows)
    return kit.arrays(params), kit.arrays(batch)


# --- what is counted, and how


def counts(kit, totals, n=3, rows=8, **options):
    """What a loss gets as totals."""
    seen = lambda params, x, *, totals: (params * x.sum(), totals)
    step = funcga.accumulate(
        funcga.grad(seen, has_aux=True), n, fold=(funcga.sum(), funcga.max()), totals=totals, **options
    )
    return step(kit.arrays(np.ones(())), kit.arrays(np.arange(float(rows))))[1]


def test_integers_are_added_exactly_and_totals_are_arrays(kit):
    large = 2**24 + 1
    as_array = lambda x: (x.sum() * 0).astype("int64") + large if kit is JAX else torch.tensor(large)
    found = counts(kit, lambda x: {"many": large, "as an array": as_array(x)})
    assert {int(count) for count in found.values()} == {3 * large}
    assert kit.backend.arrays.is_array(found["many"])


def test_counts_of_few_bits_do_not_overflow(kit):
    def totals(x):
        ones = kit.cast(x * 0 + 1, "int8")
        return {
            "int8": kit.cast(ones.sum() * 100, "int8"),
            "bool": (ones > 0).all(),
            "half": kit.cast(x.sum() * 0 + 1, "bfloat16"),
        }

    found = {name: int(count) for name, count in counts(kit, totals, n=300, rows=300).items()}
    assert found == {"int8": 30_000, "bool": 300, "half": 300}


@pytest.mark.host
def test_a_stream_counts_what_it_moves_to_a_device(kit):
    device = torch.device("cpu") if kit is TORCH else jax.devices()[1]
    loss = lambda w, x, *, totals: (w * x).sum() / totals
    step = funcga.stream(funcga.value_and_grad(loss), fold=funcga.sum(), totals=lambda x: x.sum() / 2, device=device)
    rows = np.arange(8.0)
    value, gradient = step(
        kit.arrays(np.ones(())), [rows[:3], rows[3:]] if kit is JAX else torch.from_numpy(rows).split(3)
    )
    assert np.allclose([float(value), float(gradient)], 2, rtol=LIMIT, atol=0)
    assert kit is TORCH or gradient.devices() == {device}


def test_any_gradient_function_gets_them(kit):
    loss = lambda w, x, *, totals: (w * x).sum() / totals
    of_framework = torch.func.grad(loss) if kit is TORCH else jax.grad(loss)
    own = lambda w, x, **kwargs: of_framework(w, x, **kwargs)
    for grad_fn in (of_framework, own, funcga.grad(loss)):
        step = funcga.accumulate(grad_fn, 3, fold=funcga.sum(), totals=len)
        assert float(step(kit.arrays(np.ones(())), kit.arrays(np.arange(8.0)))) == 3.5


def test_a_plan_counts_in_micro_batches_of_each_size_that_it_looks_at(kit):
    sizes = []
    totals = lambda x: sizes.append(len(x)) or {"rows": len(x)}
    loss = lambda w, x, *, totals: (w * x).sum() / totals["rows"]
    step = funcga.accumulate(funcga.grad(loss), 2, fold=funcga.sum(), totals=totals)
    plan = funcga.plan(step, kit.arrays(np.ones(())), kit.arrays(np.arange(8.0)), memory=1)
    assert [row.n for row in plan.rows] == [1, 8]  # none fits
    assert {*sizes} == {8, 1}


def test_the_window_that_fits_in_memory_has_them(kit):
    params, batch = problem(kit)
    step = objectives.step(kit, "CE + auxiliary", "auto")
    expected = objectives.expected(kit, "CE + auxiliary", params, batch)
    for _ in range(2):
        assert difference(kit, step(params, batch), expected) < LIMIT


@needs_cuda
def test_the_host_does_not_wait_for_what_is_counted():
    params, batch = ({k: v.cuda() for k, v in tree.items()} for tree in problem(TORCH))
    step = objectives.step(TORCH, "CE + auxiliary", 3)
    step(params, batch)
    with no_synchronisation():
        result = step(params, batch)
    expected = objectives.expected(TORCH, "CE + auxiliary", params, batch)
    assert difference(TORCH, result, expected) < LIMIT


# --- in JAX a step is one program


def test_a_step_with_totals_is_jitted_vmapped_and_differentiated():
    (params, batch), name = problem(JAX), "CE + auxiliary"
    step = objectives.step(JAX, name, 3)
    expected = objectives.expected(JAX, name, params, batch)
    assert difference(JAX, jax.jit(step)(params, batch), expected) < LIMIT
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    values, _ = jax.vmap(step, in_axes=(0, None))(several, batch)
    assert abs(values[0] - expected[0]) < LIMIT
    # The value of a step is differentiated as the loss of the whole batch is.
    gradient = jax.grad(lambda params: step(params, batch)[0])(params)
    assert difference(JAX, gradient, expected[1]) < LIMIT


# --- refusals


def ragged(kit, sizes=(3, 1, 4)):
    """Micro-batches whose rows cannot be counted: arrays of several lengths, and a list."""
    r = np.random.default_rng(4)
    edges = lambda size: [r.normal(size=2), r.normal(size=2)][: 1 + size % 2]
    return [
        kit.arrays({"x": r.normal(size=(size, 2)), "ends": np.arange(2 * size), "edges": edges(size)}) for size in sizes
    ]


def of_graph(params, batch, *, totals):
    nodes, edges = ((batch["x"] @ params["w"]) ** 2).sum(), sum((edge * params["w"]).sum() for edge in batch["edges"])
    return nodes / totals["nodes"] + edges / totals["edges"]


WITHOUT_WEIGHTS = {
    "sum": funcga.sum(),
    "a tree": (funcga.sum(), funcga.sum()),
    "exact": funcga.reproducible(funcga.sum()),
    "by steps": funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps),
    "a maximum": (funcga.max(), funcga.sum()),
    "rows": (funcga.logsumexp(), funcga.sum()),
}


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_fold_without_weights_asks_for_none(kit, name):
    """Of graphs, lists and strings no rows can be counted, and a sum divides by none."""
    fold, window, params = WITHOUT_WEIGHTS[name], ragged(kit), {"w": kit.arrays(np.array([0.5, -2.0]))}
    totals = lambda batch: {"nodes": batch["x"].shape[0], "edges": len(batch["edges"])}
    options = {"fold": fold, "totals": totals}
    without, with_weight = (
        funcga.stream(funcga.value_and_grad(of_graph), **options, **more)(params, window)
        for more in ({}, {"weight": lambda batch: 1})
    )
    assert difference(kit, without, with_weight) == 0
    if name == "sum":
        w = params["w"]
        nodes = sum(2 * batch["x"].T @ (batch["x"] @ w) for batch in window) / 8
        edges = sum(sum(batch["edges"]) for batch in window) / 5
        assert difference(kit, without[1]["w"], nodes + edges) < LIMIT


def test_a_fold_that_weighs_asks_for_a_weight(kit):
    params, gradient = {"w": kit.arrays(np.ones(2))}, funcga.value_and_grad(of_graph)
    own = funcga.Fold(
        funcga.reducers.sum, funcga.normalizers.Normalizer(lambda xp, reduced, tally: reduced / tally.weight)
    )
    for options in (
        {"fold": funcga.mean()},
        {"fold": funcga.per_weight()},
        {"fold": (funcga.sum(), funcga.mean())},
        {"fold": own},
        {"fold": funcga.reproducible(funcga.per_weight())},
        {"fold": funcga.sum(), "observe": funcga.gradient_noise()},
    ):
        totals = lambda batch: {"nodes": batch["x"].shape[0], "edges": len(batch["edges"])}
        step = funcga.stream(gradient, totals=totals, **options)
        window = [{**batch, "edges": tuple(batch["edges"])} for batch in ragged(kit)]
        check_refused("the rows of a micro-batch are its weight unless weight= says it", step, params, window)


def test_strings_are_streamed_without_a_weight():
    loss = lambda params, texts, *, totals: (params["w"] * sum(map(len, texts["text"]))).sum() / totals["characters"]
    totals = lambda texts: {"characters": sum(map(len, texts["text"]))}
    step = funcga.stream(funcga.grad(loss), fold=funcga.sum(), totals=totals)
    window = [{"text": ["a", "bcd"]}, {"text": ["ef"]}]
    assert step({"w": torch.ones(2)}, window)["w"].tolist() == [1, 1]


def refused(text, kit, totals=len, loss=None, **call):
    loss = loss or (lambda w, x, *, totals: (w * x).sum())
    step = funcga.accumulate(funcga.grad(loss), 2, fold=funcga.sum(), totals=totals)
    return check_refused(text, step, kit.arrays(np.ones(())), kit.arrays(np.ones((4, 3))), **call)


def test_totals_must_be_a_function():
    check_refused("totals is 3, which is no function. Pass one, such as lambda batch: {", funcga.accumulate,
                  lambda w, x, *, totals: w, 2, totals=3)  # fmt: skip


def test_grad_fn_must_take_them():
    loss = lambda params, batch: (params * batch).sum()
    params, batch = torch.ones(()), torch.ones(4)
    module = torch_backend.module_value_and_grad(torch.nn.Linear(1, 1), lambda module, x: x.sum())
    steps = [funcga.accumulate(grad_fn, 2, totals=len) for grad_fn in (funcga.grad(loss), torch.func.grad(loss))]
    for step in (*steps, lambda params, batch: funcga.accumulate(module, 2, totals=len)(batch)):
        with pytest.raises((TypeError, funcga.FuncgaError), match="unexpected keyword argument 'totals'"):
            step(params, batch)


def test_an_array_counts_as_its_sum(kit):
    """As a mask does: what it has to do with the rows of other micro-batches, nobody knows."""
    found = counts(kit, lambda x: {"rows": x >= 0, "of each": kit.xp.stack([x, x]), "one": 1}, n=3, rows=8)
    assert {name: float(total) for name, total in found.items()} == {"rows": 8, "of each": 56, "one": 3}
    assert all(total.shape == () for total in found.values())
    with pytest.raises(TypeError):
        refused("", kit, lambda x: ["a"])


def test_totals_take_what_is_split(kit):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        refused("", kit, lambda x, y: 1)
    loss = lambda w, x, *, totals: w * x
    step = funcga.accumulate(funcga.grad(loss), 2, in_axes=(None, None), fold=funcga.sum(), totals=len)
    ones = kit.arrays(np.ones(4))
    check_refused("no argument is split", step, ones, ones)


def test_a_call_brings_no_totals_of_its_own(kit):
    params, batch = problem(kit)
    steps = (objectives.step(kit, "DAPO", 2), batch), (objectives.streaming(kit, "DAPO"), [batch])
    for step, given in steps:
        with pytest.raises(TypeError, match="multiple values for keyword argument 'totals'"):
            step(params, given, totals=3)


def test_a_stream_is_gone_through_twice(kit):
    params, batch = problem(kit)
    step, window = objectives.streaming(kit, "DAPO"), objectives.cut(batch, 0, 4, 11)
    for iterator in (iter(window), (x for x in window)):
        text = "the window had 2 micro-batches when they were counted, for totals=, and 0 when they were folded."
        check_refused(text, step, params, iterator)

    class Shrinking:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(window[: 3 - self.passes])

    check_refused("the window had 2 micro-batches when they were counted, for totals=, and 1 when they were folded.",
                  step, params, Shrinking())  # fmt: skip

    class UsedUp(Shrinking):
        def __iter__(self):
            self.passes += 1
            return iter(window if self.passes == 1 else [])

    check_refused("the window had 2 micro-batches when they were counted, for totals=, and 0 when they were folded.",
                  step, params, UsedUp())  # fmt: skip


def test_a_compiled_step_counts():
    params, batch = problem(TORCH)
    step = torch.compile(objectives.step(TORCH, "DAPO", 3), backend="eager")
    assert difference(TORCH, step(params, batch), objectives.expected(TORCH, "DAPO", params, batch)) < LIMIT
