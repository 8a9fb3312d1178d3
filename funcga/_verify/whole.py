"""The whole batch: mistakes that calls with one batch show, and no comparison of micro-batches with
it would.

A call that writes, draws or remembers makes every comparison meaningless. Parameters that are not
used, a division by the number of micro-batches and a gradient that is not the loss's are wrong in a
micro-batch as in the whole batch.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from funcga._accumulate import accumulate
from funcga._backend.prefixes import leaf_paths
from funcga._grad import GradientFunction
from funcga._trees import to_jax, to_torch
from funcga._types import Array, Tree
from funcga._verify.causes import Cause, cause, note
from funcga._verify.divisors import Variant, variants
from funcga._verify.probe import (
    Leaves,
    Limit,
    Probe,
    Rows,
    largest,
    limit_of,
    random_states,
    restore,
)
from funcga.folds import concat


def unevaluated(probe: Probe) -> list[Cause]:
    """State that a loss writes to where its framework raises: not even one gradient can be
    computed.
    """
    try:
        probe.values(probe.every)
    except Exception as error:
        if not probe.framework.is_write(error):
            raise
        layers = ", ".join(probe.framework.batch_normalisers(probe.program.grad_fn)[:3])
        layers = f"; in the loss are {layers}" if layers else ""
        return [cause("state: buffers", error=type(error).__name__, layers=layers)]
    return []


class Seen(NamedTuple):
    """What one call has shown: values and a text that all calls of a pure function share, and
    how it computes.
    """

    values: Leaves
    program: str
    epsilon: float
    draws: bool

    def distance(self, other: "Seen", limit: Limit) -> float:
        """The largest relative difference of two calls, each leaf relative to itself; infinite
        for other programs.
        """
        if self.program != other.program or len(self.values) != len(other.values):
            return float("inf")
        # NaN in one of the two is no rounding, and np.max keeps it.
        return float(
            np.max(limit._replace(share=0.0).differences(self.values, other.values), initial=0.0)
        )


def impurities(probe: Probe) -> tuple[Seen, list[Cause]]:
    """What is seen of a call, and what makes the next one different: written arguments, randomness,
    state.

    The global random generators are as before.
    """
    states, args = random_states(probe), probe.gathered(probe.every)
    before = probe.numbers((args, probe.kwargs))
    try:
        first = _watched(probe, args)
        limit = limit_of(first.epsilon)
        # Writing to arguments comes first, as it explains a second call that differs.
        written = _written(probe, before, args)
        if written:
            return first, written
        distance = first.distance(_watched(probe, args), limit)
        if distance <= limit.relative:
            return first, []
        # A third call, with the random generators as they were for the first one.
        restore(probe, states)
        is_random = first.distance(_watched(probe, args), limit) <= limit.relative
    finally:
        restore(probe, states)
    return first, [_changed("randomness" if is_random else "state", distance)]


def _watched(probe: Probe, args: tuple[Tree, ...]) -> Seen:
    values, program, epsilon, draws = probe.framework.watch(probe.raw, args, probe.kwargs)
    return Seen(probe.numbers(values), program, max(epsilon, probe.epsilon), draws)


def _written(probe: Probe, before: Leaves, args: tuple[Tree, ...]) -> list[Cause]:
    paths = leaf_paths((args, probe.kwargs), probe.backend.trees, "")
    for path, x, y in zip(paths, before, probe.numbers((args, probe.kwargs)), strict=True):
        if x is not None and not np.array_equal(x, y, equal_nan=True):
            return [cause("state: arguments", path=path.removeprefix("[0]"))]
    return []


def _changed(key: str, distance: float) -> Cause:
    difference = (
        f"two calls with the same arguments differ by {distance:.1e}, relative to the largest "
        "element"
    )
    if distance == float("inf"):
        difference = "the function traces to another program the second time"
    return cause(key, difference=difference)


def late_state(probe: Probe, seen: Seen, limit: Limit) -> list[Cause]:
    """State that shows only after calls with other rows."""
    first, again = (
        seen._replace(values=values) for values in (probe.whole, probe.call(probe.every))
    )
    distance = first.distance(again, limit)
    return [] if distance <= limit.relative else [_changed("state", distance)]


def per_example(probe: Probe, part: Rows) -> tuple[list[Cause], Probe]:
    """Outputs that have a row for each example, added up or joined along another axis; and the
    Probe with concat().
    """
    some = probe.try_values(part)
    # The splits tell of a loss that refuses some batches.
    if some is None:
        return [], probe
    folds, causes = [*probe.folds], []
    for i, (x, y) in enumerate(zip(probe.whole, some, strict=True)):
        if x is None or y is None or x.shape == y.shape:
            continue
        # The axis whose length follows the number of rows.
        axis = next(
            (
                k
                for k, (of_x, of_y) in enumerate(zip(x.shape, y.shape, strict=False))
                if of_x != of_y
            ),
            0,
        )
        monoid = folds[i].reducer.monoid
        if monoid.ordered and (monoid.axis is None or monoid.axis % x.ndim == axis):
            continue
        folds[i] = concat(axis)
        words = {"whole": [*x.shape], "part": [*y.shape], "rows": probe.rows, "some": len(part)}
        of_subject = {"loss": "per-example output", "summary": "per-example output: summary"}[
            probe.subject
        ]
        key = of_subject if monoid.axis is None else "per-example output: axis"
        causes.append(cause(key, where=probe.paths[i], axis=axis or "", **words))
    if not causes or probe.threaded:
        return causes[:1], probe
    structure = probe.backend.trees.flatten(probe.output)[1]
    return causes[:1], probe.under(
        probe.backend.trees.unflatten(structure, folds), probe.program.weight
    )


def fitted(
    probe: Probe, limit: Limit, epsilon: float, parts: tuple[Rows, Rows]
) -> tuple[Limit, list[str]]:
    """The Limit with a floor that is below the largest gradient; a note if that may be nothing but
    rounding.

    A gradient is of about the size of its loss, and what rounding leaves of one that is zero of
    that size times eps.
    """
    evaluated = [
        (rows, values)
        for rows in (probe.every, *parts)
        if (values := probe.try_values(rows)) is not None
    ]
    top = max(largest(values) for _, values in evaluated)
    # The usual case: gradients stand out from the floor.
    if not 0 < top < limit.floor / limit.relative:
        return limit, []
    if top > 8 * epsilon**0.75 * max(abs(probe.loss(rows)) for rows, _ in evaluated):
        return limit._replace(floor=limit.floor * top), []
    return limit, [note("small gradients", top=top)]


def unused(probe: Probe) -> list[Cause]:
    """Parameters that the loss does not use: every gradient is zero, and nothing changes with
    them.
    """
    gradients, moved = probe.gradient_leaves(), probe.moved()
    if not gradients or moved is None or any(np.any(probe.whole[i]) for i in gradients):
        return []
    pairs = zip(probe.whole, moved.whole, strict=True)
    if any(x is not None and not np.array_equal(x, y, equal_nan=True) for x, y in pairs):
        return []
    return [cause(f"params unused: {probe.backend.name}", count=len(gradients))]


def wrong_gradient(probe: Probe, limit: Limit) -> list[Cause]:
    """A gradient that misses a part of the loss; nothing where there is no second way to compute
    one.

    What is cut off from its graph inside of a loss is missing from every micro-batch alike. So the
    gradient of the whole batch is computed once more, by the framework's own transform or with
    steps in the loss that have graphs.
    """
    grad_fn, args = probe.program.grad_fn, probe.gathered(probe.every)
    ours = grad_fn if isinstance(grad_fn, GradientFunction) else None
    if ours is not None and ours.scaled:
        return []
    transform = None if ours is None else ours.bound(probe.backend)
    output = probe.framework.other_way(grad_fn, transform, args, probe.kwargs)
    if output is None:
        return []
    steps, other = (_gradient(probe, tree) for tree in (probe.output, output))
    differences = limit.differences(steps, other)
    worst = max(differences, default=0.0)
    # Of two ways to compute the same number rounding may differ by more than in one.
    if not 10 * limit.relative < worst < float("inf"):
        return []
    if ours is None:
        return [
            cause("first-order step", where=probe.paths[differences.index(worst)], difference=worst)
        ]
    # Differences of the loss itself say which of the two is its gradient.
    return [cause("wrong gradient", difference=worst)] if _is_gradient(probe, other, steps) else []


def _gradient(probe: Probe, output: Tree) -> Leaves:
    """The leaves of the gradient in an output; of a function of the user's own, all leaves."""
    grad_fn = probe.program.grad_fn
    if isinstance(grad_fn, GradientFunction):
        output = output[1] if grad_fn.with_value else output[0] if grad_fn.has_aux else output
    return probe.numbers(output)


def _is_gradient(probe: Probe, one: Leaves, other: Leaves) -> bool:
    """Whether the loss changes as the one gradient says, and not as the other, along what they
    differ by.
    """
    difference = [None if x is None else np.real(x - y) for x, y in zip(one, other, strict=True)]
    size, step = largest(difference), 1e-5 if probe.precise else 1e-2
    if not 0 < size < float("inf"):
        return False
    direction = [None if part is None else part / size for part in difference]
    ahead, behind = (
        probe.moved(partial(_along, probe, direction, amount)) for amount in (step, -step)
    )
    if ahead is None or behind is None:
        return False
    # The derivative of the loss along the direction, and what either gradient says that it is.
    slope = (ahead.loss(probe.every) - behind.loss(probe.every)) / (2 * step)
    claims = [
        sum(
            float((np.real(x) * v).sum())
            for x, v in zip(leaves, direction, strict=True)
            if v is not None
        )
        for leaves in (one, other)
    ]
    return abs(slope - claims[0]) < 0.1 * abs(slope - claims[1])


def _along(probe: Probe, direction: Leaves, amount: float, leaves: list[Array]) -> list[Array]:
    """The leaves of the parameters, moved along a direction."""
    convert = {"torch": to_torch, "jax": to_jax}[probe.backend.name]
    cast = probe.backend.arrays.cast
    return [
        leaf if v is None else leaf + cast(convert(v * amount, device=leaf.device), leaf.dtype)
        for leaf, v in zip(leaves, direction, strict=True)
    ]


def divided(probe: Probe, n: int | None, limit: Limit) -> tuple[list[Cause], list[str]]:
    """(causes, notes) of a loss that is divided by the number of micro-batches: a note where n may
    be chance.

    With such a number doubled, the whole output is halved, or twice as large. Only then is it
    accused, and only if its name says what it stands for: that a temperature or a number of
    channels equals n is no mistake.
    """
    # Metrics beside the gradients need not have the factor. A leaf of zeros has any.
    gradients, nonzero = (
        probe.gradient_leaves(),
        [i for i in probe.additive() if np.any(probe.whole[i])],
    )
    leaves = [i for i in nonzero if i in gradients] or nonzero
    grad_fn = partial(probe.program.grad_fn, **probe.kwargs)
    for variant in (
        sorted(variants(grad_fn, n), key=lambda variant: variant.doubt) if leaves else ()
    ):
        try:
            step = accumulate(variant.function, 1, fold=probe.plain, in_axes=probe.program.in_axes)
            changed = probe.numbers(step(*probe.gathered(probe.every)))
        # The number was the length of something, and the function fails with another.
        except Exception:
            continue
        factor = 0.5 if variant.value > 1 else 2.0
        if _is_scaled(
            [probe.whole[i] for i in leaves], [changed[i] for i in leaves], factor, limit
        ):
            return _accused(probe, leaves, variant)
    return [], []


def _is_scaled(before: Leaves, after: Leaves, factor: float, limit: Limit) -> bool:
    """Whether arrays, or where there are none the scalars, are this many times as large."""
    has_arrays, size = any(x.ndim for x in before), largest(before)
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if x.ndim or not has_arrays]
    return size > 0 and all(
        np.abs(y - factor * x).max(initial=0.0) <= limit.relative * size for x, y in pairs
    )


def _accused(probe: Probe, leaves: list[int], variant: Variant) -> tuple[list[Cause], list[str]]:
    """The cause, or a note where the number may stand for something else, such as an axis of the
    batch.
    """
    split = [leaf for leaf, axis in probe.arguments if isinstance(axis, int) and leaf is not None]
    sizes = {size for leaf in split for size in leaf.shape}
    name, value = variant.name, variant.value
    operation = f"{'/' if value > 1 else '*'} {name}"
    if variant.doubt == 2 or (variant.doubt == 1 and value in sizes):
        return [], [note("factor", operation=operation)]
    summed = any(probe.folds[i].normalizer.divides_by is None for i in leaves)
    doubt = ", if it stands for the number of micro-batches" if name == repr(value) else ""
    words = {
        "name": name,
        "value": value,
        "twice": 2 * value,
        "size": "half" if value > 1 else "twice",
    }
    return [
        cause(
            f"divided by n{': summed' if summed else ''}", operation=operation, doubt=doubt, **words
        )
    ], []
