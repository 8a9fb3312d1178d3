"""`verify`: whether accumulation is exact for a loss, and what is wrong where it is not."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from funcga._backend import Backend
from funcga._backend.prefixes import leaf_paths
from funcga._call import Program, owner_of
from funcga._call.totals import Totals, check_no_totals, check_totals
from funcga._grad import GradientFunction
from funcga._reproducible import plain
from funcga._types import GradFn, TotalsFn, Tree, WeightFn
from funcga._verify.bitwise import of_bits
from funcga._verify.causes import Cause, cause, diagnose, note, of_totals, without_remainder
from funcga._verify.of_coupled import (
    StepCase,
    check_options,
    compared,
    counts_of,
    job_of,
    whole_of,
    whole_program,
)
from funcga._verify.of_coupled import unevaluated as unevaluated_step
from funcga._verify.probe import Limit, Probe, as_numbers, limit_of, random_states, restore
from funcga._verify.responses import Measured, Splits, compare, uneven
from funcga._verify.whole import (
    Seen,
    divided,
    fitted,
    impurities,
    late_state,
    per_example,
    unevaluated,
    unused,
    wrong_gradient,
)
from funcga.errors import FuncgaError, check_callable, check_count
from funcga.folds import Fold, FoldTree, mean

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class Verdict:
    """What `verify` says of a loss and its fold. `str(verdict)` is a short text for people.

    Attributes:
        ok: Whether no cause was found: every split gives the result of the whole batch, except for
            what a note says.
        causes: What is wrong, each a `Cause` with `.name`, `.what`, the line that is the `.fix`,
            and the `.evidence`.
        rows: A `Measured` for each split: its largest relative difference from the whole batch,
            with its limit.
        dtype: The dtype of the arguments in the comparison.
        notes: What else is to be known, such as what could not be looked at.
        gradients: Whether any were compared; False of a loss that was given in place of its
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
        """None if accumulation is exact.

        Raises:
            AssertionError: With the text of the verdict, if it is not.
        """
        if not self.ok:
            raise AssertionError(str(self))

    def as_dict(self) -> dict[str, object]:
        """The same as dicts, lists, strings, numbers and None, for JSON; what is not finite is a
        string.
        """
        rows: list[dict[str, object]] = []
        for row in self.rows:
            # JSON has no numbers that are not finite.
            difference = row.relative if row.relative < float("inf") else str(row.relative)
            rows.append(
                {**row._asdict(), "sizes": [*row.sizes], "relative": difference, "ok": row.ok}
            )
        return asdict(self) | {
            "causes": [asdict(each) for each in self.causes],
            "rows": rows,
            "notes": [*self.notes],
        }

    def __str__(self) -> str:
        return "\n".join(line for line, _ in _lines(self))

    def __rich__(self) -> "Text":
        from rich.text import Text

        return Text("\n").join(Text(line, style) for line, style in _lines(self))


def _lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """(line, style) of the text."""
    if verdict.ok and not verdict.gradients:
        yield "The values agree, and no gradient was compared: see the note.", "bold yellow"
    elif verdict.ok:
        yield "Accumulation is exact for this loss.", "bold green"
    else:
        count = len(verdict.causes)
        yield (
            f"Accumulation is NOT exact for this loss: {count} cause{'s' * (count != 1)}.",
            "bold red",
        )
    for number, each in enumerate(verdict.causes, 1):
        yield "", ""
        yield f"{number}. {each.name}", "bold"
        yield from ((line, "") for line in _wrapped(each.what))
        # The line itself is not wrapped, so that it can be copied; sentences that explain it are.
        line, *sentences = re.split(r"\. (?=[A-Z])", each.fix, maxsplit=1)
        yield f"   Fix: {line}", "green"
        yield from ((line, "green") for line in _wrapped("".join(sentences)))
        yield from ((line, "dim") for line in _wrapped(f"Seen: {each.evidence}"))
    if verdict.rows:
        yield "", ""
        yield f"Against the whole batch, in {verdict.dtype}:", ""
    for row in verdict.rows:
        result = row.error or (
            f"largest relative difference {row.relative:.1e} at {row.leaf}, limit {row.limit:.0e}"
        )
        yield f"   {row.split}: {result}", "" if row.ok else "red"
    for text in verdict.notes:
        yield from ((line, "dim") for line in _wrapped(text, "Note: "))


def _wrapped(text: str, first: str = "   ") -> list[str]:
    return textwrap.wrap(
        text, 110, initial_indent=first, subsequent_indent="   ", break_long_words=False
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
    """Whether `accumulate(grad_fn, n, ...)(*args, **kwargs)` is exact; if not, why, and the line
    that fixes it.

    The fold over n micro-batches, in order, and over two uneven ones in another order is compared
    with the whole batch, in float64 if grad_fn can compute in it. Where the results differ, batches
    in which two groups of rows repeat tell what kind of function the loss is.

    A step of `coupled` is compared with the gradient of its loss_fn(params, s), where s is the fold
    of summary_fn for the whole batch as one micro-batch. What is then wrong is the summary, in the
    words for a loss, or "wrong fold", as concat() for a mean.

    The names of the causes: "sum under mean", "mean under sum", "mean under per_weight", "uneven
    tokens", "wrong weight", "weight not additive", "totals not additive", "divided twice" by totals
    and by the fold, "total of zero" where that makes the loss NaN, "divided by n", "regulariser",
    "other normaliser", "batch statistics", "in-batch negatives", "coupled rows", "row order",
    "fixed rows" where their number is written down, "randomness", "state", "per-example output",
    "params unused", "by steps", "wrong gradient" where torch.func computes another one,
    "first-order step", "small remainder" where the difference is less than 1e-5, as of an epsilon
    in a count, and "not decomposable" where none of these explains it.

    A note tells what may be wrong, or could not be looked at, and leaves `.ok` as it is: that the
    loss is divided by a number which equals n, maybe by chance; that its value alone differs, by
    less than 1e-5; that every gradient is as small as rounding; or that there are no gradients.

    Differences are relative: to the largest value that was added up to a leaf, plus a share of the
    largest of all leaves, plus a floor. In float64 up to 1e-9 counts as rounding, and the share is
    a thousandth; where the loss computes in float32, 1e-4 and a tenth; in 16 bits, 8 epsilons and a
    half. The floor is 8 epsilons over that limit: 2e-6 in float64, 0.01 in float32, 1 in 16 bits.
    If all gradients are smaller than the floor, it shrinks with the largest of them, unless that is
    below 8 eps**0.75 of the loss: then a note says that nothing can be told. A mistake that is
    smaller than this for these arguments goes unnoticed.

    No argument is changed, and the global random generators are restored. The loss is called
    several times, and so is whatever it prints or stores.

    Args:
        grad_fn: As for `accumulate`, such as `funcga.value_and_grad(loss_fn)`; or a step of
            `coupled`, which brings its n, fold, weight, in_axes and totals.
        *args: Parameters and one batch, of 16 rows or so. More rows show no more, as long as they
            differ as those in training do.
        n: The number of micro-batches that is to be used, or several. Default: 3, or that of the
            step.
        fold: As for `accumulate`.
        weight: As for `accumulate`.
        in_axes: As for `accumulate`.
        totals: As for `accumulate`.
        seed: Of the order of rows, and of the groups that are looked at.
        bitwise: Whether to ask as well that the same micro-batches, of rows // n rows each, give
            the same bits in any order, as `reproducible` promises. The causes are then also "order
            of sums", where they do not; "order of kernels", where they do not although the sums are
            exact; and "bits not repeatable", where not even two calls with the same arguments do.
        **kwargs: Keyword arguments of grad_fn, passed whole.

    Returns:
        A Verdict.

    Raises:
        FuncgaError: For what `accumulate` refuses, fewer than two rows or than n, NaN among the
            arguments, or a gradient that is not finite.

    Example:
        >>> w, x = torch.ones(3), torch.randn(16, 3)
        >>> of_mean = funcga.grad(lambda w, x: ((x @ w) ** 2).mean())
        >>> funcga.verify(of_mean, w, x, n=4).assert_exact()
        >>> of_sum = funcga.grad(lambda w, x: ((x @ w) ** 2).sum())
        >>> verdict = funcga.verify(of_sum, w, x, n=4)
        >>> [cause.name for cause in verdict.causes]
        ['sum under mean']
    """
    check_callable(grad_fn, "grad_fn", "funcga.value_and_grad(loss_fn)")
    job = job_of(grad_fn)
    if job is not None:
        check_options(job, fold, weight, in_axes, totals)
    if owner_of(grad_fn) is not None:
        raise FuncgaError(
            "verify evaluates a gradient function with parameters of its own choice, and this one "
            "brings its own. Give it the loss as a function of the parameters: "
            "funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), on the module that "
            "was wrapped."
        )
    if weight is not None:
        check_callable(weight, "weight", 'lambda batch: (batch["labels"] != -100).sum()')
    if totals is not None:
        check_totals(totals, grad_fn)
        check_no_totals(kwargs)
    counts = _counts(n)
    # A loss that does not depend on its parameters is a cause here, and no error.
    if isinstance(grad_fn, GradientFunction):
        grad_fn = replace(grad_fn, reached={True})
    counted = None if totals is None else Totals(totals, None)
    program = given = Program(
        grad_fn, fold, weight, in_axes, n=counts[0] if counts else None, totals=counted
    )
    backend = program.backend(args, kwargs)
    program = replace(given, fold=_plain_folds(fold, backend))
    if job is not None:
        program = whole_program(job, backend)
    arguments = program.read(args, backend)
    rows = arguments.rows()
    _check_rows(counts, rows)
    if job is not None:
        counts = counts or counts_of(job, rows)
    # Refuses what has no rows to be cut, such as a sparse tensor.
    arguments.cut(0, 1, arguments.state)
    _check_finite((args, kwargs), backend)
    probe = Probe(program, backend, args, kwargs, precise=False)
    states = random_states(probe)
    # In float64 if that is possible, where rounding hides next to nothing; else as the arguments
    # are.
    try:
        with probe.framework.precision(precise=True):
            precise = _precise(program, backend, args, kwargs)
            if isinstance(precise, Probe):
                verdict = _verdict(precise, counts, seed, [])
        with probe.framework.precision(precise=False):
            if isinstance(precise, str):
                verdict = _verdict(
                    Probe(program, backend, args, kwargs, precise=False), counts, seed, [precise]
                )
            if bitwise and job is None:
                return _with_bits(verdict, probe, given, counts, seed)
        return verdict
    finally:
        restore(probe, states)


def _plain_folds(fold: FoldTree, backend: Backend) -> Tree:
    """The folds without exact sums, which change nothing but the rounding."""
    folds, structure = backend.trees.flatten(fold)
    return backend.trees.unflatten(
        structure, [plain(each) if isinstance(each, Fold) else each for each in folds]
    )


def _with_bits(
    verdict: Verdict, probe: Probe, program: Program, counts: list[int], seed: int
) -> Verdict:
    """The Verdict that says of the bits, too."""
    probe.values(probe.every)
    n = counts[0] if counts else min(3, probe.rows)
    causes, notes = of_bits(probe, program, n, np.random.default_rng(seed))
    return replace(
        verdict,
        ok=verdict.ok and not causes,
        causes=(*verdict.causes, *causes),
        notes=(*verdict.notes, *notes),
    )


def _counts(n: int | Sequence[int] | None) -> list[int]:
    """The numbers of micro-batches that were asked for; none for None."""
    if n is None:
        return []
    several = n if isinstance(n, tuple | list) else [n]
    counts = [check_count(count, "n", ", or several: n=(2, 3)") for count in several]
    if not counts or min(counts) < 2:
        raise FuncgaError(
            f"n is {n!r}: verify compares n micro-batches with one, so n is at least 2. Write n=8."
        )
    return list(dict.fromkeys(counts))


def _check_rows(counts: Sequence[int], rows: int) -> None:
    if rows < 2:
        raise FuncgaError(
            "the batch has 1 row, which cannot be split: verify needs at least 2, and recognises "
            "more with 16 or so. Give it a whole batch."
        )
    if counts and max(counts) > rows:
        raise FuncgaError(
            f"n={max(counts)} micro-batches were asked of a batch of {rows} rows: a micro-batch "
            f"has at least one. Write n={rows} or less, or give it a larger batch."
        )


def _check_finite(call: Tree, backend: Backend) -> None:
    """Raises FuncgaError for NaN among the arguments, with which nothing can be compared."""
    for i, leaf in enumerate(backend.trees.flatten(call)[0]):
        if backend.arrays.is_array(leaf) and backend.arrays.kind(leaf.dtype) in (
            "float",
            "complex",
        ):
            count = int(np.isnan(as_numbers(leaf, backend)).sum())
            if count:
                path = (
                    leaf_paths(call, backend.trees, "")[i].removeprefix("[0]").removeprefix("[1]")
                )
                raise FuncgaError(
                    f"the argument at {path} of the call is {backend.arrays.describe(leaf)} with "
                    f"{count} NaN: no two results could be compared. Give verify arguments without "
                    "NaN."
                )


def _precise(
    program: Program, backend: Backend, args: tuple[Tree, ...], kwargs: dict[str, Tree]
) -> Probe | str:
    """The Probe with arguments in float64, or the note that says why there is none."""
    try:
        probe = Probe(program, backend, args, kwargs, precise=True)
        probe.values(probe.every)
    # Something that the function closes over is in another dtype than float64.
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        # Torch asserts on dtypes that meet, and takes that for a bug of its own.
        text = first.rpartition("please report a bug to PyTorch. ")[2]
        return note("own dtypes", error=type(error).__name__, text=text[:160])
    return probe


def _verdict(probe: Probe, counts: list[int], seed: int, notes: list[str]) -> Verdict:
    """The Verdict: first what makes comparisons meaningless, then the splits and what explains
    them.
    """
    job = whole_of(probe)
    causes = unevaluated(probe) if job is None else unevaluated_step(probe, job)
    if causes:
        return Verdict(False, tuple(causes), (), probe.dtype, (note("no gradient"),))
    _check_gradient(probe)
    seen, causes = impurities(probe)
    if causes:
        return Verdict(False, tuple(causes), (), probe.dtype, (*notes, note("no comparison")))
    limit = limit_of(seen.epsilon)
    if limit.relative > 1e-9:
        notes = [*notes, note("rounding", limit=limit.relative)]
    if _is_weightless(probe):
        return _without_weight(probe, counts, seed, notes)
    return _compared(probe, seen, limit, counts, seed, notes)


def _check_gradient(probe: Probe) -> None:
    bad = [i for i in probe.additive() if not np.isfinite(probe.whole[i]).all()]
    if bad:
        raise FuncgaError(
            f"{probe.paths[bad[0]]} of grad_fn is not finite for the whole batch ({len(bad)} "
            "leaves are not): nothing can be compared with it. Give verify parameters and rows for "
            "which the loss and its gradients are finite."
        )


def _is_weightless(probe: Probe) -> bool:
    """Whether all rows together weigh nothing, where a fold weighs a value that is not zero."""
    if probe.program.weight is None or probe.weigh(probe.every) != 0:
        return False
    leaves = zip(probe.folds, probe.whole, strict=True)
    return any(
        fold.normalizer.divides_by == "weight" and leaf is not None and np.any(leaf)
        for fold, leaf in leaves
    )


def _without_weight(probe: Probe, counts: list[int], seed: int, notes: list[str]) -> Verdict:
    """The Verdict for a weight that is 0 everywhere; what it should be is what there is to say
    without it.
    """
    verdict = _verdict(probe.under(probe.program.fold, None), counts, seed, notes)
    lines = [each.fix for each in verdict.causes if each.name == "uneven tokens"]
    line = (
        lines[0]
        if lines
        else "drop weight=: by default a micro-batch weighs as many as it has rows"
    )
    rest = [each for each in verdict.causes if each.name != "uneven tokens"]
    causes = (cause("wrong weight: zero", line=line, rows=probe.rows), *rest)
    return replace(verdict, ok=False, causes=causes, notes=(*verdict.notes, note("without weight")))


def _compared(
    probe: Probe, seen: Seen, limit: Limit, counts: list[int], seed: int, notes: list[str]
) -> Verdict:
    """The Verdict of a function of which all calls agree: n micro-batches, and uneven ones,
    against the whole batch.
    """
    random = np.random.default_rng(seed)
    parts = uneven(probe, random)
    limit, small = fitted(probe, limit, seen.epsilon, parts)
    ns, job = counts or [min(3, probe.rows)], whole_of(probe)
    if job is not None:
        causes, rows, more = compared(StepCase(probe, job, seen, limit, ns, parts, random))
        return Verdict(not causes, tuple(causes), tuple(rows), probe.dtype, (*notes, *small, *more))
    causes, probe = per_example(probe, parts[0])
    if causes and probe.threaded:
        return Verdict(False, tuple(causes), (), probe.dtype, (*notes, note("nothing else")))
    causes += unused(probe) + of_totals(probe, parts)
    # The heart of it: the splits, what explains them, and what remains where that is next to
    # nothing.
    splits = compare(probe, ns, limit, parts)
    reasons, remainder = without_remainder(
        probe, splits, diagnose(probe, splits, seen.draws, limit, random), limit
    )
    reasons = reasons or late_state(probe, seen, limit)
    division, doubts = divided(probe, counts[0] if len(counts) == 1 else None, limit)
    # A division by n makes a mean under sum() right, for this n.
    if division:
        reasons = [each for each in reasons if each.name != "mean under sum"]
    if any(each.name == "divided twice" for each in causes):
        reasons = [each for each in reasons if each.name != "sum under mean"]
    causes += reasons + division + wrong_gradient(probe, limit)
    gradients = isinstance(probe.program.grad_fn, GradientFunction) or bool(probe.gradient_leaves())
    notes = [*notes, *small, *remainder, *doubts, *_of_comparison(probe, splits, gradients)]
    return Verdict(
        not causes, tuple(causes), tuple(splits.rows), probe.dtype, tuple(notes), gradients
    )


def _of_comparison(probe: Probe, splits: Splits, gradients: bool) -> list[str]:
    """What else is to be known of the comparison."""
    notes = [] if gradients else [note("loss")]
    notes += [note("moments")] if any(fold.reducer.over_steps for fold in probe.folds) else []
    notes += [note("carried", where=probe.paths[i]) for i in splits.carried[:1]]
    return notes + ([note("threaded")] if probe.threaded else [])
