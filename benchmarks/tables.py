"""The tables of results: rows of text, for the terminal and for whoever writes them elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks import standing
from benchmarks.comparison import Figures
from benchmarks.results import Results
from benchmarks.wording import setting

EXACT, EXACT_BFLOAT16 = 1e-5, 2.0**-8  # of float32 with some rounding; of one rounding to bfloat16

SIGN = "!"

_WIDTH = 150


class Table(NamedTuple):
    """A title, headings, and rows of as many cells; `marked` are the numbers of the rows where funcga is behind."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    marked: frozenset[int] = frozenset()


def show(results: Results, console: Console) -> None:
    """None; prints all the tables, what was left out, and where funcga is behind."""
    wide = Console(file=console.file, width=max(console.width, _WIDTH))  # a narrow terminal wraps whole lines
    for table in tables(results):
        wide.print(_rich(table))
        wide.print()
    for reason, cases in left_out(results).items():
        console.print(Text(f"LEFT OUT: {reason} ({', '.join(cases)})", style="bold red"), soft_wrap=True)
    pairs = standing.pairs(results)
    lines = standing.lines(pairs)
    if pairs:
        console.print(f"[bold]Where funcga is behind: {len(lines) or 'none'} of {len(pairs)} comparisons[/]")
        if results.mode == "quick":
            console.print("The times are of a quick run, too short to judge by.")
    for line in lines:
        console.print(f"{SIGN} {line}", markup=False, soft_wrap=True)


def _rich(table: Table) -> RichTable:
    made = RichTable(title=Text(table.title), title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, heading in enumerate(table.headings):
        made.add_column(heading, justify="left" if place == 0 else "right", no_wrap=place > 0)
    for place, row in enumerate(table.rows):
        made.add_row(*map(Text, row), style="bold red" if place in table.marked else "")
    return made


def left_out(results: Results) -> dict[str, list[str]]:
    """The cases of each reason why a contender has not taken part."""
    found: dict[str, list[str]] = {}
    for name, figures in results.cases.items():
        for key, reason in figures["left_out"].items():
            found.setdefault(f"{key}: {reason}", []).append(name)
    return found


def tables(results: Results) -> list[Table]:
    """A table for each workload, each axis of growth, who is right, and imports: those of which there are figures."""
    updates = [_update(name, figures) for name, figures in standing.of_kind(results, "update").items()]
    grown = [_growth(axis, setting, points) for (axis, setting), points in standing.growth(results).items()]
    who, imported = exactness(results), standing.of_kind(results, "imports").values()
    return [*updates, *grown, *([who] if who.rows else []), *map(_imports, imported)]


class _Column(NamedTuple):
    heading: str
    cell: Callable[[Figures, Figures], str]  # of the case's figures and of the contender's; "" if there is none


def _per(key: str, count: str) -> Callable[[Figures, Figures], str]:
    return lambda figures, own: "" if own.get(key) is None else f"{own[key] / figures[count]:.3g}"


def _counted(key: str) -> Callable[[Figures, Figures], str]:
    return lambda figures, own: "" if own.get(key) is None else f"{own[key]:,.10g}"


def _seconds_of(key: str) -> Callable[[Figures, Figures], str]:
    return lambda figures, own: "" if own.get(key) is None else seconds(own[key])


_COLUMNS = (
    _Column("an update", lambda figures, own: seconds(own["seconds"][1])),
    _Column("over\nthe loop", lambda figures, own: spread(own["over_loop"])),
    _Column("ours\nover it", lambda figures, own: _ours_over(own)),
    _Column("peak /\nparameters", _per("peak_bytes", "parameter_bytes")),
    _Column("ours /\nits peak", lambda figures, own: _peaks(figures, own)),
    _Column("allocations", _counted("allocations")),
    _Column("ops", _counted("ops")),
    _Column("compiling", _seconds_of("compile_seconds")),
    _Column("compiles", _counted("compiles")),
    _Column("traces of\nthe loss", _counted("traces")),
    _Column("collectives", _counted("collectives")),
    _Column("sent /\ngradient", _per("wire_bytes", "parameter_bytes")),
    _Column("accessed /\nparameters", _per("bytes_accessed", "parameter_bytes")),
)


def _ours_over(own: Figures) -> str:
    several = len(own["ours_over"]) > 1
    return "\n".join((f"{ours} " if several else "") + spread(found) for ours, found in own["ours_over"].items())


def _peaks(figures: Figures, own: Figures) -> str:
    ratios = (standing.peak_ratio(figures["contenders"][ours], own) for ours in own["ours_over"])
    return "\n".join("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)


def _update(name: str, figures: Figures) -> Table:
    case = figures["case"]
    behind = {pair.rival for pair in standing.case_pairs(name, figures) if pair.behind}
    everyone = standing.in_order(figures["contenders"])
    columns = [c for c in _COLUMNS if {c.cell(figures, own).strip() for own in everyone.values()} - {"", "0"}]
    rows = [
        [f"{SIGN} {own['name']}" if key in behind else own["name"], *(c.cell(figures, own) for c in columns)]
        for key, own in everyone.items()
    ]
    ranks = f", {case['ranks']} ranks" if case["ranks"] > 1 else ""
    title = (
        f"{name}: {figures['n']} micro-batches{ranks}, {figures['leaves']} leaves, "
        f"{figures['parameters']:,} parameters, {figures['rounds']} rounds"
    )
    marked = frozenset(place for place, key in enumerate(everyone) if key in behind)
    return Table(title, ["", *(column.heading for column in columns)], rows, marked)


def _growth(axis: str, setting: str, points: Sequence[standing.Point]) -> Table:
    keys = list(dict.fromkeys(key for point in points for key in point.contenders))
    names = {key: point.contenders[key]["name"] for point in points for key in point.contenders}
    headings = [axis]
    for key in keys:
        headings += [f"{names[key]}:\na micro-batch", "its peak /\nparameters"]
    rows = []
    for point in points:
        own = [point.contenders.get(key) for key in keys]
        cells = [cell for figures in own for cell in _grown(point, figures)]
        ratio = next((spread(found) for figures in own if figures for found in figures["ours_over"].values()), "")
        rows.append([f"{point.value:,}", *cells, ratio])
    return Table(f"growth with {axis}: {setting}", [*headings, "ours over the loop"], rows)


def _grown(point: standing.Point, own: Figures | None) -> Iterable[str]:
    if own is None:
        return "", ""
    peak = own.get("peak_bytes")
    return seconds(
        own["seconds"][1] / point.microbatches
    ), "" if peak is None else f"{peak / point.parameter_bytes:.3g}"


def exactness(results: Results) -> Table:
    """Who is right: each contender by each of the ways in which a loop goes wrong."""
    cases = standing.of_kind(results, "exactness")
    everyone = [
        (setting(f["case"]["setting"], f["case"]["ranks"]), own)
        for f in cases.values()
        for own in standing.in_order(f["contenders"]).values()
    ]
    ways = list(dict.fromkeys(way for _, own in everyone for way in own["errors"]))
    rows = [[f"{where}: {own['name']}", *(verdict(own, way) for way in ways)] for where, own in everyone]
    return Table(
        "Who is right: the largest error, relative to the largest element of the true gradient", ["", *ways], rows
    )


def verdict(own: Figures, way: str) -> str:
    """What became of a contender: exact, its error in percent, refused, hangs, or does not apply."""
    if refusal := own.get("refused", {}).get(way):
        return "hangs" if "wait for each other" in refusal else "refused"
    error = own["errors"].get(way)
    if error is None:
        return "does not apply"
    if error < (EXACT_BFLOAT16 if way.startswith("bfloat16") else EXACT):
        return "exact"
    return f"{100 * error:.2g} %" if error < 0.995 else f"{100 * error:.0f} %"


def _imports(figures: Figures) -> Table:
    rows = [
        [own["name"], seconds(own["seconds"][1]), *_more(own), f"{own['modules']:,}"]
        for own in figures["contenders"].values()
    ]
    headings = ["", "time", "quartiles", "more than without", "modules"]
    return Table(f"imports, each in a fresh interpreter, {figures['rounds']} rounds", headings, rows)


def _more(own: Figures) -> Iterable[str]:
    low, _, high = own["seconds"]
    more = own.get("more_seconds")
    return f"{seconds(low)} to {seconds(high)}", "" if more is None else seconds(more[1])


def seconds(value: float) -> str:
    """A time with three figures and its unit."""
    sizes = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    size, unit = next((each for each in sizes if abs(value) >= each[0]), sizes[-1])
    return f"{value / size:.3g} {unit}"


def spread(found: Any) -> str:
    """A median with its quartiles."""
    low, median, high = found
    return f"{median:.2f} ({low:.2f}-{high:.2f})"
