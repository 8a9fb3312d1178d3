"""`multi_steps` with exact sums: a window that goes on elsewhere has the same bits, whatever the number of replicas."""

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist

import funcga
from funcga.transforms import Transform
from tests.kits import JAX, TORCH
from tests.processes import processes

COUNT = 12
FOLD = funcga.reproducible(funcga.mean())


def sgd():
    """Updates that are the gradients."""
    return Transform(lambda params: (), lambda g, s, p=None: (g, s))


def gradients():
    """(the gradient, the weight) of each micro-batch."""
    r = np.random.default_rng(0)
    shapes = {"w": (40, 11), "b": (11,), "scale": ()}
    grads = [{k: r.normal(size=shape).astype("float32") for k, shape in shapes.items()} for _ in range(COUNT)]
    return list(zip(grads, r.integers(1, 4000, COUNT).tolist(), strict=True))


def updates_of(kit, order, **choices):
    tx = funcga.multi_steps(sgd(), COUNT, fold=FOLD, **choices)
    grads = [(kit.arrays(grad), weight) for grad, weight in gradients()]
    state = tx.init(grads[0][0])
    for k in order:
        updates, state = tx.update(grads[k][0], state, weight=grads[k][1])
    return updates


@pytest.mark.parametrize(("first", "second"), [(TORCH, JAX), (JAX, TORCH)])
def test_a_window_that_goes_on_in_the_other_framework_has_the_same_bits(first, second):
    transforms = [funcga.multi_steps(sgd(), COUNT, fold=FOLD, donate=kit is TORCH) for kit in (first, second)]
    states = [tx.init(kit.arrays(gradients()[0][0])) for tx, kit in zip(transforms, (first, second), strict=True)]
    state, updates = states[0], None
    for k, (grad, weight) in enumerate(gradients()):
        if k == 5:
            state = funcga.trees.from_state_dict(states[1], funcga.trees.to_state_dict(state))
        kit, tx = (first, transforms[0]) if k < 5 else (second, transforms[1])
        update = jax.jit(tx.update) if kit is JAX else tx.update
        updates, state = update(kit.arrays(grad), state, weight=weight)
    for name, expected in updates_of(TORCH, range(COUNT)).items():
        np.testing.assert_array_equal(updates[name], expected)


# -- over processes: saved on two in the middle of a window, and resumed on three


def folded(group, numbers, start=None):
    """(all states, the updates of a flush) after this replica's share of these micro-batches."""
    tx = funcga.multi_steps(sgd(), COUNT, fold=FOLD, across=group)
    grads = [(TORCH.arrays(grad), weight) for grad, weight in gradients()]
    state = tx.init(grads[0][0]) if start is None else start
    for k in numbers[dist.get_rank(group)]:
        state = tx.accumulate(grads[k][0], state, weight=grads[k][1])
    if start is None:
        states = [None] * dist.get_world_size(group)
        dist.all_gather_object(states, state, group=group)
        return tx.merge(states)
    return tx.flush(state, grads[0][0])[0]


def test_saved_on_two_processes_and_resumed_on_others():
    first, second = [[11, 3, 7, 0], [5, 1, 2, 9]], [[8], [4, 6], [10]]
    expected = updates_of(TORCH, range(COUNT))
    merged = processes().run(folded, first, size=2)[0]
    for updates in processes().run(folded, second, merged, size=len(second)):
        for name, update in updates.items():
            assert torch.equal(update, expected[name])
