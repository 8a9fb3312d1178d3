"""One group of contenders on one workload: checked against the loop by hand, timed in turn, and counted."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import interleaved, quartiles, ratios
from benchmarks.registry import Contender

Figures = dict[str, Any]


class Group(NamedTuple):
    """What a framework makes of a case. Keys are the contenders' files."""

    contenders: list[Contender]
    left_out: dict[str, str]
    loop: str  # the key of the loop by hand
    calls: dict[str, Callable[[], Any]]  # each computes one update, and waits for it
    arrays: Callable[[Any], list[Any]]  # of a result: arrays of NumPy that nothing writes to, in one order for all
    structure: Callable[[str], Figures]  # of a contender, after its first call: what is counted, not timed
    about: Figures  # n, parameters, ...
    tolerance: float = 1e-4  # of the largest element of the loop's result
    agreed: Callable[[int], int] = int  # one number of rounds for all processes
    expected: str | None = None  # the key of the one whose result is right; None: that of the loop


def compared(group: Group, seconds: float) -> Figures:
    """The figures of all contenders. Raises AssertionError if one of them does not compute what it should."""
    firsts, errors, expected = {}, {}, None
    right = group.expected or group.loop
    for key in sorted(group.calls, key=right.__ne__):  # that one first; no more than two results at a time
        start = time.perf_counter()  # of the first one's first call, what the framework sets up once is a part
        result = group.calls[key]()
        firsts[key] = time.perf_counter() - start
        arrays = group.arrays(result)
        expected = arrays if expected is None else expected
        errors[key] = difference(arrays, expected)
        del result, arrays
    limits = {c.key: c.tolerance or group.tolerance for c in group.contenders}
    wrong = {key: error for key, error in errors.items() if not error <= limits[key]}
    assert not wrong, f"these do not compute what {right} computes, and differ by so much of the largest: {wrong}"
    del expected
    gc.collect()
    times = interleaved(group.calls, seconds, agreed=group.agreed)
    figures = {
        c.key: about(c) | {"first_call_seconds": firsts[c.key], "error": errors[c.key]} | _timed(times, c, group.loop)
        for c in group.contenders
    }
    for key, figure in figures.items():
        figure |= group.structure(key)
    return {**group.about, "rounds": len(times[group.loop]), "left_out": group.left_out, "contenders": figures}


def difference(result: list[Any], other: list[Any]) -> float:
    """The largest difference of two lists of arrays, over the largest element of the other one."""
    assert [a.shape for a in result] == [b.shape for b in other], "the results differ in shape"
    largest = max(float(np.abs(b).max(initial=0)) for b in other)
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(result, other, strict=True)) / (largest or 1.0)


def about(contender: Contender) -> Figures:
    """What the results file says of it."""
    return {"name": contender.name, "source": contender.source, "against": contender.against}


def _timed(times: Mapping[str, list[float]], contender: Contender, loop: str) -> Figures:
    key = contender.key
    return {
        "seconds": quartiles(times[key]),
        "over_loop": ratios(times, key, loop),
        "ours_over": {ours: ratios(times, ours, key) for ours in contender.against if ours in times},
    }
