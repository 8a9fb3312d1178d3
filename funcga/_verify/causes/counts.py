"""Counts: the expressions of a batch that losses divide by; and totals=.

`groups` tests each expression: a mean weighs two groups of rows by what it counts in them.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names, as_parameters
from funcga._types import Array
from funcga._verify.causes import Answer, Cause, cause
from funcga._verify.exact import Case
from funcga._verify.probe import Leaves, Probe, Rows

# --- the counts in a batch


class Count(NamedTuple):
    """A count of rows, and its expression: the body of a lambda with these parameters."""

    parameters: str
    expression: str
    of: Callable[[Rows], float]

    @property
    def line(self) -> str:
        """The fix for a loss that divides by this count."""
        if self.is_of_rows:
            return "drop weight=: by default a micro-batch weighs as many as it has rows"
        return f"weight=lambda {self.parameters}: {self.expression}"

    @property
    def is_of_rows(self) -> bool:
        """Whether it is the number of rows, which is the default weight."""
        return self.of is len


def counts(probe: Probe) -> Iterator[Count]:
    """The usual counts of every leaf that is split: the rows, then those of labels, then all
    others, simplest first.

    Labels come first, since they say which items a loss is a mean over. An attention mask may count
    the same items in this batch and others in the next one.
    """
    leaves = [*_split_leaves(probe)]
    # Of a batch of complex numbers alone there is no name.
    named = [(leaf.parameters, leaf.rows) for leaf in leaves] or [("", "")]
    yield Count(*named[0], len)
    is_other = lambda leaf: not re.search("label|target", leaf.name, re.IGNORECASE)
    for leaf in sorted(leaves, key=is_other):
        for expression, counted in _expressions(leaf):
            total = lambda rows, counted=counted: float(counted[[*rows]].sum())
            yield Count(leaf.parameters, expression, total)


def form(probe: Probe) -> Count:
    """An example of a count, for a loss whose count was not found: of labels, if the batch seems
    to have any.
    """
    leaves = [*_split_leaves(probe)]
    whole = [leaf for leaf in leaves if _is_whole(leaf.values)]
    named = [(leaf.parameters, leaf.name) for leaf in whole or leaves[-1:]]
    parameters, name = (named or [("batch", 'batch["labels"]')])[0]
    return Count(parameters, f"({name} != -100).sum()", lambda rows: 0)


class _Leaf(NamedTuple):
    """A leaf that is split: its values, with the rows on axis 0, and its name in the body of a
    lambda with these parameters.
    """

    values: Array
    name: str
    axis: int
    parameters: str

    @property
    def rows(self) -> str:
        """The expression of its number of rows."""
        return f"{self.name}.shape[{self.axis}]" if self.axis else f"len({self.name})"


def _split_leaves(probe: Probe) -> Iterator[_Leaf]:
    # weight= is called with every argument that is split, so these are the parameters of the
    # lambda.
    arguments, names = probe.arguments, argument_names(probe.grad_fn, len(probe.args))
    triples = zip(names, arguments.parts, arguments.are_split(), strict=True)
    split = [(name, part) for name, part, is_split in triples if is_split]
    names = as_parameters([name for name, _ in split])
    for name, (_, part) in zip(names, split, strict=True):
        paths = leaf_paths(part.value, probe.backend.trees, name)
        for path, values, axis in zip(paths, probe.numbers(part.value), part.axes, strict=True):
            if isinstance(axis, int) and values.ndim and not np.iscomplexobj(values):
                rows_first = np.moveaxis(values, axis, 0)
                yield _Leaf(rows_first, path, axis % values.ndim, ", ".join(names))


def _is_whole(values: Array) -> bool:
    return bool(np.equal(values, np.round(values)).all())


def _expressions(leaf: _Leaf) -> Iterator[tuple[str, Array]]:
    """Pairs of an expression and the array whose sum it is."""
    values, name = leaf.values, leaf.name
    # Numbers that are not whole are weights themselves, or masks of some kind.
    if values.size == 0 or not _is_whole(values):
        if (values >= 0).all():
            yield f"{name}.sum()", values
            yield f"({name} != 0).sum()", values != 0
        yield f"({name} ** 2).sum()", values**2
        return
    shifted = [(name, values)]
    # A language model counts from the second token on, or up to the last but one.
    if leaf.axis == 0 and values.ndim > 1 and values.shape[1] > 1:
        shifted += [(f"{name}[:, 1:]", values[:, 1:]), (f"{name}[:, :-1]", values[:, :-1])]
    for spelled, part in shifted:
        unique, frequency = np.unique(part, return_counts=True)
        if (part >= 0).all():
            yield f"{spelled}.sum()", part
        # The sum of a mask is what it counts already.
        if {*unique} <= {0, 1}:
            continue
        # The usual values of what is ignored, then the most frequent one and the largest, which
        # padding may be.
        for ignored in dict.fromkeys((-100, 0, -1, unique[frequency.argmax()], unique[-1])):
            if ignored in unique:
                yield f"({spelled} != {int(ignored)}).sum()", part != ignored
        if (part < 0).any():
            yield f"({spelled} >= 0).sum()", part >= 0
        yield f"({spelled} > 0).sum()", part > 0


# --- the counts of several terms, as totals=


def totals_line(probe: Probe, chosen: Sequence[Count], has_sum: bool) -> dict[str, str]:
    """The words of the fix for terms that are divided by these counts: totals=, and the loss that
    takes them. has_sum: whether another term is a sum.
    """
    entries: dict[str, str] = {}
    terms = ["the_sum"] if has_sum else []
    for count in chosen:
        name = "rows" if count.is_of_rows else _name_of(count)
        if name in entries:
            name += f"_{len(entries) + 1}"
        entries[name] = count.expression
        total = f'totals["{name}"]'
        # There is a row in every window, and there may be nothing else.
        terms.append(f"{name}_sum / {total if name == 'rows' else at_least_one(probe, total)}")
    parameters = argument_names(probe.grad_fn, len(probe.args))
    body = ", ".join(f'"{name}": {expression}' for name, expression in entries.items())
    return {
        "line": f"totals=lambda {chosen[0].parameters}: {{{body}}}",
        "signature": f"({', '.join(filter(str.isidentifier, parameters))}, *, totals)",
        "terms": " + ".join(terms),
    }


def _name_of(count: Count) -> str:
    """A name for the count: "tokens" if it is of labels, else the last word of the expression."""
    # Of `(batch["labels"][:, 1:] != -100).sum()` the word labels.
    *_, word = re.findall(r"[A-Za-z_]\w*", re.sub(r"\.sum.*|\[:.*", "", count.expression))
    return "tokens" if re.search("label|target|mask", word, re.IGNORECASE) else word


def at_least_one(probe: Probe, total: str) -> str:
    """The expression of a total that may be 0, as a divisor."""
    form = {"torch": "{}.clamp(min=1)", "jax": "jnp.maximum({}, 1)"}[probe.backend.name]
    return form.format(total)


# --- totals that a step has already


def of_totals(case: Case) -> Iterator[Answer]:
    """Totals that do not add up, by which a loss is divided twice, or that make it NaN if 0."""
    probe = case.probe
    if probe.program.totals is not None:
        paths = leaf_paths(probe.kwargs["totals"], probe.backend.trees, "totals")
        parts = (*case.parts, case.order)
        counted = [probe.numbers(probe.count(rows)) for rows in parts]
        yield from _not_additive(paths, counted)
        yield from _divided_twice(probe, paths)
        yield from _not_finite_at_zero(probe, paths, counted, [len(rows) for rows in parts])


def _not_additive(paths: Sequence[str], counted: Sequence[Leaves]) -> Iterator[Cause]:
    for path, x, y, both in zip(paths, *counted, strict=True):
        if abs(x + y - both) > 1e-6 * max(abs(x) + abs(y), abs(both)):
            yield cause("totals not additive", path=path, parts=float(x + y), whole=float(both))
            return


def _divided_twice(probe: Probe, paths: Sequence[str]) -> Iterator[Cause]:
    # Twice the totals halve what is divided by them.
    halved = probe.with_totals([2] * len(paths))
    for i in probe.additive():
        is_divided = probe.folds[i].normalizer.divides_by is not None and np.any(probe.whole[i])
        if is_divided and np.allclose(2 * halved[i], probe.whole[i], rtol=1e-6, atol=0):
            yield cause("divided twice", where=probe.paths[i])
            return


def _not_finite_at_zero(
    probe: Probe, paths: Sequence[str], counted: Sequence[Leaves], sizes: Sequence[int]
) -> Iterator[Cause]:
    for path, *of_parts in zip(paths, *counted, strict=True):
        shares = [total / size for total, size in zip(of_parts, sizes, strict=True)]
        # What every row has as much of, such as a count of rows, is never 0.
        if np.allclose(shares, shares[0], rtol=1e-6, atol=0):
            continue
        zeroed = probe.with_totals([int(other != path) for other in paths])
        if not all(np.isfinite(zeroed[i]).all() for i in probe.additive()):
            yield cause("total of zero", path=path, line=at_least_one(probe, path))
            return
