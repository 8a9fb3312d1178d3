"""How time is measured: every contender in turn, in one process, round after round.

A ratio of two contenders is the median of the ratios within a round, with its quartiles: what slows the machine for a
moment slows both. The order of a round is drawn anew from a seed, so that nobody always comes after the same one. There
are as many rounds as fit into the time that is given, at least FEWEST and at most MOST. Python collects its garbage as
it does in use.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

FEWEST, MOST = 5, 301

Quartiles = tuple[float, float, float]


def interleaved(
    steps: Mapping[str, Callable[[], Any]], seconds: float, warm: int = 2, agreed: Callable[[int], int] = int
) -> dict[str, list[float]]:
    """The seconds of each step in each round; `agreed` makes the number of rounds the same for all processes."""
    for _ in range(warm):
        for step in steps.values():
            step()
    gc.collect()
    once = sum(_seconds(step) for step in steps.values())
    rounds = agreed(max(FEWEST, min(MOST, round(seconds / once))))
    draw = random.Random(0)  # of one seed, as ranks take turns together
    times: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(rounds):
        for key in draw.sample(list(steps), len(steps)):
            times[key].append(_seconds(steps[key]))
    return times


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def quartiles(values: list[float]) -> Quartiles:
    """(lower, median, upper)."""
    low, median, high = statistics.quantiles(values, n=4)
    return low, median, high


def ratios(times: Mapping[str, list[float]], one: str, other: str) -> Quartiles:
    """The quartiles of the ratios within a round."""
    return quartiles([a / b for a, b in zip(times[one], times[other], strict=True)])
