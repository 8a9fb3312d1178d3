"""How far two results may be apart: rounding, and no more.

A leaf is compared relative to the largest of what was added up to it, so that gradients which cancel are not accused.
The bias of an attention key, say, has a gradient that is nothing but rounding of much larger numbers, so a share of the
largest of all leaves counts as well, and last an absolute floor, for where every gradient is zero but for rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Limit(NamedTuple):
    """`relative` to the largest of a leaf, plus `share` of the largest of all leaves, plus `floor`."""

    relative: float
    share: float
    floor: float


def limit_of(eps: float) -> Limit:
    """The Limit for what is computed with this machine epsilon.

    float64 has room: a mistake is rarely below 1e-6, rounding rarely above 1e-13. In float32 sums of some thousand
    terms are 1e-5 off. In 16 bits a sum over rows that is rounded once differs by one or two epsilons.
    """
    if eps < 1e-12:
        return Limit(1e-9, 1e-3, 8 * eps)
    if eps < 1e-5:
        return Limit(1e-4, 0.1, 8 * eps)
    return Limit(8 * eps, 0.5, 8 * eps)


def scales_of(parts: Sequence[Sequence[Any]], limit: Limit) -> list[float]:
    """What a difference in each leaf is relative to, from the values of that leaf in several parts of the batch.

    None for a leaf that is not compared.
    """
    largest = [max((_largest(part[i]) for part in parts), default=0.0) for i in range(len(parts[0]))]
    arrays = [size for size, leaf in zip(largest, parts[0], strict=True) if leaf is not None and leaf.ndim]
    top = max(arrays or largest, default=0.0)
    return [size + limit.share * top + limit.floor / limit.relative for size in largest]


def _largest(leaf: Any) -> float:
    if leaf is None:
        return 0.0
    finite = np.abs(leaf[np.isfinite(leaf)])
    return float(finite.max(initial=0.0))


def relative(left: Any, right: Any, scale: float) -> float:
    """The largest difference over the scale; infinite if the shapes differ, NaN if an element of one alone is."""
    if left.shape != right.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        return float(np.where(same, 0.0, np.abs(left - right)).max(initial=0.0)) / scale
