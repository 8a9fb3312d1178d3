"""Transforms in a chain: in order, pure whatever is in it, and without a copy too many."""

import copy

import pytest
import torch
from torch import nn, optim

import funcga
import torch_backend
from funcga.transforms import Transform
from tests.test_errors import check_refused
from tests.torch_backend.optim.test_from_optimizer import problem, same

DonatingTransform = type(torch_backend.clip_grad_value(1.0))


def identity(grads, state, params):
    return grads, state


def test_it_is_the_loop_that_clips_and_steps():
    params, grads = problem(optim.AdamW)
    tx = torch_backend.chain(torch_backend.clip_grad_norm(0.5), torch_backend.from_optimizer(optim.AdamW, lr=0.1))
    own = {k: p.clone().requires_grad_() for k, p in params.items()}
    made, state = optim.AdamW(own.values(), lr=0.1), tx.init(params)
    for grad in grads:
        for k, p in own.items():
            p.data.copy_(params[k])
            p.grad = grad[k].clone()
        norm = nn.utils.clip_grad_norm_(own.values(), 0.5)
        made.step()
        updates, state = tx.update(grad, state, params)
        assert all(torch.equal(updates[k], p.detach() - params[k]) for k, p in own.items())
        assert torch.equal(state[0].norm, norm)
        params = torch_backend.apply_updates(params, updates)
    assert type(state) is tuple
    assert int(state[1].count) == 6


@pytest.mark.parametrize(("first", "second"), [("identity", "clip"), ("clip", "sgd"), ("sgd", "identity")])
def test_nothing_is_mutated_whatever_is_chained(first, second):
    kinds = {
        "identity": (lambda params: (), identity),
        "clip": torch_backend.clip_grad_value(0.1),
        "sgd": torch_backend.from_optimizer(optim.SGD, momentum=0.9, nesterov=True, foreach=True),
    }
    params, grads = problem(optim.SGD)
    tx = torch_backend.chain(kinds[first], kinds[second], torch_backend.clip_grad_value(0.05), kinds[second])
    state, donated = tx.init(params), tx.init(params)
    for grad in grads[:3]:
        before = copy.deepcopy((grad, state, params))
        updates, after = tx.update(grad, state, params)
        assert repr((grad, state, params)) == repr(before)
        again, donated = tx.donated(copy.deepcopy(grad), donated, params)
        assert same(again, updates)
        assert repr(donated) == repr(after)
        state = after


KEEPING = Transform(
    lambda params: {k: torch.zeros_like(v) for k, v in params.items()}, lambda grads, state, params: (grads, grads)
)


@pytest.mark.parametrize("link", [Transform(lambda params: (), identity), KEEPING])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_chain_hands_on_may_be_what_it_was_given_or_keeps(link, depth):
    params, grads = problem(optim.SGD)
    inner = torch_backend.chain(torch_backend.clip_grad_value(10.0), link) if link is KEEPING else link
    for _ in range(depth):
        inner = torch_backend.chain(inner)
    tx = torch_backend.chain(inner, torch_backend.clip_grad_norm(0.1))
    before, outer = copy.deepcopy(grads[0]), copy.deepcopy(grads[0])
    _, state = tx.update(grads[0], tx.init(params), params)
    _, donated = tx.donated(outer, tx.init(params), params)
    assert same(grads[0], before)
    for found in (state, donated):
        # Of the inner link: that of clipping is its norm.
        kept = [leaf for leaf in torch_backend.trees.flatten(found[0])[0] if isinstance(leaf, torch.Tensor)]
        assert all(map(torch.equal, kept, before.values()))


def test_what_a_chain_keeps_is_not_written_to_by_multi_steps():
    params, grads = problem(optim.SGD)
    tx = torch_backend.chain(torch_backend.chain(KEEPING), torch_backend.clip_grad_norm(0.1))
    steps = [funcga.multi_steps(tx, 2, donate=donate) for donate in (False, True)]
    states = [made.init(params) for made in steps]
    for grad in grads:
        (wanted, states[0]), (found, states[1]) = (
            made.update(copy.deepcopy(grad), state, params) for made, state in zip(steps, states, strict=True)
        )
        assert same(found, wanted)
        assert repr(states[1].inner) == repr(states[0].inner)


def test_what_is_handed_on_is_not_copied():
    seen = []

    def spying(kind):
        clip = torch_backend.clip_grad_value(1.0)
        spy = lambda name: lambda *args, **extra: seen.append((kind, name)) or getattr(clip, name)(*args, **extra)
        return DonatingTransform(lambda params: torch.ones(1) if kind == "state" else (), spy("update"), spy("donated"))

    tx = torch_backend.chain(spying("a"), spying("b"), spying("state"), (lambda p: (), identity), spying("c"))
    state = tx.init([torch.ones(2)])
    tx.update([torch.ones(2)], state, None)
    assert seen == [("a", "update"), ("b", "donated"), ("state", "update"), ("c", "update")]
    seen.clear()
    tx.donated([torch.ones(2)], state, None)
    assert seen == [("a", "donated"), ("b", "donated"), ("state", "donated"), ("c", "update")]


def test_clipping_writes_to_what_is_handed_on_though_it_has_a_state():
    handed_on = []

    def doubled(grads, state, params):
        handed_on.append([2 * grad for grad in grads])
        return handed_on[-1], state

    double = DonatingTransform(lambda params: (), doubled, doubled)
    tx = torch_backend.chain(double, torch_backend.clip_grad_norm(1.0))
    before = tx.init([torch.ones(2)])
    clipped, after = tx.update([torch.tensor([3.0, 4.0])], before, None)
    assert clipped[0].data_ptr() == handed_on[0][0].data_ptr()
    assert before[1].norm.isnan()
    assert after[1].norm == 10.0


def test_extra_arguments_go_to_those_that_know_them():
    given = []

    def update(grads, state, params, value=None):
        given.append(value)
        return grads, state

    tx = torch_backend.chain(
        Transform(lambda p: (), identity), (lambda p: (), update), torch_backend.clip_grad_norm(1.0)
    )
    tx.update([torch.ones(1)], tx.init(None), None, value=3, other=4)
    assert given == [3]


def test_what_is_no_chain():
    check_refused(
        "chain() was given no transform. Write chain(torch_backend.clip_grad_norm(1.0), tx).", torch_backend.chain
    )
    check_refused("transforms[1] is the class AdamW, whose step() changes parameters in place.",
                  torch_backend.chain, torch_backend.clip_grad_norm(1.0), optim.AdamW)  # fmt: skip
    tx = torch_backend.chain(torch_backend.clip_grad_norm(1.0))
    check_refused("state is not the tuple of 1 that this chain has: state = tx.init(params); updates, state = "
                  "tx.update(grads, state, params).", tx.update, [torch.ones(1)], (), None)  # fmt: skip


def test_transforms_of_optax_are_sent_over_the_bridge():
    import optax

    with pytest.raises(funcga.FuncgaError, match=r"transforms\[1\] is one of optax.*from_optax\(tx\)"):
        torch_backend.chain(torch_backend.clip_grad_norm(1.0), optax.adam(0.1))
