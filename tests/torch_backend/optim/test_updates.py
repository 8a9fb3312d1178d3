"""Updates applied to the parameters of torch: once, in the wider dtype, and nothing touched."""

import copy

import pytest
import torch

import torch_backend
from tests.test_errors import check_refused


def test_updates_are_added():
    params = {"a": torch.nn.Parameter(torch.ones(2)), "b": [torch.zeros(3), torch.ones(1)]}
    updates = {"b": [torch.ones(3), None], "a": torch.full((2,), 2.0)}
    before = copy.deepcopy((params, updates))
    found = torch_backend.apply_updates(params, updates)
    assert list(found) == ["a", "b"]
    assert torch.equal(found["a"], torch.full((2,), 3.0))
    assert torch.equal(found["b"][0], torch.ones(3))
    assert torch.equal(found["b"][1], torch.ones(1))
    assert type(found["a"]) is torch.Tensor
    assert not found["a"].requires_grad
    assert found["b"][1].data_ptr() != params["b"][1].data_ptr()
    assert repr((params, updates)) == repr(before)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_sum_is_rounded_once(mixed):
    params = {"a": torch.ones(64, dtype=torch.bfloat16), "b": torch.ones(1)}
    updates = {"a": 2**-8 + torch.arange(1, 65) * 2.0**-20, "b": None if mixed else torch.ones(1)}
    found = torch_backend.apply_updates(params, updates)["a"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (params["a"].double() + updates["a"].double()).bfloat16())
    assert not torch.equal(found, params["a"] + updates["a"].bfloat16())


def test_a_single_tensor_and_nothing():
    assert torch_backend.apply_updates(torch.ones(()), torch.ones(())) == 2
    assert torch_backend.apply_updates({}, {}) == {}


def test_what_is_no_update():
    params = {"w": torch.ones(2)}
    check_refused(
        "`updates['w']` is float32[3], and `params['w']` is float32[2]. An update is a tensor of its parameter's shape, or "
        "None: updates, state = tx.update(grads, state, params), of these params.",
        torch_backend.apply_updates, params, {"w": torch.ones(3)},
    )  # fmt: skip
    check_refused(
        "updates and params differ in structure: `updates['w']` is missing, `updates['v']` is not expected. `params` is "
        "dict(['w']: float32[2]); give updates the same structure.",
        torch_backend.apply_updates, params, {"v": torch.ones(2)},
    )  # fmt: skip
