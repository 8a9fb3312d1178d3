"""`pack`: what it promises of micro-batches and replicas, and that packs do not change the gradient."""

import itertools
import math
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcga
from benchmarks import packing
from tests.processes import processes
from tests.torch_backend.wrapped.test_wrapped import ddp, errors, fsdp2
from torch_backend import module_value_and_grad, pure_loss, trainable

CASES = int(os.environ.get("FUNCGA_FUZZ", "200"))


def longest_first(costs, count):
    """The cost of the heaviest of so many micro-batches."""
    loads = [0] * count
    for cost in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += cost
    return max(loads)


def drawn(seed):
    """Lengths of one of several kinds, a budget, a number of replicas and a cost."""
    r = random.Random(seed)
    most = r.choice([0, 3, 40, 2000])
    draws = [lambda: r.randint(0, most), lambda: most, lambda: min(most, int(r.lognormvariate(2, 1)))]
    lengths = [r.choice(draws[: r.randint(1, 3)])() for _ in range(r.choice([1, 2, 5, 12, 60, 300]))]
    cost = r.choice([None, None, lambda length: length**2, lambda length: length + length**2 / 64])
    largest = max(lengths if cost is None else map(cost, lengths))
    return lengths, (largest or 1) * r.choice([1, 1.25, 2, 5, math.inf]), r.choice([1, 2, 3, 8]), cost


@pytest.mark.parametrize("seed", range(CASES))
def test_what_it_promises(seed):
    lengths, budget, replicas, cost = drawn(seed)
    packs = funcga.pack(lengths, budget, replicas=replicas, cost=cost)
    costs = [cost(length) if cost else length for length in lengths]
    loads = [[sum(costs[row] for row in rows) for rows in pack] for pack in packs]
    (n,) = {len(pack) for pack in packs}
    count, rows = n * replicas, [row for pack in packs for rows in pack for row in rows]
    assert sorted(rows) == [*range(len(lengths))]
    assert len(packs) == replicas
    assert max(map(max, loads)) <= budget
    # as few as there may be, and no more than first fit takes
    assert sum(costs) <= count * budget
    assert n <= len(packing.first_fit_decreasing(costs, budget, replicas)[0])
    # none is empty if there are rows enough, and no replica is
    assert sum(map(bool, itertools.chain(*packs))) == min(count, len(lengths))
    assert sum(map(any, packs)) == min(replicas, len(lengths))
    # even, and the heaviest first
    assert max(map(max, loads)) <= longest_first(costs, count)
    by_turn = [*zip(*loads, strict=True)]
    assert all(min(one) >= max(other) for one, other in itertools.pairwise(by_turn))
    totals = [*map(sum, loads)]
    assert max(totals) - min(totals) <= max(max(turn) - min(turn) for turn in by_turn)
    assert packs == funcga.pack(lengths, budget, replicas=replicas, cost=cost)


@pytest.mark.parametrize("unit", [0.1, 0.7, 1 / 3, 1e-9, 1.1e12])
@pytest.mark.parametrize("replicas", [1, 2])
def test_fractions_that_fill_the_budget_take_no_more_micro_batches(unit, replicas):
    """Costs of k units, in a budget of units, against the packs of the whole numbers k."""
    for seed in range(60):
        r = random.Random(seed)
        lengths, budget = [r.randint(1, 9) for _ in range(40)], r.randint(9, 30)
        if seed % 3 == 0:  # of equal rows, which fill it exactly
            lengths, budget = [seed % 7 + 1] * 40, 5 * (seed % 7 + 1)
        whole = funcga.pack(lengths, budget, replicas=replicas)
        packs = funcga.pack(lengths, budget * unit, replicas=replicas, cost=lambda k, u=unit: k * u)
        assert len(packs[0]) == len(whole[0]), (seed, unit)
        assert all(sum(lengths[row] for row in rows) <= budget for pack in packs for rows in pack)
    # a row that costs the budget, but for its rounding
    assert funcga.pack([3], 0.3, cost=lambda k: k * 0.1) == [[[0]]]
    with pytest.raises(funcga.FuncgaError, match="fits into no micro-batch"):
        funcga.pack([1], 1.0, cost=lambda k: 1 + 1e-9)


def test_whole_numbers_are_exact_however_large():
    for number in (int, float):
        with pytest.raises(funcga.FuncgaError, match="fits into no micro-batch"):
            funcga.pack([2**52 + 1], number(2**52))
        packs = funcga.pack([2**51, 2**51 + 1], number(2**52), cost=number)
        assert sorted(map(len, packs[0])) == [1, 1]


def test_against_the_best_known():
    """On the lengths of the page's table: none takes fewer micro-batches."""
    for by in packing.rows(packing.DRAWN, updates=2, size=128).values():
        assert by["lower bound"].n <= by["`pack`"].n == min(m.n for name, m in by.items() if name != "lower bound")


def ways(costs):
    """The loads of every way to put rows together."""
    if not costs:
        return {()}
    first, *others = costs
    return {
        tuple(sorted((*loads[:k], load + first, *loads[k + 1 :])))
        for loads in ways(others)
        for k, load in enumerate((*loads, 0))
    }


def test_against_every_way_to_pack():
    """The bounds are those of Dosa (2007) and Graham (1969)."""
    r, optimal = random.Random(0), 0
    for _ in range(CASES):
        lengths = [r.randint(1, 30) for _ in range(r.randint(1, 7))]
        budget = max(lengths) + r.randint(0, 20)
        ((*microbatches,),) = funcga.pack(lengths, budget)
        n, heaviest = len(microbatches), max(sum(lengths[row] for row in rows) for rows in microbatches)
        fewest = min(len(loads) for loads in ways(lengths) if max(loads) <= budget)
        least = min(max(loads) for loads in ways(lengths) if len(loads) <= n)
        assert 9 * n <= 11 * fewest + 6
        assert heaviest <= (4 / 3 - 1 / (3 * n)) * least
        optimal += n == fewest
    assert optimal > 0.98 * CASES


def test_arrays_generators_and_numbers_of_any_kind():
    lengths = [7, 2, 5, 3, 3, 1, 4]
    expected = funcga.pack(lengths, 9, replicas=2)
    for found in (np.array(lengths), torch.tensor(lengths), jnp.array(lengths), iter(lengths)):
        assert funcga.pack(found, np.int64(9), replicas=np.int64(2)) == expected
    assert {type(row) for pack in expected for rows in pack for row in rows} == {int}
    squares = np.array(range(8)) ** 2
    assert funcga.pack(lengths, 60, cost=squares.__getitem__) == funcga.pack(lengths, 60, cost=lambda k: k**2)
    # numbers that no float64 holds are exact
    k = 2**53 + 3
    assert len(funcga.pack([6 * k, 3 * k, 3 * k, 2 * k, 2 * k, 2 * k], 6 * k)[0]) == 3
    assert len(funcga.pack([2**53, 1, 2], 2**53 + 2)[0]) == 2


BUDGET = "the budget is a number above 0, of the tokens of a micro-batch or of what they cost, and there is at least 1 replica."
COST = "both are at least 0, and finite. Write cost=lambda length: length**2, or leave it out for tokens."
REFUSED = {
    "row 2 costs 11, and the budget is 8: it fits into no micro-batch. Cut it or leave it out, or write budget=11, as no row costs more.": {"lengths": [3, 9, 11, 4]},
    "row 1 costs 81, and the budget is 64: it fits": {"lengths": [3, 9], "budget": 64, "cost": lambda length: length**2},
    "lengths is empty: there is no row to pack. Check the sampler, or that a generator was not used up before.": {"lengths": []},
    f"row 1 has -1 tokens and costs -1: {COST}": {"lengths": [3, -1]},
    **{f"budget is {budget} and replicas is 1: {BUDGET}": {"budget": budget} for budget in (0, math.nan)},
    f"budget is 8 and replicas is 0: {BUDGET}": {"replicas": 0},
    **{f"row 1 has 4 tokens and costs {cost}: {COST}": {"cost": {3: 1, 4: cost}.get} for cost in (-0.5, math.inf)},
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text):
    with pytest.raises(funcga.FuncgaError) as caught:
        funcga.pack(**{"lengths": [3, 4], "budget": 8, **REFUSED[text]})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [{"lengths": [1.5]}, {"lengths": [[1]]}, {"budget": None}, {"replicas": 2.0}, {"cost": lambda length: None}],
)
def test_what_python_refuses(given):
    with pytest.raises(TypeError):
        funcga.pack(**{"lengths": [3, 4], "budget": 8, **given})


# -- the gradient does not depend on the packs

TOKENS = [9, 8, 7]  # with a budget of 9 three micro-batches, so that of two replicas one has an empty one


def rows_of_tokens(lengths):
    r = np.random.default_rng(0)
    return [(r.integers(11, size=length), r.integers(5, size=length)) for length in lengths]


def flat(rows, numbers):
    """The rows of a micro-batch one behind the other; of an empty one a token without a label."""
    chosen = [rows[number] for number in numbers] or [(np.zeros(1, int), np.full(1, -100))]
    return tuple(torch.from_numpy(np.concatenate(column)) for column in zip(*chosen, strict=True))


def token_loss(module, x, y):
    return F.cross_entropy(module(x), y)


def count(x, y):
    return (y != -100).sum()


def wrapped(group, wrapper, lengths):
    """How far the gradient over two replicas is from that of all rows at once."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(11, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 6), nn.Tanh()), nn.Linear(6, 5))
    rows = rows_of_tokens(lengths)
    loss, expected = funcga.value_and_grad(pure_loss(module, token_loss))(
        trainable(module), *flat(rows, range(len(rows)))
    )
    packs = funcga.pack(lengths, 9, replicas=2)
    assert any([] in pack for pack in packs)
    module = {"ddp": ddp, "fsdp2": fsdp2}[wrapper](group, module)
    step = funcga.stream(module_value_and_grad(module, token_loss), weight=count)
    result = step(flat(rows, numbers) for numbers in packs[group.rank()])
    return errors(module, result, loss, [*expected.values()])


@pytest.mark.parametrize("lengths", [TOKENS, [5]], ids=["an empty micro-batch", "a replica without rows"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_over_replicas_that_reduce_by_themselves(wrapper, lengths):
    for found in processes().run(wrapped, wrapper, lengths, size=2):
        assert max(found) < 2e-6  # roundings of float32


def test_in_jax_with_one_shape():
    """Padded to the budget, micro-batches have one shape, whatever rows they have: it is compiled once."""
    lengths = [4, 9, 1, 2, 7, 3, 3]
    rows, traces, w = rows_of_tokens(lengths), [], jnp.linspace(-1, 1, 55).reshape(11, 5)

    def padded(numbers):
        x, y = (column.numpy() for column in flat(rows, numbers))
        return jnp.pad(x, (0, 9 - len(x))), jnp.pad(y, (0, 9 - len(y)), constant_values=-100)

    def loss_fn(w, x, y):
        traces.append(len(x))
        return jnp.where(y != -100, -jax.nn.log_softmax(w[x])[jnp.arange(len(x)), y], 0).sum()

    step = funcga.stream(jax.value_and_grad(loss_fn), fold=funcga.per_weight(), weight=count)
    packs = [funcga.pack(lengths, 9, replicas=replicas) for replicas in (1, 8)]
    found = [step(w, map(padded, itertools.chain(*pack))) for pack in packs]
    assert set(traces) == {9}
    assert len(traces) <= 2  # its shapes, and the program
    expected = jax.value_and_grad(loss_fn)(w, *(np.concatenate(column) for column in zip(*rows, strict=True)))
    for result in found:
        for one, other in zip(result, expected, strict=True):
            np.testing.assert_allclose(one, other / sum(lengths), atol=2e-6)  # roundings of float32
