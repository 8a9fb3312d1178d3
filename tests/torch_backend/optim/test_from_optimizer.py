"""Every optimizer of torch as pure functions: the bits of its own step, and nothing written to unless it is given away."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import funcga
import torch_backend
from funcga.transforms import Transform, apply
from tests.kits import needs_cuda, no_synchronisation
from tests.processes import processes
from tests.test_errors import check_refused
from torch_backend import chain, clip_grad_norm, from_optimizer


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
    "a third party's": (Theirs, {}),
}


def problem(optimizer, dtype=torch.float32, updates=6):
    """Parameters, and the gradients of some updates."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 3), "v": (3, 4)} if optimizer is optim.Muon else {"w": (5, 3), "deep": (4,), "scalar": ()}
    draw = lambda: {k: torch.randn(shape, generator=generator, dtype=dtype) for k, shape in shapes.items()}
    params, grads = draw(), [draw() for _ in range(updates)]
    return params, grads


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


def test_every_optimizer_of_torch_is_here():
    stock = {v for v in vars(optim).values() if isinstance(v, type) and issubclass(v, optim.Optimizer)}
    apart = {optim.Optimizer, optim.LBFGS, optim.SparseAdam}
    assert stock - apart <= {optimizer for optimizer, _ in CASES.values()}


def parameters(params):
    return {k: p.detach().clone().requires_grad_() for k, p in params.items()}


def step(made, own, grads):
    """A step of an optimizer of torch on parameters of its own; what it keeps for each."""
    for k, p in own.items():
        p.grad = None if grads[k] is None else grads[k].clone()
    made.step()
    return copy.deepcopy({k: dict(made.state.get(p, {})) for k, p in own.items()})


def addresses(tree):
    return {t.data_ptr() for t in tensors(tree) if t.numel()}


@pytest.mark.parametrize("case", CASES)
def test_updates_are_the_steps_of_the_optimizer(case):
    """By `apply` the parameters too are bitwise identical; what was donated, or saved, goes on with the same bits."""
    optimizer, options = CASES[case]
    complex_or_wide = {"Adam": torch.complex64, "Adam foreach": torch.complex64, "AdamW": torch.bfloat16}
    dtype = complex_or_wide.get(case, torch.float64 if list(CASES).index(case) % 3 == 0 else torch.float32)
    params, grads = problem(optimizer, dtype)
    own = parameters(params)
    made = optimizer([*own.values()], **options)
    tx = from_optimizer(optimizer, **options)
    state, given_state, loaded = tx.init(params), tx.init(params), tx.init(params)
    assert not any(t.any() for t in tensors(state))
    given = {k: p.clone() for k, p in params.items()}
    for grad in grads:
        params = {k: nn.Parameter(p) for k, p in params.items()}
        before = copy.deepcopy((grad, params)), repr(state)
        updates, after = tx.update(grad, state, params)
        stepped, after_apply = apply(tx, grad, state, params)
        other, loaded = tx.update(grad, saved(loaded), params)
        again, donated = tx.donated(copy.deepcopy(grad), copy.deepcopy(given_state), params)
        assert same((grad, params), before[0])
        assert repr(state) == before[1]
        assert all(p.grad is None and p.requires_grad for p in params.values())

        kept = step(made, own, grad)
        assert same(after.slots, kept)
        assert same(stepped, {k: p.detach() for k, p in own.items()})
        assert repr([after_apply, loaded, donated]) == repr([after] * 3)
        assert same([again, other], [updates] * 2)
        eps = torch.finfo(dtype).eps  # the difference of two parameters and its sum, each rounded once
        for k, p in torch_backend.apply_updates(params, updates).items():
            torch.testing.assert_close(p.detach(), own[k].detach(), rtol=4 * eps, atol=1e-6 * eps)

        returned = tensors((updates, after)), tensors((stepped, after_apply))
        for results in returned:
            assert not any(t.requires_grad or t.grad is not None for t in results)
            assert len(addresses((grad, state, params)) | addresses(results)) == len(
                addresses((grad, state, params))
            ) + len(addresses(results))
        place, gradient = addresses(given), copy.deepcopy(grad)
        given, given_state = apply(tx, gradient, given_state, given, donate=True)
        assert addresses(given) == place
        assert not addresses(gradient) & addresses(given_state)
        assert same(given, stepped)
        assert repr(given_state) == repr(after)
        params, state = stepped, after
    assert int(state.count) == 6
    assert state.started.all()


def strided(kind, values):
    """The values in other strides than they have."""
    if kind == "transposed":
        return values.mT.contiguous().mT if values.ndim > 1 else torch.stack([values, values], -1)[..., 0]
    return values.sum().expand(values.shape)


@pytest.mark.parametrize(
    ("case", "where", "kind"),
    [
        ("Adam fused", "grads", "expanded"), ("Adam fused", "params", "transposed"), ("Muon", "both", "transposed"),
        ("SGD foreach", "both", "expanded"), ("SGD fused", "grads", "expanded"), ("SGD foreach", "grads", "expanded"),
    ],
)  # fmt: skip
def test_strides_change_nothing(case, where, kind):
    optimizer, options = CASES[case]
    params, grads = problem(optimizer)
    lay = lambda tree, chosen: {k: strided(kind, v) if chosen else v for k, v in tree.items()}
    tx = from_optimizer(optimizer, **options)
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


def test_gradients_in_one_memory_and_in_the_memory_of_one_element():
    params, expanded = {"w": torch.zeros(2, 3)}, {"w": torch.ones(()).expand(2, 3)}
    tx = from_optimizer(optim.SGD, lr=1.0, fused=True)
    for function in (tx.update, tx.donated):
        assert torch.equal(function(expanded, tx.init(params), params)[0]["w"], -torch.ones(2, 3))
    tx = from_optimizer(optim.SGD, lr=1.0, momentum=0.9, nesterov=True, foreach=True)
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


ADAMW = from_optimizer(optim.AdamW, lr=0.1)
FUSED = from_optimizer(optim.AdamW, fused=True)


@pytest.mark.parametrize(
    ("call", "copies"),
    [
        (FUSED.donated, 1),
        (FUSED.update, 3),  # the parameters and two moments
        (partial(apply, FUSED, donate=True), 0),
        (partial(apply, FUSED), 3),
    ],
)
def test_one_copy_of_the_parameters_is_all_that_is_made(call, copies):
    params, grads = ({"w": torch.ones(1000), "v": torch.ones(1000)} for _ in range(2))
    _, state = FUSED.update(grads, FUSED.init(params), params)
    with Allocated() as made:
        call(grads, state, params)
    assert copies * 8000 <= made.bytes < copies * 8000 + 100


@pytest.mark.parametrize(
    ("wrap", "donate", "copies"),
    [
        (lambda tx: chain(clip_grad_norm(1.0), tx), True, 0),
        (
            lambda tx: chain((lambda p: (), lambda grads, state, p: ({k: 2 * g for k, g in grads.items()}, state)), tx),
            True,
            1,
        ),
        (lambda tx: funcga.transforms.loss_scaled(tx, init_scale=1.0), True, 0),
        (lambda tx: funcga.multi_steps(tx, 1), True, 1),  # the sums of the window
        (lambda tx: funcga.multi_steps(tx, 1, donate=True), False, 2),
    ],
)
def test_what_is_given_away_is_not_copied(wrap, donate, copies):
    params, grads = ({"w": torch.ones(1000), "v": torch.ones(1000)} for _ in range(2))
    tx = wrap(FUSED)
    params, state = apply(tx, copy.deepcopy(grads), tx.init(params), params)
    with Allocated() as made:
        apply(tx, grads, state, params, donate=donate)
    assert copies * 8000 <= made.bytes < copies * 8000 + 300


@pytest.mark.parametrize("optimizer", [Theirs, partial(optim.SGD, momentum=0.9, dampening=0.5)])
@pytest.mark.parametrize("donate", [False, True])
def test_a_parameter_without_a_gradient_is_skipped_until_it_has_one(optimizer, donate):
    params, grads = problem(optim.SGD)
    params["deep"][0] = torch.inf
    options = {"lr": 0.1} if optimizer is Theirs else {"lr": 0.1, **optimizer.keywords}
    tx = from_optimizer(Theirs if optimizer is Theirs else optim.SGD, **options)
    own = parameters(params)
    made, params = optimizer(list(own.values()), lr=0.1), {"none": None, **params}
    state = tx.init(params)
    for number, grad in enumerate(grads):
        grad = {"none": None, **grad, "deep": None if number in (0, 1, 4) else grad["deep"]}
        updates, after = tx.update(grad, state, params)
        assert updates["deep"].any() == (grad["deep"] is not None)
        params, state = apply(tx, copy.deepcopy(grad), state, params, donate=donate)
        kept = step(made, own, grad)
        assert list(params) == ["none", *own]
        assert same(params, {"none": None, **{k: p.detach() for k, p in own.items()}})
        assert repr(state) == repr(after)
        assert state.started.tolist() == [number > 1, True, True, True]  # in the order of their paths
        assert same(state.slots["w"], kept["w"])
        if number < 2:
            assert not any(t.any() for t in tensors(state.slots["deep"]))


def test_a_state_goes_on_after_its_dicts_were_sorted():
    params, grads = problem(optim.SGD)
    tx = from_optimizer(optim.SGD, momentum=0.9, dampening=0.5)
    one = {"w": grads[0]["w"], "deep": None, "scalar": None}
    state = tx.update(one, tx.init(params), params)[1]
    moved = state._replace(slots={k: state.slots[k] for k in sorted(params)})
    shuffled = {k: params[k] for k in ("scalar", "deep", "w")}
    left, right = tx.update(grads[1], state, params), tx.update(grads[1], moved, shuffled)
    assert same(left[0], right[0])
    assert same(left[1].slots, right[1].slots)
    assert list(right[0]) == list(shuffled)


def test_an_array_alone_nothing_at_all_and_gradients_with_a_graph():
    assert ADAMW.update(torch.ones(3), ADAMW.init(torch.ones(3)), torch.ones(3))[0].shape == (3,)
    assert ADAMW.update({}, ADAMW.init({}), {})[0] == {}
    grad = torch.ones(3, requires_grad=True) * 2
    updates, state = ADAMW.update([grad], ADAMW.init([torch.ones(3)]), [torch.ones(3)])
    assert not any(t.requires_grad for t in tensors((updates, state)))


def test_tied_parameters_are_two():
    rows, shared = torch.arange(6.0), torch.ones(4)
    for params in ({"a": shared, "b": shared}, {"a": rows[:4], "b": rows[2:]}, {"a": torch.ones(1).expand(4)}):
        tx = from_optimizer(optim.SGD, lr=0.5, momentum=0.9)
        grads = {k: torch.full((4,), 1.0 + at) for at, k in enumerate(params)}
        wanted, first = apply(tx, grads, tx.init(params), params)
        found, second = apply(tx, grads, tx.init(params), params, donate=True)
        assert same((found, second.slots), (wanted, first.slots))


def test_the_parameters_of_a_module_are_stepped_in_place_and_keep_their_grads():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    params = torch_backend.trainable(module)
    params["0.bias"].grad = torch.full((4,), 7.0)
    own, grads = parameters(params), {k: torch.randn_like(p) for k, p in params.items()}
    step(optim.AdamW([*own.values()], lr=0.1), own, grads)
    apply(ADAMW, grads, ADAMW.init(params), params, donate=True)
    assert same(
        {k: p.detach() for k, p in torch_backend.trainable(module).items()}, {k: p.detach() for k, p in own.items()}
    )
    assert torch.equal(module[0].bias.grad, torch.full((4,), 7.0))
    assert module[0].bias.requires_grad
    assert module[1].weight.grad is None


def careless(function, value=None):
    return from_optimizer(Theirs, also=[function], value=value).init({"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("name", "value", "function"),
    [
        ("param_groups", None, lambda own, group, *_: group.update(lr=group["lr"] / 2)),
        ("param_groups", None, lambda own, group, *_: group.update(step=group.get("step", 0) + 1)),
        ("calls", None, lambda own, *_: setattr(own, "calls", own.calls + 1)),
        ("seen", None, lambda own, *_: own.seen.add_(1)),
        ("state", None, lambda own, *_: own.state.update(step=1)),
        ("param_groups", torch.ones(3), lambda own, group, *_: group.update(value=torch.ones(4))),
        ("param_groups", torch.ones(3), lambda own, group, *_: group["value"].mul_(2)),
        ("param_groups", [], lambda own, group, *_: group["value"].append(1)),
        ("param_groups", {"past": []}, lambda own, group, *_: group["value"]["past"].append(1)),
    ],
)
def test_what_belongs_to_no_parameter_is_not_lost_silently(name, value, function):
    check_refused(
        f"Theirs is no pure update: beside the state of each parameter a step keeps {name}, which a pure update would lose. "
        "Keep optimizer.step() and give it gradients: torch_backend.assign_grads(params, grads).",
        careless, function, value,
    )  # fmt: skip


@pytest.mark.parametrize("value", [torch.ones(3), [torch.ones(2)], (0.9, 0.99), None])
def test_what_stays_as_it_is_is_not_refused(value):
    again = lambda own, group, *_: group.update(value=group["value"].clone() if torch.is_tensor(value) else value)
    tx, params = from_optimizer(Theirs, also=[again], value=value), {"w": torch.ones(2)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["w"].any()


def test_the_memory_of_a_parameter_is_not_kept():
    for alias in (lambda p: p.data.view(-1), lambda p: [p.data[1:]]):
        check_refused(
            "Theirs is no pure update: beside the state of each parameter a step keeps the memory of a parameter itself",
            careless, lambda own, group, p, state, alias=alias: state.update(alias=alias(p)),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("lr is a function of the count of updates, and scheduler sets lr, too. Give one of the two: a number for lr, or no "
         "scheduler.", lambda: from_optimizer(optim.Adam, scheduler=dict, lr=lambda count: 1.0)),
        ("groups gives `decay`, which is no option of Adam: its options are lr,",
         lambda: from_optimizer(optim.Adam, groups=lambda name: {"decay": 1}).init({"w": torch.ones(1)})),
        ("groups gives `beta`, which is no option of Adam: its options are lr, betas,",
         lambda: from_optimizer(optim.Adam, groups=lambda name: {"beta": 1}).init({"w": torch.ones(1)})),
    ],
)  # fmt: skip
def test_what_makes_no_transform(text, call):
    check_refused(text, call)


@pytest.mark.parametrize(
    ("optimizer", "options", "error", "text"),
    [
        (optim.LBFGS, {}, TypeError, "missing 1 required positional argument: 'closure'"),
        (optim.SparseAdam, {}, RuntimeError, "does not support dense gradients, please consider Adam instead"),
        (optim.SGD([torch.ones(1)], lr=1.0), {}, TypeError, "'SGD' object is not callable"),
        (optim.SGD, {"learning_rate": 1}, TypeError, "unexpected keyword argument 'learning_rate'"),
        (optim.SGD, {"lr": -1}, ValueError, "Invalid learning rate"),
        (optim.SGD, {"groups": {}}, TypeError, "not callable"),
        (optim.SGD, {"groups": lambda name: None}, TypeError, "not a mapping"),
        (optim.SGD, {"scheduler": 3}, TypeError, "not callable"),
        (optim.SGD, {"lr": lambda: 1.0}, TypeError, "takes 0 positional arguments but 1 was given"),
    ],
)
def test_what_torch_and_python_refuse_themselves(optimizer, options, error, text):
    with pytest.raises(error, match=text):
        from_optimizer(optimizer, **options).init({"w": torch.ones(1)})


@pytest.mark.parametrize(
    ("leaf", "error"),
    [(torch.ones(1, dtype=torch.int64), RuntimeError), (torch.nn.Linear(1, 1), AttributeError), (1.0, AttributeError)],
)
def test_what_is_no_parameter_is_refused_by_torch_and_python(leaf, error):
    with pytest.raises(error):
        ADAMW.init({"w": leaf})


@pytest.mark.parametrize(
    ("grads", "text"),
    [
        ({"w": torch.ones(2)}, "`grads` has another structure than it should: missing `['b']`, new nothing. Give it that of "
         "the parameters; of loss, grads = step(...) the gradients alone, with None where there is none."),
        ({"w": torch.ones(2), "b": torch.ones(1), "c": None}, "`grads` has another structure than it should: missing nothing, new `['c']`."),
        ([torch.ones(2)], "`grads` has another structure than it should: missing `['w']`, `['b']`, new `[0]`."),
        (torch.ones(2), "`grads` has another structure than it should: missing `['w']`, `['b']`, new nothing."),
    ],
)  # fmt: skip
def test_what_is_no_gradient(grads, text):
    params = {"w": torch.ones(2), "b": torch.ones(1)}
    state = ADAMW.init(params)
    before = copy.deepcopy(state)
    check_refused(text, ADAMW.update, grads, state, params)
    check_refused(text, ADAMW.donated, grads, state, params)
    assert same(tuple(state), tuple(before))


@pytest.mark.parametrize(
    ("grad", "error"),
    [
        (torch.ones(3), RuntimeError),
        (torch.ones(1), RuntimeError),
        (torch.ones(2).double(), RuntimeError),
        (torch.ones(2, device="meta"), RuntimeError),
        (1.0, TypeError),
    ],
)
def test_what_is_no_gradient_of_its_parameter_is_refused_by_torch_and_python(grad, error):
    params = {"v": torch.ones(2), "w": torch.ones(2)}
    state = ADAMW.init(params)
    before = copy.deepcopy((tuple(state), params))
    for function in (ADAMW.update, ADAMW.donated):
        with pytest.raises(error):
            function({"v": torch.ones(2), "w": grad}, state, params)
        assert same((tuple(state), params), before)


def test_what_is_no_state():
    params = {"w": torch.ones(2)}
    with pytest.raises(TypeError, match="assigned grad"):
        ADAMW.update(params, ADAMW.init(params))  # without params
    with pytest.raises(AttributeError, match="slots"):
        ADAMW.update(params, {}, params)
    other = ADAMW.init({"v": torch.ones(2)})
    check_refused("`state.slots` has another structure than it should: missing `['w']`, new `['v']`.",
                  ADAMW.update, params, other, params)  # fmt: skip


@pytest.mark.parametrize(
    ("left", "right", "error", "text"),
    [
        ("SGD momentum", "AdamW fused", KeyError, "exp_avg"),
        ("SGD momentum", "Rprop", KeyError, "prev"),
        ("AdamW", "SGD momentum", funcga.FuncgaError,
         "the state has step, exp_avg, exp_avg_sq, and after a step of SGD step, exp_avg, exp_avg_sq, momentum_buffer: it is "
         r"the state of another optimizer, or of other options\. Begin with state = tx\.init\(params\)\."),
        ("RMSprop foreach", "RMSprop", KeyError, "momentum_buffer"),
    ],
)  # fmt: skip
def test_the_state_of_another_optimizer(left, right, error, text):
    """Torch itself misses what its step reads; what a step would begin anew is refused."""
    params, grads = problem(optim.SGD)
    tx, other = (from_optimizer(CASES[case][0], **CASES[case][1]) for case in (left, right))
    other.update(grads[0], tx.init(params), params)  # nothing is in it yet
    state = tx.update(grads[0], tx.init(params), params)[1]
    for function in (other.update, other.donated):
        with pytest.raises(error, match=text):
            function(copy.deepcopy(grads[1]), state, params)


@pytest.mark.parametrize(("given", "donate"), [(False, False), (True, False), (True, True)])
def test_narrow_parameters_over_a_window_are_stepped_in_float32_and_rounded_once(given, donate):
    params, grads = problem(optim.AdamW, torch.bfloat16)
    params["deep"][1] = -0.0
    tx = funcga.multi_steps(ADAMW, 2, donate=given)
    state, kept = tx.init(params), {}
    for at, grad in enumerate(grads):
        before, place = copy.deepcopy((params, state)), addresses(params)
        after, new_state = apply(tx, copy.deepcopy(grad), state, params, donate=donate)
        if at % 2 == 0:
            assert all(after[k] is params[k] for k in params)
        else:
            own = {k: p.float().requires_grad_() for k, p in before[0].items()}
            made = optim.AdamW([*own.values()], lr=0.1)
            made.state.update({own[k]: slot for k, slot in copy.deepcopy(kept).items()})
            kept = step(made, own, {k: (grads[at - 1][k].float() + grad[k].float()) / 2 for k in grad})
            assert same(after, {k: p.detach().bfloat16() for k, p in own.items()})
            assert same(new_state.inner.slots, kept)
            assert (addresses(after) == place) == donate
        if not donate:
            assert same(params, before[0])
        if not (donate or given):
            assert repr(state) == repr(before[1])
        params, state = after, new_state


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda tx: pickle.loads(pickle.dumps(tx))])
def test_a_transform_can_be_copied(duplicate):
    params, grads = problem(optim.AdamW)
    adamw = from_optimizer(optim.AdamW, lr=0.1, scheduler=partial(optim.lr_scheduler.StepLR, step_size=2))
    tx = chain(clip_grad_norm(0.5), chain(adamw))
    state = other = tx.init(params)
    for grad in grads:
        twin = duplicate(tx)
        wanted, state = tx.update(grad, state, params)
        found, other = twin.donated(copy.deepcopy(grad), other, params)
        assert type(twin) is type(tx)
        assert same(found, wanted)


def test_inside_of_a_loss_that_is_differentiated():
    descent = Transform(lambda params: (), lambda grads, state, params: ({k: -0.1 * g for k, g in grads.items()}, ()))

    def inner(params, x):
        return ((params["w"] * x) ** 2).sum()

    def outer(params, x, donate):
        grads = torch.func.grad(inner)(params, x)
        return inner(apply(descent, grads, (), params, donate=donate)[0], x)

    params, x = {"w": torch.arange(1.0, 4.0)}, torch.tensor([1.0, 0.5, 2.0])
    by_hand = torch.func.grad(lambda p, x: inner({"w": p["w"] - 0.1 * 2 * p["w"] * x**2}, x))(params, x)
    for donate in (False, True):
        found = torch.func.grad(outer)(params, x, donate)
        torch.testing.assert_close(found, by_hand)
    assert torch.equal(params["w"], torch.arange(1.0, 4.0))


def test_the_optimizer_that_is_kept_is_nobody_elses():
    tx, expected, found = from_optimizer(optim.AdamW, lr=0.1), [], []
    trees = [
        {"a": torch.ones(3)},
        {"a": torch.ones(3), "b": torch.ones(2, 2)},
        {"a": torch.ones(3, dtype=torch.float64)},
        {"b": torch.ones(3)},
        [torch.ones(3)],
    ]
    for params in [*trees, *reversed(trees)]:
        grads = torch.utils._pytree.tree_map(lambda p: 2 * p, params)
        fresh = from_optimizer(optim.AdamW, lr=0.1)
        expected.append(apply(fresh, grads, fresh.init(params), params)[0])
        found.append(apply(tx, grads, tx.init(params), params)[0])
    assert same(found, expected)
    # after an error, too
    state = tx.init([torch.ones(3)])
    broken = state._replace(slots=[{"step": torch.ones(())}], started=torch.tensor([True]))
    with pytest.raises(KeyError, match="exp_avg"):
        apply(tx, [torch.ones(3)], broken, [torch.ones(3)])
    assert same(apply(tx, [2 * torch.ones(3)], state, [torch.ones(3)])[0], expected[4])


@pytest.mark.parametrize("case", ["Adagrad", "SGD momentum", "AdamW", "a third party's"])
def test_a_transform_serves_states_in_any_order(case):
    """Also two that begin, and one that goes back; with a scheduler, too."""
    optimizer, options = CASES[case]
    params, grads = problem(optimizer)
    make = lambda: from_optimizer(optimizer, scheduler=partial(optim.lr_scheduler.StepLR, step_size=1), **options)
    tx, states = make(), []
    wanted, state = [], make().init(params)
    for grad in grads[:3]:
        states.append(state)
        updates, state = make().update(grad, state, params)
        wanted.append((updates, repr(state)))
    for at in (0, 0, 2, 1, 2, 2, 0):
        found, after = tx.update(grads[at], tx.init(params) if at == 0 else states[at], params)
        assert same(found, wanted[at][0])
        assert repr(after) == wanted[at][1]


def test_nothing_of_the_callers_is_kept():
    tx = from_optimizer(optim.AdamW, lr=0.1)
    params = {"w": torch.ones(3)}
    after, state = apply(tx, {"w": torch.ones(3)}, tx.init(params), params, donate=True)
    seen = [weakref.ref(params["w"]), weakref.ref(after["w"]), weakref.ref(state.slots["w"]["exp_avg"])]
    del params, after, state
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


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
        stepped, states[1] = apply(ADAMW, place(grad), states[1], stepped, donate=at == 2)
        assert (before == {k: p.to_local().data_ptr() for k, p in stepped.items()}) == (at == 2)
        other, states[3] = apply(ADAMW, grad, states[3], other)
        assert all(torch.equal(stepped[k].full_tensor(), other[k]) for k in other)
    assert all(states[0].slots[k]["exp_avg"].placements == plain[k].placements for k in whole)
    clip = clip_grad_norm(1.0)
    whole = {k: grads[0][k] for k in ("w", "deep")}
    first = clip.init(place(whole))
    assert type(first.norm) is torch.Tensor
    assert first.norm.isnan()
    clipped, state = clip.update(place(whole), first)
    wanted, norm = clip.update(whole, clip.init(whole))
    assert type(state.norm) is torch.Tensor
    torch.testing.assert_close(state.norm, norm.norm)
    torch.testing.assert_close({k: v.full_tensor() for k, v in clipped.items()}, wanted)
    with pytest.raises(RuntimeError, match="DTensor"):
        ADAMW.update(grads[0], states[0], plain)


def over_ranks(group):
    """A window of two micro-batches on each of two ranks is one step of torch's optimizer with their mean."""
    params, grads = problem(optim.AdamW)
    rank = dist.get_rank()
    for donate in (False, True):
        tx = funcga.multi_steps(from_optimizer(optim.AdamW, fused=True), 2, across=group)
        found, own = (
            {k: p.clone() for k, p in params.items()},
            {k: p.clone().requires_grad_() for k, p in params.items()},
        )
        state = tx.init(found)
        for grad in copy.deepcopy(grads[2 * rank : 2 * rank + 2]):
            found, state = apply(tx, grad, state, found, donate=donate)
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
    tx = from_optimizer(optim.AdamW, **options)
    state = tx.init(params)
    with no_synchronisation():
        for grad in grads:
            updates, state = tx.donated(grad, state, params)
            params = torch_backend.apply_updates(params, updates)
