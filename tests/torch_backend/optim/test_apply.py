"""`apply` in torch: the bits of optimizer.step(), nothing written to unless it is given away, and then all in place."""

import copy
import gc
import random
import weakref
from functools import partial

import pytest
import torch
from torch import nn, optim

import funcga
import torch_backend
from funcga.transforms import Transform
from tests.torch_backend.optim.test_from_optimizer import (
    CASES,
    Allocated,
    Theirs,
    flat,
    problem,
    same,
    tensors,
)
from torch_backend import chain, clip_grad_norm, from_optimizer


def addresses(tree):
    return {path: leaf.data_ptr() for path, leaf in tree.items() if leaf is not None}


def steps(made, own, grads, before=lambda: None):
    """The parameters and what is kept after each step of an optimizer on parameters of its own."""
    for grad in grads:
        for k, p in own.items():
            p.grad = None if grad[k] is None else grad[k].clone()
        before()
        made.step()
        kept = copy.deepcopy({k: dict(made.state.get(p, {})) for k, p in own.items()})
        yield {k: p.detach().clone() for k, p in own.items()}, kept


def parameters(params):
    return {k: p.detach().clone().requires_grad_() for k, p in params.items()}


def check_steps(tx, params, grads, expected, donate, slots=lambda state: state.slots):
    """`apply` with each of the gradients gives the expected parameters, and writes where it may."""
    state = tx.init(params)
    for grad, (wanted, kept) in zip(grads, expected, strict=True):
        at, before, given = addresses(params), copy.deepcopy((params, state)), copy.deepcopy(grad)
        after, new_state = funcga.transforms.apply(tx, given, state, params, donate=donate)
        if donate:
            assert addresses(after) == at
        else:
            assert same((params, repr(state), given), (before[0], repr(before[1]), grad))
            assert not {*addresses(after).values()} & {*at.values()}
        # As the next window of multi_steps begins in the memory of the gradients.
        returned = {t.data_ptr() for t in tensors((after, new_state)) if t.numel()}
        assert not returned & {g.data_ptr() for g in given.values() if g is not None and g.layout is torch.strided}
        params, state = after, new_state
        assert same(params, wanted)
        assert not any(p.requires_grad or p.grad is not None for p in params.values())
        if kept is not None:
            assert same(flat(slots(state)), kept)


COMPLEX = {"complex": (optim.Adam, {}), "complex foreach": (optim.Adam, {"foreach": True, "amsgrad": True})}


@pytest.mark.parametrize("case", [*CASES, *COMPLEX])
def test_it_is_the_step_bit_by_bit(case):
    optimizer, options = {**CASES, **COMPLEX}[case]
    dtypes = [(torch.complex64, False), (torch.complex64, True)]
    if case in CASES:
        dtypes = [(torch.float32, False), (torch.float64, True), (torch.bfloat16, True)]
    for dtype, donate in dtypes:
        params, grads = problem(optimizer, dtype)
        own = parameters(params)
        expected = steps(optimizer([*own.values()], **options), own, grads)
        check_steps(from_optimizer(optimizer, **options), params, grads, expected, donate)


@pytest.mark.parametrize("donate", [False, True])
def test_groups_schedules_and_schedulers(donate):
    params, grads = problem(optim.AdamW)
    groups = lambda name: {"weight_decay": 0.5} if name == "w" else {}
    grouped = lambda own: [{"params": [own["w"]], "weight_decay": 0.5}, {"params": [own["deep"], own["scalar"]]}]
    # a scheduler of torch
    own = parameters(params)
    made = optim.AdamW(grouped(own), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(made, 2)
    expected = []
    for one in grads:
        expected += steps(made, own, [one])
        scheduler.step()
    tx = from_optimizer(optim.AdamW, lr=0.1, groups=groups, scheduler=partial(optim.lr_scheduler.StepLR, step_size=2))
    check_steps(tx, params, grads, expected, donate)
    # an option that is a function of the count, for all or for one group
    own = parameters(params)
    made, expected = optim.AdamW(grouped(own), lr=0.1), []
    for count, one in enumerate(grads):
        made.param_groups[0]["lr"] = 0.1 / (count + 1)
        expected += steps(made, own, [one])
    varying = lambda name: groups(name) | ({"lr": lambda count: 0.1 / (count + 1)} if name == "w" else {})
    check_steps(from_optimizer(optim.AdamW, lr=0.1, groups=varying), params, grads, expected, donate)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("optimizer", [Theirs, optim.SGD])
def test_parameters_without_a_gradient_and_one_that_is_none(optimizer, donate):
    params, grads = problem(optim.SGD)
    params["deep"][0] = torch.inf
    grads = [{**grad, "deep": None if at in (0, 1, 4) else grad["deep"]} for at, grad in enumerate(grads)]
    own = parameters(params)
    wanted = [found for found, _ in steps(optimizer([*own.values()], lr=0.1), own, grads)]
    check_steps(from_optimizer(optimizer, lr=0.1), params, grads, [(one, None) for one in wanted], donate)
    tx = from_optimizer(optimizer, lr=0.1)
    with_none = {"none": None, **params}
    given = {"none": None, **copy.deepcopy(grads[2])}
    after, _ = funcga.transforms.apply(tx, given, tx.init(with_none), with_none, donate=donate)
    assert after["none"] is None
    assert list(after) == list(with_none)


def test_the_parameters_of_a_module_are_stepped_in_place_and_keep_their_grads():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    twin = copy.deepcopy(module)
    params = torch_backend.trainable(module)
    params["0.bias"].grad = torch.full((4,), 7.0)
    tx = from_optimizer(optim.AdamW, lr=0.1)
    state, made = tx.init(params), optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        grads = {k: torch.randn_like(p) for k, p in params.items()}
        for k, p in twin.named_parameters():
            p.grad = grads[k].clone() if k in grads else None
        made.step()
        params, state = funcga.transforms.apply(tx, grads, state, params, donate=True)
        assert same(dict(module.state_dict()), dict(twin.state_dict()))
    assert torch.equal(module[0].bias.grad, torch.full((4,), 7.0))
    assert module[0].bias.requires_grad
    assert module[1].weight.grad is None


def test_tied_parameters_are_two():
    shared = torch.ones(4)
    rows = torch.arange(6.0)
    for params in ({"a": shared, "b": shared}, {"a": rows[:4], "b": rows[2:]}, {"a": torch.ones(1).expand(4)}):
        tx = from_optimizer(optim.SGD, lr=0.5, momentum=0.9)
        grads = {k: torch.full((4,), 1.0 + at) for at, k in enumerate(params)}
        wanted, first = funcga.transforms.apply(tx, grads, tx.init(params), params)
        found, second = funcga.transforms.apply(tx, grads, tx.init(params), params, donate=True)
        assert same((found, flat(second.slots)), (wanted, flat(first.slots)))


@pytest.mark.parametrize(("donate", "fused"), [(False, True), (True, False), (True, True)])
def test_strides_of_their_own(fused, donate):
    params, grads = problem(optim.AdamW)
    params["w"] = params["w"].t().contiguous().t()
    own = parameters(params)
    # a fused step of torch reads the memory of gradients in other strides as if these were the parameter's
    laid = [{**grad, "w": grad["w"].t().contiguous().t()} for grad in grads]
    expected = [(wanted, None) for wanted, _ in steps(optim.AdamW([*own.values()], fused=fused), own, laid)]
    check_steps(from_optimizer(optim.AdamW, fused=fused), params, grads, expected, donate)


@pytest.mark.parametrize("donate", [False, True])
def test_clipped_in_a_chain(donate):
    params, grads = problem(optim.AdamW)
    own = parameters(params)
    made = optim.AdamW([*own.values()], lr=0.1)
    expected = steps(made, own, grads, before=lambda: nn.utils.clip_grad_norm_(own.values(), 0.5))
    tx = chain(chain(clip_grad_norm(0.5)), chain(from_optimizer(optim.AdamW, lr=0.1)))
    check_steps(tx, params, grads, expected, donate, slots=lambda state: state[1][0].slots)


@pytest.mark.parametrize("donate", [False, True])
def test_with_a_loss_scale_and_an_overflow(donate):
    params, grads = problem(optim.AdamW)
    params["deep"][1] = -0.0
    scaled = [{k: 1024.0 * g for k, g in grad.items()} for grad in grads]
    scaled[2]["w"][0, 0] = torch.inf
    own = parameters(params)
    expected = [*steps(optim.AdamW([*own.values()], fused=True), own, grads[:2])]
    tx = funcga.transforms.loss_scaled(from_optimizer(optim.AdamW, fused=True), init_scale=1024.0)
    state = tx.init(params)
    for grad, (wanted, kept) in zip(scaled, expected, strict=False):
        at = addresses(params)
        params, state = funcga.transforms.apply(tx, grad, state, params, donate=donate)
        assert same((params, flat(state.inner.slots)), (wanted, kept))
        assert (addresses(params) == at) == donate
    skipped, after = funcga.transforms.apply(tx, scaled[2], state, params, donate=donate)
    assert int(after.skipped) == 1
    assert all(skipped[k] is params[k] for k in params)
    assert repr(skipped) == repr(expected[1][0])  # the sign of a zero, too


@pytest.mark.parametrize(("given", "donate"), [(False, False), (True, False), (True, True)])
def test_over_a_window(given, donate):
    params, grads = problem(optim.AdamW)
    params["deep"][1] = -0.0
    own = parameters(params)
    means = [{k: (a[k] + b[k]) / 2 for k in a} for a, b in zip(grads[::2], grads[1::2], strict=True)]
    expected = steps(optim.AdamW([*own.values()], fused=True), own, means)
    tx = funcga.multi_steps(from_optimizer(optim.AdamW, fused=True), 2, donate=given)
    state = tx.init(params)
    for at, grad in enumerate(grads):
        before, place = copy.deepcopy((params, state)), addresses(params)
        after, new_state = funcga.transforms.apply(tx, copy.deepcopy(grad), state, params, donate=donate)
        if at % 2 == 0:
            assert all(after[k] is params[k] for k in params)
        else:
            wanted, kept = next(expected)
            assert same((after, flat(new_state.inner.slots)), (wanted, kept))
            assert (addresses(after) == place) == donate
        if not donate:
            assert same(params, before[0])
        if not (donate or given):
            assert repr(state) == repr(before[1])
        params, state = after, new_state


@pytest.mark.parametrize("drop", ["microbatch", "window"])
def test_a_window_that_is_dropped_changes_no_bit(drop):
    params, grads = problem(optim.SGD)
    params["deep"][1] = -0.0
    tx = funcga.multi_steps(from_optimizer(optim.SGD, lr=0.1, momentum=0.9), 2, drop=drop)
    state = tx.init(params)
    before = repr(params)
    for _ in range(2):
        grad = {k: torch.full_like(g, torch.nan) for k, g in grads[0].items()}
        after, state = funcga.transforms.apply(tx, grad, state, params)
        assert all(after[k] is params[k] for k in params)
    assert repr(params) == before
    assert int(state.updates) == 0


@pytest.mark.parametrize(("given", "donate"), [(False, False), (True, False), (True, True)])
def test_narrow_parameters_are_stepped_in_float32_and_rounded_once(given, donate):
    params, grads = problem(optim.AdamW, torch.bfloat16)
    tx = funcga.multi_steps(from_optimizer(optim.AdamW, lr=0.1), 1, donate=given)
    state = tx.init(params)
    for grad in grads:
        own = {k: p.float().requires_grad_() for k, p in params.items()}
        made = optim.AdamW([*own.values()], lr=0.1)
        for k, p in own.items():
            kept = flat(state.inner.slots)[k]
            if int(state.updates):
                made.state[p] = copy.deepcopy(kept)
            p.grad = grad[k].float()
        made.step()
        at = addresses(params)
        params, state = funcga.transforms.apply(tx, grad, state, params, donate=donate)
        assert same(params, {k: p.detach().bfloat16() for k, p in own.items()})
        assert (addresses(params) == at) == donate


@pytest.mark.parametrize(
    ("wrap", "donate", "copies"),
    [
        (lambda tx: tx, True, 0),
        (lambda tx: tx, False, 3),  # the parameters and two moments
        (lambda tx: chain(clip_grad_norm(1.0), tx), True, 0),
        (lambda tx: funcga.transforms.loss_scaled(tx, init_scale=1.0), True, 0),
        (lambda tx: funcga.multi_steps(tx, 1), True, 0),
        (lambda tx: funcga.multi_steps(tx, 1, donate=True), False, 1),
    ],
)
def test_what_is_given_away_is_not_copied(wrap, donate, copies):
    params, grads = ({"w": torch.ones(1000), "v": torch.ones(1000)} for _ in range(2))
    tx = wrap(from_optimizer(optim.AdamW, fused=True))
    params, state = funcga.transforms.apply(tx, copy.deepcopy(grads), tx.init(params), params)
    with Allocated() as made:
        funcga.transforms.apply(tx, grads, state, params, donate=donate)
    assert copies * 8000 <= made.bytes < copies * 8000 + 300


def test_transforms_of_others_are_an_update_and_a_sum():
    def update(grads, state, params=None):
        return {k: -0.1 * g for k, g in grads.items()}, params  # which keeps the parameters themselves

    keeping = Transform(lambda params: params, update)
    params, grads = problem(optim.SGD)
    wanted = torch_backend.apply_updates(params, update(grads[0], None)[0])
    for donate in (False, True):
        given, before = copy.deepcopy(params), copy.deepcopy(params)
        after, state = funcga.transforms.apply(keeping, grads[0], before, given, donate=donate)
        assert same((after, state), (wanted, before))
        tx = chain(keeping, from_optimizer(optim.SGD, lr=1.0))
        given = copy.deepcopy(params)
        after, state = funcga.transforms.apply(tx, grads[0], tx.init(given), given, donate=donate)
        assert same(state[0], params)
        torch.testing.assert_close(after["w"], params["w"] + 0.1 * grads[0]["w"])
    fresh = Transform(lambda params: (), lambda grads, state, params: (update(grads, state)[0], ()))
    given = copy.deepcopy(params)
    after, _ = funcga.transforms.apply(fresh, grads[0], (), given, donate=True)
    assert same(after, wanted)
    assert addresses(after) == addresses(given)


def test_inside_of_a_loss_that_is_differentiated():
    descent = Transform(lambda params: (), lambda grads, state, params: ({k: -0.1 * g for k, g in grads.items()}, ()))

    def inner(params, x):
        return ((params["w"] * x) ** 2).sum()

    def outer(params, x, donate):
        grads = torch.func.grad(inner)(params, x)
        return inner(funcga.transforms.apply(descent, grads, (), params, donate=donate)[0], x)

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
        expected.append(funcga.transforms.apply(fresh, grads, fresh.init(params), params)[0])
        found.append(funcga.transforms.apply(tx, grads, tx.init(params), params)[0])
    assert same(found, expected)
    # after an error, too
    state = tx.init([torch.ones(3)])
    broken = state._replace(slots=[{"step": torch.ones(())}], started=torch.tensor([True]))
    with pytest.raises(funcga.FuncgaError, match="state of another optimizer"):
        funcga.transforms.apply(tx, [torch.ones(3)], broken, [torch.ones(3)])
    assert same(funcga.transforms.apply(tx, [2 * torch.ones(3)], state, [torch.ones(3)])[0], expected[4])


def test_nothing_of_the_callers_is_kept():
    tx = from_optimizer(optim.AdamW, lr=0.1)
    params = {"w": torch.ones(3)}
    after, state = funcga.transforms.apply(tx, {"w": torch.ones(3)}, tx.init(params), params, donate=True)
    seen = [weakref.ref(params["w"]), weakref.ref(after["w"]), weakref.ref(state.slots["w"]["exp_avg"])]
    del params, after, state
    gc.collect()
    assert [ref() for ref in seen] == [None] * 3


def generated(seed):
    """A transform, parameters of random kinds, and gradients for some calls."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    options = draw.choice([{}, {"momentum": 0.9, "nesterov": True, "foreach": True}, {"momentum": 0.5}])
    tx = draw.choice(
        [
            from_optimizer(optim.SGD, lr=0.1, **options),
            from_optimizer(optim.AdamW, fused=draw.random() < 0.5, amsgrad=draw.random() < 0.5),
            from_optimizer(Theirs),
            Transform(lambda params: (), lambda grads, state, params: (grads, state)),
            Transform(lambda params: params, lambda grads, state, params: (params, grads)),
        ]
    )
    for _ in range(draw.randrange(3)):
        wrap = draw.choice(
            [
                lambda tx: chain(clip_grad_norm(0.5), tx),
                lambda tx: chain(tx),
                lambda tx: funcga.multi_steps(tx, draw.randrange(1, 3), donate=draw.random() < 0.3),
            ]
        )
        tx = wrap(tx) if not isinstance(tx, funcga.transforms.MultiSteps) else tx
    shapes = [draw.choice([(), (1,), (3,), (2, 3), (0,), (3, 1)]) for _ in range(draw.randrange(1, 4))]
    leaf = lambda shape: draw.choice([torch.randn(shape), torch.randn(shape[::-1]).permute([*range(len(shape))][::-1])])
    params = {f"w{index}": leaf(shape) for index, shape in enumerate(shapes)}
    if draw.random() < 0.3:
        params = {k: nn.Parameter(p) for k, p in params.items()}
    grads = [{k: torch.randn_like(p).detach() for k, p in params.items()} for _ in range(4)]
    return tx, params, grads


@pytest.mark.parametrize("seed", range(15))
def test_whatever_is_combined_nothing_is_written_to_unless_it_is_given_away(seed):
    tx, params, grads = generated(seed)
    gives_state = isinstance(tx, funcga.transforms.MultiSteps) and tx.update.donate
    left, state = params, tx.init(params)
    right = {k: p.detach().clone() for k, p in params.items()}
    other = tx.init(right)
    for grad in grads:
        before = copy.deepcopy((grad, left)), repr(state)
        after, new_state = funcga.transforms.apply(tx, grad, state, left)
        assert repr((grad, left)) == repr(before[0])
        assert gives_state or repr(state) == before[1]
        right, other = funcga.transforms.apply(tx, copy.deepcopy(grad), other, right, donate=True)
        assert same(right, after if after is not left else {k: p.detach() for k, p in after.items()})
        assert repr(other) == repr(new_state)
        left, state = after, new_state
