"""`watch`: a training loop of torch as it is, and how its windows weigh what they add up.

- `loop_in_torch.py` sees what calls backward, clips, scales and steps, and looks at a few elements
  of the gradients; `graph_in_torch.py` reads from the graph of a loss how it weighs its targets.
- `ledger.py`: with which factor each micro-batch reaches the step.
- `causes.py`: what is wrong; texts are in `causes.toml`.

The package can be removed. It uses `Cause` of `verify` and the tables of reports.
"""

import importlib.resources
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any

from funcga._backend.dispatch import load
from funcga._doctor.causes import NOTES, judge, worst_first
from funcga._doctor.windows import Finding, Window
from funcga._tables import text_table
from funcga._verify import cause_lines, wrapped
from funcga._verify.causes import Cause
from funcga.errors import FuncgaError

if TYPE_CHECKING:
    from funcga._doctor.loop_in_torch import Loop

ROWS, BARS = 8, 16  # rows of a table, and micro-batches of a row


class Watched:
    """A training loop that is watched while a `with` block runs. `str(watched)` is a text to read.

    Attributes:
        windows: A Window for each step, in their order: its micro-batches, their `.shares` in the
            gradient beside those in the targets, the `.factor` between what the optimizer got and
            the mean over the window, `.ok`, and the names of its `.causes`.
    """

    def __init__(self, loop: "Loop") -> None:
        self._loop = loop
        self.windows: list[Window] = loop.windows
        self._judged: tuple[int, list[Finding]] = (-1, [])

    def __enter__(self) -> "Watched":
        self._loop.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.close()

    @property
    def ok(self) -> bool | None:
        """True if every window was exact, False if one was not, and None if that cannot be told."""
        if self.causes:
            return False
        known = [window.ok for window in self.windows if window.is_step]
        return True if known and all(known) and not self._loop.error else None

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What is wrong, the worst first: `.name`, `.what`, the line that is the `.fix`, and
        `.evidence`.
        """
        return tuple(_cause(each) for each in self._findings() if each.name not in NOTES)

    @property
    def notes(self) -> tuple[str, ...]:
        """Further remarks, such as what cannot be seen."""
        found = [_note(each.name, **each.words) for each in self._findings() if each.name in NOTES]
        unknown = {window.unknown: window.number for window in reversed(self.windows)}
        found += [
            f"window {number} cannot be judged: {why}"
            for why, number in unknown.items()
            if why and self.windows[number - 1].is_step
        ]
        if self._loop.error:
            found.append(_note("error", error=self._loop.error))
        if not self._loop.steps:
            found.append(_note("too long"))
        if not any(window.is_step for window in self.windows):
            found.append(_note("nothing"))
        return tuple(found)

    def assert_exact(self) -> None:
        """Raises an error unless every window was exact.

        Raises:
            AssertionError: If one was not, or if that cannot be told, with the text of the report.
        """
        if not self.ok:
            raise AssertionError(str(self))

    def as_dict(self) -> dict[str, object]:
        """The report as dicts, tuples, strings, numbers and None."""
        self._findings()
        windows = [asdict(window) | {"ok": window.ok} for window in self.windows]
        causes = [asdict(cause) for cause in self.causes]
        return {"ok": self.ok, "causes": causes, "notes": self.notes, "windows": windows}

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite is null."""
        return json.dumps(_finite(self.as_dict()), indent=1, allow_nan=False)

    def plot(self, file: str | PathLike[str]) -> None:
        """Writes a picture of each window's factor, and of the worst window's shares, to a .png,
        .svg or .pdf file.

        Raises:
            FuncgaError: If matplotlib is not installed, or cannot write the file.
        """
        from funcga._doctor.picture import draw

        self._findings()
        draw(self.windows, file)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _findings(self) -> list[Finding]:
        """One finding of each name, the worst."""
        if self._judged[0] != len(self.windows):
            judge(self.windows)
            found = [*self._loop.findings(), *worst_first(self.windows)]
            self._judged = (len(self.windows), found)
        return self._judged[1]


def watch(
    model: Any = None, optimizer: Any = None, *, across: Any = None, steps: int = 1000
) -> Watched:
    """Watches a training loop of torch as it is, and says how its windows weigh their targets.

    While the `with` block is open, calls of `backward`, of torch's functions that clip, of
    GradScaler and of `optimizer.step()` are seen. The graph of each loss says how it weighs its
    targets; some thousand elements of `.grad`, before and after each event, say with which factor
    a micro-batch reaches the step. Nothing is computed a second time, and the run is the same to
    the bit. It costs about a millisecond for each call of backward, and waits for a device at the
    step only. An error of its own ends the watch, never the run.

    The names of the causes: "uneven tokens", "wrong weight", "not divided", "divided twice",
    "short window", "divided by another n", "stepped too often", "another count", "erased", "left
    over", "clipped inside the window", "scaled inside the window", "clipped before unscaling",
    "never unscaled", "never stepped", "in no optimizer", and with `across` "ranks weigh the same"
    and "ranks apart".

    It cannot tell what a compiled or fused loss, a function of your own in the graph, or a sum of
    losses with different counts weighs: a note says so, and `ok` is None.

    Args:
        model: The module that is trained, or several; default: whatever an optimizer has.
        optimizer: The one that steps it, or several; default: all that have parameters of it.
        across: A process group, or "world" for all processes: they gather some numbers at each
            step, so all of them must watch, and step equally often.
        steps: How many steps are watched.

    Returns:
        A Watched, which is open inside of `with`.

    Raises:
        FuncgaError: If model, optimizer or steps are none.

    Example:
        >>> with funcga.watch(model, optimizer) as watched:
        ...     train()
        >>> print(watched)
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise FuncgaError(f"steps={steps!r}: it is the number of steps to watch, such as 1000.")
    loop: Loop = load_loop(model, optimizer, across, steps)
    return Watched(loop)


def load_loop(*args: Any) -> "Loop":
    load("torch")  # says how to install it if it is missing
    from funcga._doctor.loop_in_torch import loop

    return loop(*args)


# --- the text


@cache
def _texts() -> dict[str, dict[str, str]]:
    file = importlib.resources.files(__name__) / "causes.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _cause(finding: Finding) -> Cause:
    entry = _texts()[finding.name]
    what, fix, evidence = (
        " ".join(entry[part].split()).format(**finding.words)
        for part in ("what", "fix", "evidence")
    )
    if "window" in finding.words:
        evidence = f"in window {finding.words['window']}, {evidence}"
    return Cause(finding.name, what, fix, evidence)


def _note(name: str, **words: object) -> str:
    return " ".join(_texts()["notes"][name].split()).format(**words)


def _lines(watched: Watched) -> Iterator[str]:
    causes, windows = watched.causes, watched.windows
    steps = sum(window.is_step for window in windows)
    if causes:
        yield (
            f"This loop is NOT exact: {len(causes)} cause{'s' * (len(causes) != 1)} in {steps} "
            f"step{'s' * (steps != 1)}."
        )
    elif watched.ok:
        yield f"This loop is exact: every target weighs the same in each of its {steps} steps."
    else:
        yield f"Whether this loop is exact cannot be told from its {steps} steps."
    for number, cause in enumerate(causes, 1):
        yield from cause_lines(number, cause)
    if windows:
        shown = _shown(windows)
        yield ""
        yield from text_table([_HEADINGS, *map(_row, shown)]).split("\n")
        if len(windows) > len(shown):
            yield f"and {len(windows) - len(shown)} more windows"
    for note in watched.notes:
        yield from wrapped(note, "Note: ")


def _shown(windows: Sequence[Window]) -> list[Window]:
    """The first, and those that differ from the one before."""
    alike = lambda a, b: (
        (a.causes, a.unknown, len(a.coefficients))
        == (
            b.causes,
            b.unknown,
            len(b.coefficients),
        )
    )
    pairs = zip(windows, windows[1:], strict=False)
    others = [after for before, after in pairs if not alike(before, after)]
    return [windows[0], *others][:ROWS]


_HEADINGS = ["window", "optimizer", "micro-batches", "targets", "gradient", "factor", ""]


def _row(window: Window) -> list[str]:
    verdict = ", ".join(window.causes) or (f"? {window.unknown}" if window.unknown else "exact")
    return [
        str(window.number),
        window.optimizer,
        str(len(window.coefficients)),
        _bars(window.of_targets),
        _bars(window.shares),
        "" if math.isnan(window.factor) else f"{window.factor:.4g}",
        verdict,
    ]


def _bars(shares: Sequence[float]) -> str:
    """A bar for each share, the largest as high as a letter."""
    shown = shares[:BARS]
    most = max(shown, default=0.0)
    bars = "".join("▁▂▃▄▅▆▇█"[round(7 * share / most)] if share > 0 else "_" for share in shown)
    return bars + "…" * (len(shares) > BARS)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
