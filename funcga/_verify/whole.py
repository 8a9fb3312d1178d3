"""The whole batch: mistakes that calls with one batch show, and no comparison of micro-batches with it would.

A call that writes, draws or remembers makes every comparison meaningless. Parameters that are not used, a division by
the number of micro-batches and a gradient that is not the loss's are wrong in a micro-batch as in the whole batch.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from funcga._accumulate import accumulate
from funcga._backend.prefixes import leaf_paths
from funcga._grad import GradientFunction
from funcga._trees import interop
from funcga._types import Tree
from funcga._verify.causes import Cause
from funcga._verify.divisors import Variant, variants
from funcga._verify.probe import Leaves, Limit, Probe, Rows, as_numbers, largest, limit_of, random_states, restore
from funcga.folds import concat


def unevaluated(probe: Probe) -> Cause | None:
    """State that a loss writes to where its framework raises: not even one gradient can be computed."""
    try:
        probe.values(probe.every)
    except Exception as error:
        if not probe.framework.is_write(error):
            raise
        layers = ", ".join(probe.framework.batch_normalisers(probe.program.grad_fn)[:3])
        return Cause(
            "state",
            "The loss writes to tensors that it closes over, as BatchNorm in training mode does to its running "
            "statistics, and torch.func computes no gradient of that.",
            "module.eval(); or torch_backend.pure_loss(module, loss_fn), which leaves the buffers of the module alone",
            f"the call raised {type(error).__name__}{f'; in the loss are {layers}' if layers else ''}",
        )
    return None


class Seen(NamedTuple):
    """What one call has shown: values and a text that all calls of a pure function share, and how it computes."""

    values: Leaves
    program: str
    epsilon: float
    draws: bool

    def distance(self, other: "Seen", limit: Limit) -> float:
        """The largest relative difference of two calls, each leaf relative to itself; infinite for other programs."""
        if self.program != other.program or len(self.values) != len(other.values):
            return float("inf")
        return max(limit._replace(share=0.0).differences(self.values, other.values), default=0.0)


def impurities(probe: Probe) -> tuple[Seen, list[Cause]]:
    """What is seen of a call, and what makes the next one different: written arguments, randomness, state.

    The global random generators are as before.
    """
    states, args = random_states(probe), probe.gathered(probe.every)
    before = probe.numbers((args, probe.kwargs))
    try:
        first = _watched(probe, args)
        limit = limit_of(first.epsilon)
        written = _written(probe, before, args)
        if written is not None:
            return first, [written]
        second = _watched(probe, args)
        if first.distance(second, limit) <= limit.relative:
            return first, []
        restore(probe, states)
        third = _watched(probe, args)
    finally:
        restore(probe, states)
    if not first.distance(third, limit) <= limit.relative:
        return first, [_state(first.distance(second, limit))]
    cause = Cause(
        "randomness",
        "Two calls with the same arguments differ, and no longer do so once the random generators are put back: the "
        "loss draws random numbers, as dropout does. n micro-batches draw others than one batch, so they agree on "
        "average only.",
        "module.eval(), or dropout p=0, where you compare; or draw per row, from a key or a mask that is split with "
        "the batch",
        _difference(first.distance(second, limit)),
    )
    return first, [cause]


def _watched(probe: Probe, args: tuple[Tree, ...]) -> Seen:
    values, program, epsilon, draws = probe.framework.watch(probe.raw, args, probe.kwargs)
    numbers = [as_numbers(value, probe.backend) for value in values]
    return Seen(numbers, program, max(epsilon, probe.epsilon), draws)


def _written(probe: Probe, before: Leaves, args: tuple[Tree, ...]) -> Cause | None:
    after = probe.numbers((args, probe.kwargs))
    paths = leaf_paths((args, probe.kwargs), probe.backend.trees, "")
    for path, x, y in zip(paths, before, after, strict=True):
        if x is not None and not np.array_equal(x, y, equal_nan=True):
            return Cause(
                "state",
                "The call writes to its arguments, so the next micro-batch sees other ones.",
                "compute new arrays instead of writing in place: `x = x * 2`, not `x.mul_(2)`",
                f"the argument at {path.removeprefix('[0]')} of the arguments was changed by a call",
            )
    return None


def _state(distance: float) -> Cause:
    return Cause(
        "state",
        "Two calls with the same arguments differ, whatever the random generators are: something outlives a call, "
        "and the result depends on how often it was called.",
        "pass the state in and return it: in_axes=(None, funcga.CARRY, 0), fold=(funcga.mean(), funcga.carry())",
        _difference(distance),
    )


def _difference(distance: float) -> str:
    if distance == float("inf"):
        return "the function traces to another program the second time"
    return f"two calls with the same arguments differ by {distance:.1e}, relative to the largest element"


def late_state(probe: Probe, seen: Seen, limit: Limit) -> list[Cause]:
    """State that shows only after calls with other rows."""
    first, again = (seen._replace(values=values) for values in (probe.whole, probe.call(probe.every)))
    distance = first.distance(again, limit)
    return [] if distance <= limit.relative else [_state(distance)]


def per_example(probe: Probe, part: Rows) -> tuple[list[Cause], Probe]:
    """Outputs that have a row for each example under a fold that adds them up; and the Probe with concat() for them."""
    some = probe.try_values(part)
    if some is None:  # a loss that refuses some batches, of which the splits tell
        return [], probe
    folds, causes = [*probe.folds], []
    for i, (x, y) in enumerate(zip(probe.whole, some, strict=True)):
        if x is None or y is None or x.shape == y.shape or folds[i].reducer.monoid.ordered:
            continue
        axis = next((k for k, (of_x, of_y) in enumerate(zip(x.shape, y.shape, strict=False)) if of_x != of_y), 0)
        folds[i] = concat(axis)
        cause = Cause(
            "per-example output",
            f"{probe.paths[i]} has a row for each example, and the fold would add up the rows of different "
            f"micro-batches.",
            f"a tree of folds with funcga.concat({axis or ''}) in its place, such as fold=((funcga.mean(), "
            f"funcga.concat()), funcga.mean()) for ((loss, outputs), grads)",
            f"its shape is {[*x.shape]} for {probe.rows} rows and {[*y.shape]} for {len(part)}",
        )
        causes.append(cause)
    if not causes or probe.threaded:
        return causes[:1], probe
    structure = probe.backend.trees.flatten(probe.output)[1]
    return causes[:1], probe.under(probe.backend.trees.unflatten(structure, folds), probe.program.weight)


def fitted(probe: Probe, limit: Limit, epsilon: float, parts: tuple[Rows, Rows]) -> tuple[Limit, list[str]]:
    """The Limit with a floor that is below the largest gradient; a note if that may be nothing but rounding.

    A gradient is of about the size of its loss, and what rounding leaves of one that is zero of that size times eps.
    """
    evaluated = [(rows, values) for rows in (probe.every, *parts) if (values := probe.try_values(rows)) is not None]
    top = max(largest(values) for _, values in evaluated)
    if not 0 < top < limit.floor / limit.relative:
        return limit, []
    if top > 8 * epsilon**0.75 * max(abs(probe.loss(rows)) for rows, _ in evaluated):
        return limit._replace(floor=limit.floor * top), []
    note = (
        f"no gradient is larger than {top:.1e}, which may be rounding and nothing else: whether the fold is right for "
        f"this loss cannot be told from these arguments"
    )
    return limit, [note]


def unused(probe: Probe) -> list[Cause]:
    """Parameters that the loss does not use: every gradient is zero, and nothing changes with them."""
    gradients, moved = probe.gradient_leaves(), probe.moved()
    if not gradients or moved is None or any(np.any(probe.whole[i]) for i in gradients):
        return []
    pairs = zip(probe.whole, moved.whole, strict=True)
    if any(x is not None and not np.array_equal(x, y, equal_nan=True) for x, y in pairs):
        return []
    return [
        Cause(
            "params unused",
            "Every gradient is exactly zero, and nothing changes with the parameters: the loss does not use its "
            "argument, but closes over parameters of its own.",
            "loss_fn = torch_backend.pure_loss(module, lambda module, x, y: ...)"
            if probe.backend.name == "torch"
            else "use the argument: model.apply(params, x), not a model that holds its own",
            f"{len(gradients)} gradients are zero, and stay so with every parameter changed",
        )
    ]


def wrong_gradient(probe: Probe, limit: Limit) -> list[Cause]:
    """A gradient that misses a part of the loss; nothing where there is no second way to compute one.

    What is cut off from its graph inside of a loss is missing from every micro-batch alike. So the gradient of the
    whole batch is computed once more, by the framework's own transform or with steps in the loss that have graphs.
    """
    grad_fn, args = probe.program.grad_fn, probe.gathered(probe.every)
    ours = grad_fn if isinstance(grad_fn, GradientFunction) else None
    if ours is not None and ours.scaled:
        return []
    transform = None if ours is None else ours.bound(probe.backend)
    output = probe.framework.other_way(grad_fn, transform, args, probe.kwargs)
    if output is None:
        return []
    steps, other = _gradients(probe, probe.raw(*args, **probe.kwargs)), _gradients(probe, output)
    differences = limit.differences(steps, other)
    worst = max(differences, default=0.0)
    if not 10 * limit.relative < worst < float("inf"):
        return []
    if ours is None:
        return [
            Cause(
                "first-order step",
                "A step of funcga's inside of grad_fn is taken for a constant: the results of accumulate and stream "
                "have no graph, so torch.autograd.grad and .backward() do not see their derivative.",
                "funcga.grad(outer_loss), with the step in outer_loss, in place of torch.autograd.grad",
                f"{probe.paths[differences.index(worst)]} differs by {worst:.2g} of its largest element from what it "
                f"is with that derivative",
            )
        ]
    # Differences of the loss itself say which of the two is its gradient.
    if not _is_gradient(probe, ours, args, other, steps):
        return []
    return [
        Cause(
            "wrong gradient",
            "The gradient misses a part of the loss, in a micro-batch as in the whole batch: something inside of the "
            "loss takes itself out of the graph, as what calls .detach() or .backward() outside of torch.func does.",
            "torch.func.grad_and_value(loss_fn) in place of funcga.value_and_grad(loss_fn), which gives the gradients "
            "first",
            f"the gradient of the whole batch differs by {worst:.1e} from that of torch.func, with which differences "
            f"of the loss agree",
        )
    ]


def _gradients(probe: Probe, output: Tree) -> Leaves:
    """The leaves of the gradient in an output; of a function of the user's own, all leaves."""
    grad_fn = probe.program.grad_fn
    if isinstance(grad_fn, GradientFunction):
        output = output[1] if grad_fn.with_value else output[0] if grad_fn.has_aux else output
    return probe.numbers(output)


def _is_gradient(probe: Probe, grad_fn: GradientFunction, args: tuple[Tree, ...], one: Leaves, other: Leaves) -> bool:
    """Whether the loss changes as the one gradient says, and not as the other, along what they differ by."""
    difference = [None if x is None else np.real(x - y) for x, y in zip(one, other, strict=True)]
    size = largest(difference)
    if not 0 < size < float("inf"):
        return False
    direction = [None if part is None else part / size for part in difference]
    step = 1e-5 if probe.precise else 1e-2
    try:
        ahead, behind = (_loss_at(probe, grad_fn, args, direction, signed) for signed in (step, -step))
    except Exception:  # a loss that is not defined there
        return False
    slope = (ahead - behind) / (2 * step)
    one_says, other_says = (
        sum(float((np.real(x) * v).sum()) for x, v in zip(leaves, direction, strict=True) if v is not None)
        for leaves in (one, other)
    )
    return abs(slope - one_says) < 0.1 * abs(slope - other_says)


def _loss_at(
    probe: Probe, grad_fn: GradientFunction, args: tuple[Tree, ...], direction: Leaves, amount: float
) -> float:
    """The loss with its parameters moved along the direction."""
    trained, trees = grad_fn.places(len(args)), probe.backend.trees
    leaves, structure = trees.flatten(tuple(args[i] for i in trained))
    convert = {"torch": interop.to_torch, "jax": interop.to_jax}[probe.backend.name]
    moved = [
        leaf if v is None else leaf + probe.backend.arrays.cast(convert(v * amount, device=leaf.device), leaf.dtype)
        for leaf, v in zip(leaves, direction, strict=True)
    ]
    replaced = dict(zip(trained, trees.unflatten(structure, moved), strict=True))
    output = grad_fn.loss_fn(*(replaced.get(i, arg) for i, arg in enumerate(args)), **probe.kwargs)
    return float(as_numbers(grad_fn.split(output, probe.backend)[0], probe.backend))


def divided(probe: Probe, n: int | None, limit: Limit) -> tuple[list[Cause], list[str]]:
    """(causes, notes) of a loss that is divided by the number of micro-batches: a note where n may be chance.

    With such a number doubled, the whole output is halved, or twice as large. Only then is it accused, and only if its
    name says what it stands for: that a temperature or a number of channels equals n is no mistake.
    """
    gradients, nonzero = probe.gradient_leaves(), [i for i in probe.additive() if np.any(probe.whole[i])]
    leaves = [i for i in nonzero if i in gradients] or nonzero
    if not leaves:
        return [], []
    split = [leaf for leaf, axis in probe.arguments if isinstance(axis, int) and leaf is not None]
    sizes = {size for leaf in split for size in leaf.shape}
    grad_fn = partial(probe.program.grad_fn, **probe.kwargs)
    for variant in sorted(variants(grad_fn, n), key=lambda variant: variant.doubt):
        try:
            step = accumulate(variant.function, 1, fold=probe.plain, in_axes=probe.program.in_axes)
            changed = probe.numbers(step(*probe.gathered(probe.every)))
        except Exception:  # with this number the function is another one
            continue
        if _is_scaled(probe.whole, changed, leaves, 0.5 if variant.value > 1 else 2.0, limit):
            # A usual name may still be that of an axis of the batch.
            is_sure = variant.doubt == 0 or (variant.doubt == 1 and variant.value not in sizes)
            summed = any(probe.folds[i].normalizer.divides_by is None for i in leaves)
            return ([_division(variant, summed)], []) if is_sure else ([], [_doubtful(variant)])
    return [], []


def _is_scaled(before: Leaves, after: Leaves, leaves: Sequence[int], factor: float, limit: Limit) -> bool:
    """Whether arrays, or where there are none the scalars, are this many times as large."""
    arrays = [i for i in leaves if before[i].ndim] or leaves
    size = largest([before[i] for i in arrays])
    apart = [np.abs(after[i] - factor * before[i]).max(initial=0.0) for i in arrays]
    return size > 0 and all(difference <= limit.relative * size for difference in apart)


def _division(variant: Variant, summed: bool) -> Cause:
    fold = " and write fold=funcga.mean(), the default" if summed else ""
    doubt = ", if it stands for the number of micro-batches" if variant.name == repr(variant.value) else ""
    return Cause(
        "divided by n",
        "The loss is divided by the number of micro-batches, which is right for this n alone, and only if all are "
        "equal."
        if summed
        else "The loss is divided by the number of micro-batches already. The fold divides by what was folded, so "
        "gradients are n times too small, for every n.",
        f"drop `{_operation(variant)}` from the loss{fold}{doubt}",
        f"with {variant.name} = {2 * variant.value:g} instead of {variant.value:g} all of the output is "
        f"{'half' if variant.value > 1 else 'twice'} as large",
    )


def _doubtful(variant: Variant) -> str:
    return (
        f"the whole loss has the factor `{_operation(variant)}`: if it stands for the number of micro-batches, drop it "
        f"(the fold divides by what was folded); if it merely equals n, all is well"
    )


def _operation(variant: Variant) -> str:
    return f"{'/' if variant.value > 1 else '*'} {variant.name}"
