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


def test_a_window_that_is_lost_changes_the_training(monkeypatch, tmp_path):
    """As it is where only the module, the optimizer and the scheduler are saved."""
    script, path = small("train_lm_optimizer_torch", monkeypatch), tmp_path / "stopped.pt"
    run(script, "--checkpoint", path)
    expected = torch.load(path, weights_only=True)[2]
    run(script, "--checkpoint", path, "--stop-after", 6)
    trained, window, curve, done = torch.load(path, weights_only=True)
    lost = funcga.Accumulator().init(funcga.Accumulator().finalize(window))
    args = script.options(script.__file__, ["--updates", "5", "--checkpoint", str(path)], updates=40)
    with script.saving(args) as file:
        torch.save((trained, lost, curve, done), file)
    run(script, "--checkpoint", path, "--resume")
    apart = np.abs(np.subtract(torch.load(path, weights_only=True)[2], expected))
    assert apart[0] == 0
    assert apart[1:].min() > 1e-3


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_window_is_one_step_of_adamw_with_the_clipped_gradient_of_all_its_tokens_or_rows(name, monkeypatch, tmp_path):
    """By hand, for the first window, and for the shorter one that ends an epoch."""
    script, path, curves = small(name, monkeypatch, microbatches=7), tmp_path / name, []
    monkeypatch.setattr(script, "report", lambda curve, picture: curves.append([float(loss) for loss in curve]))
    by_hand, decay = (in_jax, 1e-4) if "jax" in name else (in_torch, 1e-2)
    examples, rows = (52, 8) if "lm" in name else (208, 32)
    steps = [indices for indices, _ in script.order(examples, rows=rows, n=4, updates=2)]
    params = old = None
    for update, window in enumerate((slice(0, 4), slice(4, 7)), 1):
        params, loss, grads = by_hand(script, params, steps[window])
        grads = grads if name == "train_digits_jax" else clipped(grads)  # the one that does not
        run(script, "--checkpoint", path, "--stop-after", window.stop, *["--resume"] * (update > 1))
        assert curves[-1][-1] == pytest.approx(loss, rel=1e-6)
        found, first, second = trained(path)
        keys = list(grads) if "optimizer" in name else sorted(grads)
        for key, before, mu, nu in zip(keys, old or [0.0] * len(keys), first, second, strict=True):
            np.testing.assert_allclose(mu, 0.9 * before + 0.1 * grads[key], rtol=0, atol=1e-7, err_msg=key)
            step = mu / (1 - 0.9**update) / (np.sqrt(nu / (1 - 0.999**update)) + 1e-8) + decay * params[key]
            after = params[key] - 1e-2 * (1 - (update - 1) / 5) * step
            np.testing.assert_allclose(found[key], after, rtol=0, atol=1e-6, err_msg=key)
        params, old = found, first


def clipped(grads):
    norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
    assert norm > 1.05  # or nothing would show whether the script does it
    return {key: grad / norm for key, grad in grads.items()}


def in_torch(script, params, window):
    """(parameters, loss, gradients) of all of a window; without parameters: of those that the script begins with."""
    with as_a_program():
        torch.manual_seed(0)
        module = script.Transformer(64) if hasattr(script, "Transformer") else script.network()
        module.load_state_dict({key: torch.from_numpy(param) for key, param in (params or {}).items()}, strict=False)
        named = dict(module.named_parameters())
        loss = over_all(lambda *part: script.mean_loss(module, *part), parts(script, window, torch.from_numpy))
        loss.backward()
    params = {key: param.detach().numpy() for key, param in named.items()}
    return params, loss.item(), {key: param.grad.numpy() for key, param in named.items()}


def in_jax(script, params, window):
    """The same in JAX."""
    with as_a_program():
        params, loss = params or script.initialized(*[64] * hasattr(script, "paragraphs")), script.mean_loss
        mean_loss = loss if hasattr(script, "paragraphs") else lambda *part: loss(*part)[0]
        batch = parts(script, window, np.asarray)
        whole = lambda params: over_all(lambda *part: mean_loss(params, *part), batch)
        return jax.tree.map(np.asarray, (params, *jax.jit(jax.value_and_grad(whole))(params)))


def parts(script, window, array):
    """A window as one batch of texts; as the micro-batches of digits that it has, as BatchNorm looks at each alone."""
    if hasattr(script, "paragraphs"):
        return [(array(script.paragraphs()[np.concatenate(window)].astype(np.int64)),)]
    (x, y), _ = script.digits()
    return [(array(x[indices]), array(y[indices].astype(np.int64))) for indices in window]


def over_all(mean_loss, batch):
    return sum(len(part[0]) * mean_loss(*part) for part in batch) / sum(len(part[0]) for part in batch)


def trained(path):
    """({name: parameter}, first moments of AdamW, second moments) of a checkpoint."""
    leaves = loaded(path).items()
    params = {found[1]: leaf for key, leaf in leaves if (found := re.match(r"\[0\](?:\[0\])?\['(.+?)'\]$", key))}
    return params, *([leaf for key, leaf in leaves if re.search(end, key)] for end in (FIRST, SECOND))


FIRST, SECOND = r"'exp_avg'\]$|\.mu\[", r"'exp_avg_sq'\]$|\.nu\["


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


@pytest.mark.parametrize(
    ("options", "text"),
    {
        "--resume": "--resume and --stop-after need a --checkpoint PATH",
        "--stop-after 3": "--resume and --stop-after need a --checkpoint PATH",
        "--updates 0": "argument --updates: a whole number from 1 on, not 0",
        "--updates -3": "argument --updates: a whole number from 1 on, not -3",
        "--stop-after many": "argument --stop-after: a whole number from 1 on, not many",
        "--plot none/loss.png": "argument --plot: a file in a folder that exists, not none/loss.png",
        "--checkpoint none/a.pt": "argument --checkpoint: a file in a folder that exists, not none/a.pt",
        "--checkpoint .": "argument --checkpoint: a file in a folder that exists, not .",
    }.items(),
)
def test_options_that_cannot_be_say_so_before_the_training(options, text, capsys):
    refused(lambda: example("training").options("train.py", options.split(), updates=5), text, capsys)


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


def test_who_is_stopped_while_saving_keeps_the_last_checkpoint(tmp_path):
    training, path = example("training"), tmp_path / "checkpoint"
    args = training.options("train.py", ["--checkpoint", str(path)], updates=5)

    def save(what, stop=None):
        with training.saving(args) as file:
            torch.save(what, file)
            if stop:
                raise stop

    save("the last one")
    with pytest.raises(KeyboardInterrupt):
        save("half of the next", KeyboardInterrupt)
    assert training.load(args, torch.load) == "the last one"
    save("the next one")
    assert training.load(args, torch.load) == "the next one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_training_that_is_at_its_end_says_so(capsys):
    progress = example("training").progress
    assert list(progress(list("abcd"), 5)) == []
    assert "the checkpoint is at micro-batch 5, and 4 was the last to do" in capsys.readouterr().out


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
