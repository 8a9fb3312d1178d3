"""Losses that depend on several rows together, on their number or their order.

No fold is exact for such a loss. The fix is a call of `coupled` with the names of the user's
arguments. `verify` cannot split the loss in two by itself, so the user replaces two words of the
line by the two parts.

A hard-coded number of rows, such as torch.arange(8) for labels, is right for batches of that size
only. With more or fewer rows the loss raises an error, or it treats the first rows differently from
the rest: then the order of the rows makes a difference.
"""

import numpy as np

from funcga.tools.verify.causes import Answers, Cause, cause, note, stop
from funcga.tools.verify.causes.groups import Evidence
from funcga.tools.verify.causes.lines import loss_names
from funcga.tools.verify.exact import Case, first_line
from funcga.tools.verify.probe import Probe, Rows

# --- a loss of all rows together


def of_statistics(evidence: Evidence) -> Cause:
    """The Cause of a loss that depends on statistics of its rows, or couples them."""
    case, probe, kind = evidence.case, evidence.probe, evidence.kind
    layers, twice = probe.layers(), probe.try_values(probe.all_rows * 2)
    # The value of log(sum) does so as well, and its gradient is a mean.
    if kind != "mean" and _grows_as_a_logarithm(probe, case.parts[1]):
        return evidence.cause("in-batch negatives", line=coupled_line(case, "embeddings"))
    if layers and kind != "coupled":
        return evidence.cause("batch statistics: layers", layers=layers)
    # A function of means alone, as a variance is, is the same for all rows twice; one of sums, as a
    # ratio with a constant in it, is not.
    word = "mean" if twice is None or not case.differ(twice, probe.whole) else "sum"
    line = coupled_line(case, f"{word}s", f"funcga.{word}()")
    key = "coupled rows" if kind == "coupled" else "batch statistics"
    return evidence.cause(key, line=line, kind=word)


def _grows_as_a_logarithm(probe: Probe, rows: Rows) -> bool:
    """Whether the loss, or the loss per row, grows as the logarithm of the number of repetitions.

    Each doubling of the rows adds the same to a logarithm, or nearly so if a row is not its own
    candidate. It multiplies a power, such as a norm, by the same factor.
    """
    times = (2, 4, 8, 16)
    values = np.array([probe.loss(rows * k) for k in times])
    for each in (values, values / times):
        steps = np.diff(each)
        # It stays as it is, or is unknown.
        if not np.abs(steps).min() > 1e-6 * max(abs(each[0]), 1e-9):
            continue
        first, second = np.abs(steps[1:] / steps[:-1] - 1)
        if first < 0.4 and second < max(0.7 * first, 1e-3):
            return True
    return False


def coupled_line(case: Case, summary: str, fold: str = "") -> str:
    """The call of `coupled` for this loss. summary: a word for what is folded. fold: the fold, if
    not concat().
    """
    probe, gradient = case.probe, case.probe.gradient
    names = loss_names(probe)
    summary_fn = f"lambda {', '.join([*names, *probe.kwargs])}: {summary}"
    if probe.brings_parameters:
        summary_fn = f"torch_backend.module_value_and_grad(module, {summary_fn})"
    elif probe.framework.module_loss(probe.grad_fn) is not None:
        names[0], summary_fn = "params", f"torch_backend.pure_loss(module, {summary_fn})"
    # The second function gets what is differentiated, by default the first argument.
    has_aux = gradient is not None and gradient.has_aux
    arg_indices = gradient.arg_indices(len(names)) if gradient else (0,)
    differentiated = ", ".join([names[arg_index] for arg_index in arg_indices])
    loss_fn = f"lambda {differentiated}, s: {'(loss, aux)' if has_aux else 'loss'}"

    axes = tuple(part.in_axes for part in probe.arguments.parts)
    weight = "weight" if probe.program.weight and fold == "funcga.mean()" else ""
    is_default = axes == (None, *[0] * (len(axes) - 1))
    options = {
        "n": case.counts[0] if case.counts else 8,
        "fold": fold,
        "weight": weight,
        # Parameters that a module brings are no argument of the call.
        "in_axes": "" if is_default else axes[probe.brings_parameters :],
        "argnums": gradient.argnums if gradient else 0,
        "has_aux": has_aux,
    }
    written = [f"{name}={option}" for name, option in options.items() if option]
    return f"funcga.coupled({', '.join([summary_fn, loss_fn, *written])})"


# --- a step of `coupled` that knows a number of rows


def fixed_number(case: Case) -> Answers:
    """A loss that raises an error for the whole batch, but not for a micro-batch; or for any other
    number of rows than that of the batch.
    """
    probe, n = case.probe, case.counts[0] if case.counts else 1
    size = -(-probe.rows // n)
    fewer = dict.fromkeys(min(rows, probe.rows - 1) for rows in (size, probe.rows // 2, probe.rows))
    errors = dict[int, str]()
    for rows in (probe.rows, *fewer):
        try:
            probe.values(probe.all_rows[:rows])
        except Exception as error:
            errors[rows] = first_line(error)
    working = [rows for rows in (probe.rows, *fewer) if rows not in errors]
    # An error that is not about their number is that of a later question.
    if not working or not errors or (probe.rows in working and len(working) > 1):
        return
    fails, text = next(iter(errors.items()))
    yield cause("fixed rows", works=working[0], fails=fails, error=text)
    if probe.rows in errors:
        yield stop()


def of_order(case: Case) -> Answers:
    """A loss that treats the first rows differently from the rest; a note if it depends on the
    order in another way.
    """
    probe, every = case.probe, case.probe.all_rows
    twice = every + every

    def differ(*orders: Rows) -> bool:
        one, other = map(probe.try_values, orders)
        return one is not None and other is not None and case.differ(one, other)

    def are_apart(rows: Rows, size: int) -> bool:
        """Whether the order of the first `size` rows, and that of the rest, make no difference."""
        first, rest = rows[:size], rows[size:]
        return not differ(rows, (*first[1:], first[0], *reversed(rest)))

    # The cause is known already, or it makes no difference.
    is_known = not case.splits.are_exact or probe.try_values(every[:-1]) is None
    if is_known or not differ(twice, tuple(sorted(twice))):
        return
    # The same first rows, whatever the number of all. A half ends elsewhere in twice the rows.
    sizes = [size for size in range(1, len(twice)) if are_apart(twice, size)]
    if len(sizes) == 1 and are_apart(every, sizes[0]):
        yield cause("fixed rows: first", size=sizes[0])
    else:
        yield note("row order")
