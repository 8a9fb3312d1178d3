"""Counts as totals=: what several terms are divided by, and totals that a step has already."""

from collections.abc import Sequence

import numpy as np

from funcga._backend.prefixes import leaf_paths
from funcga.tools.verify.causes import Answers, cause
from funcga.tools.verify.causes.lines import signature
from funcga.tools.verify.counted import Count
from funcga.tools.verify.exact import Case
from funcga.tools.verify.probe import Probe

# --- the counts of several terms, as totals=


def totals_line(probe: Probe, chosen: Sequence[Count], has_sum: bool) -> dict[str, str]:
    """The words of the fix for terms that are divided by these counts: totals=, and the loss that
    takes them. has_sum: whether another term is a sum.
    """
    entries: dict[str, str] = {}
    terms = ["the_sum"] if has_sum else []
    for count in chosen:
        name = "rows" if count.is_of_rows else "items"
        if name in entries:
            name += f"_{len(entries) + 1}"
        entries[name] = count.expression
        total = f'totals["{name}"]'
        # There is a row in every window, and there may be nothing else.
        terms.append(f"{name}_sum / {total if name == 'rows' else f'{total}.clip(min=1)'}")
    body = ", ".join(f'"{name}": {expression}' for name, expression in entries.items())
    return {
        "line": f"totals=lambda {chosen[0].parameters}: {{{body}}}",
        "signature": signature(probe),
        "terms": " + ".join(terms),
    }


# --- totals that a step has already


def of_totals(case: Case) -> Answers:
    """Totals that do not add up, by which a loss is divided twice, or that make it NaN if 0."""
    probe = case.probe
    if probe.counting is None:
        return
    paths = leaf_paths(probe.kwargs["totals"], probe.backend.trees, "totals")
    parts = (*case.parts, case.order)
    counted = zip(paths, *[probe.numbers(probe.count(rows)) for rows in parts], strict=True)
    # A total that is 1 for any rows, as {"one": 1} is, divides a term that is to count once.
    totals = [(path, values) for path, *values in counted if any(total != 1 for total in values)]
    for path, (x, y, both) in totals:
        if abs(x + y - both) > 1e-6 * max(abs(x) + abs(y), abs(both)):
            words = {"parts": float(x + y), "whole": float(both)}
            yield cause("totals not additive", path=path, **words)
            break
    yield from _divided_twice(probe, paths)
    for path, values in totals:
        shares = [total / len(rows) for total, rows in zip(values, parts, strict=True)]
        # What every row has as much of, such as a count of rows, is never 0.
        if not np.allclose(shares, shares[0], rtol=1e-6, atol=0):
            zeroed = probe.with_totals([int(other != path) for other in paths])
            if not all(np.isfinite(zeroed[i]).all() for i in probe.additive()):
                yield cause("total of zero", path=path)
                break


def _divided_twice(probe: Probe, paths: Sequence[str]) -> Answers:
    # Twice the totals halve what is divided by them.
    halved = probe.with_totals([2] * len(paths))
    for i in probe.additive():
        is_divided = probe.folds[i].normalizer.divides_by is not None and np.any(probe.whole[i])
        if is_divided and np.allclose(2 * halved[i], probe.whole[i], rtol=1e-6, atol=0):
            yield cause("divided twice", where=probe.paths[i])
            return
