"""The page of what the doctor finds in training code: each loop is run under it, and so is the loop with the page's fix."""

import linecache
import re
import sys
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from funcga.__main__ import main
from tests import museum
from tests.test_docs import check_shown

PAGE = "in_the_wild.md"
CAUSE = r"^\d\. (.*)$"
TEXT = (museum.PAGE.parent / PAGE).read_text()
COMMON = re.search(r"```py\n(# common\.py\n.*?)```", TEXT, re.DOTALL)[1]
SECTIONS = {text.split("\n")[0]: text for text in re.split(r"^##+ ", TEXT, flags=re.MULTILINE) if "# train.py" in text}


def block(section, language):
    return re.search(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)[1]


def fixed(section):
    """The loop with the lines that the page says to change."""
    lines = block(section, "diff").splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
    source = block(section, "py")
    assert source.count(before) == 1
    return source.replace(before, after)


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """A function that runs a loop under the command; returns the exit code, what was printed, and the gradients of each step."""
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "common.py").write_text(COMMON)

    def run(source):
        Path("train.py").write_text(source)
        monkeypatch.delitem(sys.modules, "common", raising=False)
        steps = []

        def keep(optimizer, *_):
            steps.append({i: p.grad.clone() for i, p in enumerate(optimizer.param_groups[0]["params"])})

        linecache.clearcache()  # each loop has the same name
        hook = register_optimizer_step_pre_hook(keep)
        code = main(["doctor", "train.py"])
        hook.remove()
        sys.modules.pop("common")
        return code, capsys.readouterr().out, steps

    return run


def off_by(wrong, right):
    """The error at the first step at which two loops differ."""
    errors = (museum.error(one, other) for one, other in zip(wrong, right, strict=False))
    return next(error for error in errors if error > 1e-9)


def percent(error):
    return f"{100 * error:.0f}\N{NO-BREAK SPACE}%"


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("section", SECTIONS)
def test_a_loop(section, doctor):
    code, printed, wrong = doctor(block(section, "py"))
    check_shown(PAGE, block(section, "py") + "```\n\n", printed)
    is_note = "print(" in block(section, "py")
    assert code == (0 if is_note else 1)
    code, printed_by_fixed, right = doctor(fixed(section))
    assert code == 0
    assert "Note:" not in printed_by_fixed
    if is_note:
        assert f"The fixed loop prints **{printed_by_fixed.split()[0]}**" in SECTIONS[section]
    else:
        assert f"Off by **{percent(off_by(wrong, right))}**" in SECTIONS[section]


# What the text of a section says of another form of its loop: what is written there, and the causes.
FORMS = [
    ("A counter that restarts with each epoch", {"range(2):": "range(2):\n    optimizer.zero_grad()"}, ["erased", "never stepped"]),
    (
        "A step after each micro-batch",
        {"for batch in batches": "for i, batch in enumerate(batches, 1)", "    optimizer": "    if i % n: optimizer"},
        ["divided by another n", "divided twice", "never stepped"],
    ),
    ("Labels shifted twice", {'reduction="sum"': 'reduction="mean"', "/ targets": "/ n"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("section", "changes", "names"), FORMS, ids=[form[0] for form in FORMS])
def test_another_form_of_a_loop(section, changes, names, doctor):
    source = block(section, "py")
    for old, new in changes.items():
        assert old in source
        source = source.replace(old, new)
    code, printed, _ = doctor(source)
    assert re.findall(CAUSE, printed, re.MULTILINE) == names
    assert code == bool(names)


def test_the_table_says_what_the_sections_say():
    rows = re.findall(r"^\| \[(.*?)\]\(#.*?\) \| (.*?) \| (.*?) \| (.*?) \|$", TEXT, re.MULTILINE)
    assert [row[0] for row in rows] == [*SECTIONS]
    for name, says, error, threads in rows:
        section = SECTIONS[name]
        names = re.findall(CAUSE, block(name, "text"), re.MULTILINE)
        assert says == (", ".join(f'"{each}"' for each in names) or "a note")
        off = re.search(r"Off by \*\*(.*?)\*\*", section)
        first, last = block(name, "text").split()[0], re.search(r"prints \*\*(.*?)\*\*|$", section)[1]
        assert error == (off[1] if off else f"{first}, not {last}")
        assert f"**{threads}** thread" in section


def test_as_many_threads_are_linked_as_are_counted():
    asked = [int(count) for count in re.findall(r"^\| [^|]+ \| (\d+) \| \"", TEXT, re.MULTILINE)]
    for section, of in zip(SECTIONS.values(), asked, strict=True):
        report, found = re.search(r"\*\*(\d+) of (\d+)\*\*", section).groups()
        links = re.findall(r"\[([\w.-]+/[\w.-]+ #\d+)\]\((.*?)\)", section)
        assert len({name for name, _ in links}) == len(links) == int(report)
        assert int(found) == of
        in_museum = museum.PAGE.read_text()
        assert all((f"[{name}]" in in_museum) == link.startswith("museum.md#") for name, link in links)
