"""The run: from the arguments of `verify` to its Verdict."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from funcga import normalizers
from funcga._backend.prefixes import leaf_paths
from funcga._backend.protocols import Backend
from funcga._call.program import OwningGradient, Program
from funcga._grad import GradientFunction
from funcga._verify.derivatives import differentiated_wrongly, first_order
from funcga._verify.diagnosis import diagnose
from funcga._verify.inspection import divided, has_gradients, per_example, unused
from funcga._verify.magnitude import fitted
from funcga._verify.naming import is_linear
from funcga._verify.probe import Probe, as_numbers, is_moments, random_states, restore
from funcga._verify.remainder import without_remainder
from funcga._verify.repetition import impurities, written, written_later
from funcga._verify.splits import compare, uneven
from funcga._verify.tolerance import limit_of
from funcga._verify.verdict import Cause, Verdict
from funcga.errors import FuncgaError, check_callable, check_count


def run(
    grad_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n: Any,
    fold: Any,
    weight: Any,
    in_axes: Any,
    seed: int,
) -> Verdict:
    """The Verdict; the arguments are those of `funcga.verify`."""
    check_callable(grad_fn, "grad_fn", "funcga.value_and_grad(loss_fn)")
    if isinstance(grad_fn, OwningGradient):
        raise FuncgaError(
            "verify evaluates a gradient function with parameters of its own choice, and this one brings its own. Give "
            "it the loss as a function of the parameters: "
            "funcga.value_and_grad(torch_backend.pure_loss(module, loss_fn)), on the module that was wrapped."
        )
    if weight is not None:
        check_callable(weight, "weight", 'lambda batch: (batch["labels"] != -100).sum()')
    given = _given(n)
    if isinstance(grad_fn, GradientFunction):
        grad_fn = replace(grad_fn, reached={True})  # a loss of other parameters is a cause here, and no error
    program = Program(grad_fn, fold, weight, in_axes)
    backend = program.backend(args, kwargs)
    rows = program.read(args, backend).rows()
    _check_rows(given, rows)
    _check_finite((args, kwargs), backend)
    ns = given or [min(3, rows)]
    explicit = given[0] if len(given) == 1 else None
    asked = Probe(program, backend, args, kwargs, precise=False)
    states = random_states(asked)
    try:
        with asked.own.precision("float64"):
            probe, why = _precise(program, backend, args, kwargs)
            if probe is not None:
                return _verdict(probe, ns, explicit, seed, [])
        with asked.own.precision("own"):
            probe = Probe(program, backend, args, kwargs, precise=False)
            return _verdict(probe, ns, explicit, seed, [f"not in float64, in which the call {why}"])
    finally:
        restore(asked, states)


def _given(n: Any) -> list[int]:
    """The numbers of micro-batches that were asked for; none for None."""
    if n is None:
        return []
    listed = n if isinstance(n, tuple | list) else [n]
    counts = [check_count(count, "n", ", or several: n=(2, 3)") for count in listed]
    if not counts or min(counts) < 2:
        raise FuncgaError(f"n is {n!r}: verify compares n micro-batches with one, so n is at least 2. Write n=8.")
    return list(dict.fromkeys(counts))


def _check_rows(given: Sequence[int], rows: int) -> None:
    if rows < 2:
        raise FuncgaError(
            "the batch has 1 row, which cannot be split: verify needs at least 2, and recognises more with 16 or so. "
            "Give it a whole batch."
        )
    if given and max(given) > rows:
        raise FuncgaError(
            f"n={max(given)} micro-batches were asked of a batch of {rows} rows: a micro-batch has at least one. Write "
            f"n={rows} or less, or give it a larger batch."
        )


def _check_finite(call: Any, backend: Backend) -> None:
    """Raises FuncgaError for NaN among the arguments, with which nothing can be compared."""
    for i, leaf in enumerate(backend.trees.flatten(call)[0]):
        if backend.arrays.is_array(leaf) and backend.arrays.kind(leaf.dtype) in ("float", "complex"):
            found = int(np.isnan(as_numbers(leaf, backend)).sum())
            if found:
                path = leaf_paths(call, backend.trees, "")[i].removeprefix("[0]").removeprefix("[1]")
                raise FuncgaError(
                    f"the argument at {path} of the call is {backend.arrays.describe(leaf)} with {found} NaN: no two "
                    f"results could be compared. Give verify arguments without NaN."
                )


def _precise(
    program: Program, backend: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Probe | None, str]:
    """The Probe with arguments in float64, or why there is none."""
    try:
        probe = Probe(program, backend, args, kwargs, precise=True)
        probe.values(probe.every)
    except Exception as error:  # something is in another dtype that meets them
        first, *_ = str(error).splitlines() or [""]
        said = first.rpartition("please report a bug to PyTorch. ")[2]  # which is none
        return None, f"raised {type(error).__name__}: {said[:160]}"
    return probe, ""


def _verdict(probe: Probe, ns: Sequence[int], n: int | None, seed: int, notes: list[str]) -> Verdict:
    dtype = "float64" if probe.precise else "the arguments' own dtypes"
    wrote = written(probe)
    if wrote is not None:
        return Verdict(False, (wrote,), (), dtype, ("nothing else was looked at: there is no gradient",))
    whole = probe.values(probe.every)
    _check_gradient(probe, whole)
    seen, causes = impurities(probe)
    if causes:
        notes.append("nothing else was looked at: no two calls can be compared")
        return Verdict(False, tuple(causes), (), dtype, tuple(notes))
    limit = limit_of(max(seen.eps, *_own_eps(probe)))
    if limit.relative > 1e-9:
        notes.append(
            f"it computes in less than float64 somewhere, so differences below {limit.relative:.0e} are taken for "
            f"rounding, and cannot be seen"
        )
    if _is_weightless(probe, whole):
        return _without_weight(probe, ns, n, seed, notes)
    random = np.random.default_rng(seed)
    parts = uneven(probe, random)
    limit, small = fitted(probe, limit, max(seen.eps, *_own_eps(probe), 2.0**-52), parts)
    found, folds = per_example(probe, parts[0])
    causes += found
    if found and probe.threaded:
        return Verdict(False, tuple(causes), (), dtype, (*notes, "nothing else was looked at"))
    if found:
        probe = _replaced(probe, fold=folds)
    causes += unused(probe)
    causes += first_order(probe, whole, limit)
    splits = compare(probe, ns, limit, parts)
    why, remainder = without_remainder(probe, splits, diagnose(probe, splits, seen, limit, random), limit)
    late = None if why else written_later(probe, whole, limit)
    causes += [late] if late else why
    already, doubts = divided(probe, n, limit)
    if already and any(cause.name == "mean under sum" for cause in causes):
        causes = [cause for cause in causes if cause.name != "mean under sum"]
    causes += already + differentiated_wrongly(probe, limit)
    gradients = has_gradients(probe)
    if not gradients:
        notes.append(
            "nothing that grad_fn returns has the shapes of its parameters: if it is the loss, its values are all that "
            "was compared. Verify its gradient: funcga.verify(funcga.value_and_grad(loss_fn), ...)"
        )
    notes += [*small, *remainder, *doubts, *_notes(probe, splits.carried)]
    return Verdict(not causes, tuple(causes), tuple(splits.rows), dtype, tuple(notes), gradients)


def _is_weightless(probe: Probe, whole: Sequence[Any]) -> bool:
    """Whether all rows together weigh nothing, where a fold weighs a value that is not zero."""
    if probe.program.weight is None or probe.weigh(probe.every) != 0:
        return False
    by_weight = [fold.normalizer.apply is normalizers.by_weight.apply for fold in probe.folds]
    return any(
        weighs and leaf is not None and bool(np.any(leaf)) for weighs, leaf in zip(by_weight, whole, strict=True)
    )


def _without_weight(probe: Probe, ns: Sequence[int], n: int | None, seed: int, notes: list[str]) -> Verdict:
    """The Verdict for a weight that is 0 everywhere; what it should be is what there is to say without it."""
    verdict = _verdict(_replaced(probe, weight=None), ns, n, seed, notes)
    line = next((cause.fix for cause in verdict.causes if cause.name == "uneven tokens"), None)
    cause = Cause(
        "wrong weight",
        "weight= is 0 for the whole batch, though the loss is not: every micro-batch is left out, and all results are "
        "zero.",
        line or "drop weight=: by default a micro-batch weighs as many as it has rows",
        f"weight is 0 for all {probe.rows} rows",
    )
    rest = [cause for cause in verdict.causes if cause.name != "uneven tokens"]
    said = "the splits are those without weight="
    return replace(verdict, ok=False, causes=(cause, *rest), notes=(*verdict.notes, said))


def _own_eps(probe: Probe) -> list[float]:
    names = {"float32": 2.0**-23, "complex64": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
    return [0.0, *(names.get(name, 0.0) for name in probe.dtypes)]


def _replaced(probe: Probe, **changes: Any) -> Probe:
    """The Probe of another program."""
    made = Probe(replace(probe.program, **changes), probe.backend, probe.args, probe.kwargs, probe.precise)
    made.values(made.every)
    return made


def _check_gradient(probe: Probe, whole: Sequence[Any]) -> None:
    bad = [
        i
        for i, leaf in enumerate(whole)
        if leaf is not None and is_linear(probe.folds[i]) and not np.isfinite(leaf).all()
    ]
    if bad:
        raise FuncgaError(
            f"{probe.paths[bad[0]]} of grad_fn is not finite for the whole batch ({len(bad)} leaves are not): nothing "
            f"can be compared with it. Give verify parameters and rows for which the loss and its gradients are finite."
        )


def _notes(probe: Probe, carried: Sequence[int]) -> list[str]:
    notes = []
    if any(is_moments(fold) for fold in probe.folds):
        notes.append("moments() are over micro-batches, so they depend on n by definition, and were not compared")
    if carried:
        notes.append(
            f"carried state, {probe.paths[carried[0]]}, is another after n micro-batches than after one, as running "
            f"statistics are"
        )
    if probe.threaded:
        notes.append("state is threaded from one micro-batch to the next, so rows were compared in order only")
    return notes
