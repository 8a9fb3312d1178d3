"""Counting: which expression of the batch counts what a loss divides by."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from funcga._call.arguments import CARRY
from funcga._verify.probe import Probe, Rows, as_numbers


class Count(NamedTuple):
    """An expression of the split arguments, as the body of a lambda, and its value for some rows."""

    parameters: str
    expression: str
    of: Callable[[Rows], float]

    @property
    def line(self) -> str:
        """The argument of accumulate."""
        return f"weight=lambda {self.parameters}: {self.expression}"


def counts(probe: Probe) -> Iterator[Count]:
    """The counts that people write, of every leaf that is split: simplest first, and those of labels before all.

    Labels say what a loss is over. A mask of what is attended to may well count the same in this batch, and not in the
    next one.
    """
    for values, spelled, axis, parameters in sorted(_leaves(probe), key=lambda leaf: not _LABELS.search(leaf[1])):
        for expression, select in _selections(values, spelled, axis == 0):
            yield Count(parameters, expression, partial(_total, select))


_LABELS = re.compile("label|target", re.IGNORECASE)


def form(probe: Probe) -> str:
    """The form of the argument of accumulate where no count was found: of labels, if there are any."""
    found = [(np.equal(v, np.round(v)).all(), spelled, parameters) for v, spelled, _, parameters in _leaves(probe)]
    chosen = next((leaf for leaf in found if leaf[0]), found[-1] if found else None)
    if chosen is None:
        return 'weight=lambda batch: (batch["labels"] != -100).sum()'
    return f"weight=lambda {chosen[2]}: ({chosen[1]} != -100).sum()"


def _leaves(probe: Probe) -> Iterator[tuple[Any, str, int, str]]:
    """(numbers with their rows first, how a lambda calls them, the axis of the rows, the lambda's parameters)."""
    names = _parameters(probe)
    for (root, path), (leaf, axis) in zip(probe.arguments.paths(), probe.arguments, strict=True):
        if not isinstance(axis, int) or leaf is None:
            continue
        values = as_numbers(leaf, probe.backend)
        if values is None or np.iscomplexobj(values):
            continue
        argument = path[: len(path) - len(path.removeprefix(_argument(root, path)))]
        spelled = names[argument] + path[len(argument) :]
        yield np.moveaxis(values, axis, 0), spelled, axis % values.ndim, ", ".join(names.values())


def _total(select: Any, rows: Rows) -> float:
    return float(select[[*rows]].sum())


def _argument(root: str, path: str) -> str:
    end = min((k for k in (path.find("["), path.find(".")) if k > 0), default=len(path))
    return path[: end if not path.startswith("args[") else path.index("]") + 1]


def _parameters(probe: Probe) -> dict[str, str]:
    """What a lambda calls each argument that is split, by its name in messages."""
    found: dict[str, str] = {}
    for (root, path), (_, axis) in zip(probe.arguments.paths(), probe.arguments, strict=True):
        if axis is not None and axis is not CARRY:
            argument = _argument(root, path)
            found.setdefault(argument, argument if argument.isidentifier() else "")
    free = iter(["batch", "y", "z", *(f"x{i}" for i in range(99))])
    return {argument: name or next(free) for argument, name in found.items()}


def _selections(values: Any, name: str, shifts: bool) -> Iterator[tuple[str, Any]]:
    """(expression, what each element counts) of an array whose rows are on its first axis, there and in the batch."""
    whole = np.equal(values, np.round(values)).all() and values.size > 0
    if not whole:
        if (values >= 0).all():
            yield f"{name}.sum()", values
            yield f"({name} != 0).sum()", values != 0
        yield f"({name} ** 2).sum()", values**2
        return
    for spelled, part in _shifted(values, name) if shifts else [(name, values)]:
        if set(np.unique(part)) <= {0, 1} or (part >= 0).all():
            yield f"{spelled}.sum()", part
        if set(np.unique(part)) <= {0, 1}:
            continue
        uniques, frequency = np.unique(part, return_counts=True)
        usual = [-100, 0, -1, int(uniques[frequency.argmax()]), int(uniques[-1])]
        for value in dict.fromkeys(usual):
            if value in uniques:
                yield f"({spelled} != {value}).sum()", part != value
        if (part < 0).any():
            yield f"({spelled} >= 0).sum()", part >= 0
        yield f"({spelled} > 0).sum()", part > 0


def _shifted(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, values
    if values.ndim > 1 and values.shape[1] > 1:
        yield f"{name}[:, 1:]", values[:, 1:]
        yield f"{name}[:, :-1]", values[:, :-1]


def matching(probe: Probe, holds: Callable[[Callable[[Rows], float]], bool]) -> Count | None:
    """The first Count of which `holds` says that the loss divides by it."""
    return next((count for count in counts(probe) if holds(count.of)), None)
