"""totals=: losses with several denominators are those of the whole batch, however it is cut."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcga
from tests import objectives
from tests.kits import JAX, TORCH, difference, needs_cuda, no_synchronisation
from tests.test_errors import check_refused

# Sums of some hundred numbers in float64, in another order.
LIMIT = 1e-12


@pytest.fixture(autouse=True)
def as_users_write_it(x64):
    """A count is divided by as it is, which strict promotion does not allow for integers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def problem(kit, rows=11):
    params, batch = objectives.rollouts(rows)
    return kit.arrays(params), kit.arrays(batch)


@pytest.mark.parametrize(("name", "n"), [*((name, 3) for name in objectives.OBJECTIVES), ("DAPO", 1), ("GRPO", 7)])
def test_any_number_of_microbatches_gives_the_whole_batch(kit, name, n):
    params, batch = problem(kit)
    result = objectives.step(kit, name, n)(params, batch)
    assert difference(kit, result, objectives.expected(kit, name, params, batch)) < LIMIT


@pytest.mark.parametrize("name", ["GRPO", "CE + auxiliary"])
def test_a_stream_of_ragged_microbatches_gives_the_whole_batch(kit, name):
    (params, batch), bounds = problem(kit), (0, 3, 4, 11)
    step, expected = objectives.streaming(kit, name), objectives.expected(kit, name, params, batch)
    for window in (objectives.cut(batch, *bounds), *funcga.windows(objectives.cut(batch, *bounds), 8)):
        assert difference(kit, step(params, window), expected) < LIMIT


# How far the gradient of these micro-batches is off, in percent: measured, and rounded down.
OFF = {"GRPO": 26, "DAPO": 296, "Dr. GRPO": 83, "DPO": 26, "CE + auxiliary": 86}


@pytest.mark.parametrize("name", OFF)
def test_the_mean_of_microbatch_losses_is_another_gradient(name):
    params, batch = problem(TORCH)
    # The last micro-batch is what is left over of the rows.
    _, usual = objectives.usual(TORCH, name, params, objectives.cut(batch, 0, 5, 10, 11))
    _, whole = objectives.expected(TORCH, name, params, batch)
    usual, whole = TORCH.leaves(usual)[0], TORCH.leaves(whole)[0]
    off = 100 * np.linalg.norm(usual - whole) / np.linalg.norm(whole)
    assert OFF[name] <= off < OFF[name] + 1


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


def test_python_floats_are_totals(kit):
    found = counts(kit, lambda x: {"a": 0.5, "b": [x.max(), 2.0]}, rows=9)
    assert [float(x) for x in kit.leaves(found)] == [1.5, 2 + 5 + 8, 6.0]


def test_what_is_passed_whole_is_not_counted(kit):
    calls = []
    objective = lambda params, scale, x, y, *, totals: (params * scale * x * y).sum() / totals["rows"]
    step = funcga.accumulate(
        funcga.grad(objective), 2, fold=funcga.sum(), in_axes=(None, None, 0, 0),
        totals=lambda *args: calls.append(len(args)) or {"rows": len(args[0])},
    )  # fmt: skip
    one = kit.arrays(np.ones(()))
    assert float(step(one, one, kit.arrays(np.ones(4)), kit.arrays(np.arange(4.0)))) == 1.5
    assert {*calls} == {2}


def test_state_is_threaded_as_before(kit):
    objective = lambda params, seen, x, *, totals: ((params * x).sum() / totals, seen + len(x))
    step = funcga.accumulate(
        funcga.grad(objective, has_aux=True), 3, in_axes=(None, funcga.CARRY, 0),
        fold=(funcga.sum(), funcga.carry()), totals=len,
    )  # fmt: skip
    one = kit.arrays(np.ones(()))
    gradient, seen = step(one, kit.arrays(np.zeros((), "int32")), kit.arrays(np.arange(8.0)))
    assert (float(gradient), int(seen)) == (3.5, 8)


def test_any_gradient_function_gets_them(kit):
    loss = lambda w, x, *, totals: (w * x).sum() / totals
    of_framework = torch.func.grad(loss) if kit is TORCH else jax.grad(loss)
    own = lambda w, x, **kwargs: of_framework(w, x, **kwargs)
    for grad_fn in (of_framework, own, funcga.grad(loss)):
        step = funcga.accumulate(grad_fn, 3, fold=funcga.sum(), totals=len)
        assert float(step(kit.arrays(np.ones(())), kit.arrays(np.arange(8.0)))) == 3.5


def test_the_window_that_fits_in_memory_has_them(kit):
    params, batch = problem(kit)
    step = objectives.step(kit, "CE + auxiliary", "auto")
    expected = objectives.expected(kit, "CE + auxiliary", params, batch)
    for _ in range(2):
        assert difference(kit, step(params, batch), expected) < LIMIT


def test_a_total_of_zero_gives_zeros_with_the_line_of_the_docs(kit):
    def loss(w, x, mask, *, totals):
        tokens = totals.clamp(min=1) if kit is TORCH else jnp.maximum(totals, 1)
        return (w * x * mask).sum() / tokens

    step = funcga.accumulate(funcga.value_and_grad(loss), 2, fold=funcga.sum(), totals=lambda x, mask: mask.sum())
    value, grads = step(*kit.arrays((np.ones(()), np.ones(6), np.zeros(6))))
    assert (float(value), float(grads)) == (0, 0)


CASES = int(os.environ.get("FUNCGA_FUZZ", "6"))


@pytest.mark.parametrize("seed", range(CASES))
def test_generated_trees_of_totals_are_their_sums(kit, seed):
    """Nested trees of integers, floats, bools and numbers, over rows that are cut in any way."""
    r = np.random.default_rng(seed)
    rows = int(r.integers(1, 12))
    x, numbers = r.integers(0, 2**20, size=(rows, 3)), r.normal(size=(rows, 2))
    leaves = {
        "integers": lambda x, y: x.sum(),
        "few": lambda x, y: kit.cast((x[:, 0] > 2**19).sum(), "int8"),
        "rows": lambda x, y: len(x),
        "floats": lambda x, y: y.sum(),
        "half": lambda x, y: 0.5 * len(y),
        "any": lambda x, y: (x >= 0).all(),
    }
    chosen = [str(name) for name in r.permutation([*leaves])[: r.integers(1, 7)]]
    of = {name: leaves[name] for name in chosen}

    def totals(x, y):
        found = [(name, function(x, y)) for name, function in of.items()]
        return {"first": dict(found[:1]), "others": [value for _, value in found[1:]]}

    sizes = [1] * rows if seed % 3 == 0 else None
    n = int(r.integers(1, rows + 1))
    seen = funcga.grad(lambda w, x, y, *, totals: (w * y.sum(), totals), has_aux=True)
    options = {"fold": (funcga.sum(), funcga.max()), "totals": totals}
    w, x_, y_ = kit.arrays((np.ones(()), x, numbers))
    if sizes is None:
        found = funcga.accumulate(seen, n, **options)(w, x_, y_)[1]
    else:
        found = funcga.stream(seen, **options)(w, [(x_[i : i + 1], y_[i : i + 1]) for i in range(rows)])[1]
    cuts = np.array_split(np.arange(rows), n) if sizes is None else [[i] for i in range(rows)]
    expected = {
        "integers": x.sum(), "few": (x[:, 0] > 2**19).sum(), "rows": rows, "floats": numbers.sum(),
        "half": 0.5 * rows, "any": len(cuts),
    }  # fmt: skip
    values = [found["first"][chosen[0]], *found["others"]]
    for name, value in zip(chosen, values, strict=True):
        # Only floats are rounded, and those of this sum alone are no multiples of a half.
        assert abs(float(value) - expected[name]) <= (LIMIT if name == "floats" else 0), name


def test_a_compiled_step_counts():
    params, batch = problem(TORCH)
    step = torch.compile(objectives.step(TORCH, "DAPO", 3), backend="eager")
    assert difference(TORCH, step(params, batch), objectives.expected(TORCH, "DAPO", params, batch)) < LIMIT


def test_without_jit():
    params, batch = problem(JAX)
    with jax.disable_jit():
        result = objectives.step(JAX, "CE + auxiliary", 3)(params, batch)
    assert difference(JAX, result, objectives.expected(JAX, "CE + auxiliary", params, batch)) < LIMIT


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


def test_one_program_counts_and_folds():
    params, batch = problem(JAX)
    step, compiled = objectives.step(JAX, "CE + auxiliary", 3), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    batches = [objectives.cut(batch, 0, rows)[0] for rows in (11, 11, 10, 10)]
    counts = []
    for batch in batches:
        compiled.clear()
        step(params, batch)
        counts.append(len(compiled))
    assert counts == [1, 0, 1, 0]


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


def test_a_step_with_totals_is_differentiated_in_torch():
    params, batch = problem(TORCH)
    step = objectives.step(TORCH, "DAPO", 3)
    expected = objectives.expected(TORCH, "DAPO", params, batch)
    gradient = funcga.grad(lambda params: step(params, batch)[0])(params)
    assert difference(TORCH, gradient, expected[1]) < LIMIT
    assert difference(TORCH, torch.func.grad(lambda params: step(params, batch)[0])(params), expected[1]) < LIMIT


# --- refusals


def refused(text, kit, totals=len, loss=None, **call):
    loss = loss or (lambda w, x, *, totals: (w * x).sum())
    step = funcga.accumulate(funcga.grad(loss), 2, fold=funcga.sum(), totals=totals)
    return check_refused(text, step, kit.arrays(np.ones(())), kit.arrays(np.ones((4, 3))), **call)


def test_totals_must_be_a_function():
    check_refused("totals is 3, which is no function. Pass one, such as lambda batch: {", funcga.accumulate,
                  lambda w, x, *, totals: w, 2, totals=3)  # fmt: skip


def test_grad_fn_must_take_them():
    loss = lambda params, batch: params
    text = (
        "totals= was given, and grad_fn takes (params, batch): it has no parameter `totals` for what is counted. Add "
        "it: def loss_fn(params, batch, *, totals)."
    )
    for grad_fn in (loss, funcga.grad(loss), torch.func.grad(loss), jax.grad(loss)):
        check_refused(text, funcga.accumulate, grad_fn, 2, totals=len)
        check_refused(text, funcga.stream, grad_fn, totals=len)


def test_a_loss_behind_another_signature_must_take_them_too(kit):
    inner = lambda w, x: (w * x).sum()
    text = "has no parameter `totals` for what is counted. Add it: def loss_fn(params, batch, *, totals)."
    step = funcga.accumulate(funcga.grad(lambda *args, **kwargs: inner(*args, **kwargs)), 2, totals=len)
    error = check_refused(text, step, *kit.arrays((np.ones(()), np.ones(4))))
    assert "a call raised `" in error


def test_totals_are_scalars(kit):
    refused("`totals['rows']` of a micro-batch is float", kit, lambda x: {"rows": x[0]})
    refused("A total is one number of the micro-batch: write .sum(): totals=lambda batch: {", kit, lambda x: [x])
    refused("`totals[0]` of a micro-batch is of type str, which cannot be added up", kit, lambda x: ["a"])
    refused("Return real numbers", kit, lambda x: x.sum() * 1j)
    refused("totals returned {}, without a number.", kit, lambda x: {})


def test_totals_take_what_is_split(kit):
    refused("totals is called with each argument that is split, here 1, and does not take so many", kit,
            lambda x, y: 1)  # fmt: skip
    loss = lambda w, x, *, totals: w * x
    step = funcga.accumulate(funcga.grad(loss), 2, in_axes=(None, None), fold=funcga.sum(), totals=len)
    ones = kit.arrays(np.ones(4))
    check_refused("no argument is split", step, ones, ones)


def test_a_call_brings_no_totals_of_its_own(kit):
    text = "the call has a keyword argument `totals`, and so has grad_fn from the totals= of the step."
    for step in (objectives.step(kit, "DAPO", 2), objectives.streaming(kit, "DAPO")):
        check_refused(text, step, *problem(kit), totals=3)


def test_errors_of_totals_pass(kit):
    def broken(x):
        raise ZeroDivisionError

    step = funcga.accumulate(lambda w, x, *, totals: w, 2, fold=funcga.sum(), totals=broken)
    with pytest.raises(ZeroDivisionError):
        step(kit.arrays(np.ones(())), kit.arrays(np.ones(4)))


def test_a_stream_is_gone_through_twice(kit):
    params, batch = problem(kit)
    step, window = objectives.streaming(kit, "DAPO"), objectives.cut(batch, 0, 4, 11)
    for iterator, kind in ((iter(window), "list_iterator"), ((x for x in window), "generator")):
        check_refused(
            f"microbatches is of type {kind}, which can be gone through once, and with totals= a window is counted "
            f"before it is folded. Pass a list, step(params, list(microbatches)), or what windows yields: for window "
            f"in funcga.windows(loader, 8).", step, params, iterator,
        )  # fmt: skip
        assert len([*iterator]) == 2  # nothing was taken from it

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


def test_a_loader_is_a_window():
    params, batch = problem(TORCH)
    loader = torch.utils.data.DataLoader(
        [{name: leaf[row] for name, leaf in batch.items()} for row in range(11)], batch_size=4, shuffle=True
    )
    expected = objectives.expected(TORCH, "DAPO", params, batch)
    assert difference(TORCH, objectives.streaming(TORCH, "DAPO")(params, loader), expected) < LIMIT


@pytest.mark.host
def test_totals_follow_their_stream_to_the_device(kit):
    params, batch = problem(kit)
    where = "cpu" if kit is TORCH else jax.devices()[1]
    params = params if kit is TORCH else jax.device_put(params, where)
    step = objectives.streaming(kit, "CE + auxiliary", device=where)
    expected = objectives.expected(kit, "CE + auxiliary", *problem(kit))
    assert difference(kit, step(params, objectives.cut(batch, 0, 4, 11)), expected) < LIMIT
