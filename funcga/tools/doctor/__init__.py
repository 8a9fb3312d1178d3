"""`watch`: a training loop of torch as it is, and how its windows weigh what they add up.

- `loop_in_torch.py` sees what calls backward, clips, scales, steps and erases, and in which line of
  the program; `graph_in_torch.py` reads from the graph of a loss how it weighs its targets.
- `ledger_in_torch.py`: with which factor each micro-batch reaches the step, from looks at a few
  elements of the gradients; and what is done after each of them, but belongs to the step.
- `causes.py`: what is wrong; texts are in `causes.toml`.

The package can be removed. It uses `Cause` of `verify` and the tables of reports.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from os import PathLike
from typing import Any

from funcga._backend.dispatch import load
from funcga.tools.doctor.causes import NOTES, judge, off
from funcga.tools.doctor.windows import Window
from funcga.tools.reports.tables import bars, json_text, new_figure, text_table
from funcga.tools.verify import cause_lines, wrapped
from funcga.tools.verify.causes import Cause, cause, note, texts

ROWS = 8  # of a table


@dataclass(frozen=True)
class LineCause(Cause):
    """A cause, and the line of the program that it is about.

    Attributes:
        line: Its file, its number and what it says, such as "train.py:142  loss.backward()"; "" if
            it is not known. What to write instead is `fix`.
    """

    line: str = ""


class watch:  # noqa: N801 - as torch.no_grad, it stands behind `with`
    """Watches a training loop of torch as it is, and says how its windows weigh their targets.

    While the `with` block is open, calls of `backward`, of torch's functions that clip, of
    GradScaler, `zero_grad` and `optimizer.step()` are seen, and those of torch's schedules and
    AveragedModel. The graph of each loss says how it weighs its targets; some thousand elements of
    `.grad`, before and after each event, say with which factor a micro-batch reaches the step.
    Nothing is computed a second time, and the run is the same to the bit. It waits for a device at
    the step only. An error of its own ends the watch, never the run.

    The names of the causes: "uneven tokens", "wrong weight", "not divided", "divided twice",
    "short window", "divided by another n", "stepped too often", "another count", "erased", "left
    over", "clipped inside the window", "scaled inside the window", "clipped before unscaling",
    "never unscaled", "never stepped", "in no optimizer", and with `across` "ranks weigh the same".

    `ok` is None where it cannot tell, and a note says why: compiled or fused losses, losses that
    compare rows, functions of your own in the graph, hooks that may change gradients, elements that
    are hidden below a loss, weights of your own.

    Args:
        model: The module that is trained, such as a ModuleList of several; default: what
            optimizers have.
        *optimizers: Those that step it; default: all that have parameters of it.
        optimizer: The same for one of them, by name.
        across: A process group, or "world" for all processes: they gather some numbers at each
            step, so all of them must watch, and step equally often.
        steps: How many steps are watched; 0 for all of them.
        on_step: A function of the watch, called after each step that is watched. After the last of
            `steps` it has what was found, while the run goes on. An error in it ends the watch.

    Raises:
        FuncgaError: If model is no module, or an optimizer is none.

    Example:
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with funcga.watch(model, optimizer) as watched:
        ...     for x in torch.ones(4, 2, 3):
        ...         (model(x).mean() / 4).backward()
        ...     optimizer.step()
        >>> watched.ok
        True

    Attributes:
        causes: What is wrong, the worst first: `.name`, `.what`, the `.line` of your program that
            it is about, the line that is the `.fix`, and `.evidence`.
        notes: Further remarks, such as what cannot be seen, or belongs to a step and is done after
            each micro-batch.
        windows: A Window for each step, in their order: its micro-batches, their `.shares` in the
            gradient beside those in the targets, the `.factor` between what the optimizer got and
            the mean over the window, `.ok`, and the names of its `.causes`.
    """

    def __init__(
        self,
        model: Any = None,
        *optimizers: Any,
        optimizer: Any = None,
        across: Any = None,
        steps: int = 1000,
        on_step: Callable[["watch"], object] | None = None,
    ) -> None:
        load("torch")  # says how to install it if it is missing
        from funcga.tools.doctor.loop_in_torch import Loop

        given = filter(None, (*optimizers, optimizer))
        self._loop = Loop(model, [*given], across, steps, self._after_step)
        self._on_step = on_step
        self.windows: list[Window] = self._loop.windows
        # What is found when the watch ends, by `_judge`.
        self._is_judged = False
        self.causes: tuple[LineCause, ...] = ()
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> "watch":
        self._loop.open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A program may end with sys.exit(0) as well.
        is_whole = error is None or (isinstance(error, SystemExit) and not error.code)
        self._loop.close(is_whole, "" if is_whole else repr(error))
        self._judge()

    def _after_step(self) -> None:
        if not self._loop.steps:
            self._judge()
        if self._on_step is not None:
            self._on_step(self)

    def _judge(self) -> None:
        if self._is_judged:
            return
        found = [*(self._loop.quietly(judge, self.windows) or ()), *self._loop.findings]
        self.causes = tuple(_cause(name, words) for name, words in found if name not in NOTES)
        self.notes = tuple(note(name, __name__, **words) for name, words in found if name in NOTES)
        self._is_judged = True

    @property
    def ok(self) -> bool | None:
        """True if every window was exact, False if one was not, and None if that cannot be told,
        or not yet.
        """
        if self.causes:
            return False
        known = [window.ok for window in self.windows if window.is_step]
        is_told = self._is_judged and not self._loop.is_blind
        return True if is_told and known and all(known) else None

    def assert_exact(self) -> None:
        """Raises an error unless every window was exact.

        Raises:
            AssertionError: If one was not, or if that cannot be told, with the text of the report.
        """
        if not self.ok:
            raise AssertionError(str(self))

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite is null."""
        windows = [
            asdict(replace(window, parts=[], findings=[]))
            | {"ok": window.ok, "micro_batches": len(window.parts)}
            for window in self.windows
        ]
        causes = [asdict(cause) for cause in self.causes]
        return json_text({"ok": self.ok, "causes": causes, "notes": self.notes, "windows": windows})

    def plot(self, file: str | PathLike[str]) -> None:
        """Writes a picture of the shares in the window that is furthest off, to a .png, .svg or
        .pdf file. It needs matplotlib.
        """
        worst = max(self.windows, key=off, default=Window())
        figure = new_figure(8, 4)
        axes = figure.subplots()
        axes.bar(range(len(worst.shares)), worst.shares, label="share of the gradient")
        axes.plot(worst.of_targets, "k_", label="share of the targets")
        axes.set(xlabel="micro-batch", title=", ".join(_row(worst)[::5]))
        axes.legend()
        figure.savefig(file, dpi=120)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _cause(name: str, words: dict[str, object]) -> LineCause:
    """A cause, with the line of the event that its texts name."""
    line = words.get(texts(__name__)[name].get("at", "backward"), "")
    return LineCause(**vars(cause(name, __name__, **words)), line=str(line))


# --- the text


def _lines(watched: watch) -> Iterator[str]:
    causes, windows = watched.causes, watched.windows
    steps = sum(window.is_step for window in windows)
    yield {
        True: f"Every target weighs the same in each of the steps. Steps: {steps}.",
        False: f"This loop is NOT exact. Steps: {steps}, causes: {len(causes)}.",
        None: f"Whether this loop is exact cannot be told. Steps: {steps}.",
    }[watched.ok]
    for number, each in enumerate(causes, 1):
        yield from cause_lines(number, each, each.line)
    if windows:
        # The first, and those that differ from the one before.
        alike = groupby(windows, lambda each: (each.causes, each.unknown, len(each.parts)))
        shown = [next(group) for _, group in alike][:ROWS]
        yield ""
        yield from text_table([_HEADINGS, *map(_row, shown)]).split("\n")
        if len(windows) > len(shown):
            yield f"and {len(windows) - len(shown)} more"
    for text in watched.notes:
        yield from wrapped(text, "Note: ")


_HEADINGS = ["window", "optimizer", "micro-batches", "targets", "gradient", "factor", ""]


def _row(window: Window) -> list[str]:
    verdict = ", ".join(window.causes) or (f"? {window.unknown}" if window.unknown else "exact")
    return [
        str(window.number),
        window.optimizer,
        str(len(window.parts)),
        bars(window.of_targets),
        bars(window.shares),
        "" if math.isnan(window.factor) else f"{window.factor:.4g}",
        verdict,
    ]
