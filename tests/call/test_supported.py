"""What the documentation says is supported is so: each entry of its tables is tried where a step is made."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import funcga
import torch_backend
from tests.processes import processes
from tests.torch_backend.wrapped import test_wrapped as wrappers

PAGE = (Path(__file__).parent.parent.parent / "docs" / "reference" / "accumulate.md").read_text().splitlines()
OPTIONS = {
    'drop="microbatch"': {"drop": "microbatch"},
    'drop="window"': {"drop": "window"},
    "drop=": {"drop": "window"},
    "drop_if=": {"drop": "window", "drop_if": lambda output: False},
    "observe=": {"observe": funcga.gradient_norms()},
    'n="auto"': {"n": "auto"},
    "across=": {"across": "data"},
    "totals=": {"totals": len},
    "scatter=": {"across": SimpleNamespace(scatter=0)},
}
# A schedule of a pipeline is in tests/torch_backend/pipeline.
WRAPPERS = {
    "a module's own parameters": [lambda group, module: module],
    "a module in DDP, replicate or fully_shard": [wrappers.ddp, wrappers.fsdp2],
    "a module in FullyShardedDataParallel": [wrappers.fsdp1],
}


def cells(line):
    return [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]


FEATURES = next(cells(line)[1:] for line in PAGE if line.startswith("| the gradient is that of"))
ROWS = {cells(line)[0]: cells(line)[1:] for line in PAGE if line.startswith("| a")}
PAIRS = [cells(line)[:2] for line in PAGE if line.startswith("| `") and line.count(" | `") == 1]


def outcome(gradient, *options):
    given = {"n": 2}
    for option in options:
        given |= OPTIONS.get(option, {})
    try:
        funcga.accumulate(gradient, **given)
    except funcga.FuncgaError as error:
        return str(error)
    return "yes"


def of_wrappers(group):
    loss = lambda module, x: module(x).sum()
    make = lambda wrap: torch_backend.module_value_and_grad(wrap(group, wrappers.made()), loss)
    return {
        (kind, feature): [outcome(make(wrap), feature) for wrap in wraps]
        for kind, wraps in WRAPPERS.items()
        for feature in FEATURES
    }


def test_each_entry_holds_when_a_step_is_made():
    found, _ = processes().run(of_wrappers, size=2)
    assert {*ROWS} == {"any pure function", *WRAPPERS, "a pipeline"}
    found |= {("any pure function", feature): [outcome(lambda w, x: w, feature)] for feature in FEATURES}
    for (kind, feature), texts in found.items():
        entry = ROWS[kind][FEATURES.index(feature)]
        for text in texts:
            if entry == "yes":
                assert text == "yes", (kind, feature)
            else:
                (note,) = (line for line in PAGE if line.startswith(f"{entry[4:-1]}. "))
                assert note.split(" ", 2)[2] in text, (kind, feature)


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_what_does_not_go_together_is_refused(pair):
    gradient = funcga.grad(lambda w, x, *, totals=None: (w * x).mean(), scaled="scaled=True" in pair)
    assert "was given together with" in outcome(gradient, *pair)
