"""Schedulers of torch as functions of the count: the options that they set, at every update."""

import functools

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
    "CosineAnnealingLR": functools.partial(schedulers.CosineAnnealingLR, T_max=5),
    "CosineAnnealingWarmRestarts": functools.partial(schedulers.CosineAnnealingWarmRestarts, T_0=4),
    "StepLR": functools.partial(schedulers.StepLR, step_size=3),
    "MultiStepLR": functools.partial(schedulers.MultiStepLR, milestones=[2, 5]),
    "ExponentialLR": functools.partial(schedulers.ExponentialLR, gamma=0.9),
    "LinearLR": schedulers.LinearLR,
    "ConstantLR": schedulers.ConstantLR,
    "PolynomialLR": schedulers.PolynomialLR,
    "LambdaLR": functools.partial(schedulers.LambdaLR, lr_lambda=lambda count: 1 / (1 + count)),
    "MultiplicativeLR": functools.partial(schedulers.MultiplicativeLR, lr_lambda=lambda count: 0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)]
    ),
}
OPTIONS = {
    "Adam": (optim.Adam, {"lr": 0.05}),
    "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.8}),
    "tensor": (optim.Adam, {"lr": torch.tensor(0.05)}),
}


def copied(options):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}


def options(optimizer):
    return [{k: group[k] for k in ("lr", "betas", "momentum") if k in group} for group in optimizer.param_groups]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_options_are_those_of_the_scheduler(name, kind):
    optimizer, given = OPTIONS[kind]
    rate = torch.tensor(0.02) if kind == "tensor" else 0.02
    params = {"w": torch.zeros(1), "b": torch.zeros(2)}
    before = repr(given)
    tx = torch_backend.from_optimizer(
        optimizer, groups=lambda name: {"lr": rate} if name == "b" else {}, scheduler=SCHEDULERS[name], **given
    )
    second = {"params": [params["b"]], "lr": copied({"lr": rate})["lr"]}
    followed = optimizer([{"params": [params["w"]]}, second], **copied(given))
    scheduler, expected = SCHEDULERS[name](followed), []
    for _ in range(10):
        expected.append([copied(group) for group in options(followed)])
        followed.step()
        scheduler.step()
    state = tx.init(params)
    for count in (*range(10), 7, 7, 0, 9):
        last = state._replace(count=torch.tensor(count + 1, dtype=torch.int32))
        found = torch_backend.last_options(tx, last, params)
        assert [{k: group[k] for k in wanted} for group, wanted in zip(found, expected[count], strict=True)] == expected[count]  # fmt: skip
    assert repr(given) == before


def test_other_groups_begin_anew():
    tx = torch_backend.from_optimizer(
        optim.Adam,
        lr=0.05,
        groups=lambda name: {"lr": {"b": 0.02, "c": 1.0}[name]} if name in "bc" else {},
        scheduler=functools.partial(schedulers.ExponentialLR, gamma=0.5),
    )

    def rates(names, count):
        params = {name: torch.zeros(1) for name in names}
        state = tx.init(params)._replace(count=torch.tensor(count + 1, dtype=torch.int32))
        return [group["lr"] for group in torch_backend.last_options(tx, state, params)]

    assert rates("ab", 2) == [0.0125, 0.005]
    assert rates("c", 1) == [0.5]
    assert rates("ab", 1) == [0.025, 0.01]


@pytest.mark.parametrize("name", ["OneCycleLR", "SequentialLR"])
def test_updates_are_those_of_a_loop_with_a_scheduler(name):
    torch.manual_seed(0)
    params = {"w": torch.randn(3), "b": torch.randn(2)}
    tx = torch_backend.from_optimizer(
        optim.AdamW,
        lr=0.05,
        scheduler=SCHEDULERS[name],
        groups=lambda name: {"weight_decay": 0.0} if name == "b" else {},
    )
    own = {k: p.clone().requires_grad_() for k, p in params.items()}
    followed = optim.AdamW([{"params": [own["w"]]}, {"params": [own["b"]], "weight_decay": 0.0}], lr=0.05)
    scheduler, state = SCHEDULERS[name](followed), tx.init(params)
    for _ in range(8):
        grads = {k: torch.randn_like(p) for k, p in params.items()}
        for k, p in own.items():
            p.data.copy_(params[k])
            p.grad = grads[k].clone()
        followed.step()
        scheduler.step()
        updates, state = tx.update(grads, state, params)
        assert all(torch.equal(updates[k], own[k].detach() - params[k]) for k in params)
        params = torch_backend.apply_updates(params, updates)


def test_a_scheduler_may_say_something_for_each_group():
    params = {"w": torch.zeros(3), "b": torch.zeros(2), "v": torch.zeros(1)}
    tx = torch_backend.from_optimizer(
        optim.SGD,
        lr=1.0,
        groups=lambda name: {"weight_decay": 0.1} if name == "b" else {},
        scheduler=lambda o: schedulers.LambdaLR(o, [lambda count: 1 + count, lambda count: 10 + count]),
    )
    state = tx.init(params)
    for count in range(3):
        updates, state = tx.update({k: torch.ones_like(p) for k, p in params.items()}, state, params)
        assert {k: -u[0].item() for k, u in updates.items()} == {"w": 1 + count, "b": 10 + count, "v": 1 + count}


def test_more_updates_than_were_planned():
    params, short = {"w": torch.ones(2)}, functools.partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=2)
    tx = torch_backend.from_optimizer(optim.SGD, lr=0.1, scheduler=short)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, params)
    for _ in range(2):  # and again, with the same state
        check_refused(
            "OneCycleLR does not go on after update 3: Tried to step 3 times. The specified number of total steps is 2. "
            "It is stepped once an update, and a last, shorter window is an update too. Plan for as many: "
            "total_steps=epochs * math.ceil(len(loader) / n).",
            tx.update, params, state, params,
        )  # fmt: skip


def test_what_is_no_schedule():
    params = {"w": torch.ones(2)}
    check_refused(
        "scheduler makes a ReduceLROnPlateau, which follows a metric and not the count of updates, so there is no pure "
        "function that has its options. Keep optimizer.step() and scheduler.step(metric), and give the optimizer its "
        "gradients: torch_backend.assign_grads(params, grads).",
        torch_backend.from_optimizer(optim.SGD, scheduler=schedulers.ReduceLROnPlateau).init, params,
    )  # fmt: skip
    check_refused(
        "scheduler is called with an optimizer and nothing else, and takes other arguments: missing a required argument: "
        "'max_lr'. Give it these before: scheduler=functools.partial(OneCycleLR, ...).",
        lambda: torch_backend.from_optimizer(optim.SGD, scheduler=schedulers.OneCycleLR),
    )
    check_refused(
        "scheduler returned None, which is no scheduler of torch.optim.lr_scheduler. Write scheduler=lambda optimizer: "
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100), or a function of the count of updates for an "
        "option: lr=lambda count: 1e-3 * 0.9**count.",
        torch_backend.from_optimizer(optim.SGD, scheduler=lambda optimizer: None).init, params,
    )  # fmt: skip


def test_errors_of_one_s_own_schedule_pass_through():
    table = {0: 1.0, 1: 0.5}

    def rate(update):
        if update not in table:
            raise ValueError(f"my own table has no row {update}")
        return table[update]

    tx = torch_backend.from_optimizer(
        torch.optim.SGD, lr=1.0, scheduler=functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=rate)
    )
    grads = {"w": torch.ones(2)}
    state = tx.init(grads)
    for _ in range(2):
        _, state = tx.update(grads, state, grads)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^my own table has no row 2$"):
            tx.update(grads, state, grads)


def grouped(name):
    return {"weight_decay": 0.0, "lr": lambda count: 0.2 / (2 + count)} if name == "bias" else {}


SCHEDULES = {
    "numbers": {"lr": 0.1},
    "a function": {"lr": lambda count: 0.1 * 0.9**count},
    "groups": {"lr": lambda count: 0.1 * 0.9**count, "groups": grouped},
    "a scheduler": {"lr": 0.1, "scheduler": functools.partial(schedulers.CosineAnnealingLR, T_max=5)},
    "a scheduler of groups": {
        "lr": 0.1,
        "groups": lambda name: {"lr": 0.02} if name == "bias" else {},
        "scheduler": functools.partial(schedulers.StepLR, step_size=2),
    },
}


class Recording(optim.AdamW):
    """AdamW, which writes down the options of each step."""

    steps = []  # noqa: RUF012

    def step(self, closure=None):
        self.steps.append([{k: v for k, v in group.items() if k != "params"} for group in self.param_groups])
        return super().step(closure)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("optimizer", [optim.AdamW, Recording])
def test_the_last_options_are_those_of_the_step(name, optimizer):
    params = {"weight": torch.ones(2, 3), "none": None, "bias": torch.ones(())}
    recorded, made = (torch_backend.from_optimizer(kind, **SCHEDULES[name]) for kind in (Recording, optimizer))
    state, states = recorded.init(params), []
    for _ in range(6):
        Recording.steps.clear()
        _, state = recorded.update(params, state, params)
        expected = Recording.steps[-1]
        assert torch_backend.last_options(made, state, params) == expected
        states.append((state, expected))
    # They are a function of the state, in whatever order they are asked for.
    for earlier, expected in reversed(states):
        assert torch_backend.last_options(made, earlier, params) == expected


def test_the_last_rate_is_that_of_a_loop_with_a_scheduler():
    p = torch.ones(3, requires_grad=True)
    optimizer = optim.SGD([p], lr=0.1)
    one_cycle = functools.partial(schedulers.OneCycleLR, max_lr=1.0, total_steps=6)
    scheduler = one_cycle(optimizer)
    sgd = torch_backend.from_optimizer(optim.SGD, lr=0.1, scheduler=one_cycle)
    tx = funcga.multi_steps(torch_backend.chain(torch_backend.clip_grad_norm(1.0), sgd), 2)
    params = {"p": torch.ones(3)}
    state = tx.init(params)
    for _ in range(5):
        for _ in range(2):
            _, state = tx.update(params, state, params)
        options = torch_backend.last_options(sgd, state.inner[1], params)[0]
        assert options["lr"] == optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
        assert options["momentum"] == optimizer.param_groups[0]["momentum"]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("optimizer", [optim.Adagrad, optim.Adafactor, optim.Muon])
def test_options_are_read_without_memory_of_the_size_of_the_params(optimizer):
    params = {"w": torch.ones(400, 400)}
    tx = torch_backend.from_optimizer(optimizer, lr=0.5)
    state = tx.init(params)._replace(count=torch.tensor(1, dtype=torch.int32))
    with Allocated() as made:
        (options,) = torch_backend.last_options(tx, state, params)
    assert options["lr"] == 0.5
    assert made.bytes < 1000


def test_where_there_are_no_last_options():
    params = {"w": torch.ones(2)}
    sgd = torch_backend.from_optimizer(optim.SGD)
    tx = torch_backend.chain(sgd)
    check_refused(
        "tx is of type DonatingTransform, and not what from_optimizer returned, which alone knows its options. Give it that one, and its own state: torch_backend.last_options(adamw, state.inner[1], params).",
        torch_backend.last_options, tx, tx.init(params), params,
    )  # fmt: skip
    check_refused(
        "state is of type tuple, and not the OptimizerState of from_optimizer. A chain has it at the optimizer's position, and multi_steps in `inner`: torch_backend.last_options(adamw, state.inner[1], params).",
        torch_backend.last_options, sgd, tx.init(params), params,
    )  # fmt: skip
    check_refused(
        "the state is that before the first update, so there are no last options. Read them after an update: updates, state = tx.update(grads, state, params).",
        torch_backend.last_options, sgd, sgd.init(params), params,
    )  # fmt: skip
