"""Where funcga stands: each rival with what of ours it is compared with, on each workload."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.comparison import Figures
from benchmarks.measure import Quartiles
from benchmarks.results import Results

MORE_BYTES = 1.005  # so much more at the peak is behind

_PARTS = re.compile(r"growth/(?P<axis>[^/]+)/(?P<setting>[^/]+)/(?P<value>\d+)")


class Pair(NamedTuple):
    """Ours over a rival's: quartiles of the time of an update, and the peak bytes, None if they are not counted."""

    case: str
    setting: str
    ranks: int
    workload: str
    rival: str
    ours: str
    rival_name: str
    ours_name: str
    time: Quartiles
    peak: float | None

    @property
    def behind_in_time(self) -> bool:
        """Three quarters of the rounds were slower, and so more than chance."""
        return min(self.time[0], self.time[1]) > 1

    @property
    def behind_in_bytes(self) -> bool:
        """More bytes at the peak."""
        return self.peak is not None and self.peak > MORE_BYTES

    @property
    def behind(self) -> bool:
        """In time, or in bytes."""
        return self.behind_in_time or self.behind_in_bytes


class Point(NamedTuple):
    """One case of growth: the value along the axis, and the figures of ours and of the loop by hand, by their files."""

    value: int
    microbatches: int
    parameter_bytes: int
    contenders: dict[str, Any]


def of_kind(results: Results, kind: str) -> dict[str, Figures]:
    """The figures of the cases of a kind, by name."""
    return {name: figures for name, figures in results.cases.items() if figures["case"]["kind"] == kind}


def pairs(results: Results) -> list[Pair]:
    """All the pairs of the cases of one update."""
    return [pair for name, figures in of_kind(results, "update").items() for pair in case_pairs(name, figures)]


# The rows of the README: the setting, its best-known rival, what of ours that is compared with, and on what.
_BEST_KNOWN = (
    ("torch", "loop", "funcga", "vocabulary"), ("torch", "loop", "funcga", "transformer"),
    ("torch", "functional_loop", "funcga", "transformer"), ("torch_ranks", "ddp", "funcga", "transformer"),
    ("jax", "scan", "funcga", "transformer"), ("jax_optimizer", "optax_multi_steps", "funcga_update", "matrices"),
)  # fmt: skip


def best_known(pairs: Iterable[Pair]) -> list[Pair]:
    """The pair of each row, on the workload that is named there, or on what there is."""
    by_row: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in pairs:
        by_row.setdefault((pair.setting, pair.rival, pair.ours), []).append(pair)
    rows = [(by_row[(*row,)], workload) for *row, workload in _BEST_KNOWN if (*row,) in by_row]
    best = lambda there, wanted: min(there, key=lambda pair: (pair.workload != wanted, pair.workload != "transformer"))
    return list(dict.fromkeys(best(there, wanted) for there, wanted in rows))


def case_pairs(name: str, figures: Figures) -> Iterable[Pair]:
    """The pairs of one case."""
    case, contenders = figures["case"], in_order(figures["contenders"])
    for rival, their in contenders.items():
        for ours, (low, median, high) in their["ours_over"].items():
            yield Pair(
                name, case["setting"], case["ranks"], case["workload"], rival, ours, their["name"],
                contenders[ours]["name"], (low, median, high), peak_ratio(contenders[ours], their),
            )  # fmt: skip


def in_order(contenders: dict[str, Any]) -> dict[str, Any]:
    """Ours, then the loop by hand, then the rivals."""
    return dict(sorted(contenders.items(), key=lambda item: _place(item[1])))


def _place(own: Figures) -> tuple[bool, bool]:
    return bool(own.get("against")), [*own.get("over_loop", ())] != [1.0, 1.0, 1.0]


def peak_ratio(ours: Figures, theirs: Figures) -> float | None:
    """The peak bytes of one contender over those of another; None where they were not counted."""
    one, other = ours.get("peak_bytes"), theirs.get("peak_bytes")
    if one is None or other is None:
        return None
    return 1.0 if one == other else one / max(other, 1)


def growth(results: Results) -> dict[tuple[str, str], list[Point]]:
    """The points of each (axis, setting), from the lowest value on."""
    found: dict[tuple[str, str], list[Point]] = {}
    for name, figures in of_kind(results, "growth").items():
        if parts := _PARTS.fullmatch(name):
            value = int(parts["value"])
            point = Point(value, figures["n"], figures["parameter_bytes"], figures["contenders"])
            found.setdefault((parts["axis"], parts["setting"]), []).append(point)
    return {key: sorted(points, key=lambda point: point.value) for key, points in found.items()}


def lines(pairs: Iterable[Pair]) -> list[str]:
    """Where funcga is behind, a line each."""
    return [
        f"{pair.case}: {pair.ours_name} against {pair.rival_name}: {' and '.join(_reasons(pair))}"
        for pair in pairs
        if pair.behind
    ]


def _reasons(pair: Pair) -> Iterable[str]:
    if pair.behind_in_time:
        low, median, high = pair.time
        yield f"{median:.2f} times the time (quartiles {low:.2f} to {high:.2f})"
    if pair.behind_in_bytes:
        yield f"{pair.peak:.2f} times the peak bytes"
