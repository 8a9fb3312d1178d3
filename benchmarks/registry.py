"""The contenders of a setting: each file of its folder is one, and a rival that is not installed is left out.

A contender is a module with

    NAME = "Accelerate, `accumulate`"            # as the tables say it
    SOURCE = "https://..."                       # the documentation that it is configured by; None if it is ours
    AGAINST = "funcga"                           # the file of ours that it is compared with, or a tuple of several;
                                                 # None if it is ours
    KINDS = ("update", "exactness")              # optional: what it takes part in, all of them if left out
    WORKLOADS = ("wide_bfloat16",)               # optional: the only ones that it makes sense for
    TOLERANCE = 1e-2                             # optional: how far it may be from the loop's result, if it rounds
    HANGS = ("uneven ranks",)                    # optional: columns of exactness in which its ranks hang

    def make(problem): ...                       # -> step(batch) -> (loss, gradients), of the setting's Problem

The folder's BASELINE is the loop by hand, over which every time is a ratio. EXPECTED, if it has that, is the file whose
results all others must have, and EXTRA what installs its rivals; left out, they are the loop by hand and "bench".
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from funcga.errors import FuncgaError

KINDS = ("update", "growth", "exactness")


class Contender(NamedTuple):
    """One way to accumulate."""

    key: str  # the name of its file
    name: str
    source: str | None
    against: tuple[str, ...]  # keys of ours
    kinds: tuple[str, ...]
    make: Callable[..., Any]
    workloads: tuple[str, ...] = ()  # empty means all
    hangs: tuple[str, ...] = ()
    tolerance: float | None = None  # None: that of the group


def keys(setting: str) -> list[str]:
    """The files of a setting's contenders, which this does not import."""
    folder = importlib.import_module(f"benchmarks.contenders.{setting}")
    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__))


def baseline(setting: str) -> str:
    """The file of the setting's loop by hand."""
    return importlib.import_module(f"benchmarks.contenders.{setting}").BASELINE


def expected(setting: str) -> str:
    """The file of the setting's contender whose results are the right ones."""
    return str(getattr(importlib.import_module(f"benchmarks.contenders.{setting}"), "EXPECTED", baseline(setting)))


def contenders(setting: str, kind: str, only: tuple[str, ...] = ()) -> tuple[list[Contender], dict[str, str]]:
    """(those that can run, why each of the others cannot).

    `only` names files; the loop by hand, the one that is right and what they are compared with come along.
    """
    present, always = keys(setting), {baseline(setting), expected(setting)}
    found, left_out = _installed(setting, [k for k in present if not only or k in always.union(only)])
    more = {key for c in found if c.key in only for key in c.against} - {c.key for c in found}
    rest, missing = _installed(setting, sorted(more))
    return sorted((c for c in found + rest if kind in c.kinds), key=lambda c: c.key), left_out | missing


def _installed(setting: str, wanted: list[str]) -> tuple[list[Contender], dict[str, str]]:
    found, left_out = [], {}
    for key in wanted:
        try:
            found.append(_imported(setting, key))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("benchmarks", "funcga", "torch_backend", "jax_backend"):
                raise
            left_out[key] = f"{error.name} is not installed: pip install -e '.[{_extra(setting)}]'"
    return found, left_out


def _extra(setting: str) -> str:
    """What installs a setting's rivals."""
    return str(getattr(importlib.import_module(f"benchmarks.contenders.{setting}"), "EXTRA", "bench"))


_PARTS = ("NAME", "SOURCE", "AGAINST", "make")


def _imported(setting: str, key: str) -> Contender:
    module = importlib.import_module(f"benchmarks.contenders.{setting}.{key}")
    if missing := [name for name in _PARTS if not hasattr(module, name)]:
        raise FuncgaError(
            f"benchmarks/contenders/{setting}/{key}.py has no {' and no '.join(missing)}: a contender is NAME, SOURCE, "
            "AGAINST and make, as benchmarks/registry.py says."
        )
    against = (module.AGAINST,) if isinstance(module.AGAINST, str) else tuple(module.AGAINST or ())
    kinds, workloads, hangs = (getattr(module, name, ()) for name in ("KINDS", "WORKLOADS", "HANGS"))
    tolerance = getattr(module, "TOLERANCE", None)
    return Contender(key, module.NAME, module.SOURCE, against, kinds or KINDS, module.make, workloads, hangs, tolerance)
