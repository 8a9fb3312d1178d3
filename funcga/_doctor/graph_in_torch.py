"""How a loss weighs its targets, read from its graph before `backward` frees it.

From the root down, scalar factors are multiplied until an operation reduces: a mean, a sum, or a
loss of `torch.nn.functional`. Below a reduction, masks say which of its elements are targets.

A number may stay on its device, as a tensor without axes, so that nothing waits for it before the
step of the optimizer.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from funcga._doctor.windows import Term

Number = float | torch.Tensor
Edge = tuple[Any, int]  # of a graph of autograd: a node, and which of its outputs

# Operations that change neither the values of a loss nor their number, but for the sign.
_SAME = {"ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze", "Transpose", "T", "Neg", "_DDPSink"}  # fmt: skip
_LOSSES = {
    "NllLoss": "cross entropy",
    "NllLoss2D": "cross entropy",
    "MseLoss": "squared error",
    "SmoothL1Loss": "smooth L1",
    "HuberLoss": "Huber",
    "BinaryCrossEntropy": "binary cross entropy",
    "BinaryCrossEntropyWithLogits": "binary cross entropy",
    "SoftMarginLoss": "soft margin",
}
_NONE, _MEAN = 0, 1  # the values of `reduction` that a node saves


@dataclass(frozen=True)
class Reading:
    """A Term whose numbers may still be on a device."""

    name: str = ""
    factors: tuple[Number, ...] = ()
    divisors: tuple[Number, ...] = ()
    mean_over: Number = 1.0
    counts: tuple[Number, ...] = ()
    classes: int = 0
    unread: str = ""

    def times(self, number: Number) -> "Reading":
        return replace(self, factors=(*self.factors, number))

    def term(self) -> Term:
        """It as plain numbers, for which this waits."""
        divisors = tuple(map(float, self.divisors))
        below = math.prod(divisors) * float(self.mean_over)
        each = math.prod(map(float, self.factors)) / below if below else math.nan
        return Term(self.name, each, tuple(map(float, self.counts)), divisors, self.unread)


def read(loss: torch.Tensor, gradient: torch.Tensor | None) -> list[Reading]:
    """The reductions under a loss that `backward` is called on, with this gradient."""
    if loss.numel() != 1:
        return [Reading(unread="a loss of several values")]
    above = Reading() if gradient is None else Reading().times(_number(gradient))
    with torch.no_grad():
        return [*_terms((loss.grad_fn, loss.output_nr), above)]


def _terms(edge: Edge, above: Reading) -> Iterator[Reading]:
    """The reductions below an edge; `above` has the scalars that they are multiplied by."""
    node, _ = edge
    name, below = _name(node), _inputs(node)
    scalar = _scalar(node)
    if name in ("Add", "Sub"):
        yield from _added(node, above)
    elif name in _SAME:
        yield from _terms(below[0], above.times(-1.0) if name == "Neg" else above)
    elif scalar is not None and name == "Mul":
        yield from _terms(below[0], above.times(scalar))
    elif scalar is not None:
        yield from _terms(below[0], replace(above, divisors=(*above.divisors, scalar)))
    elif name in ("Sum", "Mean") and math.prod(_shape(edge)) == 1:
        yield from _reduced(name, below[0], above)
    elif name in _LOSSES and _saved(node, "reduction") != _NONE:
        yield _of_loss(name, node, above)
    else:
        yield replace(above, name=name, unread=name)


def _added(node: Any, above: Reading) -> Iterator[Reading]:
    """The reductions below a sum of two losses."""
    alpha = _saved(node, "alpha")
    second = float(1 if alpha is None else alpha) * (-1 if _name(node) == "Sub" else 1)
    branches = [
        [*_terms((below, index), Reading().times(sign) if sign != 1 else Reading())]
        for (below, index), sign in zip(node.next_functions, (1.0, second), strict=False)
        if below is not None
    ]
    found = [reading for branch in branches for reading in branch]
    # With label smoothing, cross entropy is (1 - s) times one sum and s / classes times another, of
    # the same targets: one loss to whoever calls it.
    if len(found) == 2 and found[0].classes:
        one, other = (abs(math.prod(filter(_is_float, each.factors))) for each in found)
        if abs(one + other * found[0].classes - 1) < 1e-6:
            rest = tuple(each for each in found[0].factors if not _is_float(each))
            found = [replace(found[0], factors=rest)]
    for each in found:
        yield replace(
            each,
            factors=(*above.factors, *each.factors),
            divisors=(*above.divisors, *each.divisors),
        )


def _reduced(name: str, edge: Edge, above: Reading) -> Iterator[Reading]:
    """What a mean or a sum over all elements of an edge reduces."""
    shape = _shape(edge)
    size = math.prod(shape)
    if name == "Mean":
        above = replace(above, mean_over=size)
    # A list of losses: each is one of the terms.
    if _name(edge[0]) == "Stack" and len(shape) == 1:
        # The division by their number is one of the whole.
        above = replace(
            above, mean_over=1.0, divisors=(*above.divisors, *([size] * (name == "Mean")))
        )
        for each in _inputs(edge[0]):
            yield from _terms(each, above)
        return
    yield _elements(name, edge, above)


def _elements(name: str, edge: Edge, above: Reading) -> Reading:
    """A mean or a sum of elements, some of which may be masked."""
    shape, loss, weights, valid = _shape(edge), "values", [], []
    while True:
        node, _ = edge
        of, below, scalar = _name(node), _inputs(node), _scalar(node)
        if of in _SAME:
            above = above.times(-1.0) if of == "Neg" else above
        elif scalar is not None:
            above = above.times(scalar if of == "Mul" else 1 / scalar)
        elif of == "Mul" and len(below) == 1 and (other := _constant(node)) is not None:
            weights.append(other)
        elif of == "MaskedFill":
            valid.append(~_saved(node, "mask"))
        elif of == "Where" and len(below) == 1:
            condition = _saved(node, "condition")
            valid.append(condition if node.next_functions[0][0] is not None else ~condition)
        elif of == "Sum" and name == "Sum" and not weights and not valid:
            shape = _shape(below[0])
        else:
            break
        edge = below[0]
    if of in _LOSSES:
        loss = _LOSSES[of]
    if of.startswith("NllLoss"):
        valid.append(_saved(node, "target") != _ignored(node))
    counts = _counts(shape, weights, valid, padded=name == "Mean" and not of.startswith("NllLoss"))
    return replace(above, name=f"{loss}, {name.lower()}", counts=counts)


def _counts(
    shape: list[int], weights: list[Any], valid: list[Any], padded: bool
) -> tuple[Number, ...]:
    """What may be meant by the number of targets among elements, the likeliest first."""
    size = math.prod(shape)
    if not weights and not valid:
        return _sizes(shape)
    mask = torch.ones(shape, dtype=torch.float64, device=(weights + valid)[0].device)
    for each in valid:
        mask = mask * each.reshape(shape if each.numel() == size else each.shape)
    weighted = mask
    for each in weights:
        each = each.reshape(shape if each.numel() == size else each.shape).to(mask.dtype)
        weighted = weighted * each
        # Factors that are not all 0 or 1, such as advantages, hide no element.
        mask = torch.where(((each == 0) | (each == 1)).all(), mask * each, mask)
    rows = mask.expand(shape).reshape(shape[0], -1).amax(1).sum()
    others = [weighted.expand(shape).sum()] * bool(weights) + [float(size)] * padded
    return (mask.expand(shape).sum(), *others, rows)


def _sizes(shape: list[int]) -> tuple[Number, ...]:
    """The number of elements, and that of rows."""
    return (float(math.prod(shape)), float(shape[0] if shape else 1))


def _of_loss(name: str, node: Any, above: Reading) -> Reading:
    """A loss of torch.nn.functional that reduces by itself."""
    is_mean = _saved(node, "reduction") == _MEAN
    shape = _shape(_inputs(node)[0])
    counts = _sizes(shape)
    classes = 0
    if name.startswith("NllLoss"):
        classes = shape[-1] if len(shape) == 2 else shape[1]
        counts = ((_saved(node, "target") != _ignored(node)).sum(),)
        # Weights of classes: a mean is over their sum.
        if _saved(node, "weight") is not None:
            counts = (_number(_saved(node, "total_weight")), *counts)
    return replace(
        above,
        name=f"{_LOSSES[name]}, {'mean' if is_mean else 'sum'}",
        mean_over=counts[0] if is_mean else 1.0,
        counts=counts,
        classes=classes,
    )


# --- a node of autograd


def _name(node: Any) -> str:
    """What it computes, such as "Mul"."""
    return re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])


def _inputs(node: Any) -> list[Edge]:
    """The edges to what it computes from, without constants."""
    return [edge for edge in node.next_functions if edge[0] is not None]


def _shape(edge: Edge) -> list[int]:
    node, index = edge
    return [*node._input_metadata[index].shape]


def _saved(node: Any, name: str) -> Any:
    return getattr(node, f"_saved_{name}", None)


def _ignored(node: Any) -> int:
    """The target that cross entropy leaves out; a node saves it as a number without a sign."""
    index: int = _saved(node, "ignore_index")
    return index - 2**64 if index >= 2**63 else index


def _constant(node: Any) -> Any:
    """What a product multiplies by, or a quotient divides by; None if it has a gradient too."""
    if len(_inputs(node)) != 1:
        return None
    is_first = node.next_functions[0][0] is not None
    if not is_first and _name(node) == "Div":
        return None
    return _saved(node, "other" if is_first else "self")


def _scalar(node: Any) -> Number | None:
    """The same if it is one number."""
    if _name(node) not in ("Mul", "Div") or (other := _constant(node)) is None:
        return None
    return _number(other) if not torch.is_tensor(other) or other.numel() == 1 else None


def _number(value: Any) -> Number:
    """A number as it is now: a tensor of a device is copied, and not waited for."""
    if not torch.is_tensor(value):
        return float(value)
    value = value.detach().reshape(())
    return float(value) if value.device.type == "cpu" else value.clone()


def _is_float(number: Number) -> bool:
    return isinstance(number, float)
