"""Derivatives: whether the gradient is that of the loss, which no comparison of micro-batches with a batch shows.

What is cut off from its graph inside of a loss is missing from both sides alike. So the gradient of the whole batch is
computed once more, by the framework's own transform; where the two differ, differences of the loss decide.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from funcga._grad import GradientFunction
from funcga._trees import interop
from funcga._verify.probe import Probe, as_numbers
from funcga._verify.tolerance import Limit, relative, scales_of
from funcga._verify.verdict import Cause


def differentiated_wrongly(probe: Probe, limit: Limit) -> list[Cause]:
    """A gradient in the loop that is not the loss's; nothing where there is no second way to compute one."""
    grad_fn = probe.program.grad_fn
    if not isinstance(grad_fn, GradientFunction) or grad_fn.scaled:
        return []
    args = probe.gathered(probe.every)
    other = probe.own.other_way(grad_fn.bound(probe.backend), grad_fn, args, probe.kwargs)
    if other is None:
        return []
    loop, own = (_gradient(probe, grad_fn, output) for output in (probe.raw(*args, **probe.kwargs), other))
    scales = scales_of([loop, own], limit)
    apart = [0.0 if x is None else relative(x, y, scale) for x, y, scale in zip(loop, own, scales, strict=True)]
    worst = max(apart, default=0.0)
    if not worst > 10 * limit.relative or not _is_of(probe, grad_fn, args, own, loop):
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


def first_order(probe: Probe, whole: Sequence[Any], limit: Limit) -> list[Cause]:
    """A function that differentiates through a step by itself, for which its results have no graph."""
    if isinstance(probe.program.grad_fn, GradientFunction) or probe.backend.name == "jax":
        return []  # which see the derivative of a step
    try:
        with probe.own.differentiated():
            after = probe.numbers(probe.program.grad_fn(*probe.gathered(probe.every), **probe.kwargs))
    except Exception:  # which it is not made for
        return []
    for path, x, y in zip(probe.paths, whole, after, strict=True):
        if x is None or x.shape != y.shape:
            continue
        scale, apart = np.abs(y).max(initial=0), np.abs(x - y).max(initial=0)
        if apart > 1e3 * limit.relative * scale:
            return [
                Cause(
                    "first-order step",
                    "A step of funcga's inside of grad_fn is taken for a constant: the results of accumulate and "
                    "stream have no graph, so torch.autograd.grad and .backward() do not see their derivative.",
                    "funcga.grad(outer_loss), with the step in outer_loss, in place of torch.autograd.grad",
                    f"{path} differs by {apart / scale:.2g} of its largest element from what it is with that "
                    f"derivative",
                )
            ]
    return []


def _gradient(probe: Probe, grad_fn: GradientFunction, output: Any) -> list[Any]:
    """The leaves of the gradient in an output."""
    tree = output[1] if grad_fn.with_value else output[0] if grad_fn.has_aux else output
    return [as_numbers(leaf, probe.backend) for leaf in probe.backend.trees.flatten(tree)[0]]


def _is_of(probe: Probe, grad_fn: GradientFunction, args: tuple[Any, ...], one: list[Any], other: list[Any]) -> bool:
    """Whether the loss changes as the one gradient says, and not as the other, along what they differ by."""
    direction = [None if x is None else np.real(x - y) for x, y in zip(one, other, strict=True)]
    largest = max(np.abs(part).max(initial=0.0) for part in direction if part is not None)
    if not 0 < largest < math.inf:
        return False
    direction = [None if part is None else part / largest for part in direction]
    step = 1e-5 if probe.precise else 1e-2
    try:
        ahead, behind = (_loss(probe, grad_fn, args, direction, sign * step) for sign in (1, -1))
    except Exception:  # a loss that is not defined there
        return False
    slope = (ahead - behind) / (2 * step)
    claims = [
        sum(float((np.real(x) * v).sum()) for x, v in zip(leaves, direction, strict=True) if v is not None)
        for leaves in (one, other)
    ]
    return abs(slope - claims[0]) < 0.1 * abs(slope - claims[1])


def _loss(probe: Probe, grad_fn: GradientFunction, args: tuple[Any, ...], direction: list[Any], amount: float) -> float:
    """The loss with its parameters moved along the direction."""
    places, trees = grad_fn.places(len(args)), probe.backend.trees
    leaves, structure = trees.flatten(tuple(args[i] for i in places))
    array = getattr(interop, f"to_{probe.backend.name}")
    moved = [
        leaf if v is None else leaf + probe.backend.arrays.cast(array(v * amount, device=leaf.device), leaf.dtype)
        for leaf, v in zip(leaves, direction, strict=True)
    ]
    found = dict(zip(places, trees.unflatten(structure, moved), strict=True))
    output = grad_fn.loss_fn(*(found.get(i, arg) for i, arg in enumerate(args)), **probe.kwargs)
    return float(as_numbers(grad_fn.split(output, probe.backend)[0], probe.backend))
