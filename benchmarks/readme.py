"""The parts of the README and of the documentation with figures, between markers: what committed results render to."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import standing, tables
from benchmarks.comparison import Figures
from benchmarks.pictures import draw_summary
from benchmarks.results import ROOT, Results, loaded
from benchmarks.standing import Pair
from benchmarks.wording import framework, setting, workload
from funcga.errors import FuncgaError

README, DOCS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
COMMITTED = ROOT / "benchmarks" / "results" / "cpu.json"
COUPLED = ROOT / "benchmarks" / "results" / "cpu-coupled.json"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"
COUPLED_MARKERS = "<!-- coupled -->", "<!-- /coupled -->"
LARGE = ROOT / "benchmarks" / "results" / "cpu-large.json"
LARGE_MARKERS = "<!-- large -->", "<!-- /large -->"


def rewrite() -> int:
    """0; the README and the documentation say what the committed results say. Raises FuncgaError if there are none."""
    results, coupled, large = _committed("full", COMMITTED), _committed("coupled", COUPLED), _committed("large", LARGE)
    README.write_text(replaced(README.read_text(), summary(results, large)))
    draw_summary([*standing.pairs(results), *standing.pairs(large)], COMMITTED.with_name("cpu-summary.png"))
    DOCS.write_text(documented(DOCS.read_text(), results, coupled, large))
    return 0


def _committed(mode: str, file: Path) -> Results:
    if not file.exists():
        name = file.relative_to(ROOT)
        raise FuncgaError(f"--readme: there is no {name}. Measure first: python -m benchmarks --{mode} --out {name}")
    return loaded(file)


def documented(text: str, results: Results, coupled: Results, large: Results) -> str:
    """The page of benchmarks with the figures of all files."""
    text = replaced(replaced(text, markdown(results)), coupled_markdown(coupled), COUPLED_MARKERS)
    return replaced(text, large_markdown(large), LARGE_MARKERS)


def replaced(text: str, part: str, markers: tuple[str, str] = (BEGIN, END)) -> str:
    """The text with another part between the markers. Raises FuncgaError if it has no markers, or has them twice."""
    begin, end = markers
    if text.count(begin) != 1 or text.count(end) != 1:
        raise FuncgaError(f"--readme: the file has to have {begin} and {end} once each, around what is written.")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}"


# Whose gradients the README shows, by name.
_RIGHT = ("funcga", "a `.backward()` loop", "Accelerate, `accumulate`", "DDP, `no_sync`", "`optax.MultiSteps`")


def summary(results: Results, large: Results | None = None) -> str:
    """What the README shows: a row for the best-known rival of each setting, and who is right."""
    rows = []
    for pair in standing.best_known([*standing.pairs(results), *(standing.pairs(large) if large else ())]):
        name = f"{setting(pair.setting, pair.ranks)}: {pair.rival_name}"
        peak = "" if pair.peak is None else _bold(f"{pair.peak:.2f}", pair.behind_in_bytes)
        rows.append([name, workload(pair.workload), _bold(f"{pair.time[1]:.2f}", pair.behind_in_time), peak])
    who = tables.exactness(results)
    right = [row for row in who.rows if row[0].partition(": ")[2] in _RIGHT]
    parts = []
    if rows:
        parts.append(
            "![Time and bytes of funcga, where the best-known alternative is 1](benchmarks/results/cpu-summary.png)"
        )
        parts.append(_table(["funcga over", "on", "time", "bytes at the peak"], rows))
    if right:
        parts.append(
            f"The largest error, relative to the largest element of the true gradient:\n\n{_table(who.headings, right)}"
        )
    return "\n\n".join(parts)


def markdown(results: Results) -> str:
    """What stands between the markers."""
    pairs = standing.pairs(results)
    settings = list(dict.fromkeys(pair.setting for pair in pairs))
    who = tables.exactness(results)
    parts = [
        _about(results),
        *map(_pictures, ("torch", "JAX")),
        *(_ratios(key, [pair for pair in pairs if pair.setting == key]) for key in settings),
        *([_sent(results)] if _sendings(results) else []),
        *([f"**{who.title}.**\n\n{_table(who.headings, who.rows)}"] if who.rows else []),
        *([_growth(results)] if standing.growth(results) else []),
        *map(_imports, standing.of_kind(results, "imports").values()),
        _behind(pairs),
    ]
    return "\n\n".join(parts)


def _pictures(name: str) -> str:
    of = f"../benchmarks/results/cpu-{name.lower()}"
    return (
        f"![{name}: ratios of time and of peak bytes]({of}.png)\n\n"
        f"![{name}: how time and peak bytes grow]({of}-growth.png)"
    )


def coupled_markdown(results: Results) -> str:
    """The same for losses over the whole batch: on what it was measured, the ratios, and who is right."""
    pairs, who = standing.pairs(results), tables.exactness(results)
    ratios = [_ratios("torch_coupled", pairs)] if pairs else []
    right = [f"**{who.title}**\n\n{_table(who.headings, who.rows)}"] if who.rows else []
    return "\n\n".join([_measured_on(results, COUPLED), *ratios, *right])


def large_markdown(results: Results) -> str:
    """The same for large weights."""
    picture = "![ratios of time and of peak bytes with large weights](../benchmarks/results/cpu-large-torch.png)"
    return "\n\n".join([_measured_on(results, LARGE), picture, _ratios("torch", standing.pairs(results))])


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _measured_on(results: Results, file: Path) -> str:
    machine, versions = results.machine, {name: text.split(" (")[0] for name, text in results.versions.items()}
    days = sorted({figures["when"][:10] for figures in results.cases.values()})
    when = f"{days[0]} to {days[-1]}" if len(days) > 1 else days[0]
    where = [machine["processor"], f"{machine['cores']} cores", f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory"]
    where += [machine["system"], *([machine["accelerator"]] if machine["accelerator"] else [])]
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{', '.join(where)}; {when}; {names}; [all figures](../{file.relative_to(ROOT)})."


def _about(results: Results) -> str:
    return (
        f"{_measured_on(results, COMMITTED)}\n"
        "Each cell has two ratios of funcga to the other tool: the time of an update, and the bytes at the peak.\n"
        "A ratio below 1 means that funcga is faster, or needs fewer bytes. The ratio of times is a median over\n"
        "rounds in which all contenders take turns in one process ([method](../benchmarks/measure.py)). A ratio is\n"
        "in **bold** where funcga is behind: slower in three quarters of the rounds, or with more than "
        f"{standing.MORE_BYTES}\ntimes the bytes. "
        "Each contender is configured as its documentation recommends\n"
        "([all of them](../benchmarks/contenders)), and has computed the same gradients before it was timed."
    )


def _ratios(key: str, pairs: Sequence[Pair]) -> str:
    """The table of a setting: a rival, what of ours it is compared with if that is more than one, and the workloads."""
    workloads = list(dict.fromkeys(pair.workload for pair in pairs))
    found = {(pair.rival, pair.ours, pair.workload): pair for pair in pairs}
    names = {(pair.rival, pair.ours): (pair.rival_name, pair.ours_name) for pair in pairs}
    several = len({pair.ours for pair in pairs}) > 1
    rows = [
        [*(names[one] if several else names[one][:1]), *(_cell(found.get((*one, each))) for each in workloads)]
        for one in names
    ]
    headings = ["against", *(["with"] if several else []), *(f"{workload(each)}: time, bytes" for each in workloads)]
    return f"**{setting(key, pairs[0].ranks)}**\n\n{_table(headings, rows)}"


def _cell(pair: Pair | None) -> str:
    if pair is None:
        return ""
    time = _bold(f"{pair.time[1]:.2f}", pair.behind_in_time)
    return time if pair.peak is None else f"{time}, {_bold(f'{pair.peak:.2f}', pair.behind_in_bytes)}"


def _bold(text: str, so: bool) -> str:
    return f"**{text}**" if so else text


def _sendings(results: Results) -> dict[tuple[str, str], dict[str, str]]:
    """What each contender among replicas sends in an update, by workload."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for figures in standing.of_kind(results, "update").values():
        case = figures["case"]
        for own in standing.in_order(figures["contenders"]).values():
            if case["ranks"] > 1 and own.get("wire_bytes") is not None:
                cell = f"{own['collectives']:,}; {own['wire_bytes'] / figures['parameter_bytes']:.4g}"
                found.setdefault((setting(case["setting"], case["ranks"]), own["name"]), {})[case["workload"]] = cell
    return found


def _sent(results: Results) -> str:
    found = _sendings(results)
    workloads = list(dict.fromkeys(each for cells in found.values() for each in cells))
    rows = [
        [f"{where}: {name}", *(cells.get(each, "") for each in workloads)] for (where, name), cells in found.items()
    ]
    title = (
        "**What replicas send per update**: the number of collectives; the bytes, relative to those of the gradient."
    )
    return f"{title}\n\n{_table(['', *map(workload, workloads)], rows)}"


def _growth(results: Results) -> str:
    """A line for each axis: the ratio of time to the loop by hand, and ours at the peak, from its first to its last."""
    rows = []
    for (axis, key), points in standing.growth(results).items():
        ratios = [
            f"{ratio[1]:.2f}" for p in points for own in p.contenders.values() for ratio in own["ours_over"].values()
        ]
        peaks = [own["peak_bytes"] / p.parameter_bytes for p in points for own in p.contenders.values()
                 if not own["against"] and own.get("peak_bytes") is not None]  # fmt: skip
        values = ", ".join(f"{point.value:,}" for point in points)
        bytes_ = ", ".join(f"{peak:.3g}" for peak in peaks)
        rows.append([f"{axis}, {framework(key)}", values, ", ".join(ratios), bytes_])
    headings = ["", "from, to", "time, relative to the loop by hand", "peak bytes, relative to the parameters"]
    return f"**How it grows.**\n\n{_table(headings, rows)}"


def _imports(figures: Figures) -> str:
    rows = [
        [f"`{own['name']}`", tables.seconds(own["seconds"][1]), _more(own), f"{own['modules']:,}"]
        for own in figures["contenders"].values()
    ]
    return f"**Imports**, each in a fresh interpreter.\n\n{_table(['', 'time', 'added by funcga', 'modules'], rows)}"


def _more(own: Figures) -> str:
    return tables.seconds(own["more_seconds"][1]) if "more_seconds" in own else ""


def _behind(pairs: Sequence[Pair]) -> str:
    count = len(standing.lines(pairs))
    return f"**Where funcga is behind**: in {count or 'none'} of {len(pairs)} comparisons" + (
        ". `python -m benchmarks --show benchmarks/results/cpu.json` lists them with their quartiles." if count else "."
    )
