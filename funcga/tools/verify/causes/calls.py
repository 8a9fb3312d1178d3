"""Calls that do not give the same result again.

If a call writes to its arguments, draws random numbers or keeps state, no two results can be
compared, so these questions come first. Bits are compared in the arguments' own dtypes and with
micro-batches of one size, since the gradient of a micro-batch depends on its size.
"""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._fold.outputs import broadcast_folds
from funcga._types import Array
from funcga.errors import FuncgaError
from funcga.tools.verify.causes import Answers, Cause, cause, note, stop
from funcga.tools.verify.exact import Case, limit_of
from funcga.tools.verify.probe import Leaves


def not_differentiable(case: Case) -> Answers:
    """A loss whose gradient cannot be computed, since it writes to state that it closes over."""
    probe = case.probe
    try:
        whole = probe.whole
    except Exception as error:
        # A transform of torch forbids it.
        if "mutate a captured Tensor" not in str(error):
            raise
        yield cause("state: buffers", error=type(error).__name__)
        yield stop()
        return
    bad = [i for i in probe.additive() if not np.isfinite(whole[i]).all()]
    if bad:
        raise FuncgaError(
            f"{probe.paths[bad[0]]} of grad_fn is not finite for the whole batch ({len(bad)} "
            "leaves are not): nothing can be compared with it. Give verify parameters and rows for "
            "which the loss and its gradients are finite."
        )


def repeatable(case: Case) -> Answers:
    """Calls with the same arguments that differ: by written arguments, randomness or state.

    Stores whether it draws random numbers, and what counts as rounding in it, in the case.
    """
    probe = case.probe
    args = probe.take_rows(probe.all_rows)
    names = [*argument_names(probe.grad_fn, len(args)), "kwargs"]
    named = zip(names, (*args, probe.kwargs), strict=True)
    paths = [path for name, tree in named for path in leaf_paths(tree, probe.backend.trees, name)]
    before = probe.numbers((args, probe.kwargs))
    trace = probe.framework.trace_call
    with probe.random_kept():
        first = trace(probe.raw, args, probe.kwargs)
        *_, epsilon, case.draws = first
        case.limit = limit_of(epsilon)
        # Writing to arguments comes first, as it explains a second call that differs.
        after = probe.numbers((args, probe.kwargs))
        for path, x, y in zip(paths, before, after, strict=True):
            if not np.array_equal(x, y, equal_nan=True):
                yield cause("state: arguments", path=path)
                yield stop()
                return
        distance = _distance(case, first, trace(probe.raw, args, probe.kwargs))
    limit = case.limit.relative
    if distance > limit:
        # A third call, with the random generators as they were for the first one.
        with probe.random_kept():
            again = _distance(case, first, trace(probe.raw, args, probe.kwargs))
        yield cause("state" if again > limit else "randomness", distance=distance)
        yield stop()
    elif limit > 1e-9:
        yield note("rounding", limit=limit)


def _distance(case: Case, first: tuple[Array, ...], other: tuple[Array, ...]) -> float:
    """The largest relative difference of two calls, each leaf relative to itself; infinite if the
    programs differ, or one result is NaN.
    """
    (values, program, *_), (other_values, other_program, *_) = first, other
    if program != other_program or len(values) != len(other_values):
        return inf
    limit, numbers = case.limit._replace(share=0.0), case.probe.numbers
    return max(limit.differences(numbers(values), numbers(other_values)), default=0.0)


def by_position(case: Case) -> Iterator[Cause]:
    """Results that change with the order of the rows alone, in one micro-batch."""
    probe, order = case.probe, case.order
    if not case.splits.failed:
        return
    values = probe.values(order)
    expected = [*values]  # of what is not compared
    for i, (fold, whole) in enumerate(zip(probe.folds, probe.whole, strict=True)):
        axis = fold.reducer.monoid.axis
        if axis is not None and whole.shape[axis] == probe.rows:
            expected[i] = np.take(whole, order, axis)  # the same rows, in the other order
        elif fold.reducer.additive:
            expected[i] = whole
    differences = case.limit.differences(values, expected)
    difference = max(differences)
    if difference > case.limit.relative:
        key = "randomness: by position" if case.draws else "row order"
        where = probe.paths[differences.index(difference)]
        yield cause(key, subject=probe.subject, difference=difference, where=where)


# How many orders of the micro-batches have to have the same bits.
_ORDERS = 8


def same_bits(case: Case) -> Answers:
    """Whether a step is bitwise reproducible: for the same micro-batches, in any order."""
    probe, program = case.probe, case.probe.program
    if probe.has_state:
        yield note("bits of state")
        return
    n = case.counts[0] if case.counts else min(3, probe.rows)
    size = probe.rows // n
    step = probe.step(microbatch_size=size, fold=program.fold, weight=program.weight)

    def result(order: Sequence[int]) -> Leaves:
        rows = tuple(size * k + row for k in order for row in range(size))
        return probe.numbers(step(*probe.take_rows(rows), **probe.kwargs))

    first, random = result(range(n)), np.random.default_rng(case.seed)
    folds = broadcast_folds(program.fold, probe.output, len(first), probe.backend)
    for times in range(_ORDERS + 1):
        other = result(random.permutation(n).tolist() if times else range(n))
        for path, (fold, _), x, y in zip(probe.paths, folds, first, other, strict=True):
            # What keeps the order, such as concat(), is to have another result in another one.
            is_moved = times and fold.reducer.monoid.ordered
            if not is_moved and not np.array_equal(x, y, equal_nan=True):
                key = "order of kernels" if fold.reducer.of_bits else "order of sums"
                key = key if times else "bits not repeatable"
                yield cause(key, where=path, differ=int((x != y).sum()), size=x.size)
                return
