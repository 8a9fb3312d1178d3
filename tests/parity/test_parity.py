"""The command `python -m funcga parity`: what it finds, what it says of it, and that it can say no."""

import html
import json
import re
from importlib.util import find_spec

import pytest

from funcga.__main__ import main

NEEDED = {"torch": "torch", "jax": "jax", "optax": "optax", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED.values())}"
)


def found(tmp_path, *arguments):
    """(exit code, JSON) of the command."""
    file = tmp_path / "found.json"
    code = main(["parity", *map(str, arguments), "--json", str(file)])
    return code, json.loads(file.read_text())


def of(problem, cause, dtype="float64"):
    return [c for c in problem["compared"] if c["cause"] == cause and c["dtype"] == dtype]


def trained(problem):
    return [c for c in problem["compared"] if c["cause"] == "training"]


def losses_of(problem):
    """The losses of the full batch, wherever two of them differ by rounding."""
    full = [c for c in problem["compared"] if c["cause"] in ("accumulation", "model") and c["micro_batch"] is None]
    rows = [row for c in full for row in c["rows"] if row["path"] == "loss" and row["values"]]
    return [value for row in rows for value in row["values"]]


def largest(compared):
    return max(row["relative"] for c in compared for row in c["rows"])


@pytest.fixture
def few_rows(monkeypatch):
    """Fewer than the command itself has."""
    from sklearn.datasets import load_digits

    few = [array[:180] for array in load_digits(return_X_y=True)]
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda **_: few)
    monkeypatch.setattr("funcga.tools.parity.problems._ROWS", 12)


def test_built_in_problems_are_the_same_to_the_last_digits(tmp_path, few_rows):
    code, report = found(tmp_path, "--n", 3, "--dtype", "float64", "--updates", 0)
    assert code == 0
    assert report["ok"] is True
    assert [problem["problem"] for problem in report["problems"]] == ["digits", "cnn", "text"]
    for problem in report["problems"]:
        assert problem["ok"] is True
        assert problem["verdict"][0].startswith("The same. In float64 accumulated is the full batch to ")
        assert largest(of(problem, "accumulation")) <= 1e-13
        # Two implementations that agreed in every bit would be one.
        assert 0 < largest(of(problem, "model")) <= 1e-12
        assert largest(of(problem, "fold")) < 1e-15
        sums = [c for c in of(problem, "fold") if "plain sums" in c["what"]]
        assert [c["what"] for c in sums] == ["torch, plain sums", "JAX, plain sums"]
        assert all(row["ulps"] == 0 for c in sums for row in c["rows"])
        assert [c["micro_batch"] for c in of(problem, "model")] == [None, 0, 1, 2]
        assert all(row["dtypes"] == ["float64"] * 2 for c in problem["compared"] for row in c["rows"])
        assert losses_of(problem)
        assert all(1 < loss < 8 for loss in losses_of(problem))
    digits, cnn, text = report["problems"]
    assert digits["microbatch_rows"] == digits["microbatch_weights"] == [60, 60, 60]
    assert max(text["microbatch_weights"]) > 3 * min(text["microbatch_weights"])
    assert text["reduction"] == sum(text["microbatch_weights"])
    kernel = next(row for row in of(cnn, "model")[0]["rows"] if row["path"] == "conv2.kernel")
    assert kernel["left_path"] == "conv2.weight"
    assert kernel["shapes"] == [[3, 3, 8, 16]] * 2  # HWIO, of OIHW


def test_digits_in_float32_in_training_and_on_a_page(tmp_path, capsys, few_rows):
    code, report = found(tmp_path, "digits", "--n", 2, "--updates", 12, "--html", tmp_path / "page.html")
    printed = capsys.readouterr().out
    (problem,) = report["problems"]
    assert code == 0
    rounding = of(problem, "rounding", "float32")
    assert [c["what"] for c in rounding] == ["torch vs float64", "JAX vs float64"]
    assert all(row["ok"] and row["dtypes"] == ["float32", "float64"] for c in rounding for row in c["rows"])
    assert 1e-8 < largest(rounding) < 2e-5
    assert largest(of(problem, "model", "float32")) > 1e6 * largest(of(problem, "model"))

    assert [(t["optimizer"], t["dtype"]) for t in trained(problem)] == [
        (name, dtype) for dtype in ("float32", "float64") for name in ("sgd", "momentum", "adam", "adamw")
    ]
    for t in trained(problem):
        assert (t["ok"], t["update"], t["n"], len(t["worst"])) == (True, 12, 2, 12)
        assert max(t["worst"]) <= {"float32": 1e-5, "float64": 1e-12}[t["dtype"]]
        paths = ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]
        assert [row["path"] for row in t["rows"]] == paths
    # It trains: parameters that stay where they were would agree in every bit.
    assert all(max(t["worst"]) > 0 for t in trained(problem) if t["dtype"] == "float32")

    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)""", page)  # it loads nothing
    figures = {html.escape(figure) for figure in re.findall(r"\S+ < \S+", printed)}
    assert len(figures) > 10
    assert all(figure in page for figure in figures)
    for text in (
        "Verdict: the same.",
        "leaf, in the order of the parameters",
        "micro-batch, 0 for the full batch",
        "in training",
        "n, micro-batches",
        "hidden.weight  [64, 32]",
    ):
        assert text in page
    # Four pictures, each with a line for the limit of each dtype and a legend that names both.
    for dtype in ("float32", "float64"):
        assert len(re.findall(f">limit, {dtype}<", page)) == 4
        for name in ("torch vs full batch", "JAX vs full batch", "torch vs JAX, micro", "adamw, 12 updates"):
            assert f">{name}, {dtype}<" in page


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


def test_a_problem_of_ones_own(tmp_path, capsys):
    import jax

    before = jax.config.jax_enable_x64
    code, problem, verdict = mine(tmp_path, "", "--dtype", "bfloat16,float32")
    assert jax.config.jax_enable_x64 == before
    assert code == 0
    assert problem["problem"] == "problem"
    assert problem["reduction"] == 12 + 4
    assert 1e-4 < largest(of(problem, "rounding", "bfloat16")) < 0.03
    assert verdict.startswith("The same. In float64 ")
    assert verdict.endswith("what is left in less precision is rounding.")

    printed = capsys.readouterr().out
    assert "n = 3: 12 rows in 3 micro-batches of 4, of weight 4\n" in printed
    assert re.search(r"accumulation +torch vs full batch +\S+ < \S+ +\S+ < \S+e-6 +\S+ < 1e-13 ", printed)
    assert printed.rstrip().endswith("Verdict: the same.")


def test_one_framework_is_enough_and_one_micro_batch_no_accumulation(tmp_path):
    page = tmp_path / "page.html"
    more = "problem = funcga.checks.Problem(params, (x, y), torch_loss)"
    code, problem, verdict = mine(tmp_path, more, "--dtype", "float64", "--n", 1, "--html", page)
    assert code == 0
    assert {c["what"] for c in problem["compared"]} == {"torch vs full batch", "torch vs NumPy", "torch, plain sums"}
    assert "JAX" not in verdict
    assert page.read_text().count("nothing is compared") == 2


def test_a_function_makes_the_problem_from_the_seed(tmp_path):
    loss = "lambda p, x, y: (x @ p['w'] - y).square().mean()"
    problem = f"funcga.checks.Problem({{'w': numpy.full((3, 1), seed + 1.0)}}, (x, y), {loss})"
    (tmp_path / "mine.py").write_text(f"{MINE}\ndef make(seed):\n    return {problem}\n")
    options = "--dtype", "float64", "--n", 2
    first, same, other = (
        found(tmp_path, f"{tmp_path}/mine.py:make", "--seed", seed, *options)[1] for seed in (0, 0, 1)
    )
    assert first == same != other


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


# Teeth: what is wrong is found, and its cause is named.

WRONG = {
    "another normaliser": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda *a: 12 * jax_loss(*a))",
        r"The models differ, in float64, in micro-batch 1, 2, 3 of 3\. The loss itself differs, by 9\.2e-01\. All are "
        r"torch = 0\.0833333 x JAX: another normaliser, such as a mean against a sum\. "
        r"The training diverges: sgd ",
        {"model", "training"},
    ),
    "another activation": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jnp.square(jax.nn.soft_sign(x @ p['hidden']) @ p['out'] - y).mean())",
        r"The models differ, in float64, in micro-batch 1, 2, 3 of 3\. The loss itself differs, by .*\. 3 of 3 leaves of torch "
        r"and JAX are not close; `(hidden|out|loss)` has rel ",
        {"model", "training"},
    ),
    "rows of one micro-batch": (
        "y[5] = 9\nproblem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jnp.square(jnp.where(y > 5, 0, jnp.tanh(x @ p['hidden']) @ p['out'] - y)).mean())",
        r"in float64, in micro-batch 2 of 3\. ",
        {"model", "training"},
    ),
    "a small constant": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss(p, x * (1 + 1e-5), y), optimizers=())",
        r"The loss itself differs, by \d\.\de-0\d\. A difference this small often comes from a constant or an approximation: the eps "
        r"of a normalisation, tanh for erf in GELU\. 3 of 3 leaves of torch and JAX are not close; `(out|hidden|loss)` has rel ",
        {"model"},
    ),
    "another normaliser in one": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss(p, x, y) * len(x), optimizers=())",
        r"^Accumulation is not exact for the loss of JAX with mean\(\).* The loss is a sum over rows.* To fix it: "
        r"fold=funcga\.per_weight\(\)\. .* The models differ, in float64, ",
        {"model", "accumulation"},
    ),
    "other weights in one": (
        "count = lambda x, y: (y > 0).sum()\n"
        "problem = funcga.checks.Problem(params, (x, y), lambda p, x, y: ((torch.tanh(x @ p['hidden']) @ p['out'] - y) ** 2 * (y > 0)).sum() / (y > 0).sum(), jax_loss, weight=lambda x, y: len(x), optimizers=())",
        r"Accumulation is not exact for the loss of torch with mean\(\).* To fix it: weight=lambda ",
        {"model", "accumulation"},
    ),
    "in float32 alone": (
        "problem = funcga.checks.Problem(params, (x, y), lambda *a: torch_loss(*a) * (1.01 if a[1].dtype == torch.float32 else 1), lambda *a: jax_loss(*a) * (0.99 if a[1].dtype == 'float32' else 1), optimizers=())",
        r"^The models differ, in float32, in micro-batch 1, 2, 3 of 3\..* In float64 they agree, so it is not mere rounding\. .* "
        r"more than rounded arguments would do: something in this loss computes in less than float32",
        {"model", "rounding"},
    ),
    "float32 inside": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jnp.square((jnp.tanh(x @ p['hidden']) @ p['out']).astype('float32').astype(x.dtype) - y).mean(), optimizers=())",
        r"Accumulated, JAX vs full batch \(float64, n = 3\): .* And verify finds no mistake in the loss of JAX: it is the rounding of something "
        r"inside that computes in less than float64",
        {"model", "accumulation"},
    ),
    "a gradient that stops": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss({**p, 'hidden': jax.lax.stop_gradient(p['hidden'])}, x, y), optimizers=())",
        r"The loss is the same and its gradient is not, the last of them that of hidden: backward passes come to it first\. "
        r"1 of 3 leaves of torch and JAX are not close; `hidden` has ",
        {"model"},
    ),
    "less precision inside": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss(p, x.astype('bfloat16').astype(x.dtype) if x.dtype == 'float32' else x, y), optimizers=())",
        r"JAX vs float64 \(float32\): .* This is more than rounding explains in sums of 16 terms, and more "
        r"than rounded arguments would do: something in this loss computes in less than float32\.",
        {"model", "rounding"},
    ),
    "a sum": (
        "problem = funcga.checks.Problem(params, (x, y), lambda *a: 12 * torch_loss(*a[:2], a[2]) * len(a[1]) / 12, lambda *a: jax_loss(*a) * len(a[1]), optimizers=())",
        r"Accumulation is not exact for the loss of torch, JAX with mean\(\): (torch|JAX) vs full batch \(float64, n = 3\): 3 of 3 "
        r"leaves .* has rel 6\.7e-1, .*The loss is a sum over rows.* To fix it: .*fold=funcga\.per_weight\(\)",
        {"accumulation"},
    ),
    "not a number": (
        "problem = funcga.checks.Problem(params, (x, y), torch_loss, lambda p, x, y: jax_loss(p, x, y) + 0 * jnp.sqrt(p['out'] * 0).sum(), optimizers=())",
        r"leaves of torch and JAX are not close; `out` has NaN: 0 and 4\.",
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
    assert beyond == causes


def test_a_fold_in_less_precision_is_no_rounding(tmp_path, monkeypatch):
    """What float64 does right excuses nothing in float32."""
    import torch

    narrow = lambda dtype, arrays: torch.bfloat16 if dtype == torch.float32 else dtype
    monkeypatch.setattr("funcga._fold.accumulator_dtype", narrow)
    code, _, verdict = mine(tmp_path, "problem = funcga.checks.Problem(params, (x, y), torch_loss)")
    assert code == 1
    assert verdict.startswith("The fold itself is wrong: torch vs NumPy (float32): ")


def test_a_loss_that_is_ill_conditioned_is_no_mistake(tmp_path):
    more = """
y = numpy.tanh(x @ params["hidden"]) @ params["out"] + 1e-2 * y
problem = funcga.checks.Problem(params, (x, y), torch_loss, jax_loss, optimizers=())
"""
    code, problem, verdict = mine(tmp_path, more)
    assert code == 0
    assert any(not c["ok"] and c["explained"] for c in of(problem, "rounding", "float32"))
    assert re.search(r"Beyond its limit is .*\(float32\).*: this loss makes rounding large", verdict)


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
    assert all(row["path"] != "shift" for t in trained(problem) for row in t["rows"])
    shift = [row for c in of(problem, "model") for row in c["rows"] if row["path"] == "shift"]
    assert all(row["relative"] < 1e-12 for row in shift)  # of the largest leaf


def test_nothing_counts(tmp_path):
    more = "problem = funcga.checks.Problem(params, (x, y), torch_loss, jax_loss, weight=lambda x, y: 0 * len(x), optimizers=())"
    _, problem, verdict = mine(tmp_path, more, "--dtype", "float64")
    assert all(row["ok"] for c in of(problem, "fold") for row in c["rows"])
    assert "The fold itself is wrong" not in verdict


def test_training_that_diverges(tmp_path, monkeypatch):
    """By an optimizer that is another one, in float64; the same in float32 alone would be rounding."""
    import jax
    import optax

    right = optax.adamw
    monkeypatch.setattr(optax, "adamw", lambda lr, weight_decay: right(lr, weight_decay=weight_decay * (1 + 1e-6)))
    code, problem, verdict = mine(tmp_path, "", "--dtype", "float64")
    assert code == 1
    assert re.fullmatch(
        r"The training diverges: adamw \(float64\) from update 1 on; first \w+\. The gradients agree, so compare what the "
        r"two optimizers do with them\.",
        verdict,
    )
    assert all(c["ok"] for c in problem["compared"] if c["cause"] != "training")

    def wrong_in_float32(lr, weight_decay):
        return right(lr, weight_decay=weight_decay * (1 if jax.config.jax_enable_x64 else 1.1))

    # Training may make the rounding of a gradient as large as that.
    monkeypatch.setattr(optax, "adamw", wrong_in_float32)
    code, problem, verdict = mine(tmp_path, "")
    assert code == 0
    assert [(t["dtype"], t["ok"], t["explained"]) for t in trained(problem)] == [
        ("float32", False, True), ("float64", True, False)
    ]  # fmt: skip
    assert "Beyond its limit is adamw, 2 updates (float32): this loss makes rounding large" in verdict
