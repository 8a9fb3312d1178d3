"""Gradients given to parameters, all of them or none, and updates added to them, once, in the wider dtype."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import funcga
import torch_backend
from tests.processes import processes
from tests.test_errors import check_refused


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def ones(module):
    return {name: torch.ones_like(p) for name, p in module.named_parameters()}


def shown(module):
    return {name: None if p.grad is None else p.grad.tolist() for name, p in module.named_parameters()}


def test_gradients_are_set():
    m = module()
    backwards, names = lambda g: dict(reversed(g.items())), lambda: dict(m.named_parameters())
    for params, as_given in (
        (m, backwards),
        (names(), backwards),
        (m.parameters(), lambda g: list(g.values())),
        (list(m.parameters()), lambda g: tuple(g.values())),
        ({"deep": [names(), None]}, lambda g: {"deep": [g, None]}),
    ):
        for p in m.parameters():
            p.grad = torch.full_like(p, 7.0)
        given = ones(m)
        torch_backend.assign_grads(params, as_given(given))
        for name, p in m.named_parameters():
            assert torch.equal(p.grad, given[name])
            assert p.grad.data_ptr() == given[name].data_ptr()


def test_one_tensor_of_two_parameters_is_two_gradients():
    params, whole = {k: nn.Parameter(torch.ones(3)) for k in "ab"}, torch.arange(6.0)
    for b, is_shared in ((whole[:3], True), (whole[3:], False)):
        torch_backend.assign_grads(params, {"a": whole[:3], "b": b})
        assert params["a"].grad.data_ptr() == whole.data_ptr()
        assert (params["b"].grad.data_ptr() == b.data_ptr()) is not is_shared
    torch_backend.assign_grads(params, {"a": whole[1:4], "b": whole[:3]})
    params["a"].grad.zero_()
    assert params["b"].grad.tolist() == [0.0, 1.0, 2.0]


def test_none_and_graphs_and_frozen_parameters():
    m = module()
    m[0].bias.requires_grad_(False)
    m[1].bias.grad = torch.ones(2)
    given = {name: 1.0 * p * p for name, p in m.named_parameters() if name != "0.bias"} | {"1.bias": None}
    torch_backend.assign_grads(m, given)
    assert m[1].bias.grad is None
    assert m[0].bias.grad is None
    assert m[0].weight.grad.grad_fn is None


@pytest.mark.parametrize("grad", [torch.ones(()).expand(2, 3), torch.arange(6.0).reshape(3, 2).T])
def test_a_gradient_lies_as_its_parameter(grad):
    p, given = nn.Parameter(torch.zeros(2, 3)), grad.clone()
    torch_backend.assign_grads([p], [grad])
    assert p.grad.stride() == p.stride()
    optim.SGD([p], lr=1.0, fused=True).step()
    assert torch.equal(p.detach(), -given)
    nn.utils.clip_grad_norm_([p], 0.1)
    assert torch.equal(grad, given)


ALIKE = (
    "A gradient has its parameter's shape, dtype and device, and is a DTensor for a DTensor; and a parameter is what"
)


def test_what_no_optimizer_steps_is_given_no_gradient():
    m = module()
    text = f"`grads['0.weight']` is float32[4, 3], and `params['0.weight']` is float32[4, 3]. {ALIKE}"
    check_refused(text, torch_backend.assign_grads, m.state_dict(), ones(m))
    check_refused(text, torch_backend.assign_grads, ones(m), dict(m.named_parameters()))
    torch_backend.assign_grads([m[0].weight, torch.ones(2)], [None, None])


def test_a_gradient_of_a_frozen_parameter():
    m = module()
    m[0].bias.requires_grad_(False)
    check_refused(f"`params['0.bias']` is float32[4]. {ALIKE}", torch_backend.assign_grads, m, ones(m))
    assert all(p.grad is None for p in m.parameters())
    torch_backend.assign_grads(m, {**ones(m), "0.bias": None})
    assert [p.grad is None for p in m.parameters()] == [False, True, False, False]


def without(grads, name):
    return {k: v for k, v in grads.items() if k != name}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda g: without(g, "1.bias"), "`grads` has another structure than it should: missing `['1.bias']`, new nothing. "
         "Give it that of the parameters; of loss, grads = step(...) the gradients alone, with None where there is none."),
        (lambda g: {}, "missing `['0.weight']`, `['0.bias']`, `['1.weight']`, `['1.bias']`, new nothing"),
        (lambda g: {**g, "1.bais": None}, "missing nothing, new `['1.bais']`"),
        (lambda g: list(g.values()), "`grads` has another structure than it should: missing"),
        (lambda g: (1.0, g), "`grads` has another structure than it should: missing"),
        (lambda g: {**g, "1.bias": torch.ones(3)}, f"`grads['1.bias']` is float32[3], and `params['1.bias']` is float32[2]. {ALIKE}"),
        (lambda g: {**g, "1.bias": 1.0}, f"`grads['1.bias']` is of type float, and `params['1.bias']` is float32[2]. {ALIKE}"),
        (lambda g: {**g, "1.bias": g["1.bias"].double()}, f"is float64[2], and `params['1.bias']` is float32[2]. {ALIKE}"),
        (lambda g: {**g, "1.bias": g["1.bias"].to("meta")}, f"is float32[2] on meta, and `params['1.bias']` is float32[2]. {ALIKE}"),
    ],
)  # fmt: skip
def test_nothing_is_set_where_something_does_not_match(change, text):
    m = module()
    torch_backend.assign_grads(m, ones(m))
    before = copy.deepcopy(shown(m))
    check_refused(text, torch_backend.assign_grads, m, change({k: 2 * v for k, v in ones(m).items()}))
    assert shown(m) == before


def test_what_is_no_parameter():
    p = torch.ones(2, requires_grad=True)
    check_refused(f"`params['w']` is float32[2]. {ALIKE}", torch_backend.assign_grads, {"w": 2 * p}, {"w": p})
    check_refused(f"`params['w']` is of type float. {ALIKE}", torch_backend.assign_grads, {"w": 1.0}, {"w": p})
    check_refused(
        "`grads` has another structure than it should: missing `[1]`", torch_backend.assign_grads, [p, p], [p]
    )


def sharded(group):
    m = module()
    fully_shard(m, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = optim.SGD(m.parameters(), lr=0.1)
    gradient = torch_backend.module_value_and_grad(m, lambda m, x: m(x).square().mean())
    _, grads = gradient(torch.ones(4, 3))
    torch_backend.assign_grads(m, grads)
    before = [p.full_tensor().clone() for p in m.parameters()]
    optimizer.step()
    assert all(isinstance(p.grad, DTensor) for p in m.parameters())
    assert not any(torch.equal(p.full_tensor(), b) for p, b in zip(m.parameters(), before, strict=True))
    try:
        torch_backend.assign_grads(m, {name: grad.full_tensor() for name, grad in grads.items()})
    except funcga.FuncgaError as error:
        plain = str(error)
    try:
        torch_backend.assign_grads(module(), grads)
    except funcga.FuncgaError as error:
        return plain, str(error)


def test_dtensors_have_dtensors():
    plain, placed = processes(2).run(sharded, size=2)[0]
    assert (
        f"`grads['0.weight']` is float32[4, 3], and `params['0.weight']` is a DTensor float32[4, 3]. {ALIKE}" in plain
    )
    assert f"is a DTensor float32[4, 3], and `params['0.weight']` is float32[4, 3]. {ALIKE}" in placed


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
    assert torch_backend.apply_updates(torch.ones(()), torch.ones(())) == 2
    assert torch_backend.apply_updates({}, {}) == {}


@pytest.mark.parametrize("mixed", [False, True])
def test_the_sum_is_rounded_once(mixed):
    params = {"a": torch.ones(64, dtype=torch.bfloat16), "b": torch.ones(1)}
    updates = {"a": 2**-8 + torch.arange(1, 65) * 2.0**-20, "b": None if mixed else torch.ones(1)}
    found = torch_backend.apply_updates(params, updates)["a"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, (params["a"].double() + updates["a"].double()).bfloat16())
    assert not torch.equal(found, params["a"] + updates["a"].bfloat16())


def test_what_is_no_update():
    params = {"w": torch.ones(2)}
    check_refused(
        "`updates['w']` is float32[3], and `params['w']` is float32[2]. An update is a tensor of its parameter's shape, or "
        "None: updates, state = tx.update(grads, state, params), of these params.",
        torch_backend.apply_updates, params, {"w": torch.ones(3)},
    )  # fmt: skip
    check_refused(
        "`updates` has another structure than it should: missing `['w']`, new `['v']`.",
        torch_backend.apply_updates, params, {"v": torch.ones(2)},
    )  # fmt: skip
