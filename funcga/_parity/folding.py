"""The fold alone: what NumPy, torch and JAX make of the same micro-batch gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from funcga._accumulate import accumulate
from funcga._parity.sides import Result, Side, named
from funcga._trees import interop
from funcga.folds import Fold, sum


class Folded(NamedTuple):
    """What became of the micro-batches: by the problem's fold, and as plain sums."""

    fold: dict[str, Any]
    sums: dict[str, Any]


def by_framework(side: Side, micro_batches: Sequence[Result], weights: Sequence[float]) -> Folded:
    """The Folded of a framework, by the loop that accumulates gradients."""
    stacked = _stacked(micro_batches)
    with side.running():
        given, weight = side.placed((stacked, _weights(weights, side.dtype)))
        fold: Any = (side.problem.fold, sum())
        step = accumulate(_first, len(weights), fold=fold, weight=_weight, in_axes=0)
        with side.lock:
            work = side.own.prepared(step, (given, weight))
        return Folded(*interop.to_numpy(work()))


def _first(gradients: dict[str, Any], weights: Any) -> Any:
    first = {path: leaf[0] for path, leaf in gradients.items()}
    return first, first


def _weight(gradients: dict[str, Any], weights: Any) -> Any:
    return weights[0]


def _weights(weights: Sequence[float], dtype: str) -> Any:
    whole = all(float(weight).is_integer() for weight in weights)
    return np.asarray(weights, "int32" if whole else "float64" if dtype == "float64" else "float32")


def by_hand(fold: Fold, micro_batches: Sequence[Result], weights: Sequence[float]) -> Folded:
    """The Folded of NumPy: the fold in float64; the sums one after the other, in the dtype that they are held in."""
    stacked = _stacked(micro_batches)
    return Folded(
        {path: _fold(fold, leaf.astype(np.float64), weights).astype(leaf.dtype) for path, leaf in stacked.items()},
        {path: _sum(leaf) for path, leaf in stacked.items()},
    )


def _fold(fold: Fold, values: Any, weights: Sequence[float]) -> Any:
    total = np.tensordot(np.asarray(weights, np.float64), values, 1) if named(fold) == "mean()" else values.sum(0)
    weight = 1 if named(fold) == "sum()" else np.sum(weights)
    return total / weight if weight else np.zeros_like(total)


def _sum(values: Any) -> Any:
    held = values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    total = held[0]
    for value in held[1:]:
        total = total + value
    return total.astype(values.dtype)


def _stacked(micro_batches: Sequence[Result]) -> dict[str, Any]:
    return {path: np.stack([m.gradient[path] for m in micro_batches]) for path in micro_batches[0].gradient}
