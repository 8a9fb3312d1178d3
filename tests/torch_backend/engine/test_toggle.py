"""The structure of the calls is known, and the behaviour of the loss is new: checkpoints, hooks, functions, layers, writes.

Each step is called twice as it is, then with something switched on, and at last as at first. A result is right, or a
FuncgaError refuses the call, and leaves all as it was; no other gradient, and no other error.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import funcga
from tests.torch_backend.engine.functions import Curved, Doubled, Recompute
from torch_backend import module_value_and_grad, pure_loss, trainable

# Where the engine is wrong: what happens, in which cases, and for which kinds. Whoever mends one deletes its line.
RECOMPUTED = "a checkpoint is recomputed with the parameters that functional_call had last: other gradients, silently"
WRONG: list = []

N, ROWS, WIDTH = 4, 8, 4
LARGE = 768  # so wide that the gradient of a layer is added where it is computed


# -- what a module may come to do


def drawn(leaf, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)


class Adapter(nn.Module):
    def __init__(self, layer):
        super().__init__()
        down, up = layer.weight[:2].detach(), layer.weight[:, :2].detach()
        self.down, self.up = nn.Parameter(drawn(down, 5)), nn.Parameter(drawn(up, 6))

    def forward(self, x):
        return x @ self.down.T @ self.up.T


class Net(nn.Module):
    """Three layers; `mode` says in which way they are applied."""

    def __init__(self, dtype, width=WIDTH):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, width, dtype=dtype), nn.Linear(width, width, dtype=dtype)
        self.c = nn.Linear(width, WIDTH, dtype=dtype)
        self.register_buffer("constant", torch.ones(width, dtype=dtype))
        self.register_module("adapter", None)
        self.mode = "plain"

    def first(self, x):
        return torch.tanh(self.a(x)) * self.constant

    def second(self, h):
        return torch.tanh(self.b(h) if self.adapter is None else self.b(h) + self.adapter(h))

    def forward(self, x):
        return MODES[self.mode](self, x)


def layers(net, x, first=lambda f, x: f(x), second=lambda f, x: f(x)):
    return net.c(second(net.second, first(net.first, x.clone().requires_grad_())))


def padded(h, nodes):
    """As many nodes more, which do nothing."""
    for _ in range(nodes):
        h = h * 1.0
    return h


def doubled_gradient(net, x):
    return net.c(Doubled.apply(net.second(Doubled.apply(net.first(x)))))


def penalty_by_autograd(net, x):
    out = layers(net, x)
    (gradient,) = torch.autograd.grad(out.square().sum(), net.b.weight, create_graph=True)
    return out + gradient.square().mean()


def penalty_by_func(net, x):
    h = net.first(x)
    of_h = torch.func.grad(lambda h: net.second(h).square().sum())(h)
    own = {name: p * 1 for name, p in net.b.named_parameters()}
    of_params = torch.func.grad(lambda own: functional_call(net.b, own, (h.detach(),)).square().sum())(own)
    return net.c(net.second(h)) + of_h.square().mean() + of_params["weight"].square().mean()


def of_other_depths(net, x):
    """Another number of nodes in each micro-batch."""
    h = net.first(x)
    for _ in range(int(x[0, 0].abs() * 10) % 4):
        h = net.second(h)
    return net.c(h)


def under_autocast(net, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layers(net, x).float()


again = {True: partial(checkpoint, use_reentrant=True), False: partial(checkpoint, use_reentrant=False)}
# The nodes of a second layer are 3: those of a product by a transposed weight, and of tanh.
MODES = {
    "plain": layers,
    "reentrant, first": partial(layers, first=again[True]),
    "reentrant, later": partial(layers, second=again[True]),
    "non-reentrant, first": partial(layers, first=again[False]),
    "non-reentrant, later": partial(layers, second=again[False]),
    "both kinds": partial(layers, first=again[False], second=again[True]),
    "own pass, first": partial(layers, first=Recompute.apply),
    "own pass, later": partial(layers, second=Recompute.apply),
    "own pass, no parameter": partial(layers, second=lambda f, h: Curved.apply(f(h))),
    "function": doubled_gradient,
    "function and non-reentrant": partial(layers, first=lambda f, x: Doubled.apply(f(x)), second=again[False]),
    "autograd.grad": penalty_by_autograd,
    "func.grad": penalty_by_func,
    "depths": of_other_depths,
    "autocast inside": under_autocast,
    # of as many nodes as "plain"
    "equal, own pass": partial(layers, second=lambda f, h: padded(Recompute.apply(f, h), 2)),
    "equal, reentrant": partial(layers, second=lambda f, h: padded(again[True](f, h), 2)),
    # of as many nodes as one another
    "more, function": partial(layers, second=lambda f, h: Doubled.apply(f(h))),
    "more, own pass": partial(layers, second=lambda f, h: padded(Recompute.apply(f, h), 3)),
    "more, plain": partial(layers, second=lambda f, h: padded(f(h), 1)),
    "more, own pass, no parameter": partial(layers, second=lambda f, h: Curved.apply(f(h))),
}


def changing(*modes):
    """In each micro-batch another way."""

    def during(net, index):
        net.mode = modes[index % len(modes)]

    return during


# -- what may be done to it, before a call or in the middle of one

HANDLES: list[Any] = []  # of hooks, which `undo` takes away


def set_mode(mode):
    return lambda net: setattr(net, "mode", mode)


def full_backward_hook(net):
    HANDLES.append(net.b.register_full_backward_hook(lambda module, of_inputs, of_outputs: (of_inputs[0] * 3,)))


def observing_backward_hook(net):
    HANDLES.append(net.b.register_full_backward_hook(lambda module, of_inputs, of_outputs: None))


def hook_on_a_parameter(net):
    HANDLES.append(net.b.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)))


def replace_a_layer(net):
    with torch.random.fork_rng():
        net.b = nn.Linear(*net.b.weight.shape, dtype=net.b.weight.dtype)
    for p in net.b.parameters():
        p.data = drawn(p, 7)


def replace_and_checkpoint(net):
    replace_a_layer(net)
    net.mode = "non-reentrant, later"


def freeze(net):
    net.b.requires_grad_(False)


def freeze_first(net):
    net.a.requires_grad_(False)


def add_an_adapter(net):
    net.requires_grad_(False)
    net.adapter = Adapter(net.b)


def add_an_adapter_and_checkpoint(net):
    add_an_adapter(net)
    net.mode = "reentrant, later"


def in_the_middle(action):
    return lambda net, index: action(net) if index == 2 else None


def write(net, index):
    with torch.no_grad():
        net.b.weight.add_(0.1)


def zero_the_gradients(net, index):
    for p in net.parameters():
        if p.grad is not None:
            p.grad.zero_()


def zero_grad(net, index, set_to_none=True):
    net.zero_grad(set_to_none=set_to_none)


def backward(net, index):
    net(torch.ones(1, WIDTH, dtype=net.b.weight.dtype)).sum().backward()


def optimizer_step(net, index):
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def optimizer_step_of_the_loop(net, index):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    backward(net, index)
    optimizer.step()


def beside_a_teacher(run, net, params, x):
    teacher = {name: drawn(p, 8) for name, p in params.items()}
    return (run(x) - functional_call(net, teacher, (x,)).detach()).square().mean()


def beside_a_teacher_that_records(run, net, params, x):
    """Without detach, and its parameters record what they are used for, though nobody asks for it."""
    teacher = {name: drawn(p, 8).requires_grad_() for name, p in params.items()}
    return (run(x) - functional_call(net, teacher, (x,))).square().mean()


def beside_an_ensemble(run, net, params, x):
    members = {name: drawn(torch.stack([p, p]), 9) for name, p in net.b.named_parameters()}
    outputs = torch.func.vmap(lambda member: functional_call(net.b, member, (x,)))(members)
    return (run(x) - outputs.mean(0)).square().mean()


def beside_a_perturbed_copy(run, net, params, x):
    moved = {name: p * 1.01 for name, p in params.items()}
    return (run(x) - functional_call(net, moved, (x,))).square().mean() + run(x).square().mean()


KINDS = (
    "module",
    "alone",
    "pure_loss",
    "pure_loss, other values",
    "functional_call",
    "functional_call, other values",
)
PURE, FUNCTIONAL = KINDS[2:4], KINDS[4:]
SEVERAL = tuple(kind for kind in KINDS if kind != "alone")  # micro-batches, of which each sees what another has done


@dataclass(frozen=True)
class Case:
    """What is switched on."""

    before: Callable[[Any], Any] = lambda net: None  # done to the module, before a call
    during: Callable[[Any, int], Any] = lambda net, index: None  # by the loss of each micro-batch
    without_effect: tuple[str, ...] = ()  # the kinds whose gradient `during` does not change
    touches: frozenset[str] = frozenset()  # what `during` changes for good
    around: Callable[..., Any] = lambda run, net, params, x: run(x).to(x.dtype).square().mean()
    context: Callable[[], Any] = nullcontext  # that the step is called in
    at_first: str = "plain"  # the mode of the first calls, and of the last
    dtype: torch.dtype = torch.float64
    only_refused: tuple[str, ...] = ()  # the kinds for which nothing is right


TEACHERS = {
    "teacher": beside_a_teacher,
    "teacher that records": beside_a_teacher_that_records,
    "ensemble": beside_an_ensemble,
    "perturbed copy": beside_a_perturbed_copy,
}
OF_GRADS = frozenset({"grads of others"})  # a functional_call leaves what is the module's own to the loss
CASES = {
    **{mode: Case(set_mode(mode)) for mode in MODES if mode not in ("plain", "autocast inside")},
    "autocast inside": Case(set_mode("autocast inside"), dtype=torch.float32),
    "autocast": Case(context=lambda: torch.autocast("cpu", torch.bfloat16), dtype=torch.float32),
    "autocast and non-reentrant": Case(
        set_mode("non-reentrant, later"), context=lambda: torch.autocast("cpu", torch.bfloat16), dtype=torch.float32
    ),
    "equal, plain after own pass": Case(set_mode("plain"), at_first="equal, own pass"),
    "equal, plain after reentrant": Case(set_mode("plain"), at_first="equal, reentrant"),
    "equal, function before own pass": Case(set_mode("more, own pass"), at_first="more, function"),
    "equal, own pass before function": Case(set_mode("more, function"), at_first="more, own pass"),
    "equal, plain before own pass without": Case(set_mode("more, own pass, no parameter"), at_first="more, plain"),
    "equal, own pass without before own pass": Case(
        set_mode("more, own pass"), at_first="more, own pass, no parameter"
    ),
    "equal, in each micro-batch another": Case(during=changing("plain", "equal, own pass", "equal, reentrant")),
    "in each micro-batch another": Case(
        during=changing("depths", "own pass, later", "plain", "non-reentrant, first", "function")
    ),
    "full backward hook": Case(full_backward_hook),
    "full backward hook that changes nothing": Case(observing_backward_hook),
    "full backward hook and non-reentrant": Case(
        lambda net: (full_backward_hook(net), set_mode("non-reentrant, later")(net))
    ),
    "hook on a parameter": Case(hook_on_a_parameter),
    "frozen": Case(freeze),
    "frozen at first": Case(freeze_first),
    "adapter": Case(add_an_adapter),
    "adapter and checkpoint": Case(add_an_adapter_and_checkpoint),
    "layer replaced": Case(replace_a_layer),
    "layer replaced, with a checkpoint": Case(replace_and_checkpoint),
    "layer replaced in the middle": Case(
        during=in_the_middle(replace_a_layer), without_effect=FUNCTIONAL, only_refused=PURE
    ),
    "hook in the middle": Case(during=in_the_middle(full_backward_hook)),
    "hook on a parameter in the middle": Case(
        during=in_the_middle(hook_on_a_parameter), without_effect=FUNCTIONAL[1:], touches=frozenset({"hooks"})
    ),
    "frozen in the middle": Case(
        during=in_the_middle(freeze), without_effect=FUNCTIONAL, touches=frozenset({"requires_grad"})
    ),
    "zero_grad": Case(during=zero_grad, without_effect=KINDS, touches=OF_GRADS),
    "zero_grad in place": Case(
        during=partial(zero_grad, set_to_none=False), without_effect=KINDS, touches=OF_GRADS
    ),
    ".grad.zero_()": Case(during=zero_the_gradients, without_effect=KINDS, touches=OF_GRADS),
    "backward": Case(during=backward, without_effect=KINDS, touches=OF_GRADS),
    "backward in the middle": Case(
        during=in_the_middle(lambda net: backward(net, 0)), without_effect=KINDS, touches=OF_GRADS
    ),
    "write": Case(during=write, without_effect=SEVERAL, touches=frozenset({"values"})),
    "write in the middle": Case(
        during=in_the_middle(lambda net: write(net, 0)), without_effect=KINDS, touches=frozenset({"values"})
    ),
    "optimizer.step": Case(during=optimizer_step, without_effect=KINDS, touches=frozenset({"values"})),
    "optimizer.step after a backward": Case(
        during=optimizer_step_of_the_loop, without_effect=KINDS, touches=OF_GRADS | {"values"}
    ),
    **{
        f"{name} beside {mode}": Case(set_mode(mode), around=around)
        for name, around in TEACHERS.items()
        for mode in ("plain", "non-reentrant, later", "reentrant, later", "own pass, later")
    },
}  # fmt: skip


# -- the kinds of a step, and the loop by hand


class Stepped:
    """A step of one kind, with a loss that does what `now` says."""

    def __init__(self, kind, net):
        self.kind, self.net, self.now, self.index = kind, net, Case(), 0
        if kind in FUNCTIONAL:
            gradient = funcga.value_and_grad(
                lambda params, x: self.loss(lambda x: functional_call(net, params, (x,)), net, params, x)
            )
        elif kind in PURE:
            gradient = funcga.value_and_grad(pure_loss(net, self.of_module))
        else:
            gradient = module_value_and_grad(net, self.of_module)
        self.n = 1 if kind == "alone" else N
        self.step = gradient if kind == "alone" else funcga.accumulate(gradient, N)

    def given(self):
        """What the gradient is taken by: the module's own parameters, or other tensors."""
        own = trainable(self.net)
        return {name: p.detach() * 1.5 for name, p in own.items()} if "other" in self.kind else own

    def of_module(self, net, x):
        return self.loss(net, net, dict(net.named_parameters()), x)

    def loss(self, run, net, params, x):
        self.now.during(net, self.index)
        self.index += 1
        return self.now.around(run, net, params, x)

    def __call__(self, x):
        self.index = 0
        with self.now.context():
            return self.step(self.given(), x) if self.kind in PURE + FUNCTIONAL else self.step(x)

    def truths(self, x):
        """What a result may be.

        Torch runs a module with its own parameters again where a checkpoint was made under functional_call: then it may be
        what the loop gives, or what it would give without a checkpoint.
        """
        return [self.truth(x)] + ([self.truth(x, "plain")] if self.now.around in TEACHERS.values() else [])

    def truth(self, x, mode=None):
        """By a loop with `.backward()` over a copy of the module that has the given values as its own."""
        net, given = copy.deepcopy(self.net), self.given()
        for (name, own), copied in zip(self.net.named_parameters(), net.named_parameters(), strict=True):
            copied[1].grad = None
            copied[1].data.copy_(given.get(name, own).detach())
            for hook in () if "other" in self.kind else (own._backward_hooks or {}).values():
                copied[1].register_hook(hook)
        net.mode = net.mode if mode is None else mode
        total, sums = 0, {}
        for index, part in enumerate(x.tensor_split(self.n)):
            share = len(part) / len(x)
            with self.now.context():
                if self.kind not in self.now.without_effect:
                    self.now.during(net, index)
                value = self.now.around(net, net, dict(net.named_parameters()), part)
            value.backward()
            total += value.detach() * share
            for p in net.parameters():
                if p.grad is not None:
                    sums[p], p.grad = sums.get(p, 0) + p.grad * share, None
        after = {name: net.get_parameter(name) for name in given}
        return total, {name: sums.get(p, torch.zeros_like(p)) for name, p in after.items()}


class State:
    """What a module holds, and that a call leaves it as it was."""

    def __init__(self, net):
        self.net = net
        self.modules = {module: (dict(module._modules), module.training) for module in net.modules()}
        self.leaves = {name: (leaf, leaf.detach().clone()) for name, leaf in net.state_dict(keep_vars=True).items()}
        self.grads = {name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in net.named_parameters()}
        self.required = {name: p.requires_grad for name, p in net.named_parameters()}
        self.hooks, self.of_all, self.mode = self.count_hooks(), hooks_of_all_modules(), net.mode
        self.generator = torch.get_rng_state()

    def count_hooks(self):
        tables = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
        of_modules = [len(getattr(module, table)) for module in self.net.modules() for table in tables]
        tables = ("_backward_hooks", "_post_accumulate_grad_hooks")
        return of_modules + [len(getattr(p, table) or ()) for p in self.net.parameters() for table in tables]

    def check(self, kind, touches):
        if "values" not in touches:
            leaves = self.net.state_dict(keep_vars=True)
            assert {*leaves} == {*self.leaves}
            for name, (leaf, value) in self.leaves.items():
                assert leaves[name] is leaf
                assert torch.equal(leaf, value)
        if "grads of others" not in touches or kind not in FUNCTIONAL:
            for name, p in self.net.named_parameters():
                grad, value = self.grads[name]
                assert p.grad is grad
                assert grad is None or torch.equal(grad, value)
        if "hooks" not in touches:
            assert self.count_hooks() == self.hooks
        if "requires_grad" not in touches:
            assert {name: p.requires_grad for name, p in self.net.named_parameters()} == self.required
        assert hooks_of_all_modules() == self.of_all
        assert torch.equal(torch.get_rng_state(), self.generator)

    def undo(self):
        """Take back what a case has done."""
        while HANDLES:
            HANDLES.pop().remove()
        for module, (children, _) in self.modules.items():
            module._modules.clear()
            module._modules.update(children)
        with torch.no_grad():
            for name, (leaf, value) in self.leaves.items():
                assert self.net.state_dict(keep_vars=True)[name] is leaf
                leaf.copy_(value)
        for name, p in self.net.named_parameters():
            p.grad = self.grads[name][0]
            p.requires_grad_(self.required[name])
        self.net.mode = self.mode


def hooks_of_all_modules():
    """How many hooks torch has for every module."""
    names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return [len(getattr(torch.nn.modules.module, f"_global_{name}")) for name in names]


def off(found, wanted):
    """How far a result is off, relative to the largest of its elements; infinite if other parameters have gradients."""
    (value, grads), (expected, truth) = found, wanted
    if {*grads} != {*truth}:
        return float("inf")
    pairs = [(value, expected), *((grads[name], truth[name]) for name in truth)]
    scale = max(b.abs().max().item() for _, b in pairs)
    error = max((a - b).abs().max().item() for a, b in pairs) / scale
    return error if error == error else float("inf")


def cases():
    for kind in KINDS:
        for name in CASES:
            reasons = [reason for reason, names, kinds in WRONG if name in names and kind in kinds]
            marks = [pytest.mark.xfail(strict=True, reason=reason) for reason in reasons]
            yield pytest.param(kind, name, marks=marks, id=f"{kind}-{name}")


# Those that change how the graph of a large weight looks, or what is computed of it.
CASES_OF_LARGE = [
    "non-reentrant, later", "reentrant, later", "own pass, later", "function", "autograd.grad", "equal, own pass",
    "equal, in each micro-batch another", "in each micro-batch another", "full backward hook", "hook on a parameter",
    "hook in the middle", "frozen", "adapter", "layer replaced", "autocast", "backward",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_hook_stays():
    yield
    HANDLES.clear()


@pytest.mark.parametrize(("kind", "name"), [*cases()])
def test_what_is_switched_on_is_right_or_refused(kind, name):
    check(kind, CASES[name])


@pytest.mark.parametrize("kind", ["module", "functional_call, other values"])
@pytest.mark.parametrize("name", CASES_OF_LARGE)
def test_what_is_switched_on_beside_a_large_weight(kind, name):
    check(kind, replace(CASES[name], dtype=torch.float32), LARGE)


def check(kind, case, width=WIDTH):
    torch.manual_seed(0)
    net = Net(case.dtype, width)
    net.mode = case.at_first
    net.c.bias.grad = torch.full_like(net.c.bias, 7.0)
    x, other, more = (torch.randn(rows, WIDTH, dtype=case.dtype) for rows in (ROWS, ROWS, 2 * ROWS))
    step, limit, start = Stepped(kind, net), {torch.float64: 1e-12, torch.float32: 1e-5}[case.dtype], State(net)

    def call(batch):
        """Right, or refused; where nothing is special, right."""
        state, wanted = State(net), step.truths(batch)
        touches = step.now.touches | ({"values", "hooks"} if step.now.during is not Case.during else set())
        found = None
        with suppress(funcga.FuncgaError) if step.now is case or case.at_first != "plain" else nullcontext():
            found = step(batch)
        if found is not None:
            assert not (step.now is case and kind in case.only_refused)
            assert min(off(found, truth) for truth in wanted) <= limit
        state.check(kind, touches)

    for batch in (x, other):
        call(batch)
    for batch in (x, other, more):
        step.now = case
        case.before(net)
        call(batch)
        step.now = Case()
        start.undo()
        if batch is other:  # also right after it was switched off and on
            call(x)
    for batch in (more, x):
        call(batch)


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("which", [0, 1])
def test_an_equal_graph_beside_uneven_weights(weights, which):
    """What brings the sums to another unit is no gradient that has arrived."""
    w, x = torch.tensor(0.7, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    weights, has_function = torch.tensor(weights, dtype=torch.float64).repeat_interleave(2), [False, False]
    apply = lambda x: (x * w_now[0]).tanh()
    w_now, seen = [w], []

    def loss(w, x, weights):
        w_now[0], x = w, x.clone().requires_grad_()
        seen.append(1)
        return (Recompute.apply(apply, x * 1.0) * 1.0 if has_function[len(seen) - 1] else apply(x * 1.0)).mean()

    step = funcga.accumulate(funcga.grad(loss), 2, weight=lambda x, weights: weights.sum())
    wanted = (weights * x / torch.cosh(w * x) ** 2).sum() / weights.sum()
    for call in range(3):
        seen.clear()
        has_function[which] = call == 2
        with suppress(funcga.FuncgaError) if call == 2 else nullcontext():
            torch.testing.assert_close(step(w, x, weights), wanted)


def test_what_is_said_to_be_wrong_exists():
    assert {name for _, names, _ in WRONG for name in names} <= {*CASES}
    assert {kind for *_, kinds in WRONG for kind in kinds} <= {*KINDS}


@pytest.mark.parametrize(
    "modes",
    [
        ("plain", "equal, own pass", "equal, reentrant"),
        ("more, function", "more, own pass", "more, plain", "more, own pass, no parameter"),
    ],
)
def test_equal_graphs_have_as_many_nodes(modes):
    """As torch numbers them."""
    net, counts = Net(torch.float64), set()
    for mode in modes:
        net.mode, before = mode, torch.autograd._get_sequence_nr()
        net(torch.ones(2, WIDTH, dtype=torch.float64))
        counts.add(torch.autograd._get_sequence_nr() - before)
    assert len(counts) == 1
