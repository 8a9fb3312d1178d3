"""Magnitude: whether gradients below the floor of a Limit are small, or nothing but rounding."""

import math
from typing import Any

import numpy as np

from funcga._verify.diagnosis import loss_of
from funcga._verify.probe import Probe, Rows
from funcga._verify.tolerance import Limit


def fitted(probe: Probe, limit: Limit, eps: float, parts: tuple[Rows, Rows]) -> tuple[Limit, list[str]]:
    """The Limit with a floor that is below the largest gradient; a note if that may be nothing but rounding.

    A gradient is of about the size of its loss, and what rounding leaves of one that is zero of that size times eps.
    """
    rows = [rows for rows in (probe.every, *parts) if _accepts(probe, rows)]
    top = max(_largest(probe.values(some)) for some in rows)
    if not 0 < top < limit.floor / limit.relative:
        return limit, []
    loss = loss_of(probe)
    size = math.inf if loss is None else max(abs(loss(some)) for some in rows)
    if top > 8 * eps**0.75 * size:
        return limit._replace(floor=limit.floor * top), []
    return limit, [
        f"no gradient is larger than {top:.1e}, which may be rounding and nothing else: whether the fold is right for "
        f"this loss cannot be told from these arguments"
    ]


def _accepts(probe: Probe, rows: Rows) -> bool:
    try:
        probe.values(rows)
    except Exception:  # some losses refuse some batches
        return False
    return True


def _largest(leaves: list[Any]) -> float:
    """The largest element of all arrays, or of all scalars where there are none."""
    found = [leaf for leaf in leaves if leaf is not None]
    arrays = [leaf for leaf in found if leaf.ndim] or found
    return max((float(np.abs(leaf[np.isfinite(leaf)]).max(initial=0.0)) for leaf in arrays), default=0.0)
