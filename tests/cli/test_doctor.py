"""The command `doctor`: scripts and modules as Python runs them, however they end, and the report that they leave."""

import io
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from funcga.__main__ import main
from tests.programs import TRAIN

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torch", "jax", "optax", "sklearn")), reason="needs funcga[parity]"
)
ROOT = Path(__file__).parent.parent.parent
LOOP = TRAIN.replace("sys.exit(7)", "")
# It ends before the last step.
UNFINISHED = LOOP.replace("for _ in range(2)", "for step in range(3)").replace(
    "    optimizer.step()", "    if step == 2:\n        break\n    optimizer.step()"
)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """The script train.py in a folder of its own, with this at its end."""
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.chdir(tmp_path)
    return lambda end="", start=LOOP: Path("train.py").write_text(start + end)


def test_the_verdict_is_the_exit_code(train, capsys):
    train()
    assert main(["doctor", "--json", "found.json", "train.py", "3", "3"]) == 0
    assert json.loads(Path("found.json").read_text())["ok"] is True
    assert main(["doctor", "train.py", "3", "9"]) == 1
    assert "1. uneven tokens" in capsys.readouterr().out
    assert main(["doctor", "none.py"]) == 2


@pytest.mark.parametrize(
    ("end", "code", "shown"),
    [
        ("sys.exit(0)", 1, ""),
        ("sys.exit()", 1, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no data here')", "no data here", ""),  # which Python prints, for sys.exit(main())
        ("raise KeyError('no data here')", 2, "KeyError: 'no data here'"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_how_a_script_ends_is_kept(end, code, shown, train, capsys):
    """With the verdict on what was seen until then; a micro-batch after the last step is an error where a script is over."""
    train(end, UNFINISHED)
    assert main(["doctor", "train.py", "3", "9"]) == code
    out, err = capsys.readouterr()
    assert "uneven tokens" in out
    assert ("never stepped" in out) == (end in ("sys.exit(0)", "sys.exit()"))
    assert err.strip().endswith(shown)
    assert shown or not err
    train(start=f"import sys\n{end}")  # before a step
    assert main(["doctor", "train.py"]) == (2 if code == 1 else code)
    out, err = capsys.readouterr()
    assert "Steps: 0." in out
    assert ("the run ended with" in out) != ("came after a backward of torch" in out)
    assert ("no data here" in out) == ("no data here" in end)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def started(*arguments):
    """The command as a process of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "funcga", "doctor", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_message_of_a_script_is_shown(train):
    """By Python, as that of any program."""
    train(start="import sys\nsys.exit('no data here')")
    run = started("train.py")
    out, err = run.communicate(timeout=60)
    assert "the run ended with SystemExit('no data here')" in out
    assert (err, run.returncode) == ("no data here\n", 1)


def test_the_report_comes_after_the_steps_and_the_json_where_it_was_asked_for(train, capsys):
    train("print('the run goes on')\nimport os\nos.chdir('/')")
    assert main(["doctor", "--steps", "1", "--json", "found.json", "train.py", "3", "9"]) == 1
    os.chdir(sys.path[0])
    assert json.loads(Path("found.json").read_text())["ok"] is False
    report, rest = capsys.readouterr().out.split("the run goes on")
    assert "uneven tokens" in report
    assert rest.strip() == ""
    assert main(["doctor", "--steps", "3", "--json", "found.json", "train.py", "3", "9"]) == 1
    run, report = capsys.readouterr().out.split("the run goes on")
    assert run == ""
    assert "uneven tokens" in report


def test_a_report_that_cannot_be_written_does_not_end_the_run(train, capsys):
    train("print('the run goes on')")
    assert main(["doctor", "--steps", "1", "--json", "/dev/full", "train.py", "3", "3"]) == 2
    out, err = capsys.readouterr()
    assert "the run goes on" in out
    assert out.index("Every target weighs the same") < out.index("the run goes on")
    assert "No space left on device" in err


def test_a_module_is_run_as_python_runs_it(train, capsys):
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/sizes.py").write_text("sizes = [3, 9]")
    names = "import sys\nfrom .sizes import sizes\nassert __name__ == '__main__' and sys.argv[1:] == ['--n', '2']\n"
    Path("package/train.py").write_text(names + LOOP.replace("sys.argv[1:]", "sizes"))
    assert main(["doctor", "--steps", "9", "-m", "package.train", "--n", "2"]) == 1
    out, err = capsys.readouterr()
    assert "uneven tokens" in out
    assert err == ""


@pytest.mark.parametrize(("encoding", "bars"), [("cp1252", "8888"), ("utf-8", "████")])
def test_bars_are_digits_where_the_output_has_no_bars(encoding, bars, train, monkeypatch):
    train()
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding))
    assert main(["doctor", "train.py", "3", "3", "3", "3"]) == 0
    assert f"{bars}     {bars}      1       exact" in written.getvalue().decode(encoding)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_the_report(number, code, train):
    train("import time\nprint('trained', flush=True)\nwhile True: time.sleep(0.1)")
    run = started("--json", "found.json", "train.py", "3", "9")
    assert run.stdout.readline() == "trained\n"
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert "1. uneven tokens" in out
    assert err == ""
    assert run.returncode == code
    assert json.loads(Path("found.json").read_text())["causes"][0]["name"] == "uneven tokens"


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_process_that_a_script_has_forked_ends_as_ever(train, capsys):
    train(
        """
import os, signal, time
is_ready, says_so = os.pipe()
child = os.fork()
if not child:
    os.write(says_so, b"!")
    try:
        while True:
            time.sleep(0.1)
    finally:
        os._exit(0)
os.read(is_ready, 1)
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
"""
    )
    assert main(["doctor", "train.py", "3", "3"]) == 0


class Terminal(io.StringIO):
    """Standard output or standard error of a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


def on_a_terminal(monkeypatch):
    """Standard output and standard error from here on. (Not a fixture, which pytest would capture.)"""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal(), Terminal()
    monkeypatch.setattr("sys.stdout", terminal[0])
    monkeypatch.setattr("sys.stderr", terminal[1])
    return terminal


def test_a_terminal_has_colours_and_progress(train, monkeypatch):
    pytest.importorskip("rich")
    train()
    terminal = on_a_terminal(monkeypatch)
    assert main(["doctor", "train.py", "3", "9"]) == 1
    out, err = (stream.getvalue() for stream in terminal)
    assert "This loop is \x1b[31mNOT exact\x1b[0m. Steps: 2, causes: 1.\n" in out
    assert "\x1b[1m1. uneven tokens\x1b[0m\n" in out
    # As it is elsewhere, and no line is broken.
    assert 'reduction="sum") / targets\x1b[0m\n' in out
    assert "funcga: 1/1000 steps" in err
    assert "\n" not in err
    assert err.split("\r")[-2].strip("\x1b[02m ") == ""  # the last one is wiped away
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor", "train.py", "3", "9"]) == 1
    assert (terminal[0].getvalue(), terminal[1].getvalue()) == (out, err)


def test_without_rich_a_terminal_has_plain_text(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    train()
    terminal = on_a_terminal(monkeypatch)
    assert main(["doctor", "train.py", "3", "9"]) == 1
    assert "\x1b" not in terminal[0].getvalue()
    assert "This loop is NOT exact. Steps: 2, causes: 1.\n" in terminal[0].getvalue()
    assert terminal[1].getvalue() == ""
