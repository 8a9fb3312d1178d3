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


def refused(call, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        call()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.endswith(f"train.py: error: {text}\n")


@pytest.mark.parametrize(
    ("write", "read"), [(torch.save, torch.load), (lambda tree, file: np.savez(file, **tree), np.load)]
)
def test_a_checkpoint_is_one_of_the_training_that_goes_on(write, read, tmp_path, capsys):
    training, path = example("training"), tmp_path / "checkpoint"

    def args(script="train.py", updates=5):
        return training.options(script, ["--checkpoint", str(path), "--resume", "--updates", str(updates)], updates=9)

    refused(lambda: training.load(args(), read), f"there is no checkpoint at {path}: leave --resume out", capsys)
    with training.saving(args()) as file:
        write({"a": np.float64(3) if read is np.load else 3.0}, file)
    assert training.load(args("elsewhere/train.py"), read)["a"] == 3

    saved = f"{path} is a checkpoint of `train.py --updates 5`, and this is "
    refused(lambda: training.load(args(updates=6), read), f"{saved}`train.py --updates 6`, another training", capsys)
    with training.saving(args("another.py")) as file:
        write({}, file)
    refused(
        lambda: training.load(args(), read),
        f"{path} is a checkpoint of `another.py --updates 5`, and this is `train.py --updates 5`, another training",
        capsys,
    )
    for other in (b"", b"of another kind", b"PK\x03\x04 cut short"):
        path.write_bytes(other)
        refused(lambda: training.load(args(), read), f"{path} is no checkpoint of a training script", capsys)
