"""The texts of the causes: each is whole, short, and given by some line of the code."""

import inspect
import re
import string
from pathlib import Path

import pytest

import funcga
from funcga._verify import causes

FOLDER = Path(causes.__file__).parent
NOTES = causes.texts()["notes"]
ENTRIES = {key: entry for key, entry in causes.texts().items() if key != "notes"}
SOURCE = "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.rglob("*.py"))
# Entries that have only what the others of their name share.
SHARED = {"params unused"}


class Anything(dict):
    """Words for every text."""

    def __missing__(self, word):
        return 1.0


@pytest.mark.parametrize("key", [key for key in ENTRIES if key not in SHARED])
def test_a_text_is_whole_and_short(key):
    name = key.partition(": ")[0]
    parts = ENTRIES.get(name, {}) | ENTRIES[key]
    assert {*parts} == {"what", "fix", "evidence"}
    assert f'"{name}"' in " ".join(inspect.getdoc(funcga.verify).split())
    for text in parts.values():
        text = string.Formatter().vformat(" ".join(text.split()), (), Anything())
        assert len(re.findall(r"\.(?= [A-Z]|$)", text)) <= 3


@pytest.mark.parametrize("key", [key for key in ENTRIES if key not in SHARED])
def test_a_text_is_given_by_the_code(key):
    name, _, which = key.partition(": ")
    # f"mean under {name}" and f"params unused: {framework}" are put together.
    start = re.escape(name.replace("mean under per_weight", "mean under ").replace("mean under sum", "mean under "))
    assert re.search(f'"{start}', SOURCE)
    assert which.split(", ")[-1] in ("torch", "jax") or f": {which}" in SOURCE or f'"{which}"' in SOURCE


@pytest.mark.parametrize("key", NOTES)
def test_a_note_is_given_by_the_code(key):
    assert f'note("{key}"' in SOURCE or f'stop("{key}"' in SOURCE
    assert string.Formatter().vformat(NOTES[key], (), Anything())


def test_each_text_stands_beside_the_code_that_gives_it():
    for path in FOLDER.glob("*.toml"):
        source = path.with_suffix(".py").read_text(encoding="utf-8")
        for name in re.findall(r'(?m)^\["([^":]+)', path.read_text(encoding="utf-8")):
            assert (
                f'"{name.replace("mean under per_weight", "mean under ").replace("mean under sum", "mean under ")}'
                in source
            ), (
                path.name,
                name,
            )


def test_a_cause_is_filled_in():
    cause = causes.cause("wrong weight: zero", line="drop weight=", rows=12)
    assert cause.name == "wrong weight"
    assert (cause.fix, cause.evidence) == ("drop weight=", "weight is 0 for all 12 rows")
    with pytest.raises(KeyError):
        causes.cause("no such cause")
