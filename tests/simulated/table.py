"""The table of docs/concepts/cost.md: kernels that features launch beside the loop by hand, and waits of the host."""

from pathlib import Path
from typing import NamedTuple

from tests import simulated
from tests.processes import processes
from tests.simulated.features import FEATURES, OPTIONS, UPDATES, WINDOWS, Feature, Problem, merged

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "cost.md"
BEGIN, END = "<!-- python -m tests.simulated -->\n", "<!-- end -->\n"


class Budget(NamedTuple):
    """Kernels more than the loop by hand launches: for each leaf of a micro-batch, each micro-batch, each window."""

    per_leaf: float
    per_microbatch: float
    per_window: float
    waits: int  # of the host, in a window


def events_of(step, calls=2):
    """What happens in a call of a step that has been called before."""
    for _ in range(calls):
        step()
    with simulated.Events() as events:
        step()
    return events


def more(feature: Feature, n: int, layers: int) -> tuple[int, int]:
    """(kernels more than by hand, waits) in a window of n micro-batches and 2 * layers leaves."""
    problem = Problem("cuda", n, layers, feature.dtype)
    events = events_of(feature.step(problem))
    return events.launches - events_of(feature.loop(problem)).launches, events.waits


def budget(feature: Feature) -> Budget:
    """From windows of 4 and 8 micro-batches, with 8 and 16 leaves; the numbers of a window are those of 8 leaves."""
    launches = {(n, layers): more(feature, n, layers) for n in (4, 8) for layers in (4, 8)}
    slopes = [(launches[8, layers][0] - launches[4, layers][0]) / 4 for layers in (4, 8)]
    per_leaf = (slopes[1] - slopes[0]) / 8
    per_microbatch = slopes[0] - 8 * per_leaf
    return Budget(per_leaf, per_microbatch, launches[4, 4][0] - 4 * slopes[0], launches[8, 4][1])


def _waits_across(group, names):
    return [events_of(merged(name, group, Problem("cuda", 4))).waits for name in names]


def waits_across():
    """The waits of a window of each feature that two replicas merge."""
    waits = processes(2, "simulated").run(_waits_across, [*OPTIONS])
    assert waits[0] == waits[1]
    return dict(zip(OPTIONS, waits[0], strict=True))


def table():
    number = lambda value: f"{value:+.3g}" if value else "0"
    lines = [
        "| launches beyond the loop by hand | for each leaf of a micro-batch | for each micro-batch | for each window | waits |",
        "|---|---|---|---|---|",
    ]
    for name, feature in FEATURES.items():
        *launches, waits = budget(feature)
        lines.append(f"| {name} | {' | '.join(map(number, launches))} | {waits} |")
    lines += ["", "| merged by `across=` | waits in a window |", "|---|---|"]
    lines += [f"| {name} | {waits} |" for name, waits in waits_across().items()]
    lines += ["", "| an update of 8 leaves | launches | waits |", "|---|---|---|"]
    for name, made in UPDATES.items():
        events = events_of(made(Problem("cuda")))
        lines.append(f"| {name} | {events.launches} | {events.waits} |")
    lines += ["", "| a window of 4 micro-steps | waits |", "|---|---|"]
    lines += [f"| {name} | {events_of(made(Problem('cuda'))).waits} |" for name, made in WINDOWS.items()]
    return "\n".join(lines) + "\n"


def with_table(page):
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
