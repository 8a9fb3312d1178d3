"""The training scripts: the loss goes down, there is a picture, and what was stopped in the middle of a window goes on."""

import io
import re
import sys

import jax
import numpy as np
import pytest
import torch

import funcga
from tests.programs import EXAMPLES, as_a_program, example

SCRIPTS = [f"train_{what}_{how}" for what in ("lm", "digits") for how in ("torch", "optimizer_torch", "jax")]


def test_every_script_is_here():
    assert sorted(path.stem for path in EXAMPLES.glob("train_*.py")) == sorted(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_less_than_80_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_was_stopped_in_the_middle_of_a_window_ends_bit_for_bit_as_it_would_have(
    name, monkeypatch, tmp_path, capsys
):
    script, suffix = small(name, monkeypatch), ".npz" if "jax" in name else ".pt"
    printed = lambda: capsys.readouterr().out
    whole, stopped = tmp_path / f"whole{suffix}", tmp_path / f"stopped{suffix}"

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


def small(name, monkeypatch):
    """A script, on data of which an epoch is three windows of 4, 4 and 3 micro-batches, the last of half the rows."""
    script = example(name)
    given, data = ("paragraphs", script.paragraphs(84)) if "lm" in name else ("digits", script.digits(336))
    monkeypatch.setattr(script, given, lambda: data)
    return script


def run(script, *options):
    with as_a_program():
        script.main(["--updates", "5", *map(str, options)])


def loaded(path):
    """What a checkpoint holds: an array for every path."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    leaves, _ = jax.tree.flatten_with_path(torch.load(path, weights_only=True))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def test_a_window_that_is_lost_changes_the_training(monkeypatch, tmp_path):
    """As it is where only the module, the optimizer and the scheduler are saved."""
    script, path = small("train_lm_optimizer_torch", monkeypatch), tmp_path / "stopped.pt"
    run(script, "--checkpoint", path)
    expected = torch.load(path, weights_only=True)[2]
    run(script, "--checkpoint", path, "--stop-after", 6)
    trained, window, curve, done = torch.load(path, weights_only=True)
    lost = funcga.Accumulator().init(funcga.Accumulator().finalize(window))
    torch.save((trained, lost, curve, done), path)
    run(script, "--checkpoint", path, "--resume")
    apart = np.abs(np.subtract(torch.load(path, weights_only=True)[2], expected))
    assert apart[0] == 0
    assert apart[1:].min() > 1e-3


def test_all_tokens_of_a_window_count_the_same(monkeypatch, tmp_path):
    script, path = small("train_lm_torch", monkeypatch), tmp_path / "one.pt"
    run(script, "--checkpoint", path, "--stop-after", 4)
    found = torch.load(path, weights_only=True)[3][0]
    with as_a_program():
        torch.manual_seed(0)
        module, texts = script.Transformer(64), torch.from_numpy(script.paragraphs()).long()
    steps = [torch.from_numpy(indices) for indices, _ in script.order(84, rows=8, n=4, updates=1)]
    whole = script.mean_loss(module, texts[torch.cat(steps)]).item()
    means = np.mean([script.mean_loss(module, texts[indices]).item() for indices in steps])
    assert found == pytest.approx(whole, rel=1e-6)
    assert abs(means - whole) > 1e-4


def test_the_last_micro_batch_and_the_last_window_of_an_epoch_are_smaller_and_the_order_is_always_the_same():
    order = example("training").order
    steps = order(84, rows=8, n=4, updates=5)
    epoch, rest = steps[:11], steps[11:]
    assert [len(indices) for indices, _ in epoch] == [8] * 10 + [4]
    assert [place for place, (_, is_last) in enumerate(epoch, 1) if is_last] == [4, 8, 11]
    assert [is_last for _, is_last in rest] == [False, False, False, True] * 2
    assert sorted(np.concatenate([indices for indices, _ in epoch])) == list(range(84))
    again = order(84, rows=8, n=4, updates=6)
    assert all((a == b).all() and x == y for (a, x), (b, y) in zip(steps, again, strict=False))


def test_options_that_need_a_checkpoint_say_so(capsys):
    with pytest.raises(SystemExit):
        example("training").options(["--resume"], updates=5)
    assert "--resume and --stop-after need a --checkpoint PATH" in capsys.readouterr().err


def test_there_is_a_progress_bar_on_a_terminal_and_nothing_elsewhere(monkeypatch):
    progress = example("training").progress
    for terminal in (True, False):
        output = io.StringIO()
        output.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setenv("TERM", "xterm")
        assert list(progress(list("abcd"), 1)) == ["b", "c", "d"]
        assert ("training" in output.getvalue() and "100%" in output.getvalue()) is terminal
        assert terminal or not output.getvalue()
