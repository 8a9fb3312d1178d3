"""`pack`: which rows go together, so that micro-batches fit a budget of tokens and replicas do
equally much.

Rows are placed longest first. Where as few micro-batches as possible can be filled evenly, each row
goes to the lightest of its turn; otherwise first fit says how many it takes. It stands on nothing
but the errors, and nothing stands on it.
"""

import math
import operator
from collections.abc import Callable, Iterable
from heapq import heapreplace
from typing import Any, SupportsFloat, SupportsIndex

from funcga.errors import FuncgaError

# How often the budget of first fit is bisected, towards even micro-batches. Each time takes as long
# as first fit does.
_BISECTIONS = 2
# What costs with fractions may add up to beyond the budget, as a share of it: ten times 0.1 is a
# little more or less than 1, depending on the order.
_ROUNDING = 1e-12

Rows = list[tuple[float, int]]
"""Rows by what they cost and their numbers."""


def pack(
    lengths: Iterable[SupportsIndex],
    budget: SupportsFloat,
    *,
    replicas: SupportsIndex = 1,
    cost: Callable[[int], SupportsFloat] | None = None,
) -> list[list[list[int]]]:
    """Which rows go together: packs[replica][k] are the rows of the k-th micro-batch of a replica.

    A row is a sequence of lengths[row] tokens. It costs its length, or cost(length), and the rows
    of a micro-batch cost at most `budget` together. There are as few micro-batches as first fit
    decreasing finds, or fewer: at most 11/9 of the fewest that are possible, and 6/9 more (Dosa,
    2007). Their number is rounded up so that every replica has equally many: where replicas wait
    for each other in each micro-batch, as with FSDP, none waits for ever. The costliest is at most
    4/3 of what is possible with as many (Graham, 1969). The k-th micro-batches of all replicas
    cost about the same, and the first ones cost most. In total, two replicas differ by no more than
    their k-th micro-batches do for some k.

    Each row stands in one micro-batch. So a gradient that is weighed by tokens does not depend on
    the packs, but for the order in which it is added up. Where there are fewer rows than
    micro-batches, some micro-batches are empty, `[]`: let the collate function return one of weight
    0 in their place, such as a row of padding (docs/howto/pack.md). A replica has no row at all
    only if there are fewer rows than replicas.

    The same arguments give the same packs, so each process can compute them by itself. It is plain
    Python, and takes O(r log r) time for r rows.

    Args:
        lengths: The number of tokens of each row: ints, at least 0, or an array of them.
        budget: What a micro-batch may cost: tokens, or whatever `cost` returns. With math.inf each
            replica has one micro-batch.
        replicas: The number of replicas that share the rows.
        cost: What a row of so many tokens costs, such as lambda length: length**2; at least 0, and
            finite. Whole numbers are added up exactly. If there are fractions, sums are rounded,
            and one that exceeds the budget by less than a part in 10**12 of it fits.

    Returns:
        For each replica, also if there is only one, the list of its micro-batches: each a list of
        row numbers in ascending order.

    Raises:
        FuncgaError: A row costs more than the budget, there is no row, or a number is too small.
            Anything that is not a number is refused by Python.

    Example:
        >>> lengths = [7, 2, 5, 3, 3, 1, 4]
        >>> funcga.pack(lengths, budget=9)
        [[[0, 1], [2, 4], [3, 5, 6]]]
        >>> funcga.pack(lengths, budget=9, replicas=2)
        [[[0], [3, 4]], [[2, 5], [1, 6]]]
    """
    most, count = _number(budget), operator.index(replicas)
    if not (most > 0 and count > 0):
        raise FuncgaError(
            f"budget is {budget!r} and replicas is {replicas!r}: the budget is a number above 0, "
            "of the tokens of a micro-batch or of what they cost, and there is at least 1 replica."
        )
    costs = [_cost(row, length, cost) for row, length in enumerate(lengths)]
    if not costs:
        raise FuncgaError(
            "lengths is empty: there is no row to pack. Check the sampler, or that a generator was "
            "not used up before."
        )
    longest_first = sorted(zip(costs, range(len(costs)), strict=True), key=lambda row: -row[0])
    largest, number = longest_first[0]
    room = (
        most if all(isinstance(cost, int) for cost in (most, *costs)) else most + most * _ROUNDING
    )
    if largest > room:
        raise FuncgaError(
            f"row {number} costs {largest}, and the budget is {most}: it fits into no micro-batch. "
            f"Cut it or leave it out, or write budget={largest}, as no row costs more."
        )
    microbatches = sorted(_filled(longest_first, room, count), key=_weight, reverse=True)
    packs: list[list[list[int]]] = [[] for _ in range(count)]
    totals: list[float] = [0] * count
    # The k-th micro-batches of all replicas are neighbours. The heaviest of them goes to the
    # replica that has least so far.
    for start in range(0, len(microbatches), count):
        lightest_first = sorted(range(count), key=totals.__getitem__)
        for replica, rows in zip(lightest_first, microbatches[start : start + count], strict=True):
            packs[replica].append(sorted(row for _, row in rows))
            totals[replica] += _weight(rows)
    return packs


def _number(value: Any) -> float:
    """The value, as an int if it has no fraction, since ints are added up exactly."""
    try:
        return operator.index(value)
    except TypeError:
        number = float(value)
    return int(number) if number.is_integer() else number


def _cost(row: int, length: SupportsIndex, cost: Callable[[int], SupportsFloat] | None) -> float:
    """What a row costs. Raises FuncgaError, which names the row."""
    tokens = operator.index(length)
    number = _number(tokens if cost is None else cost(tokens))
    if not (tokens >= 0 and 0 <= number < math.inf):
        raise FuncgaError(
            f"row {row} has {tokens} tokens and costs {number}: both are at least 0, and finite. "
            "Write cost=lambda length: length**2, or leave it out for tokens."
        )
    return number


def _weight(rows: Rows) -> float:
    return sum(cost for cost, _ in rows)


def _filled(longest_first: Rows, budget: float, replicas: int) -> list[Rows]:
    """The micro-batches, equally many for each replica."""
    # No fewer can hold them.
    bound = max(1, int(-(-_weight(longest_first) // (budget * replicas)))) * replicas
    if even := _lightest(longest_first, bound, budget):
        return even
    microbatches = _first_fit(longest_first, budget)
    count = -(-len(microbatches) // replicas) * replicas
    if count > bound and (even := _lightest(longest_first, count, budget)):
        return even
    # They are too full for it. So first fit, with a lower budget that suffices.
    low, high = _weight(longest_first) / count, budget
    for _ in range(_BISECTIONS):
        # Between these, however it is rounded.
        middle = sorted((longest_first[0][0], (low + high) / 2, budget))[1]
        lower = _first_fit(longest_first, middle)
        if len(lower) > count:
            low = middle
        else:
            microbatches, high = lower, middle
    # There are more rows than micro-batches, as otherwise each row would have had its own.
    while len(microbatches) < count:
        longest = max(microbatches, key=len)
        microbatches.append(longest[1::2])
        del longest[1::2]
    return microbatches


def _lightest(longest_first: Rows, count: int, budget: float) -> list[Rows]:
    """So many micro-batches, each row in the lightest of its turn; none if that exceeds the
    budget.
    """
    microbatches: list[Rows] = [[] for _ in range(count)]
    # Of rows that cost nothing, too, no micro-batch has two before each has one.
    heap: list[tuple[float, int, int]] = [(0, 0, number) for number in range(count)]
    for row in longest_first:
        load, rows, number = heap[0]
        if load + row[0] > budget:
            return []
        heapreplace(heap, (load + row[0], rows + 1, number))
        microbatches[number].append(row)
    return microbatches


def _first_fit(longest_first: Rows, budget: float) -> list[Rows]:
    """As many micro-batches as it takes, each row in the first one that it fits into."""
    microbatches: list[Rows] = []
    # A binary tree of what is left of the budget: in micro-batch m at node leaves + m, and at most
    # in one below any other node, whose children are 2 * node and 2 * node + 1.
    leaves = 1 << (len(longest_first) - 1).bit_length()
    left = [budget] * (2 * leaves)
    for row in longest_first:
        node, cost = 1, row[0]
        while node < leaves:
            node *= 2
            if left[node] < cost:
                node += 1
        if node - leaves == len(microbatches):
            microbatches.append([])
        microbatches[node - leaves].append(row)
        most = left[node] = left[node] - cost
        while node > 1:
            sibling = left[node ^ 1]
            node //= 2
            if sibling > most:
                most = sibling
            if left[node] == most:
                break
            left[node] = most
    return microbatches
