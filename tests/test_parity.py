"""The command `python -m funcga parity`: what it prints and returns, and that it can say no."""

import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import funcga
from funcga.__main__ import main

ROOT = Path(funcga.__file__).parents[1]
NEEDED = {"torch": "torch", "jax": "jax", "optax": "optax", "sklearn": "scikit-learn", "rich": "rich"}
LIMITS = {
    "accumulated vs full": {"float32": 2e-6, "float64": 1e-13},
    "torch vs JAX": {"float32": 5e-6, "float64": 1e-12},
}
COMPARISONS = [
    "torch: accumulated vs full",
    "JAX: accumulated vs full",
    "torch vs JAX (accumulated)",
    "torch vs JAX (full)",
]
complete = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason="needs torch, jax, optax, scikit-learn and rich"
)


def command(*arguments, prelude="pass"):
    """The command in a process of its own, which first runs `prelude`; every warning is an error."""
    code = f"import sys\n{prelude}\nfrom funcga.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(exit code, JSON) of the command with everything in it."""
    file = tmp_path_factory.mktemp("parity") / "figures.json"
    return main(["parity", "--n", "7", "--json", str(file)]), json.loads(file.read_text())


@complete
def test_all_differences_are_within_the_limits(whole):
    code, found = whole
    assert code == 0
    assert found["ok"] is True
    assert [(c["problem"], c["dtype"]) for c in found["cases"]] == [
        (problem, dtype) for problem in ("digits", "text") for dtype in ("float32", "float64")
    ]
    for case in found["cases"]:
        assert case["ok"] is True
        for row in case["rows"]:
            assert list(row["differences"]) == COMPARISONS
            for name, difference in row["differences"].items():
                limit = next(limits for part, limits in LIMITS.items() if part in name)[case["dtype"]]
                assert found["limits"][name][case["dtype"]] == limit
                assert difference["relative"] <= limit, (case["problem"], case["dtype"], row["leaf"], name)
                assert difference["ok"] is True


@complete
def test_the_json_has_every_leaf_and_shows_the_micro_batches(whole):
    _, found = whole
    assert {"python", "funcga", "torch", "jax", "numpy"} == set(found["versions"])
    digits, text = found["cases"][0], found["cases"][2]
    assert [row["leaf"] for row in digits["rows"]] == [
        "loss", "hidden.weight", "hidden.bias", "output.weight", "output.bias"
    ]  # fmt: skip
    assert [row["shape"] for row in digits["rows"]] == [[], [64, 32], [32], [32, 10], [10]]
    assert digits["microbatch_rows"] == digits["microbatch_items"] == [257] * 5 + [256] * 2
    assert len(text["microbatch_rows"]) == len(text["microbatch_items"]) == text["n"] == 7
    assert max(text["microbatch_items"]) > 4 * min(text["microbatch_items"])
    assert len(text["rows"]) == 15
    assert sum(math.prod(row["shape"]) for row in text["rows"][1:]) > 20_000
    for case in found["cases"]:
        assert set(case["losses"]) == {f"{f} {how}" for f in ("torch", "jax") for how in ("full", "accumulated")}
        assert all(1 < loss < 8 for loss in case["losses"].values())


@complete
def test_frameworks_really_differ_in_rounding(whole):
    """Two implementations that agreed in every bit would be one."""
    for case in whole[1]["cases"]:
        assert any(row["differences"]["torch vs JAX (full)"]["absolute"] > 0 for row in case["rows"])


@complete
@pytest.mark.parametrize(("problem", "n"), [("digits", "1,100,1"), ("text", "40")])
def test_any_number_of_micro_batches(problem, n, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--problem", problem, "--dtype", "float64", "--n", n, "--updates", "0", "--json", str(file)]
    assert main(["parity", *arguments]) == 0
    found = [case["n"] for case in json.loads(file.read_text())["cases"]]
    assert found == {"digits": [1, 100], "text": [40]}[problem]


@complete
def test_the_printed_report():
    ran = command("parity", "--problem", "digits", "--n", "2,7", "--updates", "0")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert max(map(len, ran.stdout.splitlines())) <= 100
    assert "n = 2: 1797 rows in 2 micro-batches of 898..899 rows" in ran.stdout
    assert "n = 7: 1797 rows in 7 micro-batches of 256..257 rows" in ran.stdout
    assert "largest absolute element of the" in ran.stdout
    for heading in ("float32, n = 2", "float32, n = 7", "float64, n = 2", "float64, n = 7"):
        assert heading in ran.stdout
    for leaf in ("loss = 2.293484", "hidden.weight", "hidden.bias", "output.weight", "output.bias"):
        assert ran.stdout.count(f"\n{leaf} ") == 4
    # 4 comparisons of 5 leaves in 2 dtypes and for 2 n
    assert ran.stdout.rstrip().endswith("Verdict: the same gradients. All 80 differences are within their limits.")


@complete
def test_64_bits_are_on_only_while_the_command_runs():
    import jax

    before = jax.config.jax_enable_x64
    assert main(["parity", "--problem", "digits", "--dtype", "float64", "--updates", "1"]) == 0
    assert jax.config.jax_enable_x64 == before


# Teeth: what is wrong is found, and called by its name.


def by_steps():
    return funcga.Fold(funcga.reducers.sum, funcga.normalizers.by_steps)


WRONG = {
    "a sum folded as a mean": ("text", lambda problem: replace(problem, fold=funcga.mean(), weight=None)),
    "rows for tokens": ("text", lambda problem: replace(problem, weight=None)),
    "padding counted": ("text", lambda problem: replace(problem, weight=lambda t: t.shape[0] * (t.shape[1] - 1))),
    "divided by n": ("digits", lambda problem: replace(problem, fold=by_steps())),
}


@complete
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_fold_is_found(mistake, monkeypatch, capsys):
    from funcga.parity import problems

    name, spoil = WRONG[mistake]
    right = problems.PROBLEMS[name]()
    monkeypatch.setitem(problems.PROBLEMS, name, lambda: spoil(right))
    n = {"text": 4, "digits": 7}[name]  # neither has micro-batches that all weigh the same
    assert main(["parity", "--problem", name, "--dtype", "float64", "--n", str(n), "--updates", "0"]) == 1
    _, verdict = capsys.readouterr().out.split("Verdict: ")
    assert verdict.startswith("DIFFERENT gradients. Beyond the limits:\n")
    for framework in ("torch", "JAX"):
        assert f"\n  {name} float64 n = {n}, {framework}: accumulated vs full: " in verdict
    assert len(verdict.splitlines()) == 3
    assert "torch vs JAX" not in verdict  # both are wrong alike


@complete
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("float64", 1e-10)])
def test_a_loss_that_differs_between_frameworks_is_found(framework, dtype, error, monkeypatch, capsys, tmp_path):
    losses = importlib.import_module(f"{framework}_backend.problems")
    right, file = losses.digits_loss, tmp_path / "figures.json"
    monkeypatch.setattr(losses, "digits_loss", lambda *args: right(*args) * (1 + error))
    arguments = ["--problem", "digits", "--dtype", dtype, "--updates", "0", "--json", str(file)]
    assert main(["parity", *arguments]) == 1
    out, verdict = capsys.readouterr().out.split("Verdict: ")
    assert f"\n  digits {dtype} n = 7, torch vs JAX (accumulated): 5 of 5 leaves, worst " in verdict
    assert f"\n  digits {dtype} n = 7, torch vs JAX (full): 5 of 5 leaves, worst " in verdict
    assert "accumulated vs full" not in verdict
    assert out.count("!") == 10 + 1  # in the table, and in its caption
    found = json.loads(file.read_text())
    assert found["ok"] is False
    assert found["cases"][0]["ok"] is False
    assert [d["ok"] for d in found["cases"][0]["rows"][1]["differences"].values()] == [True, True, False, False]


@complete
def test_one_leaf_that_is_not_a_number_is_found(monkeypatch, tmp_path, capsys):
    from jax_backend import problems as losses

    right, file = losses.digits_loss, tmp_path / "figures.json"

    def wrong(params, images, labels):
        return right(params, images, labels) + 0 * (params["output"]["bias"] * math.inf).sum()

    monkeypatch.setattr(losses, "digits_loss", wrong)
    arguments = ["--problem", "digits", "--dtype", "float32", "--n", "2", "--updates", "0", "--json", str(file)]
    assert main(["parity", *arguments]) == 1
    assert "BEYOND" in capsys.readouterr().out
    row = json.loads(file.read_text())["cases"][0]["rows"][-1]
    assert row["leaf"] == "output.bias"
    assert row["differences"]["torch vs JAX (full)"] == {"absolute": None, "relative": None, "ok": False}


@complete
def test_the_training_is_the_same(whole):
    _, found = whole
    assert [(t["optimizer"], t["dtype"]) for t in found["training"]] == [
        (name, dtype) for dtype in ("float32", "float64") for name in ("sgd", "momentum", "adam", "adamw")
    ]
    for t in found["training"]:
        assert (t["updates"], t["n"], t["ok"]) == (50, 7, True)
        assert t["limit"] == {"float32": 1e-5, "float64": 1e-12}[t["dtype"]]
        assert t["losses"]["last"] < 0.2 * t["losses"]["first"]  # it trains
        assert [row["leaf"] for row in t["rows"]] == ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]
        assert all(row["relative"] <= t["limit"] for row in t["rows"])
    assert any(row["absolute"] > 0 for t in found["training"] for row in t["rows"])


@complete
def test_an_optimizer_that_differs_is_found(monkeypatch, capsys, tmp_path):
    from jax_backend import problems as losses

    right, file = losses.optimizer, tmp_path / "figures.json"

    def wrong(name):
        import optax

        return optax.adamw(0.01, weight_decay=0.1 * (1 + 1e-9)) if name == "adamw" else right(name)

    monkeypatch.setattr(losses, "optimizer", wrong)
    arguments = ["--problem", "digits", "--dtype", "float64", "--n", "2", "--updates", "20", "--json", str(file)]
    assert main(["parity", *arguments]) == 1
    out, verdict = capsys.readouterr().out.split("Verdict: ")
    assert verdict.startswith("DIFFERENT training. Beyond the limits:\n  adamw float64 after 20 updates: worst ")
    assert len(verdict.splitlines()) == 2
    assert out.count("BEYOND") == 1
    assert [t["ok"] for t in json.loads(file.read_text())["training"]] == [True, True, True, False]


@complete
def test_difference():
    import numpy as np

    from funcga.parity.differences import difference, rank

    one = np.float64([3.0, -4.0])
    assert difference(one, one, 0.0) == (0.0, 0.0, 0.0)
    assert difference(one, one, 0.0).ok
    assert difference(one + np.eye(2)[1], one, 0.3) == (1.0, 0.25, 0.3)
    assert not difference(one + np.eye(2)[1], one, 0.2).ok
    assert difference(0 * one, 0 * one, 0.1).ok
    assert difference(one, 0 * one, 0.1) == (4.0, math.inf, 0.1)
    for other in (one.astype("float32"), one[:1], one * math.nan, one * math.inf):
        assert not difference(one, other, 1e9).ok
        assert not difference(other, one, 1e9).ok
        assert not difference(other, other * math.nan, 1e9).ok
    assert rank(difference(one, one * math.nan, 1.0)) == math.inf


# The problems.


@complete
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["digits", "text"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_losses_follow_the_dtype_of_their_parameters(framework, name, dtype):
    import jax

    from funcga.parity import problems, run

    problem = problems.PROBLEMS[name]()
    losses = importlib.import_module(f"{framework}_backend.problems")
    convert = funcga.to_torch if framework == "torch" else funcga.to_jax
    with losses.precision(dtype), jax.numpy_dtype_promotion("strict"):
        args = convert(run.cast((problem.params, *(array[:3] for array in problem.batch)), dtype))
        value, gradient = funcga.value_and_grad(getattr(losses, problem.loss))(*args)
        found = run.leaves_of(funcga.to_numpy({"value": value, "gradient": gradient}))
    assert {str(array.dtype) for array in found.values()} == {dtype}
    assert all(abs(array).max() > 0 for array in found.values())


@complete
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_padding_counts_for_nothing(framework):
    import numpy as np

    from funcga.parity import problems, run

    problem = problems.text()
    losses = importlib.import_module(f"{framework}_backend.problems")
    convert = funcga.to_torch if framework == "torch" else funcga.to_jax
    assert losses.PAD == problems.PAD
    tokens, items = problem.batch[0][-3:], problem.items[-3:]
    length = max(items) + 1
    assert tokens.shape[1] > length

    def loss(tokens):
        with losses.precision("float32"):
            params, tokens = convert(run.cast((problem.params, tokens), "float32"))
            return float(losses.text_loss(params, tokens)), int(problem.weight(tokens))

    assert loss(tokens)[1] == items.sum()
    assert loss(tokens)[0] == pytest.approx(loss(tokens[:, :length])[0], rel=1e-6)
    assert loss(tokens)[0] == pytest.approx(sum(loss(row[None])[0] for row in tokens), rel=1e-6)
    assert loss(np.full_like(tokens, problems.PAD)) == (0.0, 0)


@complete
def test_the_text_is_real_and_the_problems_are_the_same_every_time():
    import numpy as np

    from funcga.parity import problems, run

    text = problems.text()
    rows = [bytes(row[row != problems.PAD].tolist()).decode() for row in text.batch[0]]
    everything = "".join(problems.topics.values())
    assert all(row in everything for row in rows)
    assert [len(row.encode()) - 1 for row in rows] == text.items.tolist()
    assert text.divisor == text.items.sum()
    for make in problems.PROBLEMS.values():
        a, b = (run.leaves_of(vars(make())["params"]) for _ in range(2))
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[leaf], b[leaf]) for leaf in a)


# Usage.

BAD = {
    "--n 0": "--n: '0' is no list of numbers of micro-batches, each at least 1: --n 1,2,7",
    "--n two": "--n: 'two' is no list of numbers of micro-batches",
    "--n 1,,2": "--n: '1,,2' is no list of numbers of micro-batches",
    "--n=-3": "--n: '-3' is no list of numbers of micro-batches",
    "--dtype float16": "--dtype: 'float16' is none of float32, float64, and no list of them",
    "--updates -1": "--updates: '-1' is no number of updates",
    "--updates ten": "--updates: 'ten' is no number of updates: --updates 50, or 0 for no training",
    "--problem mnist": "--problem: invalid choice: 'mnist'",
    "--json no/such/folder/figures.json": "--json: 'no/such/folder/figures.json' is no file in a folder that exists",
    "--json .": "--json: '.' is no file in a folder that exists",
    "--epochs 3": "unrecognized arguments: --epochs 3",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_usage(arguments, capsys):
    assert main(["parity", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"funcga: {BAD[arguments]}")
    assert "--help)" in err


def test_a_command_is_required(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "funcga: the following arguments are required: parity (see python -m funcga --help)\n"
    )


@complete
def test_more_micro_batches_than_rows(capsys):
    assert main(["parity", "--n", "7,41"]) == 2
    out, err = capsys.readouterr()
    assert out == ""  # found before any work
    assert err == "funcga: --n: 41 micro-batches are more than the 40 rows of the problem 'text'\n"


@complete
def test_a_file_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert (
        main(
            [
                "parity",
                "--problem",
                "digits",
                "--dtype",
                "float64",
                "--updates",
                "0",
                "--json",
                str(tmp_path / "x.json"),
            ]
        )
        == 2
    )
    assert (
        capsys.readouterr().err == f"funcga: --json: {tmp_path / 'x.json'} cannot be written: No space left on device\n"
    )


def test_help_and_bad_usage_need_no_package():
    blocked = "sys.modules.update(dict.fromkeys(('torch', 'jax', 'numpy', 'sklearn', 'rich')))"
    shown = command("parity", "--help", prelude=blocked)
    assert (shown.returncode, shown.stderr) == (0, "")
    for option in ("--n", "--dtype", "--updates", "--problem", "--json", "Exit code"):
        assert option in shown.stdout
    assert command("parity", "--n", "0", prelude=blocked).returncode == 2


BLOCK = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("module", NEEDED)
@pytest.mark.parametrize("prelude", ["sys.modules.update(dict.fromkeys({names!r}))", BLOCK])
def test_a_missing_package(module, prelude):
    ran = command("parity", prelude=prelude.format(names=[module]))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.count("\n") == 1
    assert NEEDED[module] in ran.stderr.split(" not installed")[0]
    assert ran.stderr.endswith("Install what parity needs: pip install 'funcga[parity]'\n")


def test_all_missing_packages_are_named_at_once():
    ran = command("parity", prelude=BLOCK.format(names=[*NEEDED]))
    assert ran.returncode == 2
    assert ran.stderr.startswith(
        "funcga: torch and jax and optax and scikit-learn and rich are not installed, and parity "
    )


def test_run_as_a_module():
    ran = subprocess.run([sys.executable, "-m", "funcga", "nonsense"], capture_output=True, text=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("funcga: parity: invalid choice: 'nonsense'")
