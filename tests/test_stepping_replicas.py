"""`multi_steps(across=)` in torch: each process folds what it has, and an update merges them, once."""

import pytest
import torch
import torch.distributed as dist

import funcga
import torch_backend
from funcga import TargetWeight, Transform
from tests.processes import Failed, processes
from tests.test_replicas import counted


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(6, 3, generator=generator, dtype=dtype),
        "b": torch.randn(3, generator=generator, dtype=dtype),
    }
    rows = torch.randn(24, 6, generator=generator, dtype=dtype)
    return params, rows


def gradient(params, rows):
    return torch.func.grad(lambda p: (torch.tanh(rows @ p["w"] + p["b"]) ** 2).mean())(params)


def sgd():
    return Transform(lambda params: (), lambda g, s, p=None: ({k: -v for k, v in g.items()}, s))


# the micro-batches of each rank, as rows of the batch: of different sizes
PARTS = [[(0, 5), (5, 6), (6, 12)], [(12, 13), (13, 20), (20, 24)]]


def updates_of(group, choices, windows):
    params, rows = problem()
    tx = funcga.multi_steps(sgd(), 3, across=group, **choices)
    state, found = tx.init(params), []
    with counted() as calls:
        for window in range(windows):
            for start, stop in PARTS[dist.get_rank(group)]:
                part = rows[start:stop] * (window + 1)
                updates, state = tx.update(gradient(params, part), state, params, weight=stop - start)
            found.append(updates)
            found.append([name for name, _ in calls])
            calls.clear()
    return found, int(state.updates), float(state.window.tally.weight[0])


@pytest.mark.parametrize("choices", [{}, {"donate": True}, {"drop": "microbatch"}], ids=str)
def test_an_update_is_that_of_all_rows(choices):
    params, rows = problem()
    for found, count, left in processes().run(updates_of, choices, 2, size=2):
        assert (count, left) == (2, 0)
        for window in range(2):
            expected = gradient(params, rows * (window + 1))
            for name, update in found[2 * window].items():
                torch.testing.assert_close(update, -expected[name], rtol=1e-13, atol=1e-14)
        assert found[1].count("allreduce_") == 1
        # once the replicas know each other: the header, the sums, and the integers that count what was rejected
        assert found[3] == ["allgather_", "allreduce_", "allgather_"]


def drops(group, drop):
    params, rows = problem()
    tx = funcga.multi_steps(sgd(), 3, across=group, drop=drop)
    state, found = tx.init(params), []
    rank = dist.get_rank(group)
    for window in range(2):
        for k, (start, stop) in enumerate(PARTS[rank]):
            grads = gradient(params, rows[start:stop])
            if (window, rank, k) == (0, 1, 1):
                grads["w"] = grads["w"] * float("nan")
            updates, state = tx.update(grads, state, params, weight=stop - start)
        found.append((updates, tx.has_updated(state)))
    return found, [int(x) for x in state.dropped], int(state.updates)


def test_a_micro_batch_is_dropped_on_one_rank():
    params, rows = problem()
    expected = gradient(params, torch.cat([rows[:13], rows[20:]])), gradient(params, rows)
    for found, dropped, count in processes().run(drops, "microbatch", size=2):
        assert (dropped, count) == ([1, 0], 2)
        for (updates, has), whole in zip(found, expected, strict=True):
            assert has
            for name in updates:
                torch.testing.assert_close(updates[name], -whole[name], rtol=1e-13, atol=1e-14)


def test_a_window_is_dropped_on_all_ranks():
    params, rows = problem()
    whole = gradient(params, rows)
    for found, dropped, count in processes().run(drops, "window", size=2):
        assert (dropped, count) == ([6, 1], 1)
        assert [has for _, has in found] == [False, True]
        assert all((u == 0).all() for u in found[0][0].values())
        for name, update in found[1][0].items():
            torch.testing.assert_close(update, -whole[name], rtol=1e-13, atol=1e-14)


def targets(group):
    params, rows = problem()
    tx = funcga.multi_steps(sgd(), TargetWeight(12), across=group)
    state, ends = tx.init(params), []
    for start, stop in PARTS[dist.get_rank(group)]:
        _, state = tx.update(gradient(params, rows[start:stop]), state, params, weight=stop - start)
        ends.append(tx.has_updated(state))
    return ends


def test_a_target_weight_is_that_of_all():
    # 5 and 1, then 1 and 7, then 6 and 4: 6, 14; 10
    assert processes().run(targets, size=2) == [[False, True, False]] * 2


def flushes(group):
    params, rows = problem()
    tx = funcga.multi_steps(sgd(), 8, across=group)
    state = tx.init(params)
    for start, stop in PARTS[dist.get_rank(group)]:
        state = tx.accumulate(gradient(params, rows[start:stop]), state, weight=stop - start)
    updates, state = tx.flush(state, params)
    return updates, tx.has_updated(state)


def test_a_partial_window_of_all_is_exact():
    params, rows = problem()
    whole = gradient(params, rows)
    for updates, has in processes().run(flushes, size=2):
        assert has
        for name in updates:
            torch.testing.assert_close(updates[name], -whole[name], rtol=1e-13, atol=1e-14)


def differs(group, how):
    params, _ = problem()
    w = params["w"]
    others = {"leaf": {"w": w}, "shape": {**params, "w": w.T.contiguous()}}
    params = others[how] if dist.get_rank(group) else params
    tx = funcga.multi_steps(sgd(), 1, across=group)
    tx.update(params, tx.init(params), params)


@pytest.mark.parametrize(("how", "texts"), [("leaf", ["['b']"]), ("shape", ["[3, 6]", "[6, 3]"])])
def test_unlike_replicas_are_found_out(how, texts):
    with pytest.raises(Failed) as failed:
        processes().run(differs, how, size=2)
    for kind, text in failed.value.errors:
        assert kind == "FuncgaError"
        assert all(part in text for part in texts)


def two_models(group):
    tx = funcga.multi_steps(sgd(), 1, across=group)
    found = []
    for width in (2, 5):
        params = {"w": torch.full((width,), 1.0 + dist.get_rank(group))}
        updates, _ = tx.update(params, tx.init(params), params)
        found.append(updates["w"].tolist())
    return found


def test_one_transform_for_two_models():
    assert processes().run(two_models, size=2) == [[[-1.5] * 2, [-1.5] * 5]] * 2


def with_adamw(group):
    params, rows = problem()
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 3, across=group)
    state = tx.init(params)
    for _ in range(3):
        for start, stop in PARTS[dist.get_rank(group)]:
            updates, state = tx.update(gradient(params, rows[start:stop]), state, params, weight=stop - start)
        params = torch_backend.apply_updates(params, updates)
    funcga.check_replicas(params, group)
    return params


def test_an_optimizer_of_torch_stays_in_step():
    params, rows = problem()
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=0.1)
    for _ in range(3):
        torch_backend.assign_grads(leaves, gradient({k: v.detach() for k, v in leaves.items()}, rows))
        optimizer.step()
    for found in processes().run(with_adamw, size=2):
        for name in found:
            torch.testing.assert_close(found[name], leaves[name].detach(), rtol=1e-9, atol=1e-11)
