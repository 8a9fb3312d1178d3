"""Every optimizer of torch as a pair of pure functions: the bits of its own step, and no argument touched."""

import copy
import io

import pytest
import torch
from torch import optim

import funcga
import torch_backend

CASES = {
    "Adadelta": (optim.Adadelta, {}),
    "Adadelta foreach": (optim.Adadelta, {"foreach": True, "weight_decay": 0.1}),
    "Adafactor": (optim.Adafactor, {}),
    "Adafactor foreach": (optim.Adafactor, {"foreach": True, "maximize": True}),
    "Adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "Adagrad foreach": (optim.Adagrad, {"foreach": True, "weight_decay": 0.1, "maximize": True}),
    "Adagrad fused": (optim.Adagrad, {"fused": True}),
    "Adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "Adam foreach": (optim.Adam, {"foreach": True, "maximize": True}),
    "Adam fused": (optim.Adam, {"fused": True, "amsgrad": True}),
    "Adam tensor": (optim.Adam, {"lr": torch.tensor(0.01), "foreach": False}),
    "AdamW": (optim.AdamW, {"foreach": False}),
    "AdamW foreach": (optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW fused": (optim.AdamW, {"fused": True, "maximize": True}),
    "Adamax": (optim.Adamax, {}),
    "Adamax foreach": (optim.Adamax, {"foreach": True, "weight_decay": 0.1}),
    "ASGD": (optim.ASGD, {"t0": 2.0}),
    "ASGD foreach": (optim.ASGD, {"foreach": True, "weight_decay": 0.1}),
    "LBFGS": (optim.LBFGS, {"max_iter": 1, "history_size": 3}),
    "Muon": (optim.Muon, {}),
    "Muon plain": (optim.Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "NAdam foreach": (optim.NAdam, {"foreach": True}),
    "RAdam": (optim.RAdam, {}),
    "RAdam foreach": (optim.RAdam, {"foreach": True, "weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "RMSprop foreach": (optim.RMSprop, {"foreach": True, "weight_decay": 0.1}),
    "Rprop": (optim.Rprop, {}),
    "Rprop foreach": (optim.Rprop, {"foreach": True, "maximize": True}),
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "SGD nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
    "SGD foreach": (optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True, "maximize": True}),
    "SparseAdam": (optim.SparseAdam, {}),
}


def test_every_optimizer_of_torch_is_here():
    stock = {v for v in vars(optim).values() if isinstance(v, type) and issubclass(v, optim.Optimizer)} - {
        optim.Optimizer
    }
    assert {optimizer for optimizer, _ in CASES.values()} == stock


def problem(optimizer, dtype=torch.float32, updates=6):
    """Parameters, and the gradients of some updates."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 3), "v": (3, 4)} if optimizer is optim.Muon else {"w": (5, 3), "deep": (4,), "scalar": ()}
    draw = lambda: {k: torch.randn(shape, generator=generator, dtype=dtype) for k, shape in shapes.items()}
    params, grads = draw(), [draw() for _ in range(updates)]
    if optimizer is optim.SparseAdam:
        params.pop("scalar")
        grads = [{k: g[k].to_sparse(1) for k in params} for g in grads]
    return params, grads


def flat(slot):
    """What is kept, with numbers for the tensors that stand for them."""
    return torch_backend.slots.from_slot(slot, owned=True)


def same(left, right):
    """Whether two things that are kept are equal bit by bit."""
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, left.device) == (right.dtype, right.shape, right.device) and torch.equal(
            left.to_dense(), right.to_dense()
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def tensors(tree):
    return [leaf for leaf in torch_backend.trees.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def reference(optimizer, options, params, grads, steps):
    """What optimizer.step() keeps and returns, started for each update from the parameters that we have then."""
    own = {k: p.clone().requires_grad_() for k, p in params.items()}
    made = optimizer(list(own.values()), **options)
    for at, grad in zip(steps, grads, strict=True):
        for k, p in own.items():
            p.data.copy_(at[k])
            p.grad = grad[k].clone()
        made.step((lambda: torch.zeros(())) if optimizer is optim.LBFGS else None)
        yield {k: dict(made.state.get(p, {})) for k, p in own.items()}, {k: p.detach().clone() for k, p in own.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_the_state_is_that_of_step_bit_by_bit(case, dtype):
    optimizer, options = CASES[case]
    params, grads = problem(optimizer, dtype)
    tx = torch_backend.from_optimizer(optimizer, **options)
    state, steps, states, after = tx.init(params), [], [], []
    for grad in grads:
        steps.append(params)
        updates, state = tx.update(grad, state, params)
        params = torch_backend.apply_updates(params, updates)
        states.append(state)
        after.append(params)
    found = zip(states, after, strict=True)
    for (state, params), (kept, expected) in zip(
        found, reference(optimizer, options, steps[0], grads, steps), strict=True
    ):
        assert same(flat(state.slots), kept)
        for k in params:
            torch.testing.assert_close(
                params[k], expected[k], rtol=4 * torch.finfo(dtype).eps, atol=1e-6 * torch.finfo(dtype).eps
            )
    assert int(state.count) == 6
    assert state.started.all()


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_mutated_or_aliased(case):
    optimizer, options = CASES[case]
    params, grads = problem(optimizer)
    params = {k: torch.nn.Parameter(p) for k, p in params.items()}
    tx = torch_backend.from_optimizer(optimizer, **options)
    state = tx.init(params)
    for grad in grads:
        before = copy.deepcopy((grad, state, params))
        updates, after = tx.update(grad, state, params)
        assert same((grad, flat(state), params), (before[0], flat(before[1]), before[2]))
        given, returned = tensors((grad, state, params)), tensors((updates, after))
        pointers = {t.data_ptr() for t in given if t.layout is torch.strided and t.numel()}
        assert not pointers & {t.data_ptr() for t in returned if t.numel()}
        assert len({t.data_ptr() for t in returned}) == len(returned)
        assert all(p.grad is None and p.requires_grad for p in params.values())
        assert not any(t.requires_grad or t.grad is not None for t in returned)
        state = after


@pytest.mark.parametrize("case", CASES)
def test_donated_has_the_same_bits(case):
    optimizer, options = CASES[case]
    params, grads = problem(optimizer)
    tx = torch_backend.from_optimizer(optimizer, **options)
    left, right = tx.init(params), tx.init(params)
    for grad in grads:
        updates, left = tx.update(grad, left, params)
        again, right = tx.donated(copy.deepcopy(grad), right, params)
        assert same((flat(left), updates), (flat(right), again))
        params = torch_backend.apply_updates(params, updates)


def test_donated_stays_in_the_memory_of_the_state():
    params, grads = problem(optim.AdamW)
    tx = torch_backend.from_optimizer(optim.AdamW)
    _, state = tx.update(grads[0], tx.init(params), params)
    at = [t.data_ptr() for t in tensors(state.slots)]
    _, state = tx.donated(grads[1], state, params)
    assert [t.data_ptr() for t in tensors(state.slots)] == at


@pytest.mark.parametrize("case", CASES)
def test_the_structure_is_complete_from_init_on(case):
    optimizer, options = CASES[case]
    params, grads = problem(optimizer)
    tx = torch_backend.from_optimizer(optimizer, **options)
    first = tx.init(params)
    after = tx.update(grads[0], first, params)[1]
    described = lambda state: [(path, t.dtype, t.shape) for path, t in zip(paths(state), tensors(state), strict=True)]
    assert all(not t.any() for t in tensors(first))
    assert (described(first) == described(after)) == (optimizer not in (optim.SparseAdam, optim.LBFGS))


def paths(state):
    named = zip(
        funcga.prefixes.leaf_paths(state, torch_backend.trees), torch_backend.trees.flatten(state)[0], strict=True
    )
    return [path for path, leaf in named if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("case", CASES)
def test_a_saved_state_goes_on_with_the_same_bits(case):
    optimizer, options = CASES[case]
    params, grads = problem(optimizer)
    tx = torch_backend.from_optimizer(optimizer, **options)
    state = tx.init(params)
    for grad in grads[:3]:
        state = tx.update(grad, state, params)[1]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    restored = torch.load(file, weights_only=True)
    for grad in grads[3:]:
        left, state = tx.update(grad, state, params)
        right, restored = tx.update(grad, restored, params)
        assert same((left, flat(state)), (right, flat(restored)))
