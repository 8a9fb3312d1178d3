"""The command `python -m funcga parity`: what it finds, what it says of it, and that it can say no."""

import contextlib
import html
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import funcga
from funcga.__main__ import main

ROOT = Path(funcga.__file__).parents[1]
NEEDED = {"torch": "torch", "jax": "jax", "optax": "optax", "sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}  # fmt: skip
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED.values())}"
)
BUILT_IN = ("digits", "cnn", "text", "batchnorm", "mixed")


def found(tmp_path, *arguments):
    """(exit code, JSON) of the command."""
    file = tmp_path / "found.json"
    code = main(["parity", *map(str, arguments), "--json", str(file)])
    return code, json.loads(file.read_text())


def of(problem, cause, dtype="float64"):
    return [c for c in problem["compared"] if c["cause"] == cause and c["dtype"] == dtype]


def largest(compared):
    return max(row["relative"] for c in compared for row in c["rows"])


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """All built-in problems, in float64, without training, which the whole command is run for."""
    return found(tmp_path_factory.mktemp("all"), "--n", 3, "--dtype", "float64", "--updates", 0)


def test_built_in_problems_are_the_same_to_the_last_digits(every):
    code, report = every
    assert code == 0
    assert report["ok"] is True
    assert [problem["problem"] for problem in report["problems"]] == [*BUILT_IN]
    for problem in report["problems"]:
        assert problem["ok"] is True
        assert problem["verdict"][0].startswith("The same. In float64 accumulated is the full batch to ")
        assert largest(of(problem, "accumulation")) <= 1e-13
        assert largest(of(problem, "model")) <= 1e-12
        sums = [c for c in of(problem, "fold") if "plain sums" in c["what"]]
        assert [c["what"] for c in sums] == ["torch, plain sums", "JAX, plain sums"]
        assert all(row["ulps"] == 0 for c in sums for row in c["rows"])
        assert largest(of(problem, "fold")) < 1e-15
        assert [c["micro_batch"] for c in of(problem, "model")] == [None, 0, 1, 2]


def test_frameworks_really_differ_in_rounding(every):
    """Two implementations that agreed in every bit would be one."""
    for problem in every[1]["problems"]:
        assert largest(of(problem, "model")) > 0


def test_the_problems_are_what_they_say(every):
    by_name = {problem["problem"]: problem for problem in every[1]["problems"]}
    digits, text = by_name["digits"], by_name["text"]
    assert [row["path"] for row in of(digits, "model")[0]["rows"]] == [
        "loss", "hidden.weight", "hidden.bias", "output.weight", "output.bias"
    ]  # fmt: skip
    assert digits["microbatch_rows"] == digits["microbatch_weights"] == [599, 599, 599]
    assert max(text["microbatch_weights"]) > 3 * min(text["microbatch_weights"])
    assert text["reduction"] == sum(text["microbatch_weights"])
    assert len(of(text, "model")[0]["rows"]) == 15
    cnn = {row["path"]: row for row in of(by_name["cnn"], "model")[0]["rows"]}
    assert cnn["conv2.kernel"]["left_path"] == "conv2.weight"
    assert cnn["conv2.kernel"]["shapes"] == [[3, 3, 8, 16]] * 2  # HWIO, of OIHW
    for problem in by_name.values():
        assert all(1 < loss < 8 for losses in problem["losses"].values() for loss in losses.values())


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """(exit code, JSON, folder with page.html and picture.png, what was printed) of one problem with everything."""
    folder, printed = tmp_path_factory.mktemp("digits"), io.StringIO()
    files = "--html", folder / "page.html", "--plot", folder / "picture.png"
    with contextlib.redirect_stdout(printed):
        return *found(folder, "digits", "--n", 7, "--updates", 12, *files), folder, printed.getvalue()


def test_float32_is_explained_by_rounding(digits):
    code, report, *_ = digits
    (problem,) = report["problems"]
    assert code == 0
    rounding = of(problem, "rounding", "float32")
    assert [c["what"] for c in rounding] == ["torch vs float64", "JAX vs float64"]
    assert all(row["ok"] and row["dtypes"] == ["float32", "float64"] for c in rounding for row in c["rows"])
    assert 1e-8 < largest(rounding) < 2e-5
    # float32 differs by more than rounding to float64 could, and float64 not at all
    assert largest(of(problem, "model", "float32")) > 1e6 * largest(of(problem, "model"))


def test_the_training_is_the_same(digits):
    (problem,) = digits[1]["problems"]
    assert [(t["optimizer"], t["dtype"]) for t in problem["training"]] == [
        (name, dtype) for dtype in ("float32", "float64") for name in ("sgd", "momentum", "adam", "adamw")
    ]
    for t in problem["training"]:
        assert (t["ok"], t["parts"], t["n"], len(t["worst"])) == (True, None, 4, 12)
        assert max(t["worst"]) <= {"float32": 1e-5, "float64": 1e-12}[t["dtype"]]
        assert t["losses"][-1] < 0.9 * t["losses"][0]  # it trains
        assert [row["path"] for row in t["last"]["rows"]] == [
            "hidden.weight", "hidden.bias", "output.weight", "output.bias"
        ]  # fmt: skip
    assert any(max(t["worst"]) > 0 for t in problem["training"])


def test_the_page_is_one_file_that_loads_nothing(digits):
    page = (digits[2] / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert page.count("<svg") == 4
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)""", page)
    figures = {html.escape(figure) for figure in re.findall(r"\S+ < \S+", digits[3])}
    assert len(figures) > 10
    assert all(f">{figure}</td>" in page for figure in figures)
    # On a narrow screen, where a table has no heading, each figure says what it is.
    assert len(re.findall("<td", page)) == len(re.findall(r'<td class="head"|<td [^>]*data-label="\w', page))
    for text in (
        "Verdict: the same.",
        "hidden.weight",
        "each micro-batch",
        "in training",
        "n, micro-batches",
        "jax 0.",
    ):
        assert text in page
    assert (digits[2] / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_printed_report(tmp_path):
    """In a process of its own, where every warning is an error."""
    (tmp_path / "mine.py").write_text(MINE)
    argv = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "funcga",
        "parity",
        f"{tmp_path}/mine.py",
        "--n",
        "2",
        "--updates",
        "0",
    ]
    wide = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    ran = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=wide, encoding="utf-8", check=False)
    said = [line for line in ran.stderr.splitlines() if not re.fullmatch(r"problem: \d+ of 16 steps are done", line)]
    assert (ran.returncode, said) == (0, [])
    assert max(map(len, ran.stdout.splitlines())) <= 100
    assert "n = 2: 12 rows in 2 micro-batches of 6\n" in re.sub(" +\n", "\n", ran.stdout)
    assert re.search(r"accumulation +torch vs full batch +\S+ < \S+e-6 +\S+ < 1e-13 ", ran.stdout)
    # In two dtypes: (2 accumulated + full + 2 micro-batches) x 3 + 2 x 2 folds x 2; and 2 x 3 for rounding.
    assert ran.stdout.rstrip().endswith("Verdict: the same. All 52 differences of a leaf are within their limits.")


def test_without_a_terminal_lines_say_how_far_the_run_is(tmp_path, monkeypatch, capsys):
    from funcga import _cli

    monkeypatch.setattr(_cli, "SECONDS", 0)
    (tmp_path / "mine.py").write_text(MINE)
    assert main(["parity", f"{tmp_path}/mine.py", "--n", "2", "--dtype", "float64", "--updates", "0"]) == 0
    steps = [int(step) for step in re.findall(r"^problem: (\d) of 8 steps are done$", capsys.readouterr().err, re.M)]
    assert steps == sorted(steps)
    assert len(steps) >= steps[-1] == 8


def test_64_bits_are_on_only_while_the_command_runs(tmp_path):
    import jax

    before = jax.config.jax_enable_x64
    (tmp_path / "mine.py").write_text(MINE)
    assert main(["parity", f"{tmp_path}/mine.py", "--n", "2", "--dtype", "float64", "--updates", "1"]) == 0
    assert jax.config.jax_enable_x64 == before


# A problem of one's own.

MINE = """
import jax, jax.numpy as jnp, numpy, torch, funcga

random = numpy.random.default_rng(0)
params = {"hidden": random.standard_normal((3, 4)), "out": random.standard_normal((4, 1))}
x, y = random.standard_normal((12, 3)), random.standard_normal((12, 1))


def torch_loss(p, x, y):
    return (torch.tanh(x @ p["hidden"]) @ p["out"] - y).square().mean()


def jax_loss(p, x, y):
    return jnp.square(jnp.tanh(x @ p["hidden"]) @ p["out"] - y).mean()


problem = funcga.checks.Problem(params, (x, y), torch_loss, jax_loss, optimizers=("adamw",))
"""


def mine(tmp_path, more, *options):
    """(exit code, JSON of the problem, its verdict) of MINE with more lines."""
    file = tmp_path / "mine.py"
    file.write_text(MINE + more)
    code, report = found(tmp_path, f"{file}:problem", "--n", 3, "--updates", 2, *options)
    (problem,) = report["problems"]
    assert report["ok"] is problem["ok"] is (code == 0)
    return code, problem, " ".join(problem["verdict"])


def test_a_problem_of_ones_own(tmp_path):
    code, problem, verdict = mine(tmp_path, "")
    assert code == 0
    assert problem["problem"] == "problem"
    assert problem["reduction"] == 12 + 4
    assert verdict.startswith("The same. In float64 ")
    assert verdict.endswith("what is left in less precision is rounding.")


def test_one_framework_is_enough(tmp_path):
    code, problem, verdict = mine(
        tmp_path, "problem = funcga.checks.Problem(params, (x, y), torch_loss)", "--dtype", "float64"
    )
    assert code == 0
    assert {c["what"] for c in problem["compared"]} == {
        "torch vs full batch", "torch vs NumPy", "torch, plain sums"
    }  # fmt: skip
    assert "JAX" not in verdict


def test_a_function_makes_the_problem_from_the_seed(tmp_path):
    more = "\ndef make(seed):\n    return funcga.checks.Problem({'w': numpy.full((3, 1), seed + 1.0)}, (x, y), lambda p, x, y: (x @ p['w'] - y).square().mean())\n"
    (tmp_path / "mine.py").write_text(MINE + more)
    options = "--dtype", "float64", "--n", 2
    losses = [
        found(tmp_path, f"{tmp_path}/mine.py:make", "--seed", seed, *options)[1]["problems"][0]["losses"]
        for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_weights_of_another_layout_and_name(tmp_path):
    code, problem, _ = mine(
        tmp_path,
        """
def other(p, x, y):
    return jnp.square(jnp.tanh(x @ p["layer"]["kernel"]) @ p["head"]["kernel"] - y).mean()

def torch_loss(p, x, y):
    return (torch.tanh(x @ p["first.weight"].T) @ p["head.weight"].T - y).square().mean()

rules = [funcga.trees.Rule(r"first\\.(.*)", r"layer.\\1"), *funcga.trees.torch_to_flax]
like = {"layer": {"kernel": jnp.zeros((3, 4))}, "head": {"kernel": jnp.zeros((4, 1))}}
state = {"first.weight": torch.from_numpy(params["hidden"].T.copy()), "head.weight": torch.from_numpy(params["out"].T.copy())}
problem = funcga.checks.Problem(state, (x, y), torch_loss, other, jax_params=like, rules=rules, optimizers=("sgd",))
""",
    )
    assert code == 0
    assert [row["left_path"] for row in of(problem, "model")[0]["rows"]] == ["loss", "first.weight", "head.weight"]
    assert [row["path"] for row in of(problem, "model")[0]["rows"]] == ["loss", "layer.kernel", "head.kernel"]


def test_other_dtypes(tmp_path):
    code, problem, _ = mine(tmp_path, "", "--dtype", "bfloat16,float64")
    assert code == 0
    assert 1e-4 < largest(of(problem, "rounding", "bfloat16")) < 0.03


def test_over_replicas(tmp_path):
    """Of a problem whose losses import their own framework, as each replica is a process that has to import it."""
    lazy = MINE.replace("import jax, jax.numpy as jnp, numpy, torch, funcga", "import numpy, funcga")
    lazy = lazy.replace("    return (torch", "    import torch\n    return (torch")
    lazy = lazy.replace("    return jnp", "    import jax.numpy as jnp\n    return jnp")
    (tmp_path / "mine.py").write_text(lazy)
    options = "--n", 3, "--updates", 0, "--dtype", "float64", "--ranks", 2
    code, report = found(tmp_path, f"{tmp_path}/mine.py:problem", *options)
    assert code == 0
    replicas = [c for c in of(report["problems"][0], "accumulation") if "replicas" in c["what"]]
    assert [c["what"] for c in replicas] == ["torch, 2 replicas", "JAX, 2 replicas"]
    assert all(c["ok"] and len(c["rows"]) == 3 for c in replicas)


# Teeth: what is wrong is found, and its cause is named.

WRONG = {
    "another normaliser": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda *a: 12 * jax_loss(*a))",
        r"The models differ, in float64: in every micro-batch\. The loss itself differs, by 9\.2e-01; beyond the limit are 2 of 2 "
        r"gradients\. All are torch = 0\.0833333 x JAX: another normaliser, such as a mean against a sum\. "
        r"The training diverges: sgd ",
        {"model", "training"},
    ),
    "another activation": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jnp.square(jax.nn.soft_sign(x @ p['hidden']) @ p['out'] - y).mean())",
        r"The models differ, in float64: in every micro-batch\. The loss itself differs, by .*; beyond the limit are 2 of 2 "
        r"gradients; most in (hidden|out) ",
        {"model", "training"},
    ),
    "rows of one micro-batch": (
        "y[5] = 9\nproblem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jnp.square(jnp.where(y > 5, 0, jnp.tanh(x @ p['hidden']) @ p['out'] - y)).mean())",
        r"in micro-batch 2 of 3, and not in the others: look at what those rows have",
        {"model", "training"},
    ),
    "a small constant": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss(p, x * (1 + 1e-5), y), optimizers=())",
        r"The loss itself differs, by \d\.\de-0\d; beyond the limit are 2 of 2 gradients; most in (out|hidden) \(.*\), "
        r"(out|hidden) \(.*\)\. So little may be a constant or an approximation: the eps of a normalisation",
        {"model"},
    ),
    "another normaliser in one": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss(p, x, y) * len(x), optimizers=())",
        r"^The models differ, in float64: .* Accumulation is not exact for the loss of JAX with mean\(\).* The other "
        r"framework's is exact: the loss of JAX divides by something else, or couples its rows\.",
        {"model", "accumulation"},
    ),
    "in float32 alone": (
        "problem = funcga.checks.Problem(params, (x, y), lambda *a: torch_loss(*a) * (1.01 if a[1].dtype == torch.float32 else 1), lambda *a: jax_loss(*a) * (0.99 if a[1].dtype == 'float32' else 1), optimizers=())",
        r"^The models differ, in float32: in every micro-batch\..* In float64 they agree, so it is not mere rounding\. .* "
        r"more than rounded arguments would do: something in this loss computes in less than float32",
        {"model", "rounding"},
    ),
    "float32 inside": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jnp.square((jnp.tanh(x @ p['hidden']) @ p['out']).astype('float32').astype(x.dtype) - y).mean(), optimizers=())",
        r"differs from the full batch by .*, and verify finds no mistake in the loss of JAX: it is the rounding of something "
        r"inside that computes in less than float64",
        {"model", "accumulation"},
    ),
    "a gradient that stops": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss({**p, 'hidden': jax.lax.stop_gradient(p['hidden'])}, x, y), optimizers=())",
        r"The loss is the same and its gradient is not; beyond the limit are 1 of 2 gradients, the last of them hidden: "
        r"backward passes come to it first",
        {"model"},
    ),
    "less precision inside": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss(p, x.astype('bfloat16').astype(x.dtype) if x.dtype == 'float32' else x, y), optimizers=())",
        r"JAX vs float64 \(float32\) differs by .*, which is more than rounding explains in sums of 16 terms, and more "
        r"than rounded arguments would do: something in this loss computes in less than float32\.",
        {"model", "rounding"},
    ),
    "a sum": (
        "problem = funcga.checks.Problem(params, (x, y), lambda *a: 12 * torch_loss(*a[:2], a[2]) * len(a[1]) / 12, lambda *a: jax_loss(*a) * len(a[1]), optimizers=())",
        r"Accumulation is not exact for this loss with mean\(\): over n = 3 micro-batches \(float64\) it differs from the "
        r"full batch by 6\.7e-01 in .*The loss is a sum over rows.* To fix it: .*fold=funcga\.per_weight\(\)",
        {"accumulation"},
    ),
    "batch statistics": (
        "problem = funcga.checks.Problem(params, (x, y), lambda p, x, y: torch_loss(p, (x - x.mean(0)) / x.std(0, correction=0), y), lambda p, x, y: jax_loss(p, (x - x.mean(0)) / x.std(0), y), optimizers=())",
        r"Accumulation is not exact for this loss .*statistics",
        {"accumulation"},
    ),
    "not a number": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss(p, x, y) + 0 * jnp.sqrt(p['out'] * 0).sum(), optimizers=())",
        r"out has NaN in JAX: 0 in torch, 4 in JAX\.",
        {"accumulation", "model", "rounding"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_what_is_wrong_is_named(mistake, tmp_path):
    more, pattern, causes = WRONG[mistake]
    narrow = causes & {"rounding"} or "float32" in mistake
    code, problem, verdict = mine(tmp_path, more, "--dtype", "float32,float64" if narrow else "float64")
    assert code == 1
    assert re.search(pattern, verdict), verdict
    beyond = {c["cause"] for c in problem["compared"] if not c["ok"] and not c["explained"]}
    beyond |= {"training" for t in problem["training"] if not t["ok"]}
    assert beyond == causes


def test_a_fold_that_is_wrong_is_told_from_gradients_that_are(tmp_path, monkeypatch):
    from funcga._parity import run

    right = run.fold_in_framework

    def wrong(*args):
        folded = right(*args)
        return folded._replace(fold={path: leaf * (1 + 1e-9) for path, leaf in folded.fold.items()})

    monkeypatch.setattr(run, "fold_in_framework", wrong)
    code, problem, verdict = mine(tmp_path, "", "--dtype", "float64")
    assert code == 1
    assert verdict.startswith("The fold itself is wrong: torch vs NumPy (float64) differ by 1.0e-09 in ")
    assert {c["cause"] for c in problem["compared"] if not c["ok"]} == {"fold"}


def test_a_fold_in_less_precision_is_no_rounding(tmp_path, monkeypatch):
    """What float64 does right excuses nothing in float32."""
    import torch

    from torch_backend import arrays

    monkeypatch.setattr(arrays, "accumulator_dtype", lambda dtype: torch.bfloat16 if dtype == torch.float32 else dtype)
    code, _, verdict = mine(tmp_path, "problem = funcga.checks.Problem(params, (x, y), torch_loss)")
    assert code == 1
    assert verdict.startswith("The fold itself is wrong: torch vs NumPy (float32) differ by ")


def test_a_loss_that_is_ill_conditioned_is_no_mistake(tmp_path):
    more = """
y = numpy.tanh(x @ params["hidden"]) @ params["out"] + 1e-2 * y
problem = funcga.checks.Problem(params, (x, y), torch_loss, jax_loss, optimizers=())
"""
    code, problem, verdict = mine(tmp_path, more)
    assert code == 0
    assert any(not c["ok"] and c["explained"] for c in of(problem, "rounding", "float32"))
    assert "rounding, which this loss makes large" in verdict


def test_noise_that_adam_divides_by_itself_is_set_aside(tmp_path):
    """As the bias of a key in attention: softmax does not see it."""
    more = """
params = {**params, "shift": numpy.ones((1,))}
weigh = lambda s, shift, ns: ns(s + shift)
problem = funcga.checks.Problem(params, (x, y),
    lambda p, x, y: (torch.softmax(x + p["shift"], -1) @ p["hidden"] @ p["out"] - y).square().mean(),
    lambda p, x, y: jnp.square(jax.nn.softmax(x + p["shift"]) @ p["hidden"] @ p["out"] - y).mean(), optimizers=("adamw",))
"""
    code, problem, verdict = mine(tmp_path, more)
    assert code == 0
    assert "Left out of the training with Adam: shift. The gradient there is 0 except for rounding" in verdict
    assert all(row["path"] != "shift" for t in problem["training"] for row in t["last"]["rows"])
    shift = [row for c in of(problem, "model") for row in c["rows"] if row["path"] == "shift"]
    assert all(row["relative"] < 1e-12 for row in shift)  # of the largest leaf


def test_nothing_counts(tmp_path):
    more = "problem = funcga.checks.Problem(params, (x, y), torch_loss, jax_loss, weight=lambda x, y: 0 * len(x), optimizers=())"
    _, problem, verdict = mine(tmp_path, more, "--dtype", "float64")
    assert all(row["ok"] for c in of(problem, "fold") for row in c["rows"])
    assert "The fold itself is wrong" not in verdict


def test_an_optimizer_that_differs_is_found(tmp_path, monkeypatch):
    from funcga._parity import in_jax as losses

    right = losses.optimizer

    def wrong(name):
        import optax

        return optax.adamw(0.01, weight_decay=0.1 * (1 + 1e-6)) if name == "adamw" else right(name)

    monkeypatch.setattr(losses, "optimizer", wrong)
    code, problem, verdict = mine(tmp_path, "", "--dtype", "float64")
    assert code == 1
    assert re.fullmatch(
        r"The training diverges: adamw \(float64\) from update 1 on; first \w+\. The gradients agree, so compare what the "
        r"two optimizers do with them\.",
        verdict,
    )
    assert all(c["ok"] for c in problem["compared"])


def test_rounding_that_training_makes_larger_is_no_mistake():
    from funcga._compare.report import Report
    from funcga._compare.row import row_of as row
    from funcga._parity.report import verdict
    from funcga._parity.run import Findings, Trajectory

    near, far = (Report((row("w", np.float64([1.0]), np.float64([1 + gap]), limit=1e-6),)) for gap in (0, 1e-3))
    problem = funcga.checks.Problem({}, (), abs, abs)
    good, bad = [near, near], [near, far]

    def findings(narrow, wide):
        pairs = [("float32", narrow), ("float64", wide)]
        trajectories = [Trajectory("sgd", dtype, 1, [1.0, 0.5], reports) for dtype, reports in pairs]
        return Findings(problem, ["float32", "float64"], 1, [1], [1.0], {}, [], trajectories, {}, {"float32": 1e-7})

    assert findings(bad, good).ok
    assert findings(bad, good).trajectories[0].diverges == 2
    assert not findings(bad, bad).ok
    assert not findings(good, bad).ok
    assert "diverges: sgd (float64) from update 2 on; first w" in verdict(findings(good, bad)).sentences[0]


def drawn(ns, micro_batches, updates):
    """The four axes of a run with these figures."""
    from matplotlib.figure import Figure

    from funcga._compare.report import Report
    from funcga._compare.row import row_of as row
    from funcga._parity import page
    from funcga._parity.run import Compared, Findings, Trajectory

    dtypes = ["float32", "float64"]
    near = {
        dtype: Report(tuple(row(path, np.ones(1, dtype), np.ones(1, dtype)) for path in ("loss", "w", "b")))
        for dtype in dtypes
    }
    compared = [
        Compared("accumulation", f"{name} vs full batch", dtype, n, near[dtype], name)
        for dtype in dtypes for name in ("torch", "JAX") for n in ns
    ]  # fmt: skip
    for dtype in dtypes:
        compared += [Compared("model", "torch vs JAX, full", dtype, None, near[dtype])]
        parts = range(micro_batches)
        compared += [Compared("model", "micro", dtype, micro_batches, near[dtype], micro_batch=k) for k in parts]
    trajectories = [Trajectory("sgd", dtype, 1, [1.0], [near[dtype]] * updates) for dtype in dtypes if updates]
    problem = funcga.checks.Problem({}, (), abs, abs)
    findings = Findings(
        problem, dtypes, 1, [1] * micro_batches, [1.0] * micro_batches, {}, compared, trajectories, {}, {}
    )
    axes = Figure(figsize=(28, 5), layout="constrained").subplots(1, 4)
    for ax, panel in zip(axes, page._panels(findings), strict=True):
        page._draw(ax, panel)
    axes[0].figure.draw_without_rendering()
    return axes


def test_no_dtype_hides_another_in_the_pictures():
    for ax in drawn(ns=[1, 2, 8], micro_batches=8, updates=3):
        points = [line for line in ax.lines if len(line.get_xdata()) > 2 or line.get_marker() not in ("None", "")]
        # All differences are 0: points of one dtype lie in those of the other, which are larger, and rings.
        sizes = {line.get_markersize(): line.get_markerfacecolor() for line in points}
        assert len(sizes) == 2
        assert sizes[max(sizes)] == "none"
        limits = [text for text in ax.texts if text.get_text().startswith("limit, ")]
        assert [text.get_text() for text in limits] == ["limit, float32", "limit, float64"]
        assert sorted(text.xy[1] for text in limits) == sorted(
            {line.get_ydata()[0] for line in ax.lines if line not in points}
        )
        assert ax.get_legend().get_window_extent().x0 > ax.get_window_extent().x1


def test_one_micro_batch_is_no_comparison_and_one_number_is_a_point():
    by_n, _, by_micro_batch, by_update = drawn(ns=[1, 2, 8], micro_batches=8, updates=1)
    assert [label.get_text() for label in by_n.get_xticklabels()] == ["2", "8"]
    points = [line for line in by_update.lines if line.get_marker() not in ("None", "")]
    assert [len(line.get_xdata()) for line in points] == [1, 1]
    by_n, *_ = drawn(ns=[1, 8], micro_batches=8, updates=0)
    assert [label.get_text() for label in by_n.get_xticklabels()] == ["8"]
    assert [text.get_text() for text in by_n.get_legend().get_texts()] == [
        "torch, float32", "JAX, float32", "torch, float64", "JAX, float64"
    ]  # fmt: skip
    assert by_n.get_xlabel() == "n, micro-batches"
    by_n, _, by_micro_batch, by_update = drawn(ns=[1], micro_batches=1, updates=0)
    for ax, text in (
        (by_n, "n = 1 is the full batch"),
        (by_micro_batch, "n = 1 is the full batch"),
        (by_update, "not run"),
    ):
        assert [shown.get_text() for shown in ax.texts] == [text]
        assert not ax.axison


# The built-in problems.


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_losses_follow_the_dtype_of_their_parameters(framework, name):
    import jax

    from funcga._parity.problems import PROBLEMS
    from funcga._parity.sides import Side

    problem = PROBLEMS[name]()
    few = tuple(tree if isinstance(tree, dict) else tree[:3] for tree in problem.batch)
    side = Side(replace(problem, batch=few), framework, "float32")
    with side.own.precision(precise=False), jax.numpy_dtype_promotion("strict"):
        value, gradient = side.compiled(*side.args)
    leaves = [funcga.to_numpy(value), *side.named(gradient).values()]
    assert {str(array.dtype) for array in leaves} == {"float32"}
    assert all(abs(array).max() > 0 for array in leaves)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_padding_counts_for_nothing(framework):
    from funcga._parity import problems
    from funcga._parity.sides import Side

    losses = importlib.import_module(f"funcga._parity.in_{framework}")
    assert losses.PAD == problems.PAD
    text = problems.text()
    tokens = text.batch[0][-3:]
    items = (tokens != problems.PAD).sum(1) - 1
    length = max(items) + 1
    assert tokens.shape[1] > length

    def loss(tokens):
        side = Side(replace(text, batch=(tokens,)), framework, "float32")
        with side.running():
            return float(side.loss(*side.args)), int(text.weight(side.args[1]))

    assert loss(tokens)[1] == items.sum()
    assert loss(tokens)[0] == pytest.approx(loss(tokens[:, :length])[0], rel=1e-6)
    assert loss(tokens)[0] == pytest.approx(sum(loss(row[None])[0] for row in tokens), rel=1e-6)
    assert loss(np.full_like(tokens, problems.PAD)) == (0.0, 0)


def test_the_text_is_real_and_the_problems_are_the_same_every_time():
    from pydoc_data.topics import topics

    from funcga._parity import problems

    text = problems.text()
    rows = [bytes(row[row != problems.PAD].tolist()).decode() for row in text.batch[0]]
    everything = "".join(topics.values())
    assert all(row in everything for row in rows)
    assert text.reduction == sum(len(row.encode()) - 1 for row in rows) == int(problems.count_targets(text.batch[0]))
    for make in problems.PROBLEMS.values():
        first, again, other = make(), make(), make(seed=1)
        assert funcga.compare(first.params, again.params, rtol=0).ok
        assert funcga.compare(first.batch, again.batch, rtol=0).ok
        assert not any(row.ok for row in funcga.compare(first.params, other.params).rows)


def test_batch_normalisation_by_the_statistics_of_a_micro_batch_would_not_do():
    """The built-in problem has frozen ones; this is why."""
    import torch

    from funcga._parity.problems import batchnorm

    problem = batchnorm()
    params, _, images, labels = funcga.to_torch((problem.params, *problem.batch))

    def loss(params, images, labels):
        x = images[:, :64] @ params["hidden"]["weight"]
        x = torch.nn.functional.batch_norm(
            x, None, None, params["norm"]["weight"], params["norm"]["bias"], training=True
        )
        logits = torch.tanh(x) @ params["output"]["weight"]
        return torch.nn.functional.cross_entropy(logits, labels.long())

    found = funcga.verify(funcga.value_and_grad(loss), params, images[:24], labels[:24])
    assert [cause.name for cause in found.causes] == ["batch statistics"]


def test_figures():
    from funcga._parity.report import figure

    assert [figure(x) for x in (0, 1.5, 8.6e-7, 1e-13)] == ["0", "1.5e+00", "8.6e-7", "1.0e-13"]
    assert figure(2.4e-5, 0) == "2e-5"
    assert math.isnan(float(figure(math.nan)))
