"""Clipping as a transform: the bits of torch.nn.utils, and the gradients as they were."""

import copy

import pytest
import torch
from torch.nn import utils

import funcga
import torch_backend
from tests.kits import needs_cuda, no_synchronisation
from tests.test_errors import check_refused
from tests.torch_backend.optim.test_from_optimizer import same

CLIPS = {
    "norm": (lambda: torch_backend.clip_grad_norm(0.7), lambda p: utils.clip_grad_norm_(p, 0.7)),
    "large": (lambda: torch_backend.clip_grad_norm(1e6), lambda p: utils.clip_grad_norm_(p, 1e6)),
    "max": (
        lambda: torch_backend.clip_grad_norm(0.3, "inf"),
        lambda p: utils.clip_grad_norm_(p, 0.3, float("inf")),
    ),
    "one": (lambda: torch_backend.clip_grad_norm(0.3, 1, True), lambda p: utils.clip_grad_norm_(p, 0.3, 1, True)),
    "value": (lambda: torch_backend.clip_grad_value(0.4), lambda p: utils.clip_grad_value_(p, 0.4)),
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
    tx = torch_backend.clip_grad_norm(1.0)
    _, state = tx.update(params, tx.init(params))
    is_wide = dtype in (torch.float64, torch.complex128)
    assert state.norm.dtype == (torch.float64 if is_wide else torch.float32)
    assert torch.allclose(state.norm, torch.tensor(3.0, dtype=state.norm.dtype).sqrt(), atol=0.005)
    restored = funcga.trees.from_state_dict(tx.init(params), funcga.trees.to_state_dict(state))
    assert torch.equal(restored.norm, state.norm)
    torch.save(state, tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt", weights_only=True).norm, state.norm)


def test_a_state_that_was_saved_without_a_norm():
    params = {"w": torch.tensor([3.0, 4.0])}
    adamw = torch_backend.from_optimizer(torch.optim.AdamW)
    tx = funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(1.0), adamw), 1)
    saved = funcga.trees.to_state_dict(tx.update(params, tx.init(params), params)[1])
    del saved[".inner[0].norm"]
    with pytest.raises(funcga.FuncgaError, match=r"\.inner\[0\]\.norm"):
        funcga.trees.from_state_dict(tx.init(params), saved)
    initial = tx.init(params)
    state = funcga.trees.from_state_dict(initial, {**funcga.trees.to_state_dict(initial), **saved})
    assert state.inner[0].norm.isnan()
    older = state._replace(inner=((), state.inner[1]))
    for before in (state, older):
        assert tx.update(params, before, params)[1].inner[0].norm == 5.0


def test_the_last_norm_stays_where_there_is_no_update():
    tx = torch_backend.clip_grad_norm(1.0)
    tx = funcga.transforms.loss_scaled(tx, init_scale=4.0)
    state = tx.init([torch.ones(2)])
    for grad, norm in (([12.0, 16.0], 5.0), ([torch.nan, 1.0], 5.0), ([0.0, 2.0], 1.0)):
        _, state = tx.update([torch.tensor(grad)], state)
        assert state.inner.norm == norm
    steps = funcga.multi_steps(torch_backend.clip_grad_norm(1.0), 2)
    state, norms = steps.init([torch.ones(2)]), []
    for grad in ([3.0, 4.0], [9.0, 12.0], [0.0, 0.0], [0.0, 1.0]):
        _, state = steps.update([torch.tensor(grad)], state)
        norms.append(float(state.inner.norm))
    assert str(norms) == "[nan, 10.0, 10.0, 0.5]"


def test_a_norm_that_is_not_finite():
    grads = [torch.tensor([torch.nan, 1.0])]
    assert torch_backend.clip_grad_norm(1.0).update(grads, ())[0][0].isnan().all()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch_backend.clip_grad_norm(1.0, error_if_nonfinite=True).update(grads, ())


@pytest.mark.parametrize(("limit", "shown"), [(-1, "-1"), ("1", "'1'"), (float("nan"), "nan"), (True, "True")])
def test_what_is_no_limit(limit, shown):
    text = f"is {shown}, and must be a number, at least 0: "
    check_refused(f"max_norm {text}max_norm=1.0.", torch_backend.clip_grad_norm, limit)
    check_refused(f"clip_value {text}clip_value=1.0.", torch_backend.clip_grad_value, limit)


def test_what_is_no_gradient():
    check_refused("`grads['a'][0]` is of type float. Give a tensor, or None where there is none.",
                  torch_backend.clip_grad_norm(1.0).update, {"a": [1.0]}, ())  # fmt: skip


def test_a_sparse_gradient_is_refused():
    grads = {"w": torch.eye(2).to_sparse()}
    text = "`grads['w']` is a sparse tensor float32[2, 2], which torch does not clip. Give a dense one: grad.to_dense(), or nn.Embedding(..., sparse=False)."
    for tx in (torch_backend.clip_grad_norm(1.0), torch_backend.clip_grad_value(1.0)):
        check_refused(text, tx.update, grads, ())
        check_refused(text, tx.donated, grads, ())


@pytest.mark.parametrize("norm_type", ["foo", None, True, float("nan")])
def test_what_is_no_norm(norm_type):
    text = f'norm_type is {norm_type!r}, and must be a number, or "inf": norm_type=2.0.'
    check_refused(text, torch_backend.clip_grad_norm, 1.0, norm_type)


def test_donated_gradients_in_one_memory_are_clipped_once_each():
    grad = torch.tensor([3.0, 4.0])
    wanted, _ = torch_backend.clip_grad_norm(1.0).update([grad, grad], ())
    assert same(torch_backend.clip_grad_norm(1.0).donated([grad, grad], ())[0], wanted)
    expanded = torch.ones(()).expand(4)
    assert same(torch_backend.clip_grad_norm(1.0).donated([expanded], ())[0],
                torch_backend.clip_grad_norm(1.0).update([expanded], ())[0])  # fmt: skip


@needs_cuda
@pytest.mark.parametrize("case", ["norm", "max", "value"])
def test_the_host_waits_for_no_device(case):
    tx, grads = CLIPS[case][0](), [torch.randn(5, device="cuda"), torch.randn(3, 4, device="cuda")]
    with no_synchronisation():
        _, state = tx.update(grads, tx.init(grads))
    assert case == "value" or state.norm.is_cuda
