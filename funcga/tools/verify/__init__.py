"""`verify`: whether accumulation is exact for a loss, and if not, why.

Two halves, read in this order:

- `exact.py`: *is it exact?* One table: several splits against the whole batch. `probe.py` calls the
  function with any rows of the batch.
- `causes/`: *why not?* Questions in one table, `LOSS` below for a loss and `STEP` for a step of
  `coupled`. Each tests for its causes and yields those it finds; their texts are in the TOML file
  beside it. `causes/groups.py` (what kind of function is it?) and `counted.py` (what in the batch
  does it count?) are shared by several questions, and so is `causes/lines.py`: what is printed can
  be pasted.

`in_torch.py` and `in_jax.py` contain what only one framework can answer. The package can be
removed: the library has its name, `funcga.verify`, and only `parity` and the command line import
it. It uses `accumulate`, `coupled`, the folds, `to_numpy` and these seams of the core:

- `step.program`, `step.counting` and `step.coupled`: what a step computes; `Program.read`, `weigh`
- `Arguments.cut`: any rows of the arguments; `argument_names`
- `GradientFunction`: which arguments are differentiated, and where the gradient is
- `broadcast_folds` and `plain`: the Fold of each leaf; `Fold.reducer` and `.normalizer`
- `leaf_paths` and a Backend's `arrays` and `trees`
- in torch `recording_loss`, `PureLoss`, `ModuleGradient` and `modules_in`
"""

import importlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from funcga._accumulate import TotalsFn, accumulate
from funcga._call import owner_of
from funcga._grad import GradientFunction
from funcga._types import Args, GradFn, Tree, WeightFn
from funcga.errors import FuncgaError, check_count
from funcga.folds import FoldTree, mean
from funcga.tools.coupled import Coupled
from funcga.tools.reports.tables import plain
from funcga.tools.verify.causes import (
    Answer,
    Cause,
    Note,
    Question,
    Stop,
    calls,
    causes_in,
    counts,
    division,
    folds,
    note,
    outputs,
    rows,
    summaries,
)
from funcga.tools.verify.exact import Case, Measured, first_line
from funcga.tools.verify.probe import Probe

# The questions, in the order in which they are asked.
LOSS: tuple[Question, ...] = (
    calls.not_differentiable,
    calls.repeatable,
    outputs.small_gradients,
    outputs.per_example,
    folds.all_weightless,
    outputs.unused_parameters,
    counts.of_totals,
    folds.explain,
    folds.weightless_rows,
    division.divided_by_n,
    outputs.wrong_gradient,
    outputs.remarks,
)
STEP: tuple[Question, ...] = (
    rows.fixed_number,
    calls.not_differentiable,
    calls.repeatable,
    outputs.small_gradients,
    counts.of_totals,
    summaries.explain_step,
    outputs.unused_parameters,
    rows.of_order,
)
# A cause, and another one that it implies.
_IMPLIED = {
    "divided by n": "mean under sum",  # a division by n makes it right, for this n
    "divided twice": "sum under mean",
    "wrong weight": "uneven tokens",
}


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`. `str(verdict)` is a short text to read.

    Attributes:
        ok: True if no cause was found: every split gives the result of the whole batch, except for
            what a note says.
        causes: The mistakes, each a `Cause` with `.name`, `.what`, the line that is the `.fix`, and
            the `.evidence`.
        rows: A `Measured` for each split: its largest relative difference from the whole batch,
            with its limit.
        dtype: The dtype of the arguments in the comparison.
        notes: Further remarks, such as what could not be checked.
        gradients: Whether any were compared; False for a loss that was given in place of its
            gradient.

    Example:
        >>> gradient = funcga.value_and_grad(lambda w, x: ((x @ w) ** 2).sum())
        >>> verdict = funcga.verify(gradient, torch.ones(3), torch.randn(16, 3), n=4)
        >>> verdict.ok, [cause.name for cause in verdict.causes]
        (False, ['sum under mean'])
    """

    ok: bool
    causes: tuple[Cause, ...]
    rows: tuple[Measured, ...]
    dtype: str
    notes: tuple[str, ...] = ()
    gradients: bool = True

    def assert_exact(self) -> None:
        """Raises an error unless accumulation is exact.

        Raises:
            AssertionError: If accumulation is not exact, with the text of the verdict.
        """
        if not self.ok:
            raise AssertionError(str(self))

    def as_dict(self) -> dict[str, object]:
        """The verdict for JSON; numbers that are not finite are None."""
        rows = [row._asdict() | {"ok": row.ok} for row in self.rows]
        return plain(asdict(self) | {"rows": rows})

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(verdict: Verdict) -> Iterator[str]:
    count = len(verdict.causes)
    if not verdict.ok:
        yield f"Accumulation is NOT exact for this loss: {count} cause{'s' * (count != 1)}."
    elif verdict.gradients:
        yield "Accumulation is exact for this loss."
    else:
        yield "The values agree, and no gradient was compared: see the note."
    for number, each in enumerate(verdict.causes, 1):
        yield from cause_lines(number, each)
    if verdict.rows:
        yield from ("", f"Largest relative difference from the whole batch, in {verdict.dtype}:")
    yield from (f"   {row}" for row in verdict.rows)
    for text in verdict.notes:
        yield from wrapped(text, "Note: ")


def cause_lines(number: int, cause: Cause, at: str = "") -> Iterator[str]:
    """A cause as lines of a report, after an empty one. `at`: a line of code that it is about."""
    # The line itself is not wrapped, so that it can be copied; sentences that explain it are.
    line, *sentences = re.split(r"\. (?=[A-Z])|; ", cause.fix, maxsplit=1)
    yield from ("", f"{number}. {cause.name}", *wrapped(cause.what))
    if at:
        yield f"   At {at}"
    yield f"   Fix: {line}"
    yield from wrapped("".join(sentences))
    yield from wrapped(f"Seen: {cause.evidence}")


def wrapped(text: str, first: str = "   ") -> list[str]:
    """The lines of a sentence, indented as in a report; `first` stands before the first one."""
    return textwrap.wrap(
        text, 88, initial_indent=first, subsequent_indent="   ", break_long_words=False
    )


def verify(
    grad_fn: GradFn,
    *args: Tree,
    n: int | Sequence[int] | None = None,
    fold: FoldTree = mean(),  # noqa: B008 - a frozen value
    weight: WeightFn | None = None,
    in_axes: Tree = None,
    totals: TotalsFn | None = None,
    seed: int = 0,
    bitwise: bool = False,
    **kwargs: Tree,
) -> Verdict:
    """Checks whether `accumulate(grad_fn, n, ...)(*args, **kwargs)` is exact, and finds the cause
    if it is not.

    The step over n micro-batches, in order, and over two uneven ones in another order is compared
    with the step over the whole batch, in float64 if grad_fn can compute in it. If the results
    differ, grad_fn is called with repeated groups of rows, to find out what kind of function of the
    rows the loss is. Each cause comes with the line that fixes it.

    A step of `coupled` is compared with the same step over the whole batch as one micro-batch. If
    they differ, the summary is at fault: the causes are those of a loss, or "wrong fold", such as
    concat() for a mean.

    The names of the causes: "sum under mean", "mean under sum", "mean under per_weight", "uneven
    tokens", "wrong weight", "weight not additive", "totals not additive", "divided twice" by totals
    and by the fold, "total of zero" if that makes the loss NaN, "divided by n", "regulariser",
    "other normaliser", "batch statistics", "in-batch negatives", "coupled rows", "row order",
    "fixed rows" if their number is hard-coded, "randomness", "state", "per-example output",
    "params unused", "by steps", "wrong gradient" if torch.func computes a different one,
    "first-order step", "small remainder" if the difference is less than 1e-5, as from an epsilon
    in a count, and "not decomposable" if none of these explains it.

    A note says what may be wrong, or could not be checked, and leaves `.ok` as it is: that the
    loss is divided by a number which equals n, perhaps by chance; that only its value differs, by
    less than 1e-5; that every gradient is as small as rounding; or that there are no gradients.

    Differences are relative: to the largest value that was added up to a leaf, plus a share of the
    largest of all leaves, plus a floor. In float64 up to 1e-9 counts as rounding, and the share is
    a thousandth; where the loss computes in float32, 1e-4 and a tenth; in 16 bits, 8 epsilons and a
    half. The floor is 8 epsilons over that limit: 2e-6 in float64, 0.01 in float32, 1 in 16 bits.
    If all gradients are smaller than the floor, it shrinks with the largest of them, unless that is
    below 8 eps**0.75 of the loss: then a note says that these arguments cannot show anything. A
    smaller mistake goes unnoticed.

    No argument is changed, and the global random generators are restored. The loss is called
    several times, with whatever it prints or stores.

    Args:
        grad_fn: As for `accumulate`, such as `funcga.value_and_grad(loss_fn)`, or
            `torch_backend.module_value_and_grad(module, loss_fn)` of a module that nothing wraps,
            whose buffers stay as they are; or a step of `coupled`, which brings its n, fold,
            weight, in_axes and totals.
        *args: Parameters, unless grad_fn is that of a module, and one batch of about 16 rows. More
            rows show no more, as long as the rows vary as they do in training.
        n: The number of micro-batches to verify, or several. Default, and for 1: 3, or that of the
            step.
        fold: As for `accumulate`.
        weight: As for `accumulate`.
        in_axes: As for `accumulate`.
        totals: As for `accumulate`.
        seed: Of the order of the rows, and of their groups.
        bitwise: Whether to check as well that the same micro-batches, of rows // n rows each, give
            the same bits in any order, as `reproducible` promises. Further causes are then "order
            of sums"; "order of kernels", if the bits differ although the sums are exact; and "bits
            not repeatable", if even two calls with the same arguments differ.
        **kwargs: Keyword arguments of grad_fn, passed whole.

    Returns:
        A Verdict.

    Raises:
        FuncgaError: If `accumulate` raises it, the batch has fewer than two rows, or a gradient is
            not finite.

    Example:
        >>> w, x = torch.ones(3), torch.randn(16, 3)
        >>> of_mean = funcga.grad(lambda w, x: ((x @ w) ** 2).mean())
        >>> funcga.verify(of_mean, w, x, n=4).assert_exact()
        >>> of_sum = funcga.grad(lambda w, x: ((x @ w) ** 2).sum())
        >>> verdict = funcga.verify(of_sum, w, x, n=4)
        >>> [cause.name for cause in verdict.causes]
        ['sum under mean']
    """
    job = job_of(grad_fn)
    options = {"fold": fold, "weight": weight, "in_axes": in_axes, "totals": totals}
    if job is not None and [*options.values()] != [mean(), None, None, None]:
        raise FuncgaError(
            "fold=, weight=, in_axes= and totals= are for a gradient function, and a step of "
            "`coupled` brings its own. Leave them out: funcga.verify(step, params, *batch)."
        )
    if owner_of(grad_fn if job is None else job.program.grad_fn) is not None:
        grad_fn, args, options["in_axes"] = _with_parameters(grad_fn, args, in_axes)
    # A loss that does not depend on its parameters is a cause here, and no error.
    if isinstance(grad_fn, GradientFunction):
        grad_fn = replace(grad_fn, reached={True})
    step = vars(job or accumulate(grad_fn, 1, **options))
    program, counting = step["program"], step["counting"]
    probe = Probe(program, job, args, kwargs, precise=False, counting=counting)
    case, found = Case(probe, _counts(n, probe), seed), list[Answer]()
    with probe.random_kept():
        # In float64 if possible, where rounding hides next to nothing.
        with probe.framework.precision(precise=True):
            try:
                case.probe = Probe(program, job, args, kwargs, precise=True, counting=counting)
                _ = case.probe.whole
            # Something that the function closes over is in another dtype than float64.
            except Exception as error:
                case.probe = probe
                found.append(note("own dtypes", error=first_line(error)))
        with probe.framework.precision(precise=case.probe.precise):
            for question in LOSS if job is None else STEP:
                found += question(case)
                if found and isinstance(found[-1], Stop):
                    break
        if bitwise and job is None:
            with probe.framework.precision(precise=False):
                probe.values(probe.all_rows)
                found += calls.same_bits(replace(case, probe=probe))
    return _verdict(case, found)


def _with_parameters(grad_fn: GradFn, args: Args, in_axes: Tree) -> tuple[GradFn, Args, Tree]:
    """A gradient function of a module's own parameters as one that takes them first, with its
    arguments and in_axes. Raises FuncgaError for a wrapped module, and for a step of `coupled`.
    """
    own = importlib.import_module("funcga.tools.verify.in_torch").of_parameters(grad_fn)
    if own is None:
        raise FuncgaError(
            "verify evaluates a gradient function, or a step, with parameters of its own choice, "
            "and this one brings its own. Give it one of pure_loss, with the module that was "
            "wrapped: funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), or "
            "funcga.coupled(torch_backend.pure_loss(module, summary_fn), loss_fn, n=8)."
        )
    grad_fn, parameters = own
    # A module splits all of its arguments.
    if not isinstance(in_axes, tuple | list):
        in_axes = [0 if in_axes is None else in_axes] * len(args)
    return grad_fn, (parameters, *args), (None, *in_axes)


# --- what is refused


def job_of(step: object) -> Coupled | None:
    """What a step of `coupled` computes; None for any other function."""
    job = getattr(step, "coupled", None)
    return job if isinstance(job, Coupled) else None


def _counts(n: int | Sequence[int] | None, probe: Probe) -> list[int]:
    """The numbers of micro-batches to verify: those that were asked for, or that of the step; [] if
    there are none above 1.
    """
    rows, job = probe.rows, probe.job
    if rows < 2:
        raise FuncgaError(
            "the batch has 1 row, which cannot be split: verify needs at least 2, and recognises "
            "more with 16 or so. Give it a whole batch."
        )
    if n is None and job is not None:
        n = sum(count for count, _ in job.program.split.groups(rows))
    several = n if isinstance(n, tuple | list) else [1 if n is None else n]
    counts = [check_count(count, "n", ", or several: n=(2, 3)") for count in several]
    return list(dict.fromkeys(min(count, rows) for count in counts if count > 1))


def _verdict(case: Case, found: Sequence[Answer]) -> Verdict:
    """The Verdict of all answers."""
    causes = causes_in(found)
    implied = {_IMPLIED.get(each.name) for each in causes}
    is_stopped = any(isinstance(answer, Stop) for answer in found)
    return Verdict(
        ok=not causes,
        causes=tuple(each for each in causes if each.name not in implied),
        rows=() if is_stopped else tuple(case.splits.rows),
        dtype="float64" if case.probe.precise else "the arguments' own dtypes",
        notes=tuple(str(answer) for answer in found if isinstance(answer, Note)),
        gradients=note("loss") not in found,
    )
