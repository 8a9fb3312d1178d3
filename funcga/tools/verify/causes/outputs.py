"""Outputs that are not the gradient of the intended loss.

They are as wrong for the whole batch as for a micro-batch, so comparing the two does not show it.
"""

import numpy as np

from funcga.folds import concat
from funcga.tools.verify.causes import Answers, cause, note, stop
from funcga.tools.verify.causes.lines import fold_line
from funcga.tools.verify.exact import Case, is_compared, largest


def small_gradients(case: Case) -> Answers:
    """Gradients that may be nothing but rounding. If all are below the floor of the limit, the
    floor is lowered.

    A gradient is about as large as its loss; one that is zero but for rounding, eps times as
    large.
    """
    probe, limit = case.probe, case.limit
    top = max(map(largest, case.evaluated))
    # The usual case: gradients stand out from the floor.
    if not 0 < top < limit.floor / limit.relative:
        return
    epsilon = limit.floor / 8
    if top > 8 * epsilon**0.75 * abs(probe.loss(probe.all_rows)):
        case.limit = limit._replace(floor=limit.floor * top)
    else:
        yield note("small gradients", top=top)


def per_example(case: Case) -> Answers:
    """Outputs that have a row for each example, added up or joined along another axis.

    Further questions are about the step with concat() in its place.
    """
    probe, part = case.probe, case.parts[0]
    some = probe.try_values(part)
    # The splits tell of a loss that refuses some batches.
    if some is None:
        return
    folds, apart = [*probe.folds], list[int]()
    for i, (x, y) in enumerate(zip(probe.whole, some, strict=True)):
        if x.shape != y.shape:
            # The axis whose length follows the number of rows.
            sizes = enumerate(x.shape)
            axis = next((axis for axis, size in sizes if y.shape[axis : axis + 1] != (size,)), 0)
            monoid = folds[i].reducer.monoid
            is_joined = monoid.ordered and (monoid.axis is None or monoid.axis % x.ndim == axis)
            if not is_joined:
                folds[i] = concat(axis)
                apart.append(i)
    if apart:
        case.probe, i = probe.with_folds(folds), apart[0]
        words = {"where": probe.paths[i], "rows": probe.rows, "some": len(part)}
        shapes = {"whole": [*probe.whole[i].shape], "part": [*some[i].shape]}
        # The line has concat() for all of them.
        yield cause("per-example output", line=fold_line(case.probe, "", ()), **words, **shapes)
        if probe.has_state:
            yield stop()


def unused_parameters(case: Case) -> Answers:
    """Parameters that the loss does not use: every gradient is zero, and no output depends on
    them.
    """
    probe = case.probe
    gradients, moved = probe.gradient_leaves(), probe.at_other_parameters()
    if not gradients or moved is None or any(np.any(probe.whole[i]) for i in gradients):
        return
    pairs = zip(probe.whole, moved.whole, strict=True)
    if all(np.array_equal(x, y, equal_nan=True) for x, y in pairs):
        yield cause("params unused", count=len(gradients))


def wrong_gradient(case: Case) -> Answers:
    """A gradient that misses a part of the loss, if there is a second way to compute it.

    A part of a loss that leaves the graph is missing from every micro-batch. So the gradient of
    the whole batch is computed a second time: by the framework's own transform, or with graphs for
    the steps in the loss.
    """
    probe, gradient, limit = case.probe, case.probe.gradient, case.limit
    # Steps of JAX have jax.grad itself, and what they return can always be differentiated.
    if probe.backend.name == "jax" or (gradient is not None and gradient.scaled):
        return
    transform = None if gradient is None else gradient.bound(probe.backend)
    args = probe.take_rows(probe.all_rows)
    output = probe.framework.second_output(probe.grad_fn, transform, args, probe.kwargs)
    if output is None:
        return
    differences = limit.differences(probe.whole, probe.numbers(output))
    worst = max(differences)
    # Of two ways to compute the same number rounding may differ by more than in one.
    if 10 * limit.relative < worst < float("inf"):
        key = "wrong gradient" if gradient else "first-order step"
        yield cause(key, where=probe.paths[differences.index(worst)], difference=worst)


def remarks(case: Case) -> Answers:
    """Notes about what was not compared."""
    probe = case.probe
    if probe.gradient is None and not probe.gradient_leaves():
        yield note("loss")
    others = [i for i, fold in enumerate(probe.folds) if not is_compared(fold)]
    if others:
        yield note("not compared", where=probe.paths[others[0]])
    if probe.has_state:
        yield note("threaded")
