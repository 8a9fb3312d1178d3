"""How a loss weighs its targets, read from its graph before `backward` frees it.

From the root down, scalar factors are collected until an operation sums: a sum, a mean, or a loss
of `torch.nn.functional`. Below that, masks say which of the elements are targets. What lies deeper
is searched for operations that compare rows: such a loss is no sum over rows, each by itself. A
number on a device stays there as a tensor, so that nothing waits for it before the step.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from funcga.tools.doctor.windows import Number, Term

Edge = tuple[Any, int]  # of a graph of autograd: a node, and which of its outputs

# Operations that leave the values of a loss as they are, but for the sign, and their number.
_SAME = re.compile(
    "ToCopy|Clone|(Unsafe)?View|(Reshape)?Alias|(Un)?[Ss]queeze|T|Transpose|Neg|_DDPSink"
)
_LOSSES = re.compile("(Nll|Mse|SmoothL1|Huber|SoftMargin)Loss(2D)?|BinaryCrossEntropy(WithLogits)?")
# Functions of each element by itself.
_EACH = re.compile(
    "Pow|Abs|Sqrt|Relu|Neg|Mul|Div|ToCopy|Clone|Rsub|Sub|Add|Exp|Log|Log1P|Sigmoid|Clamp(Min|Max)?"
)
_STATISTICS = re.compile(
    "Sum|Mean|Std|Var|(Std|Var)Mean|Prod|(LinalgVector)?Norm|(Log)?Softmax|Logsumexp|A?(max|min)|"
    "Max|Min|Sort|Topk|Kthvalue|Median|Cumsum|Pdist"
)
TERMS, ELEMENTS, NODES = 1000, 2**22, 100  # of a loss, of a mask, and that are searched
_NONE, _MEAN = 0, 1  # values of `reduction`


def read(loss: torch.Tensor) -> list[Term]:
    """The terms of a loss that `backward` is called on."""
    if loss.numel() != 1 or loss._backward_hooks:
        return [Term("several values, or one with a hook")]
    try:
        pairs = [*islice(_terms((loss.grad_fn, loss.output_nr), Term()), TERMS)]
        comparing = _comparing([node for _, node in pairs])
    except Exception as error:  # of a graph that is too deep, or freed
        return [Term(type(error).__name__)]
    if comparing:
        return [Term(f"{comparing}, which compares rows (see coupled),")]
    return [term for term, _ in pairs] if len(pairs) < TERMS else [Term("many terms")]


def hooks(params: Sequence[torch.Tensor]) -> str:
    """The name of a hook that may change gradients of parameters; "" if there is none."""
    for param in params:
        for each in (param._backward_hooks, param._post_accumulate_grad_hooks):
            for hook in (each or {}).values():
                if not str(hook.__module__).startswith("torch."):
                    return str(getattr(hook, "__qualname__", hook))
    return ""


def _terms(edge: Edge, above: Term) -> Iterator[tuple[Term, Any]]:
    """The terms below an edge, each with the node at which reading ends; `above` has the scalars
    that it is multiplied by.
    """
    node, _ = edge
    name, below = _name(node), _inputs(node)
    if name in ("Add", "Sub"):
        yield from _added(node, above)
    elif (scaled := _scaled(node, above)) is not None:
        yield from _terms(below[0], scaled)
    elif name in ("Sum", "Mean") and math.prod(_shape(edge)) == 1:
        size = float(math.prod(_shape(below[0])))
        yield _elements(below[0], above, size if name == "Mean" else None)
    elif _LOSSES.fullmatch(name) and _saved(node, "reduction") != _NONE:
        yield _elements(edge, above)
    else:
        yield replace(above, name=name), node


def _added(node: Any, above: Term) -> Iterator[tuple[Term, Any]]:
    """The terms of a sum or difference of two losses."""
    alpha = _saved(node, "alpha")
    for edge, sign in zip(node.next_functions, (None, alpha), strict=False):
        if edge[0] is not None:
            yield from _terms(edge, above if sign in (None, 1) else above.times(float(sign)))


def _elements(edge: Edge, above: Term, size: float | None = None) -> tuple[Term, Any]:
    """A sum of elements, some of which may be masked; with a size, their mean. And its node."""
    shape, masks = _shape(edge), list[torch.Tensor]()
    while True:
        node, _ = edge
        name, below = _name(node), _inputs(node)
        if (scaled := _scaled(node, above)) is not None:
            above = scaled
        elif name == "Mul" and (mask := _constant(node)) is not None:
            masks.append(mask)
        elif name == "Sum" and not (size or masks):
            shape = _shape(below[0])
        else:
            break
        edge = below[0]
    reduction, is_nll = _saved(node, "reduction"), name.startswith("NllLoss")
    if is_nll:
        target = _saved(node, "target")
        masks.append(target != _ignored(node))
        shape = [*target.shape] if reduction else shape
    elif reduction:
        shape = _shape(below[0])
    if not _is_read(node, shape, masks):
        return replace(above, name=name), node
    counts = _counts(shape, masks)
    if size:
        above = above.over(size)
        # It may be meant to count what is masked, too.
        counts = counts if is_nll else (*counts, (size, size))
    elif reduction == _MEAN:
        above = above.over(counts[0][0])
    return replace(above, name=name, counts=counts), node


def _is_read(node: Any, shape: list[int], masks: list[torch.Tensor]) -> bool:
    """False for a list of losses, which are no targets, for weights of classes, and for masks as
    large as a vocabulary.
    """
    is_small = not masks or math.prod(shape) < ELEMENTS
    return is_small and _name(node) != "Stack" and _saved(node, "weight") is None


def _ignored(node: Any) -> int:
    """The target that cross entropy leaves out."""
    return _signed(_saved(node, "ignore_index"))


def _counts(shape: list[int], masks: list[torch.Tensor]) -> tuple[tuple[Number, Number], ...]:
    """The sum of the weights of elements, and what may be meant by the number of targets."""
    size = math.prod(shape)
    if not masks:
        return ((float(size), float(size)),)
    ones = mask = weights = torch.ones(shape, dtype=torch.float64, device=masks[0].device)
    number: Number = 1.0
    for each in masks:
        each = each.reshape(shape if each.numel() == size else each.shape).double()
        # A mask has one number beside 0. Others, such as advantages, hide no element.
        is_mask = ((each == 0) | (each == each.max())).all()
        number = torch.where(is_mask, number * each.max(), number)
        hidden = torch.where(is_mask, (each != 0).double(), ones)
        mask, weights = mask * hidden, weights * torch.where(is_mask, hidden, each)
    counts = ((number * mask.sum(), mask.sum()),)
    if not any(each.is_floating_point() for each in masks):
        return counts
    return *counts, (number * weights.sum(), weights.sum())


# --- what lies below: rows that are compared


def _comparing(nodes: Sequence[Any]) -> str:
    """The name of an operation on rows together that a loss depends on; "" if there is none."""
    queue, seen = [*nodes], {*nodes}
    for node in queue:
        if _compares_rows(node):
            return _name(node)
        # What is below a function in Python is not known to be what it depends on.
        for each, _ in () if isinstance(node, BackwardCFunction) else node.next_functions:
            if each is not None and each not in seen and len(seen) < NODES:
                seen.add(each)
                queue.append(each)
    return ""


def _compares_rows(node: Any) -> bool:
    """Whether a node takes a statistic over the first axis, or multiplies rows by rows."""
    name, below = _name(node), _inputs(node)
    shape = _shape((node, 0))
    if _STATISTICS.fullmatch(name) and below:
        return _is_over_rows(node, _shape(below[0])) and not _is_of_parameters(below[0])
    if name in ("Mm", "Addmm", "Cdist") or (name == "Bmm" and shape[0] == 1):
        pair = node.next_functions[-2:]
        return all(each is not None and not _is_of_parameters((each, i)) for each, i in pair)
    if name == "Expand" or (name in ("Mul", "Add", "Sub", "Div") and len(below) > 1):
        return _is_outer(below, shape) and not any(map(_is_of_parameters, below))
    return False


def _is_over_rows(node: Any, shape: Sequence[int]) -> bool:
    """Whether a statistic is one over the first axis, which is none of several outputs."""
    given = _saved(node, "dim")
    dims = [given] if isinstance(given, int) else given or range(len(shape))
    is_over = bool(shape) and shape[0] > 1 and 0 in [_signed(d) % len(shape) for d in dims]
    return is_over and _name(_inputs(node)[0][0]) != "Stack"


def _is_outer(below: Sequence[Edge], shape: list[int]) -> bool:
    """Whether rows along the first axis meet rows along another one."""
    lengths = [[1] * (len(shape) - len(s)) + s for s in map(_shape, below)]
    is_outer = all(each != shape for each in lengths) and any(s[0] < shape[0] for s in lengths)
    is_square = len(shape) > 1 and shape[0] == shape[1] == lengths[0][1]
    return is_outer and (len(below) > 1 or is_square)


def _is_of_parameters(edge: Edge) -> bool:
    """Whether something small is computed from parameters alone."""
    queue = [edge[0]]
    for node in queue:
        below = _inputs(node)
        # Data stand beside parameters, and have more axes.
        if len(below) < len(node.next_functions) and not (
            _EACH.fullmatch(_name(node)) and _shape((node, 0)) == _shape(below[0])
        ):
            return False
        if len(queue) > 16 or "Embedding" in _name(node):
            return False
        queue += [each for each, _ in below]
    return True


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
    # A hook may unpack but once, or compute a checkpoint again.
    if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:
        raise RuntimeError
    return getattr(node, f"_saved_{name}", None)


def _signed(index: int) -> int:
    """A number that a node saves without a sign."""
    return index - 2**64 if index >= 2**63 else index


def _is_number(edge: Edge) -> bool:
    """Whether it is a number, perhaps as a tensor of one element: a mean of it is the same."""
    while _shape(edge):
        node, _ = edge
        is_same = _SAME.fullmatch(_name(node)) or _name(node) == "Stack"
        if not (is_same and len(node.next_functions) == 1 and math.prod(_shape(edge)) == 1):
            return False
        edge = node.next_functions[0]
    return True


def _constant(node: Any) -> Any:
    """What a product multiplies by, or a quotient divides by; None if that has a gradient too."""
    if _name(node) not in ("Mul", "Div") or len(_inputs(node)) != 1:
        return None
    is_first = node.next_functions[0][0] is not None
    return _saved(node, "other") if is_first else _saved(node, "self")


def _scaled(node: Any, above: Term) -> Term | None:
    """What is above a node, with its factor; None if it does more than to multiply by one."""
    name, below = _name(node), _inputs(node)
    is_reduction = name in ("Sum", "Mean", "Stack")
    if _SAME.fullmatch(name) or (is_reduction and len(below) == 1 and _is_number(below[0])):
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
