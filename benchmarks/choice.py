"""The cases that `--only` chooses, by parts of their names and by contenders."""

from collections.abc import Sequence

from benchmarks import registry
from benchmarks.cases import Case
from funcga.errors import FuncgaError, similar


def chosen(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The cases in whose names one of these is, with those contenders alone that are named; all if nothing is named.

    A name that is a contender's file is that contender; without a part of a case's name it chooses all the cases that
    the contender takes part in. Raises FuncgaError if a name is neither.
    """
    contenders = {key for case in cases for key in _contenders(case)}
    _check(names, cases, contenders)
    files = [name for name in names if name in contenders]
    parts = [name for name in names if name not in contenders] or [""]
    found = [case for case in cases if any(part in case.name for part in parts)]
    if not files:
        return found
    narrowed = [case._replace(only=tuple(key for key in files if key in _contenders(case))) for case in found]
    return [case for case in narrowed if case.only]


def _check(names: Sequence[str], cases: Sequence[Case], contenders: set[str]) -> None:
    for name in names:
        if name not in contenders and not any(name in case.name for case in cases):
            known = {*contenders, *(case.name for case in cases), *(part for c in cases for part in c.name.split("/"))}
            raise FuncgaError(
                f"--only: {name!r}{similar(name, sorted(known))} is no part of the name of a case, and no contender, "
                "of this mode. python -m benchmarks --list has them all."
            )


def _contenders(case: Case) -> tuple[str, ...]:
    if case.only:
        return case.only
    return () if case.kind == "imports" else tuple(registry.keys(case.setting))
