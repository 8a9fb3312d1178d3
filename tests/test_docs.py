"""The documentation: every block of every page runs, in the order of the page, in every framework that it is for."""

import contextlib
import importlib
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import optax
import pytest
import torch.distributed as dist

import funcga
from tests import house, versions
from tests.kits import JAX, TORCH
from tests.processes import launched
from torch_backend import _private

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts
}


def blocks(page):
    """The blocks that run. Those inside of a list are indented, and those of another language only show something."""
    found = re.finditer(r"^( *)```(?:\{code-cell\} )?python\n(.*?)^ *```", PAGES[page], re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block[2]) for block in found]


# A page is of one of two kinds. One that imports funcga is a program: its blocks run from top to bottom, with nothing but
# what they import and make. Every block of any other page runs by itself, among the names of a user (`context`).
PROGRAMS = [page for page in PAGES if re.search(r"^import funcga$", "".join(blocks(page)), re.MULTILINE)]
# What a page needs besides what this project does, and what shows that it does. (Trainer imports Accelerate.)
FRAMEWORKS = {
    "accelerate": r"^from accelerate import|^from transformers import .*Trainer",
    "lightning": r"^import lightning",
    "peft": r"^from peft import",
    "transformers": r"^from transformers import",
}


def context(kit):
    """The names that the README's blocks take for granted: a user's own parameters, batch, loss and loader."""
    r = np.random.default_rng(0)
    floats = lambda *shape: kit.arrays(r.normal(size=shape).astype("float32"))
    params = {"w": floats(3, 2), "b": floats(2)}
    batch = {"x": floats(10, 3), "y": floats(10, 2)}
    labels = kit.arrays(np.where(np.arange(6) < [[6], [2], [0], [5], [1]], 1, -100).astype("int32"))
    predict = lambda params, x: x @ params["w"] + params["b"]
    loss_fn = lambda params, batch: ((predict(params, batch["x"]) - batch["y"]) ** 2).mean()

    def sum_of_token_losses(params, batch):
        mask = kit.cast(batch["labels"] != -100, "float32")
        return (mask * predict(params, batch["x"])[:, None, 0] ** 2).sum()

    tx = optax.adam(1e-3)
    return {
        "funcga": funcga, "params": params, "batch": batch, "x": batch["x"], "y": batch["y"], "predict": predict,
        "loss_fn": loss_fn, "sum_of_token_losses": sum_of_token_losses, "optax": optax, "tx": tx,
        "tokens": {"x": floats(5, 3), "labels": labels}, "state": {"seen": 0},
        "loader": [{k: v[i : i + 1] for k, v in batch.items()} for i in range(10)],
        "grads": params, "opt_state": tx.init(params) if kit is JAX else None,
    }  # fmt: skip


def frameworks(block):
    """A block that imports a framework is for that one, any other for both."""
    named = [kit for kit in (TORCH, JAX) if re.search(rf"^import {kit.name}$", block, re.MULTILINE)]
    return named or [TORCH, JAX]


CASES = [
    (kit, page, block) for page in PAGES if page not in PROGRAMS for block in blocks(page) for kit in frameworks(block)
]


@pytest.fixture
def replica(tmp_path, request):
    """For a block that needs one: a process group of one."""
    if "torch.distributed" not in request.getfixturevalue("block"):
        yield
        return
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.host
@pytest.mark.parametrize(
    ("kit", "page", "block"),
    CASES,
    ids=[f"{kit.name}-{page}-{block.strip().splitlines()[0][:30]}" for kit, page, block in CASES],
)
@pytest.mark.usefixtures("replica")
def test_a_block_runs(kit, page, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where files are saved
    with jax.numpy_dtype_promotion("standard"):
        names = context(kit)
        exec(compile("import funcga\n" + block, page, "exec"), names)
    if "grads" in block:
        assert all(np.isfinite(leaf).all() for leaf in kit.leaves(names["grads"]))


def run_from_top_to_bottom(page):
    names = {"__name__": "__main__"}
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks(page):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(block, page, "exec"), names)
            check_shown(page, f"{block}```\n\n", printed.getvalue())
            print(printed.getvalue(), end="")


def check_shown(page, above, printed):
    """What a page shows below a block is what it printed, however lines are broken; "..." leaves some of it out."""
    words = lambda text: " ".join(text.split())
    shown = re.search(re.escape(above) + r"```text\n([^$].*?)```", PAGES[page], re.DOTALL)
    for part in shown[1].split("\n...\n") if shown else []:
        assert words(part) in words(printed)
        printed = words(printed).split(words(part), 1)[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("page", PROGRAMS)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    for framework, imports in FRAMEWORKS.items():
        if re.search(imports, "".join(blocks(page)), re.MULTILINE):
            pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    if "torchrun" in re.sub(r"```sh.*?```", "", PAGES[page], flags=re.DOTALL):  # it is a program of several processes
        printed = launched(run_from_top_to_bottom, page, count=2)
    else:
        run_from_top_to_bottom(page)
        printed = capsys.readouterr().out
    assert printed or page.startswith("reference")  # who tries it sees that it worked


SESSIONS = [
    (page, *session)
    for page in PAGES
    for session in re.findall(r"```py\n# (\w+\.py)\n(.*?)```\n\n```sh\n(.*?)```", PAGES[page], re.DOTALL)
]


@pytest.mark.parametrize(("page", "file", "source", "command"), SESSIONS, ids=[session[0] for session in SESSIONS])
def test_a_command_prints_what_the_page_shows(page, file, source, command, tmp_path):
    for framework, imports in FRAMEWORKS.items():
        if re.search(imports, source, re.MULTILINE):
            pytest.importorskip(framework)
    (tmp_path / file).write_text(source)
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=os.environ | paths, capture_output=True, text=True, check=False
    )
    check_shown(page, f"{command}```\n\n", done.stdout)


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../CONTRIBUTING.md", "../examples/README.md"])
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(((?!http)[^)#]*)#?([^)]*)\)", prose):
        linked = (DOCS / page).parent / target if target else DOCS / page
        assert linked.exists(), target
        # As GitHub and MyST make them of headings.
        titles = re.findall(r"^#+ (.*)", linked.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_code_fits_the_width_of_a_page(page):
    code = re.findall(
        r"^( *)(?:```|~~~)[^\n]*\n(.*?)^ *(?:```|~~~)", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    lines = [line.removeprefix(indent) for indent, block in code for line in block.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


def named(text):
    """The names of ours in a text, in code or prose or an error: `funcga.a` or `funcga.a.b`."""
    return set(re.findall(r"(?<![\w./-])((?:funcga|torch_backend|jax_backend)(?:\.[A-Za-z_]\w*){1,2})(?!\w|\{)", text))


def exists(name):
    """Whether there is such a name: an attribute, or a module."""
    package, first, *rest = name.split(".")
    try:
        value = getattr(importlib.import_module(package), first, None) or importlib.import_module(f"{package}.{first}")
        # An attribute of a function or a class may be that of its results.
        if rest and isinstance(value, ModuleType) and not hasattr(value, rest[0]):
            importlib.import_module(name)
    except ImportError:
        return False
    return True


@pytest.mark.host
def test_names_that_texts_mention_exist():
    root = DOCS.parent
    files = [file for folder in (*house.PACKAGES, "docs", "examples") for file in (root / folder).rglob("*.*")]
    texts = {file: file.read_text() for file in (*files, *root.glob("*.md")) if file.suffix in (".py", ".md")}
    names = {name: file for file, text in texts.items() for name in named(text) if not name.endswith((".py", ".md"))}
    assert len(names) > 200
    assert {name: file for name, file in names.items() if not exists(name)} == {}
    assert not exists("funcga.rules")
    assert not exists("funcga.trees.nothing")


def test_every_page_is_in_a_table_of_contents():
    listed = {
        str((Path(page).parent / line).with_suffix(".md"))
        for page, text in PAGES.items()
        for toctree in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
        for line in toctree.split()
        if not line.startswith(":")
    }
    assert {*PAGES} - {"index.md"} <= listed


def test_llms_txt_lists_every_page_and_is_small():
    text = runpy.run_path(str(DOCS / "llms.py"))["text"]()
    linked = re.findall(r"^- \[[^\]]+\]\((\S+)\.html\)", text, re.MULTILINE)
    assert sorted(linked) == sorted(page.removesuffix(".md") for page in PAGES if page != "index.md")
    assert len(text) < 12_200


def test_the_package_promises_the_versions_that_were_tried():
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    tried = {key: versions.cells(line)[2:6] for key, line in versions.rows(PAGES["reference/versions.md"]).items()}
    assert (*tried,) == versions.ROWS
    assert all((DOCS.parent / path).exists() for path in versions.CORE)
    for found in [found for (_, age), found in tried.items() if age == "oldest"]:
        pairs = zip(found, versions.floors(), strict=True)
        assert all(version == least or version.startswith(f"{least}.") for version, (_, least) in pairs)
    pythons = [each.split(" :: ")[-1] for each in project["classifiers"] if re.search(r"Python :: 3\.", each)]
    assert tuple(pythons) == versions.PYTHONS
    assert project["requires-python"] == f">={pythons[0]}"
    of_torch = [found[0].rsplit(".", 1)[0] for found in (tried[versions.ROWS[0]], tried[versions.ROWS[-1]])]
    assert " to ".join(of_torch) == _private.TRIED
    line = r"^\| (Python|torch|jax|optax)[^|]* \| ([\d.]+) and newer \|$"
    limits = dict(re.findall(line, PAGES["reference/versions.md"], re.MULTILINE))
    assert limits | {"flax": dict(versions.floors())["flax"]} == {"Python": pythons[0], **dict(versions.floors())}
