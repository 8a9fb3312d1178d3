"""Benchmarks from the command line to the reader: what is chosen, resumed, refused, shown and written. Nothing is timed."""

import io
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from funcga import FuncgaError

if any(find_spec(name) is None for name in ("rich", "matplotlib")):
    pytest.skip("needs funcga[bench]", allow_module_level=True)

from rich.console import Console

from benchmarks import (
    comparison,
    readme,
    registry,
    results,
    running,
    tables,
    torch_workloads,
)  # fmt: skip
from benchmarks.__main__ import main
from benchmarks.cases import Case, cases
from benchmarks.choice import chosen
from benchmarks.pictures import draw
from benchmarks.running import CaseError
from benchmarks.torch_problem import Problem
from tests.test_readme import README

OURS = {"source": None, "against": [], "ours_over": {}}
RIVAL = {"source": "https://example.org", "against": ["funcga"]}


def contenders(ratio, peak=1000):
    """Made up: ours takes so much of the loop's time, in all quartiles, and so many bytes where the loop takes 1000."""
    spread = [ratio - 0.01, ratio, ratio + 0.01]
    timed = {"seconds": [0.001, 0.002, 0.003], "over_loop": [1.0, 1.0, 1.0]}
    return {
        "funcga": {"name": "funcga", **OURS, **timed, "peak_bytes": peak, "collectives": 1, "wire_bytes": 4000},
        "loop": {"name": "a `loop`", **RIVAL, **timed, "ours_over": {"funcga": spread}, "peak_bytes": 1000},
    }


def figures(ratio, peak=1000, **more):
    about = {"n": 8, "leaves": 3, "parameters": 1000, "parameter_bytes": 4000, "rounds": 5}
    return {**about, "left_out": {}, "contenders": contenders(ratio, peak), **more}


EXACT = {"uneven tokens": 1e-7, "partial window": 1e-7, "bfloat16 sums": 2e-3, "uneven ranks": None}
WRONG = {"uneven tokens": 0.314, "bfloat16 sums": 5e-3, "uneven ranks": None}
REFUSED = {"partial window": "ValueError: no"}
IMPORTED = {
    "name": "import torch, funcga",
    "seconds": [1.0, 2.0, 3.0],
    "modules": 1200,
    "more_seconds": [0.1, 0.2, 0.3],
}


@pytest.fixture
def sample():
    """Made-up results, with one case of every kind."""
    exactness = {
        "funcga": {"name": "funcga", **OURS, "errors": EXACT, "refused": {}},
        "loop": {"name": "a `loop`", **RIVAL, "errors": WRONG, "refused": REFUSED},
    }
    found = results.Results("full", "cpu", {"processor": "A|B", "cores": 2, "memory_bytes": 2**34, "system": "Linux", "accelerator": None},
                            {"python": "3.11", "funcga": "0.1.0 (abcdef01)"}, {})  # fmt: skip
    growing = Case("", "growth", "torch", "rows", only=("funcga",))
    for case, made in [
        (Case("torch/tiny", "update", "torch", "tiny"), figures(1.2)),
        (Case("torch/wide", "update", "torch", "wide"), figures(0.9, 1006, left_out={"rival": "no [bench]"})),
        (Case("torch_ranks/wide", "update", "torch_ranks", "wide", ranks=2), figures(1.005)),
        (growing._replace(name="growth/micro-batches/torch/16", value=16), figures(1.0, n=16)),
        (growing._replace(name="growth/micro-batches/torch/4", value=4), figures(1.1, n=4)),
        (Case("exactness/torch", "exactness", "torch"), {"left_out": {}, "contenders": exactness}),
        (Case("imports", "imports", "imports"), {"rounds": 7, "left_out": {}, "contenders": {"torch_funcga": IMPORTED}}),
    ]:  # fmt: skip
        found = found.plus(case, made)
    return found


def printed(found):
    console = Console(width=200, file=io.StringIO())
    tables.show(found, console)
    return console.file.getvalue()


def group(**gradients):
    """Of contenders that find these gradients; "rival" is compared with "funcga"."""
    made = [
        registry.Contender(key, key, None, ("funcga",) if key == "rival" else (), ("update",), len) for key in gradients
    ]
    calls = {key: (lambda found=found: [np.array(found)]) for key, found in gradients.items()}
    return comparison.Group(made, {"other": "no"}, "loop", calls, list, lambda key: {"ops": len(key)}, {"n": 2})


def test_a_contender_that_computes_something_else_is_refused():
    right = [1.0, 2.0]
    for wrong in ([1.0, 2.02], [1.0, float("nan")], [1.0]):
        with pytest.raises(AssertionError, match=r"do not compute what loop computes|differ in shape"):
            comparison.compared(group(funcga=right, loop=right, rival=wrong), 0)
        with pytest.raises(AssertionError, match=r"do not compute what loop computes|differ in shape"):
            comparison.compared(group(funcga=wrong, loop=right, rival=right), 0)


def test_ratios_are_ours_over_the_rival_within_a_round(monkeypatch):
    times = {"funcga": [1.0, 10.0, 100.0], "loop": [1.0, 1.0, 1.0], "rival": [0.5, 5.0, 50.0]}
    monkeypatch.setattr(comparison, "interleaved", lambda calls, seconds, agreed: times)
    found = comparison.compared(group(funcga=[1.0], loop=[1.0], rival=[1.0]), 0)
    rival = found["contenders"]["rival"]
    assert rival["ours_over"] == {"funcga": (2.0, 2.0, 2.0)}
    assert (rival["over_loop"][1], rival["seconds"][1], rival["ops"]) == (5.0, 5.0, 5)
    assert (found["rounds"], found["n"], found["left_out"]) == (3, 2, {"other": "no"})


def test_only():
    quick = cases("quick")
    names = lambda only: [case.name for case in chosen(quick, only)]
    assert chosen(quick, []) == quick
    assert names(["growth"]) == [case.name for case in quick if case.name.startswith("growth/")] != []
    assert names(["torch/tiny", "imports"]) == ["torch/tiny", "imports"]
    by_name = {case.name: case.only for case in chosen(quick, ["accelerate"])}
    assert by_name == {"torch/tiny": ("accelerate",), "exactness/torch": ("accelerate",)}
    assert [case.only for case in chosen(quick, ["torch/tiny", "accelerate", "fabric"])] == [("accelerate", "fabric")]


def test_resuming(tmp_path, sample):
    file, runs = tmp_path / "found.json", []
    wanted = [Case(name, "update", "torch", "tiny") for name in "abc"]

    def measure(case):
        runs.append(case.name)
        if case.name == "b" and runs.count("b") == 1:
            raise CaseError("Traceback ...\nValueError: b")
        return figures(1.0)

    console = Console(width=500, file=io.StringIO())
    first = running.run(wanted, sample._replace(cases={}), file, console, measure)
    assert first.failed == {"b": "Traceback ...\nValueError: b"}
    assert [*results.loaded(file).cases] == ["a", "c"]  # the rest went on
    second = running.run(wanted, results.resumed(file, sample._replace(cases={})), file, console, measure)
    assert (runs, second.failed) == (["a", "b", "c", "b"], {})
    assert f"2 of 3 cases are in {file}; --again measures them again." in console.file.getvalue()
    assert [*tmp_path.iterdir()] == [file]


def test_files_of_other_runs_are_refused(tmp_path, sample):
    file = tmp_path / "found.json"
    results.saved(sample, file)
    line = "Figures of one file are of one run: --again replaces it, --out FILE writes another."
    for other, text in [
        (sample._replace(mode="quick"), "another mode: 'full', and this run is 'quick'"),
        (sample._replace(device="cuda"), "another device: 'cpu', and this run is 'cuda'"),
        (sample._replace(machine={**sample.machine, "cores": 64}), "another machine: cores was 2 and is 64"),
        (sample._replace(versions={**sample.versions, "jax": "1"}), "another version: jax was None and is '1'"),
    ]:
        with pytest.raises(FuncgaError, match=re.escape(f"{file} has results of {text}. {line}")):
            results.resumed(file, other)
    assert results.resumed(file, sample._replace(cases={})).cases.keys() == sample.cases.keys()
    file.write_text("[]")
    with pytest.raises(FuncgaError, match="has no results of benchmarks"):
        results.loaded(file)
    file.write_text('{"format": 2}')
    with pytest.raises(FuncgaError, match="has format 2, and this program reads format 1"):
        results.loaded(file)


REFUSALS = {
    "--quick --full": "--full: not allowed with argument --quick (see python -m benchmarks --help)",
    "--only acelerate": "--only: 'acelerate' (`accelerate`?) is no part of the name of a case, and no contender, of this mode. python -m benchmarks --list has them all.",
    "--quick --only transfomer": "--only: 'transfomer'",
    "--only torch/transfromer": "--only: 'torch/transfromer' (`torch/transformer`?) is no part",
    "--device tpu": "--device: 'tpu' is no device: write cpu, cuda or cuda:1",
    "--device cuda:x": "--device: 'cuda:x' is no device",
    "--out figures.txt": "--out: 'figures.txt' is no file of JSON in a folder that exists: write FILE.json",
    "--out no/such/figures.json": "--out: 'no/such/figures.json' is no file of JSON",
    "--show nothing.json": "--show: there is no file 'nothing.json'",
    "--rounds 3": "unrecognized arguments: --rounds",
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSALS)
def test_refusals(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    written = capsys.readouterr().err
    assert written.startswith(f"benchmarks: {REFUSALS[line]}")
    assert not [*tmp_path.iterdir()]


def test_a_device_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["--quick", "--device", "cuda:1", "--only", "torch/tiny"]) == 2
    written = capsys.readouterr().err
    assert written.startswith("benchmarks: --device cuda:1: torch ")
    assert "has 1 CUDA devices here. Leave --device out to measure on the CPU" in written


def test_tables_mark_where_funcga_is_behind(sample):
    found = {table.title.partition(":")[0]: table for table in tables.tables(sample)}
    assert found["torch/tiny"].marked == {1}  # slower
    assert [row[0] for row in found["torch/tiny"].rows] == ["funcga", "! a `loop`"]
    assert [row[0] for row in found["torch_ranks/wide"].rows] == ["funcga", "a `loop`"]
    assert found["torch/wide"].marked == {1}  # more bytes
    assert not found["torch_ranks/wide"].marked  # a quartile below 1: it may be chance
    text = printed(sample)
    assert "! a `loop`" in text
    assert "short" not in text
    assert "too short to judge by" in printed(sample._replace(mode="quick"))
    assert "Where funcga is behind: 2 of 3 comparisons" in text
    assert "! torch/tiny: funcga against a `loop`: 1.20 times the time (quartiles 1.19 to 1.21)" in text
    assert "! torch/wide: funcga against a `loop`: 1.01 times the peak bytes" in text
    assert "LEFT OUT: rival: no [bench] (torch/wide)" in text


def test_the_readme_says_what_the_committed_file_says():
    assert (
        readme.replaced("a <!-- benchmarks --> old <!-- /benchmarks --> b", "new")
        == "a <!-- benchmarks -->\nnew\n<!-- /benchmarks --> b"
    )
    if not readme.COMMITTED.exists():
        pytest.skip("NO COMMITTED RESULTS YET: python -m benchmarks --full --out benchmarks/results/cpu.json")
    if not readme.COUPLED.exists():
        pytest.skip(
            "NO COMMITTED RESULTS YET: python -m benchmarks --coupled --out benchmarks/results/cpu-coupled.json"
        )
    found, coupled, large = map(results.loaded, (readme.COMMITTED, readme.COUPLED, readme.LARGE))
    docs = readme.DOCS.read_text()
    assert readme.replaced(README, readme.summary(found, large)) == README, "run: python -m benchmarks --readme"
    assert readme.documented(docs, found, coupled, large) == docs, "run: python -m benchmarks --readme"
    for file, mode in ((found, "full"), (coupled, "coupled"), (large, "large")):
        assert (file.mode, file.device) == (mode, "cpu")
        assert [*file.cases] == [case.name for case in cases(mode)]
        assert not tables.left_out(file)
    names = ("torch", "torch-growth", "jax", "jax-growth", "summary")
    pictures = [readme.COMMITTED.with_name(f"cpu-{name}.png") for name in names]
    assert all(picture.stat().st_size < 150_000 for picture in pictures)


def test_pictures(tmp_path, sample):
    file = tmp_path / "picture.png"
    written = draw(sample, file)
    assert [picture.stem for picture in written] == ["picture-torch", "picture-torch-growth", "picture-summary"]
    assert all(4_000 < picture.stat().st_size < 150_000 for picture in written)
    only = sample._replace(cases={"imports": sample.cases["imports"]})
    assert draw(only, file) == []  # nothing of what it draws


def test_after_ctrl_c_the_file_is_whole(tmp_path, monkeypatch, capsys):
    """The second case is interrupted; the first one is in the file."""

    def measured(case):
        if case.name == "imports":
            raise KeyboardInterrupt
        return figures(1.0)

    monkeypatch.setattr(running, "measured", measured)
    file = tmp_path / "found.json"
    assert main(["--quick", "--only", "torch/tiny", "imports", "--out", str(file)]) == 130
    assert capsys.readouterr().err == "benchmarks: interrupted. The same command goes on from here.\n"
    assert [*results.loaded(file).cases] == ["torch/tiny"]


def test_the_rival_of_the_documentation_computes_what_the_loop_computes():
    (block,) = [
        b
        for b in re.findall(r"```python\n(.*?)```", readme.DOCS.read_text(), re.DOTALL)
        if "benchmarks.torch_problem" in b
    ]
    names = {}
    exec(block, names)
    loop = next(c for c in registry.contenders("torch", "update", ("loop",))[0] if c.key == "loop")
    torch.manual_seed(0)
    tiny = torch_workloads.tiny(2, 0, "cpu")
    (loss, grads), (expected_loss, expected) = (
        make(Problem(tiny.module, tiny.loss, 2, tiny.size))(tiny.batch) for make in (names["make"], loop.make)
    )
    torch.testing.assert_close((loss, grads), (expected_loss, expected))


def test_figures_in_prose_are_generated():
    """In the README the numbers of the introduction stand in its table, or in the documentation's."""
    prose = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", readme.DOCS.read_text(), flags=re.DOTALL)
    assert not re.search(r"\b\d+\.\d\d\b", prose)
    (percent,) = re.findall(r"off by \*\*(\d+ %)\*\*", README)
    assert re.search(rf"a `\.backward\(\)` loop \| {percent} ", README)
    page = readme.DOCS.read_text().replace("**", "")
    headings = re.search(r"^\| against \| with \| (.*) \|$", page, re.M)[1].split(": time, bytes")
    cells = re.search(r"^\| a `.backward\(\)` loop \| funcga \| (.*) \|$", page, re.M)[1].split(" | ")
    measured = {name.removeprefix(" | "): cell.split(", ") for name, cell in zip(headings, cells, strict=False)}
    transformer, small, *bfloat16 = re.findall(r"\*\*([\d.]+)\*\*\s+times", README)
    assert transformer == measured["transformer, 4 layers of 128"][0]
    assert small == measured["MLP, 12 layers of 64"][0]
    assert bfloat16 == measured["MLP, 8 layers of 512, bfloat16"]
