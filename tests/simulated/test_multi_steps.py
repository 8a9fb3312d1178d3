"""`multi_steps` on a device, with weights or tests that the host does not see: launches, bytes, and what stays as it was."""

import pytest
import torch

import funcga
import torch_backend
from tests import simulated

pytestmark = pytest.mark.simulated
NAN, INF = float("nan"), float("inf")


def made(n=4, **options):
    return funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), n, donate=True, **options)


def weighed(on_device):
    """The weights of a window."""
    return [torch.tensor(k + 1.0, device="cuda") if on_device else k + 1.0 for k in range(4)]


LAUNCHES = {
    "numbers": ({}, False, 19),
    "weights on the device": ({}, True, 70),
    "sums": ({"fold": funcga.per_weight()}, True, 70),
    "drop": ({"drop": "microbatch"}, False, 118),
    "drop, weights on the device": ({"drop": "microbatch"}, True, 126),
    "drop a window": ({"drop": "window"}, False, 125),
}


@pytest.mark.parametrize("leaves", [8, 32])
@pytest.mark.parametrize("case", LAUNCHES)
def test_launches_do_not_grow_with_the_leaves(case, leaves):
    options, on_device, most = LAUNCHES[case]
    params = {str(k): torch.ones(8, 8, device="cuda") for k in range(leaves)}
    tx, weights = made(**options), weighed(on_device)
    state = tx.init(params)
    for _ in range(3):
        with simulated.Events() as events:
            for weight in weights:
                _, state = tx.update(params, state, params, weight=weight)
    assert events.launches <= most + 2
    assert events.waits == (1 if "drop" in options else 0)


@pytest.mark.parametrize("options", [{}, {"drop": "microbatch"}], ids=str)
def test_leaves_of_several_dtypes_are_as_many_groups(options):
    """A parameter without a gradient has a None."""
    launches = []
    for leaves in (2, 16):
        params = {"frozen": None}
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
            params |= {f"{dtype}, {k}": torch.ones(8, device="cuda", dtype=dtype) for k in range(leaves)}
        tx = made(**options)
        state = tx.init(params)
        with simulated.Events() as events:
            for weight in weighed(True):
                state = tx.accumulate(params, state, weight=weight)
        launches.append(events.launches)
        for name, total in state.window.accumulated.items():
            assert total is None if name == "frozen" else total.cpu().eq(10).all()
    assert launches[0] == launches[1]


@pytest.mark.parametrize("options", [{}, {"drop": "microbatch"}], ids=str)
def test_one_copy_of_the_gradients_is_made(options):
    params = {str(k): torch.ones(2**14, device="cuda") for k in range(8)}
    tx, size = made(**options), 8 * 2**16
    state = tx.init(params)
    for weight in weighed(True):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        state = tx.accumulate(params, state, weight=weight)
        assert torch.cuda.max_memory_allocated() - before <= size + 2**14


def bits(tree):
    return [leaf.cpu().numpy().tobytes() for leaf in torch.utils._pytree.tree_leaves(tree)]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("fold", [funcga.mean(), funcga.per_weight()], ids=["mean", "per_weight"])
def test_what_does_not_count_changes_no_bit_of_the_sums(fold, dtype, bad):
    """Neither a dropped micro-batch nor one of weight 0 in a mean: 0 * NaN is NaN."""
    r = torch.Generator().manual_seed(0)
    good = {name: torch.randn(5, generator=r).to("cuda", dtype) for name in "ab"}
    spoilt = {"a": good["a"], "b": good["b"].index_fill(0, torch.tensor([2], device="cuda"), bad)}
    one, zero = torch.tensor(3, device="cuda"), torch.tensor(0.0, device="cuda")
    cases = [({"drop": "microbatch"}, one), ({"drop": "microbatch"}, 2.5), ({}, zero)]
    for options, weight in cases if fold == funcga.mean() else cases[:2]:
        tx = made(fold=fold, **options)
        empty = tx.init(good)
        state = tx.accumulate(good, tx.accumulate(spoilt, empty, weight=weight), weight=one)
        found, wanted = tx.accumulate(spoilt, state, weight=weight), tx.accumulate(good, empty, weight=one)
        assert bits(found.window.accumulated) == bits(wanted.window.accumulated)
        assert bits(found.window.tally.weight) == bits(wanted.window.tally.weight)
        assert int(found.window.rejected) == (2 if options else 0)


def test_a_maximum_is_that_of_what_is_kept():
    """Beside sums, in one window."""
    fold = {"w": funcga.mean(), "m": funcga.max()}
    tx, drops = made(fold=fold), made(fold=fold, drop="microbatch")
    good = [{name: torch.full((3,), k, device="cuda") for name in "wm"} for k in (-2.0, -1.0)]
    state = other = tx.init(good[0])
    for grads in (good[0], {**good[0], "w": good[0]["w"] * NAN}, good[1]):
        other = drops.accumulate(grads, other)
    for grads in good:
        state = tx.accumulate(grads, state)
    assert bits(state.window.accumulated) == bits(other.window.accumulated)


@pytest.mark.parametrize("scope", ["microbatch", "window"])
def test_a_window_without_an_update_changes_no_bit(scope):
    params = {name: torch.full((5,), 0.1, device="cuda") for name in "ab"}
    spoilt = {**params, "b": params["b"] * NAN}
    tx = made(2, drop=scope)
    _, state = tx.update(params, tx.update(params, tx.init(params), params)[1], params)
    before = bits(state.inner)
    bad = [spoilt, spoilt] if scope == "microbatch" else [params, spoilt]
    for grads in bad:
        updates, state = tx.update(grads, state, params)
    assert bits(state.inner) == before
    assert bits(updates) == bits(dict.fromkeys("ab", torch.zeros(5)))
    assert (int(state.updates), int(state.dropped.microbatches)) == (1, 2)
    assert int(state.dropped.windows) == (scope == "window")


def test_a_sum_of_nothing_that_counts_is_zero():
    """Of plain sums, too, in which a micro-batch of weight 0 has its values."""
    params = {"w": torch.tensor([1.0, NAN, INF], device="cuda")}
    for fold in (funcga.mean(), funcga.per_weight()):
        keeps = funcga.multi_steps(funcga.transforms.Transform(lambda p: (), lambda g, s, p=None: (g, s)), 1, fold=fold)
        updates, _ = keeps.update(params, keeps.init(params), params, weight=torch.tensor(0.0, device="cuda"))
        assert updates["w"].tolist() == [0, 0, 0]
