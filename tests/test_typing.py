"""What a user's type checker sees: mistakes are found, and nothing that is right is called one."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The comment says what mypy is to find in a line; the others have no errors.
SCRIPT = '''
from collections.abc import Iterator

import funcga


class Array:
    """What stands for a tensor."""

    def mean(self) -> "Array":
        return self

    def __matmul__(self, other: "Array") -> "Array":
        return other


def loss_fn(params: dict[str, Array], x: Array, *, train: bool = False) -> Array:
    return (x @ params["w"]).mean()


def with_aux(params: dict[str, Array], x: Array) -> tuple[Array, int]:
    return x.mean(), 1


params, x = {"w": Array()}, Array()
step = funcga.accumulate(funcga.value_and_grad(loss_fn), n=8)
loss, grads = step(params, x)
loss, grads = step(params, x, train=True)
loss.mean(), grads["w"].mean()
grads["w"].foo  # attr-defined
grads.w  # attr-defined
step("complete", nonsense=1)  # call-arg, arg-type
step(params)  # call-arg
step(params, x, nonsense=1)  # call-arg
loss.backwards()  # attr-defined

(value, aux), grads = funcga.accumulate(funcga.value_and_grad(with_aux, has_aux=True), microbatch_size=2)(params, x)
value.mean(), aux + 1
aux.mean()  # attr-defined
short = funcga.accumulate(funcga.value_and_grad(lambda params, x: (x @ params["w"]).mean()), "auto")
short(params, x)
short(params)  # call-arg
(of_params, of_x) = funcga.accumulate(funcga.grad(loss_fn, argnums=(0, 1)), 4)(params, x)
only_grads, aux = funcga.accumulate(funcga.grad(with_aux, has_aux=True), 4)(params, x)
only_grads["w"].mean(), aux + 1
aux.mean()  # attr-defined
funcga.accumulate(funcga.grad(loss_fn), 4)(params, x)["w"].foo  # attr-defined
funcga.value_and_grad(loss_fn, scaled=True)(params, x, loss_scale=2.0)
funcga.grad(loss_fn)(params, x, loss_scale=2.0)  # call-arg
funcga.grad(3)  # call-overload
funcga.accumulate(3, 4)  # call-overload
funcga.accumulate(funcga.grad(loss_fn), "all")  # call-overload
funcga.accumulate(funcga.grad(loss_fn), 4, folds=funcga.sum())  # call-overload, call-overload

fold = funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)
funcga.accumulate(funcga.grad(loss_fn), 4, fold=fold)
funcga.accumulate(funcga.grad(loss_fn), 4, drop="window", drop_if=lambda grads: grads["w"].isnan().any())
funcga.accumulate(funcga.grad(loss_fn), 4, fold=funcga.mean(dtype="float32"))
funcga.accumulate(funcga.value_and_grad(loss_fn), 4, fold=(funcga.mean(), {"w": funcga.sum(), "b": [funcga.max()]}))
funcga.accumulate(funcga.grad(loss_fn), 4, fold=funcga.mean)  # call-overload
funcga.accumulate(funcga.value_and_grad(loss_fn), 4, fold=(funcga.mean(), {"w": funcga.sum}))  # dict-item
funcga.stream(funcga.grad(loss_fn), fold=funcga.per_weight)  # call-overload

stream = funcga.stream(funcga.value_and_grad(loss_fn), weight=lambda x: 3)
items: Iterator[list[Array]] = funcga.windows([x, x, x], 2)
for window in items:
    loss, grads = stream(params, window)
    loss.mean()
rows: list[list[int]] = [*funcga.windows([x], 2)]  # list-item

def summary_fn(params: dict[str, Array], x: Array) -> dict[str, Array]:
    return {"x": x @ params["w"]}


def of_summaries(params: dict[str, Array], s: dict[str, Array]) -> Array:
    return s["x"].mean()


coupled = funcga.coupled(summary_fn, of_summaries, n=4, weight=lambda params, x: 3)
loss, grads = coupled(params, x)
loss.backwards()  # attr-defined
grads["w"].foo  # attr-defined
coupled(params)  # call-arg
funcga.coupled(summary_fn, of_summaries, folds=funcga.mean())  # call-overload, call-overload
funcga.coupled(summary_fn, of_summaries, 4, argnums=(0, 1))(params, x)

tx = funcga.multi_steps((lambda params: (), lambda grads, state, params: (grads, state)), 4)
state = tx.init(params)
updates, state = tx.update(grads, state, params, weight=3)
updates["w"].foo  # attr-defined
state.update  # attr-defined
state.updates, tx.accumulate(grads, state).offered
tx.update(grads, params)  # arg-type

funcga.Accumulator((funcga.mean(), funcga.sum()))
funcga.Accumulator(funcga.mean)  # arg-type
funcga.nonsense  # attr-defined
'''

# Gradients of a module's own parameters: of the arguments of loss_fn after the module.
MODULES = """
import torch
from torch import Tensor, nn

import funcga
from torch_backend import assign_grads, from_optimizer, module_value_and_grad, trainable


def loss_fn(model: nn.Linear, x: Tensor, y: Tensor, *, train: bool = False) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def with_aux(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return x.mean(), 1


model, x, y = nn.Linear(3, 2), torch.ones(4, 3), torch.ones(4, 2)
gradient = module_value_and_grad(model, loss_fn)
step = funcga.accumulate(gradient, n=2)
loss, grads = step(x, y, train=True)
loss.mean(), grads["weight"].mean()
assign_grads(model, grads)
assign_grads(model, loss)  # call-overload
assign_grads(model, None)  # call-overload
assign_grads(trainable(model), grads)
assign_grads([*model.parameters()], [None, x])
assign_grads(model.parameters(), (x, y))
gradient(x, y)[0].backwards()  # attr-defined
step(x)  # call-arg
step(x, y, 3, 4, z=5)  # arg-type, call-arg, call-arg, call-arg
step("text", y)  # arg-type
grads.weight  # attr-defined
(value, aux), grads = funcga.accumulate(module_value_and_grad(model, with_aux, has_aux=True), microbatch_size=2)(x)
value.mean(), aux + 1
aux.mean()  # attr-defined
short = funcga.accumulate(module_value_and_grad(model, lambda model, x: model(x).mean()), 2)
short(x)[1]["weight"].mean()
short(x, y)  # call-arg
module_value_and_grad(nn.parallel.DistributedDataParallel(model), loss_fn, sync="every")(x, y)
module_value_and_grad(model, loss_fn, scaled=True)(x, y, loss_scale=2.0)
gradient(x, y, loss_scale=2.0)  # call-arg
module_value_and_grad(loss_fn, model)  # call-overload
loss, grads = funcga.stream(gradient)(funcga.windows([(x, y)], 2))

loss, grads = funcga.coupled(module_value_and_grad(model, with_aux), lambda model, s: s[0] * s[1], n=2)(x)
assign_grads(model, grads)
params = trainable(model)
tx = from_optimizer(torch.optim.AdamW, lr=1e-3)
state = tx.init(params)
updates, state = tx.update(grads, state, params)
updates["weight"].foo  # attr-defined
state.slots, state.started.all()
state.steps  # attr-defined
"""


SCRIPTS = {"functions.py": SCRIPT, "modules.py": MODULES}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What one mypy --strict prints of all scripts."""
    path = tmp_path_factory.mktemp("typing")
    for name, source in SCRIPTS.items():
        (path / name).write_text(source)
    environment = {**os.environ}
    if not _is_visible():
        environment["MYPYPATH"] = str(ROOT)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(path / "cache"), *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path, env=environment, check=False)
    return done.stdout + done.stderr


def _is_visible():
    """Whether the package is installed so that mypy sees it: its files, or a plain path to them."""
    packages = Path(sysconfig.get_path("purelib"))
    paths = [line for file in packages.glob("*funcga*.pth") for line in file.read_text().splitlines()]
    return (packages / "funcga").is_dir() or any(Path(line).is_dir() for line in paths)


@pytest.mark.parametrize("name", SCRIPTS)
def test_mistakes_are_found_and_nothing_else(name, printed):
    lines, found = enumerate(SCRIPTS[name].splitlines(), 1), {}
    expected = {number: sorted(line.split("  # ")[1].split(", ")) for number, line in lines if "  # " in line}
    for line, code in re.findall(rf"(?m)^{name}:(\d+): error: .*\[(\S+)\]$", printed):
        found.setdefault(int(line), []).append(code)
    assert {number: sorted(codes) for number, codes in found.items()} == expected, printed
