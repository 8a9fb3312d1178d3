"""A number of rows that is written down in a step of `coupled`, such as torch.arange(8) for labels.

The step is right for batches of that size alone. With another number of rows the loss raises an
error, or it treats the first rows apart from the others: then their order makes a difference.
"""

from funcga._coupled import Coupled
from funcga._verify.causes import Cause, cause, note
from funcga._verify.probe import Limit, Probe, Rows


def of_order(
    probe: Probe, job: Coupled, limit: Limit, parts: tuple[Rows, Rows]
) -> tuple[list[Cause], list[str]]:
    """(causes, notes) of a loss that knows a number of rows, or that depends on their order."""
    every, order = probe.every, parts[0] + parts[1]
    # The parts have been evaluated already.
    if all(probe.try_values(rows) is None for rows in parts) and not probe.takes_a_row_fewer():
        fewer = every[: probe.rows // 2]
        try:
            probe.values(fewer)
        except Exception as error:
            return [of_fixed_rows(probe, job, probe.rows, fewer, error)], []
    of_leaves = probe.backend.trees.flatten(job.program.fold)[0]
    if not any(fold.reducer.monoid.axis is not None for fold in of_leaves):
        return [], []  # nothing has an order
    # Of other numbers of rows first one that has been evaluated already.
    other = next(
        (rows for rows in (parts[0], every + every) if probe.try_values(rows) is not None), None
    )
    if _differ(probe, limit, every, order):
        size = _first_rows(probe, limit)
        if size is None:
            return [], [note("row order")]
        changed = (
            f"of all exchanges of two neighbouring rows only that of rows {size} and {size + 1} "
            "changes it"
        )
    elif other is not None and _differ(probe, limit, other, tuple(sorted(other))):
        size = probe.rows
        changed = f"the order of the rows changes it for {len(other)} rows, and not for {size}"
    else:
        return [], []
    return [cause("fixed rows: first", size=size, changed=changed)], []


def _differ(probe: Probe, limit: Limit, left: Rows, right: Rows) -> bool:
    """Whether the loss of the same rows in two orders differs; False where it cannot be
    evaluated.
    """
    values = [probe.try_values(rows) for rows in (left, right)]
    if values[0] is None or values[1] is None:
        return False
    return max(limit.differences(values[0], values[1]), default=0.0) > limit.relative


def _first_rows(probe: Probe, limit: Limit) -> int | None:
    """How many rows at the beginning are treated apart from the others, whatever their number;
    None if none are.
    """
    found = []
    for row in range(1, probe.rows):
        if _differ(probe, limit, probe.every, _exchanged(probe.every, row)):
            found.append(row)
        if len(found) > 1:
            return None
    # A half of the rows ends elsewhere if there are twice as many.
    twice = probe.every + probe.every
    is_fixed = bool(found) and _differ(probe, limit, twice, _exchanged(twice, found[0]))
    return found[0] if is_fixed else None


def _exchanged(rows: Rows, row: int) -> Rows:
    return (*rows[: row - 1], rows[row], rows[row - 1], *rows[row + 1 :])


def of_fixed_rows(probe: Probe, job: Coupled, works: int, fails: Rows, error: Exception) -> Cause:
    """The Cause of a loss that works with so many rows, and raises this error for these."""
    function = "summary_fn" if _summary_fails(probe, job, fails) else "loss_fn"
    first, *_ = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {first[:200]}"
    return cause("fixed rows", function=function, works=works, fails=len(fails), error=text)


def _summary_fails(probe: Probe, job: Coupled, rows: Rows) -> bool:
    try:
        job.program.grad_fn(*probe.gathered(rows), **probe.kwargs)
    except Exception:
        return True
    return False
