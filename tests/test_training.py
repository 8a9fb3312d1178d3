"""The training scripts: the loss goes down, there is a picture, and what was stopped in the middle of a window goes on."""

import re

import jax
import numpy as np
import pytest
import torch

from tests.programs import as_a_program, example

SCRIPTS = [f"train_{what}_{how}" for what in ("lm", "digits") for how in ("torch", "optimizer_torch", "jax")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_was_stopped_in_the_middle_of_a_window_ends_bit_for_bit_as_it_would_have(
    name, monkeypatch, tmp_path, capsys
):
    script = small(name, monkeypatch)
    printed = lambda: capsys.readouterr().out
    whole, stopped = tmp_path / f"{name} whole", tmp_path / f"{name} stopped"

    run(script, "--checkpoint", whole, "--plot", tmp_path / "loss.png")
    first, last = map(
        float, re.search(r"loss ([\d.]+) at the first update, ([\d.]+) at update 5$", printed(), re.M).groups()
    )
    assert last < first
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    run(script, "--checkpoint", stopped, "--stop-after", 6)  # two of the second window
    assert {int(steps) for path, steps in loaded(stopped).items() if path.endswith("tally.steps")} == {2}

    run(script, "--checkpoint", stopped, "--resume")
    expected, found = loaded(whole), loaded(stopped)
    assert list(found) == list(expected)
    for path, leaf in expected.items():
        assert found[path].tobytes() == leaf.tobytes(), path


def small(name, monkeypatch, microbatches=11):
    """A script, on data of which an epoch is so many micro-batches, the last one of half the rows; n is 4."""
    script = example(name)
    given, rows = (script.paragraphs, 8) if "lm" in name else (script.digits, 32)
    data = given(microbatches * rows - rows // 2)
    monkeypatch.setattr(script, given.__name__, lambda: data)
    return script


def run(script, *options):
    with as_a_program():
        script.main(["--updates", "5", *map(str, options)])


def loaded(path):
    """What a checkpoint holds: an array for every path."""
    if "jax" in path.name:
        return dict(np.load(path))
    leaves, _ = jax.tree.flatten_with_path(torch.load(path, weights_only=True))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
