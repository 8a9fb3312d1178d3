"""`funcga.pack` against the best known ways to pack rows: `python -m benchmarks.packing` prints the table of its page.

Each rival takes as many micro-batches as it needs, a multiple of the replicas, so that none exceeds the budget. All
deal micro-batches to replicas as `pack` does, so that what differs is which rows go together.
"""

import ast
import heapq
import io
import random
import sysconfig
import time
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import funcga

Bins = list[list[int]]
REPLICAS = 8


def first_fit_decreasing(lengths: list[int], budget: int, replicas: int) -> list[Bins]:
    """Longest first, into the first micro-batch with space (Johnson, 1973), as multipack does."""
    bins: Bins = []
    free: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        number = next((k for k, left in enumerate(free) if left >= lengths[row]), len(free))
        if number == len(free):
            bins.append([])
            free.append(budget)
        bins[number].append(row)
        free[number] -= lengths[row]
    bins += [[] for _ in range(-len(bins) % replicas)]
    return _dealt(bins, lengths, replicas)


def longest_first(lengths: list[int], budget: int, replicas: int) -> list[Bins]:
    """Longest first, into the lightest of so many micro-batches (Graham, 1969); one more each until they fit."""

    def made(count: int) -> Bins:
        bins: Bins = [[] for _ in range(count)]
        heap = [(0, number) for number in range(count)]
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            load, number = heap[0]
            heapq.heapreplace(heap, (load + lengths[row], number))
            bins[number].append(row)
        return bins

    return _grown(made, lengths, budget, replicas)


def karmarkar_karp(lengths: list[int], budget: int, replicas: int) -> list[Bins]:
    """The largest differencing method (1982), as verl has it: the two most uneven partitions are joined."""

    def made(count: int) -> Bins:
        empty: list[tuple[int, list[int]]] = [(0, [])] * (count - 1)
        heap = [(-length, row, [(length, [row]), *empty]) for row, length in enumerate(lengths)]
        heapq.heapify(heap)
        while len(heap) > 1:
            _, order, one = heapq.heappop(heap)
            other = heap[0][2]
            joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
            joined.sort(key=lambda part: -part[0])
            heapq.heapreplace(heap, (joined[-1][0] - joined[0][0], order, joined))
        return [rows for _, rows in heap[0][2]]

    return _grown(made, lengths, budget, replicas)


def _grown(made: Callable[[int], Bins], lengths: list[int], budget: int, replicas: int) -> list[Bins]:
    """With the smallest number of micro-batches that fits, from the lower bound."""
    count = -(-sum(lengths) // (budget * replicas)) * replicas
    bins = made(count)
    while max(sum(lengths[row] for row in rows) for rows in bins) > budget:
        count += replicas
        bins = made(count)
    return _dealt(bins, lengths, replicas)


def _dealt(bins: Bins, lengths: list[int], replicas: int) -> list[Bins]:
    """Those of similar weight to different replicas, the heaviest of them to the replica that has least."""
    weigh = lambda rows: sum(lengths[row] for row in rows)
    bins = sorted(bins, key=weigh, reverse=True)
    packs: list[Bins] = [[] for _ in range(replicas)]
    for start in range(0, len(bins), replicas):
        lightest = sorted(packs, key=lambda pack: sum(map(weigh, pack)))
        for pack, rows in zip(lightest, bins[start : start + replicas], strict=True):
            pack.append(rows)
    return packs


PACKERS = {
    "`pack`": lambda lengths, budget, replicas: funcga.pack(lengths, budget, replicas=replicas),
    "first fit decreasing": first_fit_decreasing,
    "longest first": longest_first,
    "Karmarkar and Karp": karmarkar_karp,
}


def lognormal(median: float, sigma: float, most: int) -> Callable[[random.Random], int]:
    """Lengths that are drawn: their logarithms are normal, and what exceeds `most` is cut off."""
    return lambda r: min(most, 1 + int(r.lognormvariate(0, sigma) * median))


def functions() -> list[int]:
    """The lengths of all functions of Python's standard library, in tokens of Python."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_bytes()
        lines = [token.start[0] for token in tokenize.tokenize(io.BytesIO(source).readline)]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                found.append(bisect_right(lines, node.end_lineno or 0) - bisect_left(lines, node.lineno))
    return found


Draw = Callable[[random.Random], int]
# Lengths that are drawn: the budget, which is the longest row, and a function that draws one.
DRAWN: dict[str, tuple[int, Draw]] = {
    "instructions: lognormal, median 120": (2048, lognormal(120, 0.9, 2048)),
    "chats: lognormal, median 400": (4096, lognormal(400, 1.1, 4096)),
    "reasoning: lognormal, median 4,000": (16384, lognormal(4000, 0.9, 16384)),
    "reasoning, at length squared": (16384**2, lambda r: lognormal(4000, 0.9, 16384)(r) ** 2),
    "chunks of books: 4 of 5 are full": (2048, lambda r: 2048 if r.random() < 0.8 else r.randint(1, 2048)),
}


class Measured(NamedTuple):
    """`n`: the micro-batches of a replica. `waste`: the part of all budgets that is not used. `totals`: what the
    costliest replica has over the mean, less 1. `turns`: the same if replicas wait for each other in each micro-batch.
    """

    n: float
    waste: float
    totals: float
    turns: float
    seconds: float  # of the processor


def measured(packer: Callable[..., list[Bins]], lengths: list[int], budget: int, replicas: int) -> Measured:
    """What the packs of one update are like, which have to keep the promises of `pack`."""
    start = time.process_time()
    packs = packer(lengths, budget, replicas)
    seconds = time.process_time() - start
    loads = [[sum(lengths[row] for row in rows) for rows in pack] for pack in packs]
    assert sorted(row for pack in packs for rows in pack for row in rows) == [*range(len(lengths))]
    assert max(map(max, loads)) <= budget
    (n,) = {len(pack) for pack in packs}
    mean = sum(lengths) / replicas
    totals, turns = max(map(sum, loads)) / mean - 1, sum(map(max, zip(*loads, strict=True))) / mean - 1
    return Measured(n, 1 - mean / (n * budget), totals, turns, seconds)


def rows(kinds: dict[str, tuple[int, Draw]], updates: int, size: int) -> dict[str, dict[str, Measured]]:
    """Means over so many updates of so many rows: of each kind of lengths and each packer; and the lower bound of n."""
    found = {}
    for kind, (budget, draw) in kinds.items():
        r = random.Random(0)
        drawn = [[draw(r) for _ in range(size)] for _ in range(updates)]
        found[kind] = {
            name: Measured(*map(fmean, zip(*(measured(p, one, budget, REPLICAS) for one in drawn), strict=True)))
            for name, p in PACKERS.items()
        }
        bounds = [-(-sum(one) // (budget * REPLICAS)) for one in drawn]
        found[kind]["lower bound"] = Measured(fmean(bounds), 0, 0, 0, 0)
    return found


def main() -> None:
    """The table, in Markdown."""
    print(f"| lengths | lower bound | {' | '.join(PACKERS)} | 100,000 rows |")
    print("| --- " * (len(PACKERS) + 3) + "|")
    of_functions = [length for length in functions() if length <= 2048]
    kinds = {"functions of Python's library": (2048, lambda r: r.choice(of_functions)), **DRAWN}
    for kind, by in rows(kinds, updates=10, size=1024).items():
        bound, (budget, draw), r = by.pop("lower bound").n, kinds[kind], random.Random(0)
        drawn = [draw(r) for _ in range(100_000)]
        many = min(measured(PACKERS["`pack`"], drawn, budget, REPLICAS) for _ in range(3))
        cells = [
            f"{m.n:.1f}, {100 * m.waste:.1f} %, {100 * m.turns:.2f} %, {1000 * m.seconds:.0f} ms" for m in by.values()
        ]
        print(f"| {kind} | {bound:.1f} | {' | '.join(cells)} | {100 * many.waste:.2f} %, {many.seconds:.1f} s |")


if __name__ == "__main__":
    main()
