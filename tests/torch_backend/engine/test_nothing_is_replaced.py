"""Nothing in torch is replaced, not even while a window lasts: seen from inside of a loss, at a first and at a later call.

Whoever looks a function of torch up by identity, as torch.jit.script does, or calls it in another thread meanwhile, finds
torch's own. Entries in torch's public registries of hooks may be there during a call, and are gone after it.
"""

import functools
import json
import os
import subprocess
import sys

import pytest

CASES = [
    "a function", "functional_call", "pure_loss", "a module", "a gradient alone", "a stream", "a checkpoint",
    "a function in Python", "a full backward hook", "a large weight", "a large weight by functional_call", "observe",
    "drop", "other folds", "aux", "in another thread",
]  # fmt: skip
DURING = ["first call", "later call", "another thread meanwhile"]
AFTER = ["after it", "after an error of the first call", "after an error of a later call"]
PROGRAM = '''
import json, sys, threading, types
import torch
from torch import nn
from torch.func import functional_call
import torch._dynamo  # it replaces names of torch itself, and checkpoints import it
import torch.distributed.fsdp
import torch.nn.utils.stateless
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)
is_code = lambda value: callable(value) or isinstance(value, property | classmethod | staticmethod | types.ModuleType)


def picture():
    """For each module and class of torch, by name: itself, and the functions, classes and modules that its names stand for."""
    owners = {}
    for path, module in [*sys.modules.items()]:
        if path.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            owners[path] = module
            for value in [*vars(module).values()]:
                if isinstance(value, type) and value.__module__.startswith("torch"):
                    owners[f"{value.__module__}.{value.__qualname__}"] = value
    return {path: (owner, {k: v for k, v in vars(owner).items() if is_code(v)}) for path, owner in owners.items()}


def changed():
    """The names that stand for something else than before, and those that were added to a class."""
    found, absent = [], object()
    for path, (owner, before) in BEFORE.items():
        now = vars(owner)
        found += [f"{path}.{name}" for name, value in before.items() if now.get(name, absent) is not value]
        if isinstance(owner, type) and len(now) > SIZES[path]:
            found += [f"{path}.{name}" for name, value in [*now.items()] if is_code(value) and name not in before]
    return sorted(found)


def registries():
    """How many entries there are in torch's registries of hooks and modes."""
    names = [name for name in vars(torch.nn.modules.module) if name.startswith("_global_") and name.endswith("hooks")]
    tables = [len(getattr(torch.nn.modules.module, name)) for name in names]
    modes = [len(torch.overrides._get_current_function_mode_stack())]
    return tables + modes + [torch._C._autograd._top_saved_tensors_default_hooks(True) is not None]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def net(wide=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, wide), nn.Tanh(), nn.Linear(wide, 2 * wide))


def again(module, x):
    return checkpoint(module, x, use_reentrant=False).square().mean()


def plain(module, x):
    return module(x).square().mean()


def squared(module, x):
    return Square.apply(module(x)).mean()


def with_large(module, x):
    """512 x 1024 weights, which are 2**19."""
    return (module(x) + nn.functional.linear(module[1](module[0](x)), module[2].weight)).square().mean()


def of_params(module, params, x):
    return functional_call(module, params, (x,)).square().mean()


def warm_up():
    """All that torch imports and replaces by itself."""
    torch.optim.AdamW([torch.zeros(1)])  # the first one wraps a method of its class
    for loss in (plain, again, squared):
        loss(net(), torch.randn(6, 3)).backward()
    hooked = net()
    hooked[0].register_full_backward_hook(lambda *args: None)
    plain(hooked, torch.randn(6, 3)).backward()
    with_large(net(512), torch.randn(6, 3)).backward()
    of_params(net(), dict(net().named_parameters()), torch.randn(6, 3)).backward()
    torch.func.vmap(torch.func.grad(lambda x: x * x))(torch.ones(2))


warm_up()
BEFORE, OPEN = picture(), registries()
SIZES = {path: len(vars(owner)) for path, (owner, _) in BEFORE.items()}

import funcga
import torch_backend


class Look:
    """Wraps a loss: what has changed when it is called, and an error that it raises."""

    def __init__(self, loss):
        self.loss, self.looks, self.fails, self.calls = loss, None, False, 0

    def __call__(self, *args):
        self.calls += 1
        if self.looks is not None:
            self.looks |= {*changed()}
        if self.fails and self.calls == 2:
            raise KeyError("mine")
        return self.loss(*args)


def step_of(case):
    """(the loss that looks, a call of its step)."""
    module, x = net(512 if "large" in case else 4), torch.randn(6, 3)
    if case == "a full backward hook":
        module[0].register_full_backward_hook(lambda *args: None)
    given = {name: p.detach() for name, p in module.named_parameters()}
    if "functional_call" in case or case == "a function":
        look = Look(lambda params, x: of_params(module, params, x))
        if case == "a function":
            look = Look(lambda params, x: (x @ params["0.weight"].T).square().mean())
        step = funcga.accumulate(funcga.value_and_grad(look), 2)
        return look, lambda: step(given, x)
    look = Look({"a checkpoint": again, "a function in Python": squared, "a large weight": with_large}.get(case, plain))
    if case in ("pure_loss", "a stream", "observe", "drop", "other folds"):
        gradient = funcga.value_and_grad(torch_backend.pure_loss(module, look))
        if case == "a stream":
            step = funcga.stream(gradient)
            return look, lambda: step(given, [x, x])
        options = {
            "observe": {"observe": funcga.gradient_norms()}, "drop": {"drop": "microbatch"},
            "other folds": {"fold": (funcga.mean(), funcga.max())},
        }.get(case, {})
        step = funcga.accumulate(gradient, 2, **options)
        return look, lambda: step(given, x)
    if case == "aux":
        look = Look(lambda module, x: (plain(module, x), x.sum()))
        step = funcga.accumulate(torch_backend.module_value_and_grad(module, look, has_aux=True), 2)
        return look, lambda: step(x)
    gradient = torch_backend.module_value_and_grad(module, look)
    step = gradient if case == "a gradient alone" else funcga.accumulate(gradient, 2)
    return look, lambda: step(x)


def in_a_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def seen_by(case):
    found = {}

    def called(moment, look, call, fails=False):
        look.looks, look.fails, look.calls = set(), fails, 1 if case == "a gradient alone" else 0
        try:
            call()
        except KeyError:
            pass
        else:
            assert not fails
        found[moment], look.looks = sorted(look.looks), None
        after = "after it" if not fails else f"after an error of the {moment}" if moment[0] == "f" else f"after an error of a {moment}"
        found[after] = sorted({*found.get(after, []), *changed()})
        if registries() != OPEN:
            found[after].append("registries of hooks")

    def run():
        look, call = step_of(case)
        called("first call", look, call)
        call()
        called("later call", look, call)
        meanwhile, loss = set(), look.loss
        look.loss = lambda *args: in_a_thread(lambda: meanwhile.update(changed())) or loss(*args)
        call()
        found["another thread meanwhile"] = sorted(meanwhile)
        look.loss = loss
        kept = {moment: found[moment] for moment in ("first call", "later call")}
        called("later call", look, call, fails=True)
        called("first call", *step_of(case), fails=True)
        found.update(kept)

    in_a_thread(run) if case == "in another thread" else run()
    return found


found = {case: seen_by(case) for case in json.loads(sys.argv[1])}
print(json.dumps(found))
'''


@functools.cache
def found():
    """By a process of its own, whose torch nobody has touched."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CASES)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("moment", DURING + AFTER)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_replaced(case, moment):
    assert found()[case][moment] == []
