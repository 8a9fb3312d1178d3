"""Denominators: the counts that several terms of a loss are divided by, as totals=; and what is
wrong with totals.

Each term that is a mean weighs two groups of rows by what it counts, so their ratios name the
expressions of the batch that count the same. Two pairs of groups leave few that fit by chance.
"""

import re
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._types import Tree
from funcga._verify.divisors import Count, counts, form, rows_of
from funcga._verify.probe import Probe, Rows


class Mixture(NamedTuple):
    """How much the group A weighs for each B in the terms of a loss that are means."""

    a: Rows
    b: Rows
    ratios: tuple[float, ...]

    def is_of(self, chosen: Sequence[Count]) -> bool:
        """Whether these are what the terms count."""
        pairs = [(count.of(self.a), count.of(self.b)) for count in chosen]
        if any(a <= 0 or b <= 0 for a, b in pairs):
            return False
        return np.allclose(sorted(a / b for a, b in pairs), sorted(self.ratios), rtol=1e-5, atol=0)


def lines(probe: Probe, mixtures: Sequence[Mixture], has_sum: bool) -> dict[str, str]:
    """The words of the line to write: totals= for these terms, and what the loss is then;
    `has_sum`: one is a sum.
    """
    number = len(mixtures[0].ratios)
    candidates = [rows_of(probe), *counts(probe)]
    fitting = (
        chosen
        for chosen in combinations(candidates, number)
        if all(each.is_of(chosen) for each in mixtures)
    )
    # Where no expression counts what the loss counts, the line shows the form.
    chosen = next(fitting, (candidates[0], form(probe))[-number:])
    named = [*zip(_names(chosen), (count.expression for count in chosen), strict=True)]
    entries = ", ".join(f'"{name}": {expression}' for name, expression in named)
    # There is a row in every window, and there may be nothing else.
    totals = [(name, f'totals["{name}"]') for name, _ in named]
    terms = [
        f"{name}_sum / {total if name == 'rows' else at_least_one(probe, total)}"
        for name, total in totals
    ]
    parameters = argument_names(probe.program.grad_fn, len(probe.args))
    return {
        "line": f"totals=lambda {chosen[0].parameters}: {{{entries}}}",
        "signature": (
            f"({', '.join(name for name in parameters if name.isidentifier())}, *, totals)"
        ),
        "terms": " + ".join(["the_sum"] * has_sum + terms),
    }


def at_least_one(probe: Probe, total: str) -> str:
    """What is written where a total may be 0."""
    return {"torch": "{}.clamp(min=1)", "jax": "jnp.maximum({}, 1)"}[probe.backend.name].format(
        total
    )


def _names(chosen: Sequence[Count]) -> list[str]:
    """A name for each count: rows, tokens for what labels say, else the last word of what is
    counted.
    """
    names: list[str] = []
    for count in chosen:
        # Of `(batch["labels"][:, 1:] != -100).sum()` the word labels.
        words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\.(sum|shape).*|\[:.*", "", count.expression))
        name = "tokens" if re.search("label|target|mask", words[-1], re.IGNORECASE) else words[-1]
        name = "rows" if re.match(r"len\(|.*\.shape\[", count.expression) else name
        names.append(name if name not in names else f"{name}_{len(names) + 1}")
    return names


# --- totals that a step has already


class NotAdditive(NamedTuple):
    """A total of which two parts of the batch have others than add up to it."""

    path: str
    parts: float
    whole: float


def not_additive(probe: Probe, parts: tuple[Rows, Rows]) -> NotAdditive | None:
    """The first total that depends on how the batch is cut."""
    first, second, whole = (
        probe.numbers(probe.count(rows)) for rows in (*parts, parts[0] + parts[1])
    )
    for path, x, y, both in zip(
        _paths(probe, probe.kwargs["totals"]), first, second, whole, strict=True
    ):
        if abs(x + y - both) > 1e-6 * max(abs(x) + abs(y), abs(both)):
            return NotAdditive(path, float(x + y), float(both))
    return None


def spoilt_by_zero(probe: Probe, parts: tuple[Rows, Rows]) -> str | None:
    """The path of the first total with which the loss, or its gradient, is not finite where it is
    0.

    What every row has as much of, such as a count of rows, is never 0.
    """
    totals = probe.kwargs["totals"]
    leaves, structure = probe.backend.trees.flatten(totals)
    shares = [
        np.stack(probe.numbers(probe.count(rows))) / len(rows) for rows in (*parts, probe.every)
    ]
    for leaf_index, path in enumerate(_paths(probe, totals)):
        if all(np.isclose(share[leaf_index], shares[0][leaf_index], rtol=1e-6) for share in shares):
            continue
        zeroed = [leaf * 0 if index == leaf_index else leaf for index, leaf in enumerate(leaves)]
        values = probe.given(totals=probe.backend.trees.unflatten(structure, zeroed)).try_values(
            probe.every
        )
        if values is not None and not all(
            np.isfinite(values[leaf]).all() for leaf in probe.additive()
        ):
            return path
    return None


def divided_twice(probe: Probe) -> str | None:
    """The path of the first leaf that the loss divides by its totals, and the fold once more.

    Twice such totals halve it.
    """
    leaves, structure = probe.backend.trees.flatten(probe.kwargs["totals"])
    doubled = probe.backend.trees.unflatten(structure, [leaf * 2 for leaf in leaves])
    values = probe.given(totals=doubled).try_values(probe.every)
    if values is None:
        return None
    for leaf in probe.additive():
        whole, by_twice = probe.whole[leaf], values[leaf]
        is_divided = probe.folds[leaf].normalizer.divides_by is not None
        if is_divided and np.any(whole) and np.allclose(2 * by_twice, whole, rtol=1e-6, atol=0):
            return probe.paths[leaf]
    return None


def _paths(probe: Probe, totals: Tree) -> list[str]:
    return leaf_paths(totals, probe.backend.trees, "totals")
