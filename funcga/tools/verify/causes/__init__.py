"""Why not: one file for each family of causes, and the texts of all in causes.toml.

A question is a function of a Case. It tests for its causes and yields a Cause for each one found,
with evidence and the line that fixes it, or a Note if something may be wrong. The package above
has the table of all questions, in the order in which they are asked.
"""

import importlib.resources
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from funcga.tools.verify.exact import Case


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong.

    Attributes:
        name: A short identifier that stays, such as "uneven tokens".
        what: What is wrong, in a sentence or two.
        fix: The line to write instead.
        evidence: The figures by which it was recognised.
    """

    name: str
    what: str
    fix: str
    evidence: str


class Note(str):
    """A remark that leaves the verdict as it is."""


class Stop(Note):
    """A note after which no further question is asked."""


Answer = Cause | Note
Answers = Iterator[Answer]
Question = Callable[[Case], Iterable[Answer]]


@cache
def texts(package: str = __name__) -> dict[str, dict[str, str]]:
    """The texts of the causes and of the notes, by name, in causes.toml of a package."""
    file = importlib.resources.files(package) / "causes.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def cause(key: str, package: str = __name__, /, **words: object) -> Cause:
    """The Cause whose texts have this key, with `words` filled in."""
    name = key.partition(":")[0]
    entry = texts(package).get(name, {}) | texts(package)[key]
    words = {"subject": "loss"} | words
    what, fix, evidence = (
        " ".join(entry[part].split()).format(**words) for part in ("what", "fix", "evidence")
    )
    return Cause(name, what, fix, evidence)


def note(key: str, package: str = __name__, /, **words: object) -> Note:
    """The note of this name, with `words` filled in."""
    return Note(" ".join(texts(package)["notes"][key].split()).format(**words))


def stop() -> Stop:
    """The last answer, where results cannot be compared."""
    return Stop(note("nothing else"))


def causes_in(answers: Iterable[Answer]) -> list[Cause]:
    """The causes among the answers."""
    return [answer for answer in answers if isinstance(answer, Cause)]
