"""How a loss weighs its targets, read from its graph before `backward` frees it.

From the root down, scalar factors are collected until an operation sums: a sum, a mean, or a loss
of `torch.nn.functional`. Below that, masks say which of the elements are targets. A number on a
device stays there as a tensor, so that nothing waits for it before the step.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from funcga._doctor.windows import Number, Term

Edge = tuple[Any, int]  # of a graph of autograd: a node, and which of its outputs

# Operations that leave the values of a loss as they are, but for the sign, and their number.
_SAME = re.compile(
    "ToCopy|Clone|(Unsafe)?View|(Reshape)?Alias|(Un)?[Ss]queeze|T|Transpose|Neg|_DDPSink"
)
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
_NONE, _MEAN = 0, 1  # values of `reduction`


def read(loss: torch.Tensor) -> list[Term]:
    """The terms of a loss that `backward` is called on."""
    if loss.numel() != 1:
        return [Term("several values")]
    return [*_terms((loss.grad_fn, loss.output_nr), Term())]


def _terms(edge: Edge, above: Term) -> Iterator[Term]:
    """The terms below an edge; `above` has the scalars that it is multiplied by."""
    node, _ = edge
    name, below = _name(node), _inputs(node)
    if name in ("Add", "Sub"):
        yield from _added(node, above)
    elif (scaled := _scaled(node, above)) is not None:
        yield from _terms(below[0], scaled)
    elif name in ("Sum", "Mean") and math.prod(_shape(edge)) == 1:
        size = float(math.prod(_shape(below[0])))
        if _name(below[0][0]) == "Stack" and len(_shape(below[0])) == 1:
            # A list of losses.
            for each in _inputs(below[0][0]):
                yield from _terms(each, above.over(size) if name == "Mean" else above)
        else:
            yield _elements(below[0], above, size if name == "Mean" else None)
    elif name in _LOSSES and _saved(node, "reduction") != _NONE:
        yield _elements(edge, above)
    else:
        yield replace(above, name=name)


def _added(node: Any, above: Term) -> Iterator[Term]:
    """The terms of a sum or difference of two losses."""
    alpha = _saved(node, "alpha")
    signs = (1.0, 1.0 if alpha is None else float(alpha))
    found = [
        term
        for (below, index), sign in zip(node.next_functions, signs, strict=False)
        if below is not None
        for term in _terms((below, index), Term().times(*[sign] * (sign != 1)))
    ]
    # With label smoothing, cross entropy is (1 - s) times one sum and s / classes times another, of
    # the same targets: one loss to whoever calls it.
    own = [math.prod(f for f in term.factors if isinstance(f, float)) for term in found]
    is_smooth = len(found) == 2 and found[0].classes > 0
    if is_smooth and math.isclose(abs(own[0]) + abs(own[1]) * found[0].classes, 1):
        found = [found[0].times(1 / own[0])]
    for term in found:
        yield term.times(*above.factors).over(*above.divisors)


def _elements(edge: Edge, above: Term, size: float | None = None) -> Term:
    """A sum of elements, some of which may be masked; with a size, their mean."""
    weights, valid = list[Any](), list[Any]()
    shape = _shape(edge)
    while True:
        node, _ = edge
        name, below = _name(node), _inputs(node)
        if (scaled := _scaled(node, above)) is not None:
            above = scaled
        elif name == "Mul" and (other := _constant(node)) is not None:
            weights.append(other)
        elif name == "MaskedFill":
            valid.append(~_saved(node, "mask"))
        elif name == "Where" and len(below) == 1:
            condition = _saved(node, "condition")
            valid.append(condition if node.next_functions[0][0] is not None else ~condition)
        elif name == "Sum" and not (size or weights or valid):
            shape = _shape(below[0])
        else:
            break
        edge = below[0]
    reduction, classes = _saved(node, "reduction"), 0
    is_nll = name.startswith("NllLoss")
    if is_nll:
        target, of_classes = _saved(node, "target"), _saved(node, "weight")
        index = _saved(node, "ignore_index")
        # A node saves it as a number without a sign.
        valid.append(target != (index - 2**64 if index >= 2**63 else index))
        classes = _shape(below[0])[1 if name == "NllLoss2D" else -1]
        shape = [*target.shape] if reduction else shape
        if of_classes is not None:
            weights.append(of_classes[target.clamp(0, classes - 1)])
    elif name in _LOSSES and reduction:
        shape = _shape(below[0])
    counts = _counts(shape, weights, valid)
    if name in _LOSSES and reduction == _MEAN:
        above = above.over(counts[-1])
    elif size:
        # It may be meant to count what is masked, too.
        above, counts = above.over(size), counts if is_nll else (*counts, size)
    return replace(above, name=_LOSSES.get(name, "values"), counts=counts, classes=classes)


def _counts(shape: list[int], weights: list[Any], valid: list[Any]) -> tuple[Number, ...]:
    """What may be meant by the number of targets: those that no mask hides; the sum of weights."""
    size = math.prod(shape)
    if not weights and not valid:
        return (float(size),)
    mask = weighted = torch.ones(shape, dtype=torch.float64, device=(weights + valid)[0].device)
    for each in weights + valid:
        each = each.reshape(shape if each.numel() == size else each.shape).double()
        weighted = weighted * each
        # Factors that are not all 0 or 1, such as advantages, hide no element.
        mask = torch.where(((each == 0) | (each == 1)).all(), mask * each, mask)
    return (mask.sum(), weighted.sum()) if weights else (mask.sum(),)


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


def _constant(node: Any) -> Any:
    """What a product multiplies by, or a quotient divides by; None if that has a gradient too."""
    if _name(node) not in ("Mul", "Div") or len(_inputs(node)) != 1:
        return None
    is_first = node.next_functions[0][0] is not None
    return _saved(node, "other") if is_first else _saved(node, "self")


def _scaled(node: Any, above: Term) -> Term | None:
    """What is above a node, with its factor; None if it does more than to multiply by one."""
    if _SAME.fullmatch(_name(node)):
        return above
    other = _constant(node)
    if other is None or (torch.is_tensor(other) and other.numel() != 1):
        return None
    return (above.over if _name(node) == "Div" else above.times)(_number(other))


def _number(value: Any) -> Number:
    """A number as it is now: one of a device is copied there, and not waited for."""
    if not torch.is_tensor(value) or value.device.type == "cpu":
        return float(value)
    return value.detach().reshape(()).clone()
