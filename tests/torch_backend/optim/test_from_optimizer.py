"""Every optimizer of torch as a pair of pure functions: the bits of its own step, and no argument touched."""

import copy
import inspect
import io
import pickle
import re
from collections import OrderedDict
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import funcga
import torch_backend
from funcga import FuncgaError
from tests.kits import needs_cuda, no_synchronisation
from tests.processes import processes
from tests.test_errors import check_refused

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
}


REFUSED = {optim.LBFGS, optim.SparseAdam}


def test_every_optimizer_of_torch_is_here():
    stock = {v for v in vars(optim).values() if isinstance(v, type) and issubclass(v, optim.Optimizer)} - {
        optim.Optimizer
    }
    assert {optimizer for optimizer, _ in CASES.values()} == stock - REFUSED


def problem(optimizer, dtype=torch.float32, updates=6):
    """Parameters, and the gradients of some updates."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 3), "v": (3, 4)} if optimizer is optim.Muon else {"w": (5, 3), "deep": (4,), "scalar": ()}
    draw = lambda: {k: torch.randn(shape, generator=generator, dtype=dtype) for k, shape in shapes.items()}
    params, grads = draw(), [draw() for _ in range(updates)]
    return params, grads


def flat(slot):
    """What is kept, with numbers for the tensors that stand for them."""
    if isinstance(slot, dict):
        return {key: flat(value) for key, value in slot.items()}
    if type(slot) in (list, tuple):
        return type(slot)(map(flat, slot))
    return slot.value.item() if type(slot).__name__ == "Number" else slot


def same(left, right):
    """Whether two things that are kept are bitwise identical."""
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


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def described(state):
    assert list(state.slots)
    return [(name, *map(str, slot), *[(t.dtype, t.shape) for t in tensors(slot)]) for name, slot in state.slots.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_updates_are_the_steps_of_the_optimizer(case, dtype):
    """From the parameters of each update: the state to the bit, and nothing is mutated or aliased. What is donated, and
    what was saved, goes on with the same bits.
    """
    optimizer, options = CASES[case]
    params, grads = problem(optimizer, dtype)
    params = {k: torch.nn.Parameter(p) for k, p in params.items()}
    own = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    made = optimizer([*own.values()], **options)
    tx = torch_backend.from_optimizer(optimizer, **options)
    state, donated, loaded = tx.init(params), tx.init(params), tx.init(params)
    assert not any(t.any() for t in tensors(state))
    for grad in grads:
        for k, p in own.items():
            p.data.copy_(params[k].detach())
            p.grad = grad[k].clone()
        made.step()
        before = copy.deepcopy((grad, state, params))
        updates, after = tx.update(grad, state, params)
        assert same(flat(after.slots), {k: dict(made.state.get(p, {})) for k, p in own.items()})
        assert same((grad, state, params), before)
        assert described(after) == described(state)
        returned = tensors((updates, after))
        pointers = {t.data_ptr() for t in tensors((grad, state, params)) if t.numel()}
        assert len(pointers | {t.data_ptr() for t in returned}) == len(pointers) + len(returned)
        assert not any(t.requires_grad or t.grad is not None for t in returned)
        again, donated = tx.donated(copy.deepcopy(grad), donated, params)
        other, loaded = tx.update(grad, saved(loaded), params)
        assert same([again, donated, other, loaded], [updates, after] * 2)
        assert all(p.grad is None and p.requires_grad for p in params.values())
        state, params = after, torch_backend.apply_updates(params, updates)
        for k, p in own.items():
            eps = torch.finfo(dtype).eps  # the difference of two parameters and its sum, each rounded once
            torch.testing.assert_close(params[k], p.detach(), rtol=4 * eps, atol=1e-6 * eps)
        params = {k: torch.nn.Parameter(p) for k, p in params.items()}
    assert int(state.count) == 6
    assert state.started.all()


def strided(kind, values):
    """The values in other strides than they have."""
    if kind == "transposed":
        return values.mT.contiguous().mT if values.ndim > 1 else torch.stack([values, values], -1)[..., 0]
    return values.sum().expand(values.shape)


@pytest.mark.parametrize(
    "case", ["Adam fused", "Adafactor foreach", "Muon", "SGD nesterov", "SGD foreach", "SGD fused"]
)
@pytest.mark.parametrize(
    ("where", "kind"), [("grads", "expanded"), ("params", "transposed"), ("both", "transposed"), ("both", "expanded")]
)
def test_strides_change_nothing(case, where, kind):
    optimizer, options = CASES[case]
    params, grads = problem(optimizer)
    lay = lambda tree, chosen: {k: strided(kind, v) if chosen else v for k, v in tree.items()}
    tx = torch_backend.from_optimizer(optimizer, **options)
    odd = lay(params, where != "grads")
    plain = {k: v.contiguous() for k, v in odd.items()}
    states = [tx.init(params)] * 3  # laid as the parameters were then
    for grad in grads[:3]:
        given = lay(grad, where != "params")
        contiguous = {k: v.contiguous().clone() for k, v in given.items()}
        before = copy.deepcopy(given)
        wanted, first = tx.update(contiguous, states[0], plain)
        found, second = tx.update(given, states[1], odd)
        assert same(given, before)
        own = {k: v.clone() if kind == "expanded" else v for k, v in copy.deepcopy(given).items()}
        again, third = tx.donated(own, copy.deepcopy(states[2]), odd)
        for tree in ((found, second), (again, third)):  # a sum over other strides is one in another order
            torch.testing.assert_close(tensors(tree), tensors((wanted, first)), rtol=1e-5, atol=1e-6)
        states = [first, second, third]


def test_a_fused_step_reads_the_memory_of_its_gradients_only():
    params, grads = {"w": torch.zeros(2, 3)}, {"w": torch.arange(6.0).reshape(3, 2).T}
    tx = torch_backend.from_optimizer(optim.SGD, lr=1.0, fused=True)
    assert torch.equal(tx.update(grads, tx.init(params), params)[0]["w"], -grads["w"])
    expanded = {"w": torch.ones(()).expand(2, 3)}
    assert torch.equal(tx.update(expanded, tx.init(params), params)[0]["w"], -torch.ones(2, 3))
    assert torch.equal(tx.donated(expanded, tx.init(params), params)[0]["w"], -torch.ones(2, 3))


def test_donated_gradients_in_one_memory_are_written_to_apart():
    tx = torch_backend.from_optimizer(optim.SGD, lr=1.0, momentum=0.9, nesterov=True, foreach=True)
    params, grad = {"a": torch.zeros(2), "b": torch.zeros(2)}, torch.ones(2)
    wanted = tx.update({"a": grad, "b": grad}, tx.init(params), params)
    assert same(tx.donated({"a": grad, "b": grad}, tx.init(params), params)[0], wanted[0])


class Allocated(TorchDispatchMode):
    """Counts the bytes of what operations return in new memory."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        at = lambda tree: {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(tree)}
        before, output = at((args, kwargs)), function(*args, **(kwargs or {}))
        self.bytes += sum(size for where, size in at(output).items() if where not in before)
        return output


@pytest.mark.parametrize(("name", "copies"), [("donated", 1), ("update", 3)])
def test_one_copy_of_the_parameters_is_all_that_is_made(name, copies):
    params, grads = ({"w": torch.ones(1000), "v": torch.ones(1000)} for _ in range(2))
    tx = torch_backend.from_optimizer(optim.AdamW, fused=True)
    _, state = tx.update(grads, tx.init(params), params)
    with Allocated() as made:
        getattr(tx, name)(grads, state, params)
    assert copies * 8000 <= made.bytes < copies * 8000 + 100


ADAMW = torch_backend.from_optimizer(optim.AdamW, lr=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_parameter_without_a_gradient_is_skipped_until_it_has_one(momentum):
    params, grads = problem(optim.SGD)
    params["deep"][0] = torch.inf
    options = {"lr": 0.1, "momentum": momentum, "dampening": 0.5}
    tx = torch_backend.from_optimizer(optim.SGD, **options)
    own = {k: p.clone().requires_grad_() for k, p in params.items()}
    made, state = optim.SGD(list(own.values()), **options), tx.init(params)
    for number, grad in enumerate(grads):
        grad = {**grad, "deep": None if number in (0, 1, 4) else grad["deep"]}
        for k, p in own.items():
            p.grad = None if grad[k] is None else grad[k].clone()
        made.step()
        updates, state = tx.update(grad, state, params)
        assert updates["deep"].any() == (grad["deep"] is not None)
        assert state.started.tolist() == [number > 1, True, True]
        kept = made.state[own["deep"]] if number > 1 else {"momentum_buffer": torch.zeros(4)} if momentum else {}
        assert same(state.slots["deep"], dict(kept))


def test_a_state_goes_on_after_its_dicts_were_sorted():
    params, grads = problem(optim.SGD)
    tx = torch_backend.from_optimizer(optim.SGD, momentum=0.9, dampening=0.5)
    one = {"w": grads[0]["w"], "deep": None, "scalar": None}
    state = tx.update(one, tx.init(params), params)[1]
    moved = state._replace(slots={k: state.slots[k] for k in sorted(params)})
    shuffled = {k: params[k] for k in ("scalar", "deep", "w")}
    left, right = tx.update(grads[1], state, params), tx.update(grads[1], moved, shuffled)
    assert same(left[0], right[0])
    assert same(left[1].slots, right[1].slots)
    assert list(right[0]) == list(shuffled)


class Pair(NamedTuple):
    left: object
    right: object


@pytest.mark.parametrize(
    "tree",
    [
        lambda a, b: {"layer": {"a": a}, "rest": [b, None]},
        lambda a, b: (a, [b]),
        lambda a, b: OrderedDict(b=b, a=a),
        lambda a, b: Pair(a, {"x": b}),
    ],
)
def test_any_tree(tree):
    a, b = torch.ones(2), torch.ones(3)
    params, grads = tree(a, b), tree(2 * a, -b)
    tx = torch_backend.from_optimizer(optim.SGD, lr=0.5, momentum=0.9)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    torch.testing.assert_close(tensors(updates), tensors(tree(-a, 0.5 * b)))
    torch.testing.assert_close(tensors(tx.update(grads, state, params)[0]), tensors(tree(-1.9 * a, 0.95 * b)))
    assert torch_backend.trees.flatten(updates)[1] == torch_backend.trees.flatten(params)[1]


def test_a_tensor_is_a_tree_and_nothing_is_one():
    state = ADAMW.init(torch.ones(3))
    assert ADAMW.update(torch.ones(3), state, torch.ones(3))[0].shape == (3,)
    assert ADAMW.update({}, ADAMW.init({}), {})[0] == {}


def test_gradients_with_a_graph_are_detached():
    grad = torch.ones(3, requires_grad=True) * 2
    updates, state = ADAMW.update([grad], ADAMW.init([torch.ones(3)]), [torch.ones(3)])
    assert not any(t.requires_grad for t in tensors((updates, state)))


def test_an_option_is_a_function_of_the_count():
    params, grads = problem(optim.AdamW)
    tx = torch_backend.from_optimizer(
        optim.AdamW, lr=lambda count: 0.1 / (1 + count), weight_decay=lambda count: 0.1 * count
    )
    state = tx.init(params)
    made = optim.AdamW([p.clone().requires_grad_() for p in params.values()])
    for count, grad in enumerate(grads):
        made.param_groups[0] |= {"lr": 0.1 / (1 + count), "weight_decay": 0.1 * count}
        for k, p in zip(params, made.param_groups[0]["params"], strict=True):
            p.data.copy_(params[k])
            p.grad = grad[k].clone()
        made.step()
        updates, state = tx.update(grad, state, params)
        for k, p in zip(params, made.param_groups[0]["params"], strict=True):
            assert torch.equal(updates[k], p.detach() - params[k])


def test_groups_have_options_of_their_own_by_name():
    params = {"a": {"bias": torch.ones(2), "weight": torch.ones(2, 2)}, "list": [torch.ones(1)]}
    seen = []

    def groups(name):
        seen.append(name)
        return {"weight_decay": 0.0} if name.endswith("bias") else {"lr": lambda count: 0.5} if name == "list.0" else {}

    tx = torch_backend.from_optimizer(optim.SGD, lr=0.1, weight_decay=1.0, groups=groups)
    grads = {"a": {"bias": torch.zeros(2), "weight": torch.zeros(2, 2)}, "list": [torch.zeros(1)]}
    updates, _ = tx.update(grads, tx.init(params), params)
    close = lambda t, value: torch.testing.assert_close(t, torch.full_like(t, value))
    close(updates["a"]["bias"], 0.0)
    close(updates["a"]["weight"], -0.1)
    close(updates["list"][0], -0.5)
    assert set(seen) == {"a.bias", "a.weight", "list.0"}
    seen.clear()
    tx.init(dict(torch.nn.Sequential(torch.nn.Linear(2, 2)).named_parameters()))
    assert seen == ["0.weight", "0.bias"]


def test_what_evaluates_the_loss_itself_is_refused():
    place = (
        "and a transform is given the gradients of one place. Call the optimizer itself, optimizer.step(closure), with "
        "a closure that assigns what accumulate returns."
    )
    check_refused(
        f"LBFGS evaluates the loss itself, {place}", lambda: torch_backend.from_optimizer(optim.LBFGS, max_iter=1)
    )
    tx, params = torch_backend.from_optimizer(optim.SGD), {"x": torch.ones(3)}
    with pytest.raises(FuncgaError, match=f"closure= was given, {re.escape(place)}"):
        tx.update(params, tx.init(params), params, closure=lambda: 1.0)


class Theirs(optim.Optimizer):
    """An optimizer of a third party, with numbers and a list in its state, which writes to its gradients.

    also: a list with a function of (optimizer, group, parameter, its state), which each step calls in the end.
    """

    def __init__(self, params, lr=0.1, also=(), value=None):
        super().__init__(params, {"lr": lr, "also": also, "value": value})
        self.calls, self.seen = 0, torch.zeros(3)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "step": 0,
                        "rate": 1.0,
                        "seen": False,
                        "none": None,
                        "past": [torch.zeros_like(p)],
                    }
                state["step"] += 1
                state["rate"] *= 0.9 ** state["step"]
                state["seen"] = True
                state["past"][0].add_(p.grad)
                p.grad.mul_(2)
                p.sub_(state["past"][0] * state["rate"] * group["lr"])
                for function in group["also"]:
                    function(self, group, p, state)


def test_one_of_a_third_party():
    params, grads = problem(Theirs)
    tx = torch_backend.from_optimizer(Theirs)
    state = tx.init(params)
    own = {k: p.clone().requires_grad_() for k, p in params.items()}
    made = Theirs(list(own.values()))
    for grad in grads:
        given = copy.deepcopy(grad)
        updates, state = tx.update(grad, state, params)
        assert same(grad, given)
        params = torch_backend.apply_updates(params, updates)
        for k, p in own.items():
            p.grad = grad[k].clone()
        made.step()
        for k, p in own.items():
            torch.testing.assert_close(params[k], p.detach())
            assert same(flat(state.slots)[k], dict(made.state[p]))
    assert state.slots["w"]["step"].value.dtype == torch.int64  # a number is a tensor in a state


def careless(function, value=None):
    return torch_backend.from_optimizer(Theirs, also=[function], value=value).init({"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("name", "value", "function"),
    [
        ("param_groups[0]['lr']", None, lambda own, group, *_: group.update(lr=group["lr"] / 2)),
        ("calls", None, lambda own, *_: setattr(own, "calls", own.calls + 1)),
        ("seen", None, lambda own, *_: own.seen.add_(1)),
        ("state['step']", None, lambda own, *_: own.state.update(step=1)),
        ("param_groups[0]['value']", torch.ones(3), lambda own, group, *_: group.update(value=torch.ones(4))),
        ("param_groups[0]['value']", torch.ones(3), lambda own, group, *_: group["value"].mul_(2)),
        ("param_groups[0]['value']", [], lambda own, group, *_: group["value"].append(1)),
        ("param_groups[0]['value']", {"past": []}, lambda own, group, *_: group["value"]["past"].append(1)),
    ],
)
def test_what_belongs_to_no_parameter_is_not_lost_silently(name, value, function):
    check_refused(
        f"a step of Theirs changes its `{name}`, which belongs to no parameter, so that it is in no state, and a pure "
        "update would lose it. Keep optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads).",
        careless, function, value,
    )  # fmt: skip


@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(2)], (0.9, 0.99), None])
def test_what_stays_as_it_is_is_not_refused(value):
    again = lambda own, group, *_: group.update(value=group["value"].clone() if torch.is_tensor(value) else value)
    tx, params = torch_backend.from_optimizer(Theirs, also=[again], value=value), {"w": torch.ones(2)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].any()


def test_what_is_no_tensor_is_not_kept():
    check_refused(
        "the optimizer keeps `object` of type Theirs for a parameter, which is no tensor and cannot be put into a state. "
        "Keep optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads).",
        careless, lambda own, group, p, state: state.update(object=own),
    )  # fmt: skip
    check_refused(
        "Theirs keeps the memory of the parameter itself as `alias`, which a pure update cannot follow. Keep "
        "optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads).",
        careless, lambda own, group, p, state: state.update(alias=p.data.view(-1)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("from_optimizer makes the optimizer anew for each update, so it takes a class and its options, and was given 3. "
         "Write from_optimizer(torch.optim.AdamW, lr=1e-3).", lambda: torch_backend.from_optimizer(3)),
        ("`learning_rate` is no option of SGD. Its options are lr, momentum,", lambda: torch_backend.from_optimizer(optim.SGD, learning_rate=1)),
        ("`beta` is no option of Adam (`betas`?). Its options are lr, betas,", lambda: torch_backend.from_optimizer(optim.Adam, beta=1)),
        ("differentiable=True steps through autograd, and an update is computed on a copy, without it. Leave it out.",
         lambda: torch_backend.from_optimizer(optim.Adam, differentiable=True)),
        ("groups is {}, which is no function. Pass one, such as lambda name: {\"weight_decay\": 0.0} if name.endswith(\"bias\") else {}.",
         lambda: torch_backend.from_optimizer(optim.Adam, groups={})),
        ("scheduler is 3, which is no function. Pass one, such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30).",
         lambda: torch_backend.from_optimizer(optim.Adam, scheduler=3)),
        ("lr is a function of the count of updates, and scheduler sets lr, too. Give one of the two: a number for lr, or no "
         "scheduler.", lambda: torch_backend.from_optimizer(optim.Adam, scheduler=dict, lr=lambda count: 1.0)),
        ("groups('w') is None. It returns a dict, of the options the parameter has for itself, such as {\"weight_decay\": 0.0}, "
         "and {} where it has none.", lambda: torch_backend.from_optimizer(optim.Adam, groups=lambda name: None).init({"w": torch.ones(1)})),
        ("groups('w') gives an option `decay`, which is no option of Adam. Its options are lr,",
         lambda: torch_backend.from_optimizer(optim.Adam, groups=lambda name: {"decay": 1}).init({"w": torch.ones(1)})),
        ("`params['w']` is int64[1]: parameters are tensors of floating point or complex numbers. Leave it out, or put None "
         "there; a module's are torch_backend.trainable(module).", lambda: ADAMW.init({"w": torch.ones(1, dtype=torch.int64)})),
        ("`params['w']` is of type Linear: parameters", lambda: ADAMW.init({"w": torch.nn.Linear(1, 1)})),
    ],
)  # fmt: skip
def test_what_makes_no_transform(text, call):
    check_refused(text, call)


@pytest.mark.parametrize(
    ("grads", "text"),
    [
        ({"w": torch.ones(2)}, "grads and params differ in structure: `grads['b']` is missing. `params` is dict(['w']: "
         "float32[2], ['b']: float32[1]). Give grads the same structure, with None where there is no gradient."),
        ({"w": torch.ones(2), "b": torch.ones(1), "c": None}, "grads and params differ in structure: `grads['c']` is not expected."),
        ([torch.ones(2)], "`grads['w']` is missing, `grads['b']` is missing, `grads[0]` is not expected."),
        (torch.ones(2), "grads and params differ in structure: `grads` is float32[2]."),
        ({"w": torch.ones(3), "b": torch.ones(1)}, "`grads['w']` is float32[3], and `params['w']` is float32[2]. A gradient has its "
         "parameter's shape: give the parameters that it was computed for, and the gradients alone of loss, grads = "
         "step(...)."),
        ({"w": 1.0, "b": torch.ones(1)}, "`grads['w']` is of type float, and `params['w']` is float32[2]. Give a tensor, or None where "
         "there is no gradient."),
        ({"w": torch.ones(2, dtype=torch.float64), "b": None}, "`grads['w']` is float64[2], and `params['w']` is float32[2]. An optimizer "
         "of torch computes in one dtype. Give it the parameters in that of the gradients, parameter.to(torch.float64), and let "
         "torch_backend.apply_updates round the sum, as funcga.multi_steps does; or fold to that of the parameters: "
         "funcga.mean(out_dtype=torch.float32)."),
        ({"w": torch.ones(2, device="meta"), "b": None}, "`grads['w']` is float32[2] on meta, and `params['w']` is float32[2]. Move it: "
         "grad.to('cpu')."),
    ],
)  # fmt: skip
def test_what_is_no_gradient(grads, text):
    params = {"w": torch.ones(2), "b": torch.ones(1)}
    state = ADAMW.init(params)
    before = copy.deepcopy(state)
    check_refused(text, ADAMW.update, grads, state, params)
    check_refused(text, ADAMW.donated, grads, state, params)
    assert same(tuple(state), tuple(before))


def test_what_is_no_state():
    params = {"w": torch.ones(2)}
    check_refused("params are missing, and the step of a torch optimizer starts from them: tx.update(grads, state, params).",
                  ADAMW.update, params, ADAMW.init(params))  # fmt: skip
    check_refused("state is of type dict, and should be what init or the update before returned: state = tx.init(params); "
                  "updates, state = tx.update(grads, state, params).", ADAMW.update, params, {}, params)  # fmt: skip
    other = ADAMW.init({"v": torch.ones(2)})
    check_refused("state.slots and params differ in structure: `state.slots['w']` is missing, `state.slots['v']` is not expected.",
                  ADAMW.update, params, other, params)  # fmt: skip
    broken = ADAMW.init(params)._replace(slots={"w": torch.ones(2)})
    check_refused("`state.slots['w']` is float32[2], and should be a dict of what the optimizer keeps for that parameter: it is the "
                  "state of others. Begin with state = tx.init(params).", ADAMW.update, params, broken, params)  # fmt: skip


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ("SGD momentum", "AdamW", "has momentum_buffer, and AdamW looks for "),
        ("SGD momentum", "AdamW fused", "has momentum_buffer, and AdamW looks for "),
        ("AdamW", "SGD momentum", "has step, exp_avg, exp_avg_sq, and SGD looks for momentum_buffer there"),
        ("AdamW", "Adam", "has step, exp_avg, exp_avg_sq, and Adam looks for max_exp_avg_sq there: it is the state of another "
         "optimizer, or of other options. Begin with state = tx.init(params)."),
    ],
)  # fmt: skip
def test_the_state_of_another_optimizer(left, right, text):
    params, grads = problem(optim.SGD)
    make = lambda case: torch_backend.from_optimizer(CASES[case][0], **CASES[case][1])
    state = make(left).init(params)
    make(right).update(grads[0], state, params)  # nothing is in it yet
    state = make(left).update(grads[0], state, params)[1]
    check_refused(f"`state.slots['w']` {text}", make(right).update, grads[1], state, params)
    check_refused(f"`state.slots['w']` {text}", make(right).donated, copy.deepcopy(grads[1]), state, params)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda tx: pickle.loads(pickle.dumps(tx))])
def test_a_transform_can_be_copied(duplicate):
    params, grads = problem(optim.AdamW)
    adamw = torch_backend.from_optimizer(optim.AdamW, lr=0.1, scheduler=partial(optim.lr_scheduler.StepLR, step_size=2))
    tx = torch_backend.chain(torch_backend.clip_grad_norm(0.5), torch_backend.chain(adamw))
    state = other = tx.init(params)
    for grad in grads:
        twin = duplicate(tx)
        wanted, state = tx.update(grad, state, params)
        found, other = twin.donated(copy.deepcopy(grad), other, params)
        assert type(twin) is type(tx)
        assert same(found, wanted)


OPTIMIZERS = {optimizer for optimizer, _ in CASES.values()}
MODES = [{"foreach": False}, {"foreach": True}, {"fused": True}]
NESTEROV = {"momentum": 0.9, "nesterov": True}
GRID = [
    (optimizer, mode | own)
    for optimizer in OPTIMIZERS
    for mode in MODES
    for own in ([{}, {"momentum": 0.9, "weight_decay": 0.1}, NESTEROV] if optimizer is optim.SGD else [{}])
    + [{"weight_decay": 0.1}, {"maximize": True}]
    if {*mode, *own} <= {*inspect.signature(optimizer).parameters}
]


def test_of_torchs_own_sgd_alone_writes_to_its_gradients():
    wrote = []
    for optimizer, options in GRID:
        params, grads = problem(optimizer)
        made = optimizer([p.requires_grad_() for p in params.values()], **options)
        for grad in grads[:3]:
            for k, p in params.items():
                p.grad = grad[k].clone()
            made.step()
            if not all(torch.equal(p.grad, grad[k]) for k, p in params.items()):
                wrote.append((optimizer, options))
    assert wrote
    assert all(made == (optim.SGD, {"foreach": True} | NESTEROV) for made in wrote)


def sharded(group):
    """Of clipped gradients, by update and by apply: the parameters that are not those of one device, and the errors."""
    mesh = dist.init_device_mesh("cpu", (2,))
    params, grads = problem(optim.AdamW)
    places = {"w": Shard(0), "deep": Shard(0), "scalar": Replicate()}
    place = lambda tree: {k: distribute_tensor(v.clone(), mesh, [places[k]]) for k, v in tree.items()}
    plain, stepped, whole = place(params), place(params), params
    states = [ADAMW.init(plain), ADAMW.init(stepped), ADAMW.init(whole), ADAMW.init(whole)]
    other = whole
    for at, grad in enumerate(grads[:3]):
        updates, states[0] = ADAMW.update(place(grad), states[0], plain)
        plain = torch_backend.apply_updates(plain, updates)
        updates, states[2] = ADAMW.update(grad, states[2], whole)
        whole = torch_backend.apply_updates(whole, updates)
        assert all(torch.equal(plain[k].full_tensor(), whole[k]) for k in whole)
        before = {k: p.to_local().data_ptr() for k, p in stepped.items()}
        stepped, states[1] = funcga.transforms.apply(ADAMW, place(grad), states[1], stepped, donate=at == 2)
        assert (before == {k: p.to_local().data_ptr() for k, p in stepped.items()}) == (at == 2)
        other, states[3] = funcga.transforms.apply(ADAMW, grad, states[3], other)
        assert all(torch.equal(stepped[k].full_tensor(), other[k]) for k in other)
    assert all(states[0].slots[k]["exp_avg"].placements == plain[k].placements for k in whole)
    clip = torch_backend.clip_grad_norm(1.0)
    whole = {k: grads[0][k] for k in ("w", "deep")}
    clipped, state = clip.update(place(whole), clip.init(whole))
    wanted, norm = clip.update(whole, clip.init(whole))
    assert type(state.norm) is torch.Tensor
    torch.testing.assert_close(state.norm, norm.norm)
    torch.testing.assert_close({k: v.full_tensor() for k, v in clipped.items()}, wanted)
    check_refused(
        "`grads['w']` is float32[5, 3], and `params['w']` is a DTensor float32[5, 3]. The gradient of a DTensor is one:",
        ADAMW.update, grads[0], states[0], plain,
    )  # fmt: skip


def over_ranks(group):
    """A window of two micro-batches on each of two ranks is one step of torch's optimizer with their mean."""
    params, grads = problem(optim.AdamW)
    rank = dist.get_rank()
    for donate in (False, True):
        tx = funcga.multi_steps(torch_backend.from_optimizer(optim.AdamW, fused=True), 2, across=group)
        found, own = (
            {k: p.clone() for k, p in params.items()},
            {k: p.clone().requires_grad_() for k, p in params.items()},
        )
        state = tx.init(found)
        for grad in copy.deepcopy(grads[2 * rank : 2 * rank + 2]):
            found, state = funcga.transforms.apply(tx, grad, state, found, donate=donate)
        for k, p in own.items():
            p.grad = ((grads[0][k] + grads[1][k]) + (grads[2][k] + grads[3][k])) / 4
        optim.AdamW([*own.values()], fused=True).step()
        assert same(found, {k: p.detach() for k, p in own.items()})
        _, state = tx.flush(tx.accumulate(grads[rank], state), found)
        assert int(state.updates) == 2


@pytest.mark.parametrize("check", [sharded, over_ranks])
def test_on_two_ranks(check):
    processes(2).run(check, size=2)


@needs_cuda
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_the_host_waits_for_no_device(options):
    params, grads = problem(optim.AdamW)
    on_device = lambda tree: {k: v.cuda() for k, v in tree.items()}
    params, grads = on_device(params), list(map(on_device, grads))
    tx = torch_backend.from_optimizer(optim.AdamW, **options)
    state = tx.init(params)
    with no_synchronisation():
        for grad in grads:
            updates, state = tx.donated(grad, state, params)
            params = torch_backend.apply_updates(params, updates)
