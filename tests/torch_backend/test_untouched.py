"""Torch is after every call what it was before: whoever uses it elsewhere in the process runs no code of ours."""

import os
import subprocess
import sys

PROGRAM = '''
import sys
import types

import torch
from torch import nn
import torch._dynamo  # it replaces names of torch itself, and checkpoints import it
import torch.distributed.fsdp
import torch.nn.utils.stateless
from torch.utils.checkpoint import checkpoint


is_code = lambda value: callable(value) or isinstance(value, property | classmethod | staticmethod)


def picture():
    """The functions, classes and methods that the names of torch's modules and classes stand for."""
    seen = {}
    for path, module in [*sys.modules.items()]:
        if path.partition(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for name, value in [*vars(module).items()]:
                if is_code(value):
                    seen[path, name] = value
                if isinstance(value, type) and value.__module__.startswith("torch"):
                    seen |= {(path, name, key): each for key, each in [*vars(value).items()] if is_code(each)}
    return seen


def changed(before):
    """The names that stand for something else than before, and those that were added to a class."""
    after, known = picture(), {key[:2] for key in before}
    return [
        key
        for key, value in after.items()
        if before.get(key, value) is not value or (len(key) == 3 and key not in before and key[:2] in known)
    ]


def features():
    import funcga
    import torch_backend

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    params = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(6, 3)
    loss = lambda module, x: checkpoint(module, x, use_reentrant=False).square().mean()
    call = lambda params, x: torch.func.functional_call(module, params, (x,)).square().mean()
    of_module = torch_backend.module_value_and_grad(module, loss)
    of_call = funcga.value_and_grad(call)
    adamw = torch_backend.from_optimizer(torch.optim.AdamW, lr=0.1)

    def multi_steps():
        tx = funcga.multi_steps(adamw, 2)
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(of_call(params, x)[1], state, params)

    def failing():
        try:
            funcga.accumulate(funcga.grad(lambda params, x: 1 / 0), 2)(params, x)
        except ZeroDivisionError:
            pass

    return {
        "the import": lambda: None,
        "a gradient": lambda: of_call(params, x),
        "accumulate": lambda: funcga.accumulate(of_call, 2)(params, x),
        "pure_loss": lambda: funcga.accumulate(funcga.grad(torch_backend.pure_loss(module, loss)), 2)(params, x),
        "a module": lambda: funcga.accumulate(of_module, 2)(x),
        "stream": lambda: funcga.stream(of_call)(params, [x, x]),
        "a step in a loss": lambda: funcga.grad(lambda p: funcga.accumulate(of_call, 2)(p, x)[0])(params),
        "coupled": lambda: funcga.coupled(
            torch_backend.module_value_and_grad(module, lambda module, x: module(x)), lambda module, s: s.var(), 2
        )(x),
        "observe": lambda: funcga.accumulate(of_call, 2, observe=funcga.gradient_noise())(params, x),
        "drop": lambda: funcga.accumulate(of_call, 2, drop="microbatch")(params, x),
        "reproducible": lambda: funcga.accumulate(of_call, 2, fold=funcga.reproducible(funcga.mean()))(params, x),
        "multi_steps": multi_steps,
        "plan": lambda: funcga.plan(funcga.accumulate(of_call, 2), params, x),
        "verify": lambda: funcga.verify(of_call, params, x, n=2),
        "a loss that fails": failing,
    }


torch.optim.AdamW([torch.zeros(1)])  # the first one wraps a method of its class
before = picture()
for name, run in features().items():
    run()
    assert changed(before) == [], (name, changed(before))
print("untouched")
'''


def test_nothing_of_torch_is_replaced_after_a_call():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    assert done.stdout.rstrip().endswith("untouched"), done.stdout + done.stderr
