"""Schedulers of torch as functions of the count: the options that they set, at every update."""

from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

import funcga
import torch_backend
from tests.test_errors import check_refused
from tests.torch_backend.optim.test_from_optimizer import Allocated

SCHEDULERS = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "CosineAnnealingLR": partial(schedulers.CosineAnnealingLR, T_max=5),
    "StepLR": partial(schedulers.StepLR, step_size=3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)]
    ),
}


def groups(name):
    return {"lr": 0.02, "weight_decay": 0.1} if name == "b" else {}


SCHEDULES = {
    "numbers": {"lr": 0.1},
    "a function": {"lr": lambda count: 0.1 * 0.9**count, "groups": lambda name: {"weight_decay": 0.1} if name == "b" else {}},
    "of a group": {"lr": 0.1, "groups": lambda name: {"lr": lambda count: 0.2 / (2 + count)} if name == "b" else {}},
    "for each group": {"scheduler": lambda o: schedulers.LambdaLR(o, [lambda count: 1 + count, lambda count: 9 + count])},
    **{name: {"scheduler": scheduler} for name, scheduler in SCHEDULERS.items()},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rate"),
    [(name, "tensor" if index % 3 == 2 else "number") for index, name in enumerate(SCHEDULES)] + [("StepLR", "tensor")],
)
def test_updates_and_their_options_are_those_of_a_loop(name, rate):
    """`w` and `v` are in one group, and `b`, which stands between them, in another; what a loop by hand sets is in it."""
    lr = lambda value: torch.tensor(value) if rate == "tensor" else value
    given = {"lr": lr(0.05), "groups": groups, **SCHEDULES[name]}
    before = repr(given)
    kind, extra = (optim.SGD, {"momentum": 0.8}) if rate == "number" else (optim.Adam, {"foreach": False})
    tx = torch_backend.from_optimizer(kind, **given, **extra)
    torch.manual_seed(0)
    params = {"w": torch.randn(3), "none": None, "b": torch.randn(2), "v": torch.randn(())}
    own = {k: p.clone().requires_grad_() for k, p in params.items() if p is not None}
    of_group = {**{k: v for k, v in given.items() if k == "lr"}, **given["groups"]("b")}
    at = lambda options, count: {k: v(count) if callable(v) else v for k, v in options.items()}
    clone = lambda v: v.clone() if isinstance(v, torch.Tensor) else v
    tensors = [
        {"params": [own["w"], own["v"]]},
        {"params": [own["b"]], **{k: clone(v) for k, v in at(of_group, 0).items()}},
    ]
    made = kind(tensors, lr=clone(at({"lr": given["lr"]}, 0)["lr"]), **extra)
    scheduler = given["scheduler"](made) if "scheduler" in given else None
    state, states = tx.init(params), []
    for count in range(8):
        if scheduler is None:
            for group, options in zip(made.param_groups, ({"lr": given["lr"]}, of_group), strict=True):
                group.update(at(options, count))
        grads = {k: torch.randn_like(p) for k, p in own.items()}
        for k, p in own.items():
            p.data.copy_(params[k])
            p.grad = grads[k].clone()
        names = ["lr", "weight_decay", *({"betas", "momentum"} & {*made.defaults})]
        wanted = [{k: clone(group[k]) for k in names} for group in made.param_groups]
        made.step()
        if scheduler is not None:
            scheduler.step()
        updates, state = tx.update({"none": None, **grads}, state, params)
        assert all(torch.equal(updates[k], p.detach() - params[k]) for k, p in own.items())
        states.append((state, wanted))
        params = torch_backend.apply_updates(params, updates)
    for state, wanted in (*states, *states[::-1], states[3], states[3]):
        found = torch_backend.last_options(tx, state, params)
        assert [{k: group[k] for k in wanted[0]} for group in found] == wanted
        assert all({*group} == {*made.defaults} for group in found)
    assert repr(given) == before


def test_other_groups_begin_anew():
    tx = torch_backend.from_optimizer(
        optim.Adam,
        lr=0.05,
        groups=lambda name: {"lr": {"b": 0.02, "c": 1.0}[name]} if name in "bc" else {},
        scheduler=partial(schedulers.ExponentialLR, gamma=0.5),
    )

    trees = {names: {name: torch.zeros(1) for name in names} for names in ("ab", "c")}
    states = {names: tx.init(params) for names, params in trees.items()}

    def rates(names, count):
        state = states[names]._replace(count=torch.tensor(count + 1, dtype=torch.int32))
        return [group["lr"] for group in torch_backend.last_options(tx, state, trees[names])]

    assert rates("ab", 1) == [0.025, 0.01]
    assert rates("c", 2) == [0.25]
    assert rates("ab", 3) == [0.00625, 0.0025]


def test_errors_of_a_schedule():
    """In each update of the same state: those of torch, and one's own, pass through."""
    short = partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=2)
    mine = partial(schedulers.LambdaLR, lr_lambda=lambda update: {0: 1.0, 1: 0.5, 2: 0.2}[update])
    params = {"w": torch.ones(2)}
    for scheduler, error, text in ((short, ValueError, "Tried to step 3 times"), (mine, KeyError, "^3$")):
        tx = torch_backend.from_optimizer(optim.SGD, lr=0.1, scheduler=scheduler)
        state = tx.init(params)
        for _ in range(3):
            _, state = tx.update(params, state, params)
        for _ in range(2):
            with pytest.raises(error, match=text):
                tx.update(params, state, params)


def test_what_is_no_schedule():
    params = {"w": torch.ones(2)}
    for make, error, text in (
        (schedulers.ReduceLROnPlateau, TypeError, "missing 1 required positional argument: 'metrics'"),
        (schedulers.OneCycleLR, TypeError, "max_lr"),
        (lambda optimizer: None, AttributeError, "NoneType"),
    ):
        tx = torch_backend.from_optimizer(optim.SGD, scheduler=make)
        with pytest.raises(error, match=text):
            tx.update(params, tx.update(params, tx.init(params), params)[1], params)


@pytest.mark.parametrize("optimizer", [optim.Adagrad, optim.Adafactor, optim.Muon])
def test_options_are_read_without_memory_of_the_size_of_the_params(optimizer):
    params = {"w": torch.ones(400, 400)}
    tx = torch_backend.from_optimizer(optimizer, lr=0.5)
    state = tx.init(params)._replace(count=torch.tensor(1, dtype=torch.int32))
    with Allocated() as made:
        (options,) = torch_backend.last_options(tx, state, params)
    assert options["lr"] == 0.5
    assert made.bytes < 1000


def test_where_the_last_options_are():
    params, sgd = (
        {"w": torch.ones(2)},
        torch_backend.from_optimizer(optim.SGD, lr=0.1, scheduler=partial(schedulers.StepLR, step_size=1)),
    )
    tx = funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(1.0), sgd), 2)
    state = tx.init(params)
    for _ in range(4):
        _, state = tx.update(params, state, params)
    assert torch_backend.last_options(sgd, state.inner[1], params)[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(TypeError, match="builtin_function_or_method"):  # of a tuple
        torch_backend.last_options(sgd, state.inner, params)
    text = (
        "the state is that before the first update, so there are no last options. Read them after an update: updates, "
    )
    check_refused(text, torch_backend.last_options, sgd, sgd.init(params), params)
