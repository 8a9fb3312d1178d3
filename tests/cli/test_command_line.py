"""The command line: what it refuses and how, loading a file, verify and info; each in this process, as `main`."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import funcga
from funcga.__main__ import main

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torch", "jax", "optax", "sklearn")), reason="needs funcga[parity]"
)

MINE = """
import jax.numpy as jnp, numpy, torch, funcga
x = numpy.random.default_rng(0).standard_normal((12, 3))
params = {"w": numpy.ones((3, 1))}


def loss(p, x):
    return ((x @ p["w"]) ** 2).mean()


good = funcga.checks.Problem(params, (x,), loss, loss)
args = funcga.to_torch((params, x))
grad_fn = funcga.value_and_grad(loss)
total = funcga.value_and_grad(lambda p, x: 12 * loss(p, x) * len(x))
rows = len
number, none, later = 3, funcga.checks.Problem(params, (x,)), None
no_scalar = funcga.checks.Problem(params, (x,), lambda p, x: x @ p["w"], loss)
no_key = funcga.checks.Problem(params, (x,), lambda p, x: p["weight"].sum(), loss)
others = funcga.checks.Problem(params, (x,), loss, lambda p, x: loss({"w": p["kernel"]}, x), jax_params={"kernel": jnp.ones((3, 1))})
folds = funcga.checks.Problem(params, (x,), loss, fold=funcga.max())
optimizers = funcga.checks.Problem(params, (x,), loss, loss, optimizers=("lion",))


def makes():
    return 3


def fails(seed):
    raise RuntimeError("no data here")
"""

STEPS = """
import torch, funcga
summary_fn, weight = lambda p, x: (x * p).mean(0), 3
step = funcga.coupled(summary_fn, lambda p, s: (s**2).sum(), 4, fold=funcga.mean())
wrong = funcga.coupled(summary_fn, lambda p, s: (s**2).sum(), 4, fold=funcga.sum())
args = torch.arange(3.0), torch.arange(24.0).reshape(8, 3)
"""

LOSSES = """
import functools, jax, torch, funcga
from funcga import mean
from funcga.checks import Problem
model = torch.nn.Linear(3, 1)


class Config:
    rate = 3


def loss(p, x):
    return (p * x).mean()


def noise(*shape, scale):
    return scale * torch.randn(shape)


args, number, weight = (torch.ones(3), torch.ones(8, 3)), 3, len
gradient, traced = funcga.grad(loss), jax.grad(loss)
_private = gradient
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("losses.py").write_text(LOSSES)
    Path("steps.py").write_text(STEPS)
    Path("broken.py").write_text("import nothing_of_this_name\n")
    Path("crooked.py").write_text("x = (\n")
    Path("stops.py").write_text("raise SystemExit(0)\n")


PARITY = "parity {} --dtype float64 --n 2 --updates 1"
REFUSED = {
    "": "the following arguments are required: parity | verify | doctor | plan | info",
    "train": "parity | verify | doctor | plan | info: invalid choice: 'train' (choose from ",
    "parity --n 0": "--n: invalid counts value: '0'",
    "parity --n 1,,2": "--n: invalid counts value: '1,,2'",
    "parity --dtype float8": "--dtype: invalid dtypes value: 'float8'",
    "parity --seed x": "--seed: invalid int value: 'x'",
    "parity --json no/such/folder/figures.json": "--json: 'no/such/folder/figures.json' is not a file in a folder that exists",
    "parity --html .": "--html: '.' is not a file in a folder that exists",
    "parity --epochs 3": "unrecognized arguments: --epochs",
    "parity mnist": "mnist.py does not import: FileNotFoundError: ",
    "parity digits --device cuda:77": "CUDA",
    "parity absent.py": "absent.py does not import: FileNotFoundError: ",
    "parity broken.py": "broken.py does not import: ModuleNotFoundError: No module named 'nothing_of_this_name' (line 1 of ",
    "parity crooked.py": "crooked.py does not import: SyntaxError: '(' was never closed (crooked.py, line 1)",
    "parity stops.py": "stops.py does not import: SystemExit: 0 (line 1 of ",
    "parity mine.py": "mine.py: mine.py has no `problem`. Write mine.py:NAME of what is meant, or add it: problem = funcga.checks.Problem(",
    "parity losses.py": "losses.py: losses.py has no `problem`. Write losses.py:NAME of what is meant, or add it: problem = funcga.checks.Problem(params, batch, torch_loss=..., jax_loss=...).",
    "verify losses.py": "losses.py has no `grad_fn`. Write losses.py:NAME of what is meant",
    "verify steps.py": "steps.py has no `grad_fn`. Write",
    "parity mine.py:godo": "mine.py:godo: mine.py has no `godo`. Write mine.py:NAME",
    "parity mine.py:number": "mine.py:number is no funcga.checks.Problem with a torch_loss, a jax_loss or both, nor a function that returns one: problem = funcga.checks.Problem(",
    "parity mine.py:makes": "mine.py:makes is no funcga.checks.Problem with a torch_loss, a jax_loss or both, nor a function that returns one: problem = funcga.checks.Problem(",
    "parity mine.py:none": "mine.py:none is no funcga.checks.Problem with a torch_loss, a jax_loss or both, nor a function that returns one: problem = funcga.checks.Problem(",
    PARITY.format("mine.py:no_scalar"): "torch, float64: the loss is float64[12, 1], and a gradient is that of a scalar",
    PARITY.format("mine.py:others"): "JAX, float64: the trees have different leaves: in tree, missing `kernel`, new `w`",
    PARITY.format("mine.py:folds"): "torch, float64: fold is <Fold: max, identity>, and parity knows what the whole batch's gradient is for mean(), per_weight() and sum(). Compare with one of them.",
    PARITY.format("mine.py:optimizers"): "KeyError: 'lion'",
    "verify mine.py:number": "grad_fn is 3, which is no function. Pass one, such as funcga.value_and_grad(loss_fn)",
    "verify mine.py --args nothing": "has no tuple `nothing`. A gradient function is called with the arguments that its file has: args = (params, batch).",
    "verify mine.py --args number": "has no tuple `number`. A gradient function is called with the arguments that its file has: args = (params, batch).",
    "verify mine.py --fold sum": "unrecognized arguments: --fold sum",
    "doctor --steps x": "--steps: invalid count value: 'x'",
    "doctor --steps 0 train.py": "--steps: invalid count value: '0'",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_wrong_is_refused_in_a_line(line, mine, capsys):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    refusal = err.strip().splitlines()[-1]
    assert re.match("funcga( parity| verify| doctor)?: ", refusal)
    assert REFUSED[line] in refusal, refusal
    assert "Traceback" not in out + err
    assert "Verdict" not in out


def test_errors_of_a_users_file(mine, capsys):
    """One line with their place, and with --debug the traceback; an interruption is quiet."""
    assert main(PARITY.format("mine.py:no_key").split()) == 2
    line = 'no_key = funcga.checks.Problem(params, (x,), lambda p, x: p["weight"].sum(), loss)'
    where = f"(line {MINE.splitlines().index(line) + 1} of {Path('mine.py').resolve()})"
    assert (
        capsys.readouterr().err.strip().splitlines()[-1] == f"funcga: KeyError: 'weight' {where}. --debug shows where."
    )
    assert main(["parity", "mine.py:fails", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.strip().splitlines()[-1].startswith("funcga: RuntimeError: no data here (line ")
    Path("interrupted.py").write_text("raise KeyboardInterrupt\n")
    for command in ("parity", "verify", "plan"):
        assert main([command, "interrupted.py"]) == 130
    assert capsys.readouterr().err == ""
    assert main([*["verify", "mine.py", "--n", "2"], "--json", "/dev/full"]) == 2
    assert "funcga: OSError: [Errno 28] No space left on device" in capsys.readouterr().err


def test_help_version_and_info(capsys):
    options = ["--n", "--dtype", "--device", "--seed", "--json", "--html"]
    for command, shown in (([], []), (["parity"], options), (["verify"], ["--n", "--args"]), (["plan"], ["--memory"])):
        assert main([*command, "--help"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("usage: ")
        assert all(option in out for option in shown)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"funcga {funcga.__version__}\n"
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for pattern in (rf"funcga +{funcga.__version__}", r"torch +2\.\S+ +cpu", r"jax +0\.\S+ +cpu:0", r"numpy +2\."):
        assert re.search(pattern, out), out


def test_verify_says_what_is_right_and_what_is_wrong(mine, capsys):
    assert main(["verify", "mine.py"]) == 0
    assert "grad_fn: Accumulation is exact for this loss." in capsys.readouterr().out
    assert main(["verify", "mine.py:total", "--json", "verdict.json"]) == 1
    out = capsys.readouterr().out
    assert "total: Accumulation is NOT exact for this loss" in out
    assert "Fix: fold=funcga.per_weight()" in out
    found = json.loads(Path("verdict.json").read_text())
    assert found["total"]["ok"] is False
    assert [cause["name"] for cause in found["total"]["causes"]] == ["sum under mean"]
    Path("summed.py").write_text(f"{MINE}\nfold, weight = funcga.per_weight(), len\n")
    assert main(["verify", "summed.py:total", "--n", "2,5"]) == 0
    assert main(["verify", "mine.py:good", "--n", "3"]) == 0
    out = capsys.readouterr().out
    assert "torch: Accumulation is exact for this loss." in out
    assert "JAX: Accumulation is exact for this loss." in out
    assert main(["verify", "steps.py:step"]) == 0  # of coupled, with what it brings
    assert "Largest relative difference from the whole batch" in capsys.readouterr().out
    assert main(["verify", "steps.py:wrong", "--n", "2"]) == 1
    assert "1. mean under sum" in capsys.readouterr().out


def test_a_loss_alone_certifies_its_values_only(mine, capsys):
    assert main(["verify", "losses.py:loss", "--n", "2"]) == 0
    out = capsys.readouterr().out
    assert "loss: The values agree, and no gradient was compared: see the note." in out
    assert "Verify its gradient: funcga.verify(funcga.value_and_grad(loss_fn), ...)" in " ".join(out.split())
    assert main(["verify", "losses.py:gradient", "--n", "2"]) == 0
    assert "no gradient was compared" not in capsys.readouterr().out


MISSING = """
import sys
from funcga.__main__ import main


class Missing:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing)
sys.exit(main(["parity", "digits", "--html", "page.html", "--updates", "0"]))
"""


@pytest.mark.parametrize("missing", ["sklearn", "torch", "matplotlib"])
def test_a_missing_package_is_named(missing):
    done = subprocess.run([sys.executable, "-c", MISSING, missing], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == f"funcga: {missing} is not installed; the commands need pip install 'funcga[parity]'\n"
    assert "cause" not in done.stdout  # before anything is computed


PLANS = """
import torch, funcga
gradient = funcga.value_and_grad(lambda p, x: torch.tanh(x @ p).square().mean())
step = funcga.accumulate(gradient, 3)
args = torch.empty(64, 64, device="meta"), torch.empty(1000, 64, device="meta")
one = args[0]
"""


def test_plan(tmp_path, capsys):
    file, found = tmp_path / "plans.py", tmp_path / "plan.json"
    file.write_text(PLANS)
    assert main(["plan", f"{file}:step", "--memory", "700 KB", "--json", str(found)]) == 0
    plan = json.loads(found.read_text())
    assert f"n={plan['n']}, micro-batches of {plan['microbatch_size']} rows" in capsys.readouterr().out
    assert plan["peak_bytes"] <= 700_000 == plan["memory"]
    assert main(["plan", f"{file}:gradient", "--memory", "1000"]) == 1
    assert "no n fits" in capsys.readouterr().out
    assert main(["plan", f"{file}:step", "--args", "one"]) == 2
    assert "has no tuple `one`" in capsys.readouterr().err
    assert main(["plan", f"{file}:step", "--memory", "much"]) == 2
    assert "no number of bytes" in capsys.readouterr().err
    assert main(["plan", f"{file}:args"]) == 2
