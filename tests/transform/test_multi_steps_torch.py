"""`multi_steps` in torch: memory, what is given away, sparse gradients, compiled halves, saved states."""

import io

import pytest
import torch

import funcga
import torch_backend
from funcga import Fold, Monoid, Reducer, normalizers
from funcga.transforms import Transform
from tests.kits import TORCH, difference, needs_cuda, no_synchronisation
from tests.torch_backend.optim.test_from_optimizer import Allocated
from torch_backend import from_optimizer


def tree(seed, dtype=torch.float32, width=32):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)
    return {"w": make(width, width), "b": make(width), "scale": make()}


def adamw(**options):
    return from_optimizer(torch.optim.AdamW, lr=0.1, **options)


def made(tx, emits, window=4):
    """What a call of `update` makes, in trees of the parameters' size: all of it, kept or not."""
    params = {f"w{i}": torch.randn(64, 64) for i in range(8)}
    grads = {name: torch.ones_like(leaf) for name, leaf in params.items()}
    state = tx.init(params)
    for _ in range(2 * window - (1 if emits else 2)):
        _, state = tx.update(grads, state, params)
    with Allocated() as found:
        tx.update(grads, state, params)
    trees, rest = divmod(found.bytes, 8 * 64 * 64 * 4)
    assert rest < 64 * 64  # of counts, and of weights
    return trees


def test_memory_that_is_given_away_is_used():
    tx = funcga.multi_steps(adamw(fused=True), 4, donate=True)
    assert made(tx, emits=False) == 0
    assert made(tx, emits=True) == 1  # the updates


def test_a_pure_update_makes_what_it_returns():
    tx = funcga.multi_steps(adamw(fused=True), 4)
    assert made(tx, emits=False) == 2  # the accumulators, and zeros
    assert made(tx, emits=True) == 4  # the same, the updates and the two moments


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("fold", [funcga.mean(), funcga.per_weight(), funcga.max()], ids=["mean", "per_weight", "max"])
def test_an_empty_window_takes_no_memory_and_goes_on_from_a_file(fold, donate):
    """A weight of 0 begins it as well: nothing is in the sums then, and they may be added to."""
    sgd, params = Transform(lambda p: (), lambda g, s, p=None: (g, s)), tree(0)
    tx, found = funcga.multi_steps(sgd, 3, fold=fold, donate=donate), []
    _, empty = tx.flush(tx.accumulate(tree(1), tx.init(params)), params)
    of_nothing = empty.window.accumulated["w"].untyped_storage().nbytes()
    assert of_nothing == (32 * 32 * 4 if fold == funcga.max() else 4)
    file = io.BytesIO()
    torch.save(empty, file)
    file.seek(0)
    for state in (empty, torch.load(file, weights_only=True), tx.init(params)):
        for seed, weight in ((2, 0), (3, 5), (4, 1)):
            updates, state = tx.update(tree(seed), state, params, weight=weight)
        found.append(updates)
    assert difference(TORCH, found[0], found[1]) == difference(TORCH, found[0], found[2]) == 0
    if fold == funcga.mean():
        expected = {name: (5 * tree(3)[name] + tree(4)[name]) / 6 for name in params}
        assert difference(TORCH, found[0], expected) < 1e-6


@pytest.mark.parametrize("wrap", [torch.nn.Parameter, lambda t: t.view(-1)], ids=["parameter", "view"])
def test_what_is_kept_in_disguise_is_not_emptied(wrap):
    def update(grads, state, params=None):
        return {k: -v for k, v in grads.items()}, {k: wrap(v) for k, v in grads.items()}

    tx, params = funcga.multi_steps(Transform(lambda params: (), update), 1), tree(0)
    _, state = tx.update(tree(1), tx.init(params), params)
    for name, kept in state.inner.items():
        torch.testing.assert_close(kept.detach().reshape(-1), tree(1)[name].reshape(-1))


def test_the_callers_gradients_are_never_written_to():
    """Also if the monoid returns what it was given."""
    last = Fold(
        Reducer(lambda xp, v, w: v, Monoid(lambda xp, like: like * 0, lambda xp, a, b: b)), normalizers.by_weight
    )
    tx, params, grads = funcga.multi_steps(adamw(), 1, fold=last), tree(0), tree(1)
    tx.update(grads, tx.init(params), params, weight=5)
    assert difference(TORCH, grads, tree(1)) == 0


def test_zeros_are_each_their_own_and_may_be_written_to():
    params = {"a": torch.ones(()), "b": torch.ones(()), "c": torch.ones(3), "d": torch.ones(3)}
    updates, _ = (tx := funcga.multi_steps(adamw(), 2)).update(params, tx.init(params), params)
    for update in updates.values():
        update.mul_(2)
    updates["a"].add_(1)
    updates["c"][0] += 1
    assert [updates[name].sum().item() for name in "abcd"] == [1, 0, 1, 0]


def test_gradients_of_another_device():
    tx, params = funcga.multi_steps(adamw(), 2), tree(0)
    state = tx.init(params)
    with pytest.raises(RuntimeError, match="on device meta"):
        tx.accumulate({name: leaf.to("meta") for name, leaf in params.items()}, state)


def test_a_transform_keeps_no_graph():
    """Though the params require gradients."""
    decay = Transform(lambda p: p, lambda g, s, p=None: ({k: g[k] + p[k] for k in g}, {k: s[k] + p[k] for k in s}))
    tx, params = funcga.multi_steps(decay, 1), {"w": torch.nn.Parameter(torch.ones(2))}
    updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
    assert not updates["w"].requires_grad
    assert not state.inner["w"].requires_grad


@pytest.mark.parametrize("donate", [False, True])
def test_updates_without_an_update_change_nothing(donate):
    tx, params = funcga.multi_steps(adamw(), 2, donate=donate), tree(0)
    updates, _ = tx.update(tree(1), tx.init(params), params)
    if donate:  # they take no memory
        assert updates["w"].untyped_storage().nbytes() == 4
        with pytest.raises(RuntimeError, match="more than one element"):
            updates["w"].add_(1)
    applied = torch_backend.apply_updates(params, updates)
    assert difference(TORCH, applied, params) == 0
    assert applied["w"].data_ptr() != params["w"].data_ptr()


def test_sparse_gradients_are_summed_densely_and_looked_at():
    params = {"e": torch.ones(5, 2), "frozen": None}
    with torch.sparse.check_sparse_tensor_invariants():
        make = lambda value: torch.sparse_coo_tensor([[1, 1, 3]], torch.full((3, 2), value), (5, 2)).coalesce()
        one, bad = ({"frozen": None, "e": make(value)} for value in (1.0, float("nan")))
        for drop, count in (("microbatch", 1), ("window", 3)):
            tx = funcga.multi_steps(adamw(), 4, drop=drop)
            state = tx.accumulate(one, tx.accumulate(one, tx.init(params)))
            torch.testing.assert_close(state.window.accumulated["e"], 2 * one["e"].to_dense())
            updates, state = tx.flush(tx.accumulate(bad, state), params)
            assert int(state.dropped.microbatches) == count
            assert updates["frozen"] is None


def test_the_halves_compile_to_one_graph_each():
    tx = funcga.multi_steps(Transform(lambda p: (), lambda g, s, p=None: ({k: -v for k, v in g.items()}, s)), 3)
    params = tree(0)
    accumulate = torch.compile(lambda g, s: tx.accumulate(g, s), fullgraph=True, backend="eager")
    eager = state = tx.init(params)
    for k in range(3):
        eager, state = tx.accumulate(tree(k + 1), eager), accumulate(tree(k + 1), state)
    assert difference(TORCH, tx.flush(state, params)[0], tx.flush(eager, params)[0]) == 0


def test_a_weight_that_the_host_does_not_see_weighs_each_leaf_as_its_fold_says():
    """The sum of a mean is in a unit, 16 for a weight of 20, and that of another fold is not."""
    fold = {"w": funcga.mean(), "b": Fold(funcga.reducers.weighted, normalizers.by_steps), "scale": funcga.sum()}
    tx = funcga.multi_steps(Transform(lambda p: (), lambda g, s, p=None: (g, s)), 2, fold=fold)
    compiled = torch.compile(lambda g, s, weight: tx.accumulate(g, s, weight=weight), backend="eager")
    eager = state = tx.init(tree(0))
    for k, weight in enumerate((20.0, 3.0)):
        eager, state = tx.accumulate(tree(k), eager, weight=weight), compiled(tree(k), state, torch.tensor(weight))
    assert difference(TORCH, tx.flush(state, tree(0))[0], tx.flush(eager, tree(0))[0]) <= 1e-6


@needs_cuda
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_the_host_does_not_wait_for_the_device(donate, options):
    move = lambda tree: {name: leaf.cuda() for name, leaf in tree.items()}
    tx, params = funcga.multi_steps(adamw(**options), 2, donate=donate), move(tree(0))
    state, grads = tx.init(params), [move(tree(k + 1)) for k in range(4)]
    tokens = torch.tensor(7, device="cuda")
    for warm in (True, False):
        with no_synchronisation() if not warm else torch.no_grad():
            for g in grads:
                updates, state = tx.update(g, state, params, weight=tokens)
    assert updates["w"].is_cuda
