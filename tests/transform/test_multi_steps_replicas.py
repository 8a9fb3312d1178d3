"""`multi_steps(across=)` in torch: each process folds what it has, and an update merges them, once."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist

import funcga
import torch_backend
from funcga.transforms import TargetWeight, Transform
from tests.processes import processes
from tests.torch_backend.reduce.test_replicas import counted


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(6, 3, generator=generator, dtype=dtype),
        "scale": torch.randn((), generator=generator, dtype=dtype),  # which travels in the header
        "b": torch.randn(3, generator=generator, dtype=dtype),
    }
    rows = torch.randn(24, 6, generator=generator, dtype=dtype)
    return params, rows


def gradient(params, rows):
    return torch.func.grad(lambda p: (torch.tanh(p["scale"] * (rows @ p["w"]) + p["b"]) ** 2).mean())(params)


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
        # A window that is not full, with the last call of every rank.
        state = tx.accumulate(gradient(params, part), state, weight=len(part))
        updates, state = tx.flush(state, params)
        found.append(updates)
    return found, int(state.updates), float(state.window.tally.weight[0])


@pytest.mark.parametrize("choices", [{"donate": True}, {"drop": "microbatch"}], ids=str)
def test_an_update_is_that_of_all_rows(choices):
    params, rows = problem()
    for found, count, left in processes().run(updates_of, choices, 2, size=2):
        assert (count, left) == (3, 0)
        partial = gradient(params, 2 * torch.cat([rows[6:12], rows[20:24]]))
        for name, update in found.pop().items():
            torch.testing.assert_close(update, -partial[name], rtol=1e-13, atol=1e-14)
        for window in range(2):
            expected = gradient(params, rows * (window + 1))
            for name, update in found[2 * window].items():
                torch.testing.assert_close(update, -expected[name], rtol=1e-13, atol=1e-14)
        # The header, which counts what was rejected, and the sums; in the first window more only where the processes take
        # steps of other numbers, as they have merged something else before.
        assert found[1][-2:] == found[3] == ["allgather_", "allreduce_"]
        assert {*found[1][:-2]} <= {"allgather_"}


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


def test_what_one_rank_drops_is_dropped_on_all():
    """A micro-batch with its weight, or the whole window."""
    params, rows = problem()
    whole = gradient(params, rows)
    without = gradient(params, torch.cat([rows[:13], rows[20:]]))
    zeros = {name: torch.zeros_like(leaf) for name, leaf in whole.items()}
    for drop, counts, first in (("microbatch", [1, 0, 2], without), ("window", [6, 1, 1], zeros)):
        for found, dropped, count in processes().run(drops, drop, size=2):
            assert [*dropped, count] == counts
            assert [has for _, has in found] == [drop == "microbatch", True]
            for (updates, _), expected in zip(found, (first, whole), strict=True):
                for name in updates:
                    torch.testing.assert_close(updates[name], -expected[name], rtol=1e-13, atol=1e-14)


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


# A state that is saved in the middle of a window


def in_the_middle(group, window):
    """The state of each rank after two calls of three, in the first window or in the second."""
    params, rows = problem()
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 3, across=group)
    state = tx.init(params)
    for call in range(3 * window + 2):
        start, stop = PARTS[group.rank()][call % 3]
        updates, state = tx.update(gradient(params, rows[start:stop]), state, params, weight=stop - start)
        if tx.has_updated(state):
            params = torch_backend.apply_updates(params, updates)
    return tx.merge([state]) if group.size() == 1 else state, params


def goes_on(group, state, params, last):
    """The update that ends the window: each rank has a part of the rows of the last call."""
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 3, across=group)
    rows = problem()[1][last][group.rank() :: group.size()]
    updates, state = tx.update(gradient(params, rows), state, params, weight=len(rows))
    assert tx.has_updated(state)
    return updates, [int(x) for x in (state.updates, state.offered, state.window.tally.steps)]


LAST = [*range(6, 12), *range(20, 24)]  # the rows of the last call of PARTS


@pytest.mark.parametrize(("size", "window"), [(1, 1), (3, 0)])
def test_a_merged_state_goes_on_with_any_number_of_replicas(size, window):
    saved = processes().run(in_the_middle, window, size=2)
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 3)
    merged, params = tx.merge([state for state, _ in saved]), saved[0][1]
    whole, alone = problem()[1], funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 1)
    start, state = problem()[0], None
    state = alone.init(start)
    for _ in range(window + 1):
        expected, state = alone.update(gradient(start, whole), state, start)
        start = torch_backend.apply_updates(start, expected)
    for updates, counts in processes().run(goes_on, merged, params, LAST, size=size):
        assert counts == [window + 1, 0, 0]
        for name in updates:
            torch.testing.assert_close(updates[name], expected[name], rtol=1e-9, atol=1e-11)
    found, _ = tx.update(gradient(params, whole[LAST]), merged, params, weight=len(LAST))  # without replicas
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-11)


def a_part_goes_on(group, state, params):
    """An update of the state that another replica has saved; one that raises tells the others, which need not wait."""
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 3, across=group)
    with pytest.raises(funcga.FuncgaError) as error:
        tx.update(gradient(params, problem()[1]), state, params)
    return str(error.value)


def test_the_part_of_another_replica_is_refused():
    saved = processes().run(in_the_middle, 0, size=2)
    texts = processes().run(a_part_goes_on, saved[1][0], saved[0][1], size=1)
    text = (
        "the state was saved in the middle of a window, as the part of replica (rank, number of replicas) [(1, 2)], (0, 0) "
        "for that of all, and None without across=: an update takes the state of every replica, each once, and a replica "
        "its own. Merge the states of all replicas, state = tx.merge(states), and load that one on every replica, whatever "
        "their number. Gather them when you save: torch.distributed.all_gather_object(states, state). Without across= save "
        "one state, tx.merge([state]): each is a window of its own."
    )
    assert texts == [text]
    tx = funcga.multi_steps(torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1), 3)
    for state, params in saved:
        with pytest.raises(funcga.FuncgaError, match="an update takes the state of every replica, each once"):
            tx.flush(state, params)
    (first, _), (second, _) = saved
    for states, listed in (
        ([first], [(0, 2)]),
        ([first, first], [(0, 2), (0, 2)]),
        ([second, first, first], [(1, 2), (0, 2), (0, 2)]),
    ):
        with pytest.raises(
            funcga.FuncgaError, match=re.escape(f"number of replicas) {listed}, (0, 0) for that of all")
        ):
            tx.merge(states)
    later = second._replace(updates=second.updates + 1)
    with pytest.raises(
        funcga.FuncgaError, match=r"not of one moment: they have made so many updates: 0, 1\. Save them"
    ):
        tx.merge([first, later])
    merged = tx.merge([second, first])
    assert tx.merge([merged, merged]).window.tally.steps == merged.window.tally.steps  # both are of all replicas


def raises_after_the_merge(group, kind):
    """What each rank has in three updates, of which rank 1 raises in the second: its optimizer, or its observer."""
    params, rows = problem()
    rank, update = group.rank(), 0

    def fails(value):
        if rank == 1 and update == 1:
            raise OSError("disk full")
        return value

    observe, tx = None, sgd()
    if kind == "observer":
        observe = funcga.observers.Observer(funcga.mean(), lambda xp, observed: fails(observed.result))
    else:
        tx = Transform(lambda params: (), lambda g, s, p=None: (fails(g), s))
    tx = funcga.multi_steps(tx, 1, across=group, observe=observe)
    state, found = tx.init(params), []
    for update in range(4):  # noqa: B007 - fails reads it
        try:
            _, state = tx.update(gradient(params, rows), state, params)
            found.append("nothing")
        except (OSError, funcga.FuncgaError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("kind", ["optimizer", "observer"])
def test_an_error_after_the_merge_ends_the_next_update_on_all(kind):
    first, second = processes().run(raises_after_the_merge, kind, size=2)
    assert first[:2] == ["nothing"] * 2
    assert second[:2] == ["nothing", "disk full"]
    assert first[2:] == second[2:]
    assert all(text.startswith("the replicas are out of step") for text in first[2:])


def requests(group, state, bounds):
    """The state of each rank after as many requests as it gets: rows of the batch, from one bound to the next."""
    params, rows = problem()
    tx = funcga.multi_steps(sgd(), 1, across=group)
    state = tx.init(params) if state is None else state
    own = bounds[group.rank()]
    for start, stop in itertools.pairwise(own):
        state = tx.accumulate(gradient(params, rows[start:stop]), state, weight=stop - start)
    return state


def flushed(group, state):
    tx = funcga.multi_steps(sgd(), 1, across=group)
    return tx.flush(state, problem()[0])[0]


# How many requests each rank gets, before the states are saved and after that, on as many ranks.
UNEVEN = [
    ([[0, 2, 5, 6], [6, 12]], [[12, 16, 20, 24], [24]]),
    ([[0, 2, 5, 12], [12]], [[12], [12, 20, 24]]),
    ([[0], [0, 2, 5, 12]], [[12, 24], [24]]),
    ([[0], [0], [0, 2, 12]], [[12], [12], [12, 24]]),
]


@pytest.mark.parametrize(("before", "after"), UNEVEN)
def test_states_of_replicas_with_other_numbers_of_requests_are_merged(before, after):
    """Twice: what a replica has not added to since a state was loaded is counted once."""
    params, rows = problem()
    tx, alone = funcga.multi_steps(sgd(), 1, across=dist.group.WORLD), funcga.multi_steps(sgd(), 1)
    states = processes().run(requests, None, before, size=len(before))
    merged = tx.merge(states)
    assert int(merged.offered) == max(map(len, before)) - 1
    assert int(merged.window.tally.steps) == sum(map(len, before)) - len(before)
    of_all = torch.cat([rows[each[0] : each[-1]] for each in before])
    for found in (alone.flush(merged, params)[0], *processes().run(flushed, merged, size=3)):
        for name, expected in gradient(params, of_all).items():
            torch.testing.assert_close(found[name], -expected, rtol=1e-12, atol=1e-14)
    states = processes().run(requests, merged, after, size=len(after))
    again = tx.merge(states)
    for found in (*processes().run(flushed, again, size=2), alone.flush(again, params)[0]):
        for name, expected in gradient(params, rows).items():
            torch.testing.assert_close(found[name], -expected, rtol=1e-12, atol=1e-14)
    for wrong in (states[:1], [states[0], *states]):
        if any(state.window.part.tolist() != [0, 0] for state in wrong):
            with pytest.raises(funcga.FuncgaError, match="an update takes the state of every replica, each once"):
                tx.merge(wrong)


def saved_after_an_update(group, how):
    """The state of rank 0 between two windows, loaded everywhere by way of a state dict."""
    params, rows = problem()
    tx = funcga.multi_steps(sgd(), 1, across=group)
    _, state = tx.update(gradient(params, rows), tx.init(params), params)
    both = [None] * group.size()
    dist.all_gather_object(both, funcga.trees.to_state_dict(state), group=group)
    state = funcga.trees.from_state_dict(tx.init(params), both[0])
    updates, _ = tx.update(gradient(params, rows[group.rank() :: 2]), state, params)
    return updates


def test_between_two_windows_the_state_of_one_replica_is_that_of_all():
    params, rows = problem()
    halves = [gradient(params, rows[rank::2]) for rank in range(2)]
    for updates in processes().run(saved_after_an_update, None, size=2):
        for name in updates:
            torch.testing.assert_close(updates[name], -(halves[0][name] + halves[1][name]) / 2)


# An error of one rank, which it catches, and goes on with a new state


def goes_on_after_an_error(group, kind, at, windows):
    """What each rank has of its windows, of 4 rows each: the updates, or a text. Rank 1 fails in window `at`."""
    params, rows = problem()
    rank, found = group.rank(), []
    n = (lambda updates: 2) if kind == "update of a schedule" else 2
    tx = funcga.multi_steps(sgd(), n, across=group)
    state = tx.init(params)
    for window in range(windows[rank]):
        fails, (first, second) = rank == 1 and window == at, rows[4 * window + 2 * rank :][:2]
        last, weight, given = gradient(params, second[None]), 1, params
        if fails and kind == "structure":
            last = {"v": last["w"]}
        elif fails and ("update" in kind or kind in ("weight", "dropped")):
            weight = -1
        elif fails and kind == "params":
            given = {"v": params["w"]}
        try:
            if "update" in kind:
                _, state = tx.update(gradient(params, first[None]), state, params)
                updates, state = tx.update(last, state, given, weight=weight)
            else:
                state = tx.accumulate(gradient(params, first[None]), state)
                try:
                    state = tx.accumulate(last, state, weight=weight)
                except funcga.FuncgaError:
                    if kind != "dropped":
                        raise
                updates, state = tx.flush(None if fails and kind == "state" else state, given)
            found.append(updates)
        except funcga.FuncgaError as error:
            found.append(str(error))
            state = tx.init(params)
    return found


def is_that_of_the_rows(found, rows):
    """Whether this is an update, exact by autograd of the mean over these rows in float64."""
    expected = gradient(problem()[0], problem()[1][rows])
    return isinstance(found, dict) and all(torch.allclose(found[k], -expected[k], rtol=1e-12) for k in expected)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", ["params", "state", "update", "update of a schedule"])
def test_an_error_in_a_call_that_merges_ends_that_window_on_all(kind, at):
    found = processes().run(goes_on_after_an_error, kind, at, (4, 4), size=2)
    assert found[0][at].startswith("rank 1 has raised an error in this window, and has nothing to merge")
    assert isinstance(found[1][at], str)
    for window in {*range(4)} - {at}:
        for each in found:
            assert is_that_of_the_rows(each[window], [*range(4 * window, 4 * window + 4)])


@pytest.mark.parametrize("kind", ["weight", "structure"])
def test_a_window_that_one_rank_leaves_out_is_refused_on_all(kind):
    """Rank 1 calls `flush` once less: its window 2 meets window 1 of rank 0, and is refused with all that follow."""
    first, second = processes().run(goes_on_after_an_error, kind, 1, (3, 4), size=2)
    for found in (first[0], second[0]):
        assert is_that_of_the_rows(found, [0, 1, 2, 3])
    assert "micro-batch is -1" in second[1] or "another structure" in second[1]
    assert first[1:] == second[2:]
    assert first[1].startswith(
        "the replicas are out of step: rank 0 begins window 2 and has finished 1, from a state after 1 updates, rank 1 "
        "begins window 2 and has finished 1. One of them has left out a window that the others merged"
    )
    assert first[1].endswith("make the transform anew on every rank, and go on from one state.")
    assert first[2].startswith("the replicas are out of step: rank 0 begins window 3 and has finished 1, rank 1 ")


def test_a_micro_batch_that_one_rank_drops_after_an_error_is_left_out_alone():
    for found in processes().run(goes_on_after_an_error, "dropped", 1, (3, 3), size=2):
        for window, rows in enumerate(([0, 1, 2, 3], [4, 5, 6], [8, 9, 10, 11])):
            assert is_that_of_the_rows(found[window], rows)


def some_without(group, drop, observe):
    """Four windows: with rows of rank 1, of none, of rank 0, and of both."""
    params, rows = problem()
    observe = funcga.gradient_noise() if observe else None
    tx = funcga.multi_steps(sgd(), 1, across=group, drop=drop, observe=observe)
    state, found = tx.init(params), []
    for window, ranks in enumerate(([1], [], [0], [0, 1])):
        if group.rank() in ranks:
            part = rows[4 * window + 2 * group.rank() :][:2]
            state = tx.accumulate(gradient(params, part), state, weight=2)
        try:
            updates, state = tx.flush(state, params)
            found.append(updates)
        except funcga.FuncgaError as error:
            found.append(str(error))
    return found, int(state.updates)


@pytest.mark.parametrize(("drop", "observe"), [(None, False), ("microbatch", False), ("window", False), (None, True)])
def test_a_rank_that_has_nothing_takes_part_in_a_flush(drop, observe):
    for found, updates in processes().run(some_without, drop, observe, size=2):
        assert found.pop(1) == (
            "the window is empty: nothing was accumulated since the last update, on any replica, so there is nothing to "
            "flush. After the last window ask first: if state.offered > 0. Over replicas flush once for each window that "
            "one of them has a micro-batch of."
        )
        assert updates == 3
        for each, rows in zip(found, ([2, 3], [8, 9], [12, 13, 14, 15]), strict=True):
            assert is_that_of_the_rows(each, rows)
