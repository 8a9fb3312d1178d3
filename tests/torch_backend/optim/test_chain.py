"""Transforms in a chain, and clipping, the first of them: the bits of torch, and without a copy too many."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn import utils

import funcga
import torch_backend
from funcga._transform.apply import UpdateFunction
from funcga.transforms import Transform
from tests.kits import needs_cuda, no_synchronisation
from tests.test_errors import check_refused
from tests.torch_backend.optim.test_from_optimizer import problem, same
from torch_backend import chain, clip_grad_norm, clip_grad_value, from_optimizer


def identity(grads, state, params):
    return grads, state


def test_it_is_the_loop_that_clips_and_steps():
    params, grads = problem(optim.AdamW)
    tx = chain(chain(clip_grad_norm(0.5)), chain(from_optimizer(optim.AdamW, lr=0.1)))
    own = {k: p.clone().requires_grad_() for k, p in params.items()}
    made, state = optim.AdamW(own.values(), lr=0.1), tx.init(params)
    for at, grad in enumerate(grads):
        for k, p in own.items():
            p.grad = grad[k].clone()
        norm = nn.utils.clip_grad_norm_(own.values(), 0.5)
        made.step()
        params, state = funcga.transforms.apply(tx, copy.deepcopy(grad), state, params, donate=at % 2 == 1)
        assert same(params, {k: p.detach() for k, p in own.items()})
        assert torch.equal(state[0][0].norm, norm)
    assert type(state) is tuple
    assert int(state[1][0].count) == 6


KEEPING = Transform(
    lambda params: {k: torch.zeros_like(v) for k, v in params.items()}, lambda grads, state, params: (grads, grads)
)


@pytest.mark.parametrize("link", [Transform(lambda params: (), identity), KEEPING])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_chain_hands_on_may_be_what_it_was_given_or_keeps(link, depth):
    params, grads = problem(optim.SGD)
    inner = chain(clip_grad_value(10.0), link) if link is KEEPING else link
    for _ in range(depth):
        inner = chain(inner)
    tx = chain(inner, clip_grad_norm(0.1))
    before, outer = copy.deepcopy(grads[0]), copy.deepcopy(grads[0])
    _, state = tx.update(grads[0], tx.init(params), params)
    _, donated = tx.donated(outer, tx.init(params), params)
    assert same(grads[0], before)
    for found in (state, donated):
        # Of the inner link: that of clipping is its norm.
        kept = [leaf for leaf in torch_backend.trees.flatten(found[0])[0] if isinstance(leaf, torch.Tensor)]
        assert all(map(torch.equal, kept, before.values()))


@pytest.mark.parametrize("donate", [False, True])
def test_a_chain_inside_of_a_loss_that_is_differentiated(donate):
    descent = Transform(lambda params: (), lambda grads, state, params: ([-0.1 * g for g in grads], ()))
    double = Transform(lambda params: (), lambda grads, state, params: ([2 * g for g in grads], ()))
    tx, x = chain(double, descent), torch.tensor([1.0, 0.5])
    inner = lambda params: ((params[0] * x) ** 2).sum()

    def outer(w):
        updates, _ = (tx.donated if donate else tx.update)(torch.func.grad(inner)([w]), ((), ()), [w])
        return inner([w + updates[0]])

    w = torch.tensor([1.0, 2.0])
    by_hand = torch.func.grad(lambda w: inner([w - 0.2 * 2 * w * x**2]))(w)
    torch.testing.assert_close(torch.func.grad(outer)(w), by_hand)


class Spy(UpdateFunction):
    """Clips, and notes whether what it was given is its own."""

    def __init__(self, name, seen):
        self.clip, self.name, self.seen = clip_grad_value(1.0).update, name, seen

    def stepped(self, owned, *args):
        self.seen.append((self.name, owned))
        return self.clip.stepped(owned, *args)


def test_what_is_handed_on_is_not_copied():
    seen = []
    spying = lambda kind: Transform(lambda params: torch.ones(1) if kind == "state" else (), Spy(kind, seen))
    tx = chain(spying("a"), spying("b"), spying("state"), (lambda p: (), identity), spying("c"))
    state = tx.init([torch.ones(2)])
    tx.update([torch.ones(2)], state, None)
    assert seen == [("a", False), ("b", False), ("state", False), ("c", False)]
    seen.clear()
    tx.donated([torch.ones(2)], state, None)
    assert seen == [("a", True), ("b", True), ("state", True), ("c", True)]


def test_extra_arguments_go_to_those_that_know_them():
    given = []

    def update(grads, state, params, value=None):
        given.append(value)
        return grads, state

    tx = chain(Transform(lambda p: (), identity), (lambda p: (), update), clip_grad_norm(1.0))
    tx.update([torch.ones(1)], tx.init(None), None, value=3, other=4)
    assert given == [3]


def test_what_is_no_chain():
    clip = clip_grad_norm(1.0)
    with pytest.raises(AttributeError, match="'AdamW' has no attribute 'update'"):
        chain(clip, optim.AdamW)
    with pytest.raises(ValueError, match="zip"):
        chain(clip).update([torch.ones(1)], (), None)


# Clipping.

CLIPS = {
    "norm": (lambda: clip_grad_norm(0.7), lambda p: utils.clip_grad_norm_(p, 0.7)),
    "large": (lambda: clip_grad_norm(1e6), lambda p: utils.clip_grad_norm_(p, 1e6)),
    "max": (
        lambda: clip_grad_norm(0.3, "inf"),
        lambda p: utils.clip_grad_norm_(p, 0.3, float("inf")),
    ),
    "one": (lambda: clip_grad_norm(0.3, 1, True), lambda p: utils.clip_grad_norm_(p, 0.3, 1, True)),
    "value": (lambda: clip_grad_value(0.4), lambda p: utils.clip_grad_value_(p, 0.4)),
}


def gradients(dtype=torch.float32):
    torch.manual_seed(0)
    return {"a": torch.randn(5, 3, dtype=dtype), "deep": [torch.randn((), dtype=dtype), None, torch.randn(7).to(dtype)]}


def check_norm(state, norm):
    """The state is the norm that torch returned, and `()` if it returned none."""
    assert state == () if norm is None else torch.equal(state.norm, norm.to(state.norm.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CLIPS)
def test_the_bits_are_those_of_torch(case, dtype):
    make, clip = CLIPS[case]
    tx, grads = make(), gradients(dtype)
    before, state = copy.deepcopy(grads), tx.init(grads)
    assert case == "value" or state.norm.isnan()
    clipped, state = tx.update(grads, state, None, unknown=3)
    params = [torch.zeros_like(grad) for grad in (before["a"], before["deep"][0], before["deep"][2])]
    for p, grad in zip(params, (before["a"], before["deep"][0], before["deep"][2]), strict=True):
        p.grad = grad.clone()
    norm = clip(params)
    expected = {"a": params[0].grad, "deep": [params[1].grad, None, params[2].grad]}
    check_norm(state, norm)
    assert same(clipped, expected)
    assert same(clipped, before) == (case == "large")
    assert same(grads, before)
    assert clipped["a"].data_ptr() != grads["a"].data_ptr()
    donated, state = tx.donated(grads, state)
    check_norm(state, norm)
    assert same(donated, expected)
    assert donated["a"].data_ptr() == grads["a"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128])
def test_the_norm_keeps_its_dtype_and_its_state_can_be_restored(dtype, tmp_path):
    params = {"a": torch.ones(3, dtype=dtype), "b": None}
    tx = clip_grad_norm(1.0)
    _, state = tx.update(params, tx.init(params))
    is_wide = dtype in (torch.float64, torch.complex128)
    assert state.norm.dtype == (torch.float64 if is_wide else torch.float32)
    assert torch.allclose(state.norm, torch.tensor(3.0, dtype=state.norm.dtype).sqrt(), atol=0.005)
    restored = funcga.trees.from_state_dict(tx.init(params), funcga.trees.to_state_dict(state))
    assert torch.equal(restored.norm, state.norm)
    torch.save(state, tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt", weights_only=True).norm, state.norm)


def test_gradients_of_fully_shard_are_clipped():
    """Those of a layer lie in one piece of memory, each behind the one before it."""
    model = nn.Linear(5, 8)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model)
        gradient = torch_backend.module_value_and_grad(model, lambda m, x: m(x).square().mean())
        _, grads = gradient(torch.randn(4, 5))
        params = torch_backend.trainable(model)
        tx = chain(clip_grad_norm(0.1), from_optimizer(optim.SGD, lr=1.0, momentum=0.5, nesterov=True))
        updates, (clipped, _) = tx.update(grads, tx.init(params), params)
        plain = [each.full_tensor() for each in grads.values()]
        norm = sum(each.square().sum() for each in plain).sqrt()
        assert torch.allclose(clipped.norm, norm)
        for update, grad in zip(updates.values(), plain, strict=True):
            assert torch.allclose(update.full_tensor(), -1.5 * grad * 0.1 / norm, rtol=1e-4)
    finally:
        dist.destroy_process_group()


def test_the_last_norm_stays_where_there_is_no_update():
    tx = clip_grad_norm(1.0)
    tx = funcga.transforms.loss_scaled(tx, init_scale=4.0)
    state = tx.init([torch.ones(2)])
    for grad, norm in (([12.0, 16.0], 5.0), ([torch.nan, 1.0], 5.0), ([0.0, 2.0], 1.0)):
        _, state = tx.update([torch.tensor(grad)], state)
        assert state.inner.norm == norm
    steps = funcga.multi_steps(clip_grad_norm(1.0), 2)
    state, norms = steps.init([torch.ones(2)]), []
    for grad in ([3.0, 4.0], [9.0, 12.0], [0.0, 0.0], [0.0, 1.0]):
        _, state = steps.update([torch.tensor(grad)], state)
        norms.append(float(state.inner.norm))
    assert str(norms) == "[nan, 10.0, 10.0, 0.5]"


def test_a_norm_that_is_not_finite():
    grads = [torch.tensor([torch.nan, 1.0])]
    assert clip_grad_norm(1.0).update(grads, ())[0][0].isnan().all()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm(1.0, error_if_nonfinite=True).update(grads, ())


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("max_norm is -1, and must be a number, at least 0: max_norm=1.0.", lambda: clip_grad_norm(-1)),
        ("max_norm is nan, and must be", lambda: clip_grad_norm(float("nan"))),
        ("clip_value is -0.5, and must be a number", lambda: clip_grad_value(-0.5)),
    ],
)  # fmt: skip
def test_what_is_not_clipped(text, make):
    check_refused(text, make)


@pytest.mark.parametrize(
    ("tx", "grads", "error"),
    [
        (clip_grad_norm(1.0, "foo"), [torch.ones(1)], ValueError),
        (clip_grad_norm(1.0), {"a": [1.0]}, AttributeError),
        (clip_grad_norm(1.0), [torch.eye(2).to_sparse()], NotImplementedError),
        (clip_grad_value(1.0), [torch.eye(2).to_sparse()], NotImplementedError),
    ],
)
def test_what_torch_refuses_itself(tx, grads, error):
    for function in (tx.update, tx.donated):
        with pytest.raises(error):
            function(grads, ())


def test_donated_gradients_in_one_memory_are_clipped_once_each():
    grad = torch.tensor([3.0, 4.0])
    wanted, _ = clip_grad_norm(1.0).update([grad, grad], ())
    assert same(clip_grad_norm(1.0).donated([grad, grad], ())[0], wanted)
    expanded = torch.ones(()).expand(4)
    assert same(clip_grad_norm(1.0).donated([expanded], ())[0],
                clip_grad_norm(1.0).update([expanded], ())[0])  # fmt: skip


@needs_cuda
@pytest.mark.parametrize("case", ["norm", "max", "value"])
def test_the_host_waits_for_no_device(case):
    tx, grads = CLIPS[case][0](), [torch.randn(5, device="cuda"), torch.randn(3, 4, device="cuda")]
    with no_synchronisation():
        _, state = tx.update(grads, tx.init(grads))
    assert case == "value" or state.norm.is_cuda
