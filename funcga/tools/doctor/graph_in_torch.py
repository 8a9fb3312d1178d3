"""How a loss weighs its targets, read from its graph before `backward` frees it.

From the root down, scalar factors are collected; sums, masks and selections give their elements
weights, as they do in `backward`. A node that does anything else ends that: its elements are the
targets, or rows of scores, if it is of a softmax. What lies deeper is searched for operations that
compare rows: such a loss is no sum over rows, each by itself. A number on a device stays there as a
tensor, so that nothing waits for it before the step.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from funcga.tools.doctor.windows import Number, Term

Edge = tuple[Any, int]  # of a graph of autograd: a node, and which of its outputs
Weights = torch.Tensor | None  # of the elements of an edge; None for ones
Read = tuple[Edge, Term, Weights]  # the term has the scalars on the way from the root to the edge

# Operations that leave the values of a loss as they are, and their number.
_SAME = re.compile("ToCopy|Clone|(Unsafe)?View|(Reshape)?Alias|(Un)?[Ss]queeze|_DDPSink")
# Those that move elements, and those that leave some of them out.
_MOVES = ("T", "Transpose", "Permute", "Cat", "Stack")
_SELECTS = re.compile(
    "MaskedFill|Where|MaskedSelect|Select|Slice|Split(WithSizes)?|Unbind|Expand|Diagonal|Nansum"
)
_PRODUCTS = ("Dot", "Mv", "Mm", "Bmm")
_LOSSES = re.compile("(Nll|Mse|SmoothL1|Huber|SoftMargin)Loss(2D)?|BinaryCrossEntropy(WithLogits)?")
_SCATTERS = re.compile("Index(Add|Put|Reduce)|Scatter|Segment")  # sums over elements by numbers
# Functions of each element by itself.
_EACH = re.compile(
    "Pow|Abs|Sqrt|Relu|Neg|Mul|Div|ToCopy|Clone|Rsub|Sub|Add|Exp|Log|Log1P|Sigmoid|Clamp(Min|Max)?"
)
_STATISTICS = re.compile(
    "Sum|Mean|Std|Var|(Std|Var)Mean|Prod|(LinalgVector)?Norm|(Log)?Softmax|Log(cum)?sumexp|A?(max|min)|"
    "Max|Min|Sort|Topk|Kthvalue|Median|Cum(sum|max|min|prod)|Pdist"
)
TERMS, ELEMENTS, NODES = 1000, 2**22, 100  # of a loss, of a mask, and that are searched
DEPTH = 8  # of functions of elements in which a mask is looked for
_NONE, _MEAN = 0, 1  # values of `reduction`


def read(loss: torch.Tensor) -> list[Term]:
    """The terms of a loss that `backward` is called on."""
    if loss.numel() != 1 or loss._backward_hooks:
        return [Term("several values, or one with a hook")]
    try:
        leaves = _leaves((loss.grad_fn, loss.output_nr))
        # A softmax below cross entropy is one over classes.
        nodes = [
            _inputs(node)[0][0] if above.name and len(_shape((node, 0))) == 1 else node
            for (node, _), above, _ in leaves
        ]
        comparing = next((_name(node) for node in _below_of(nodes) if _compares_rows(node)), "")
        if comparing:
            return [Term(f"{comparing}, which compares rows (see coupled),")]
        return [_term(*leaf) for leaf in leaves]
    except Exception as error:  # of a graph that is too deep, or freed
        return [Term(type(error).__name__)]


def hooks(params: Sequence[Any]) -> str:
    """The name of a hook of parameters or modules that may change gradients; "" if there is
    none.
    """
    for param in params:
        for kind in ("", "_post_accumulate_grad", "_backward_pre"):
            for hook in (getattr(param, f"{kind or '_backward'}_hooks", None) or {}).values():
                if not str(hook.__module__).startswith("torch."):
                    return str(getattr(hook, "__qualname__", hook))
    return ""


# --- above the targets: what is linear


def _leaves(root: Edge) -> list[Read]:
    """What reading ends at, below the root of a loss."""
    leaves: dict[Edge, Read] = {}
    stack: list[Read] = [(root, Term(), None)]
    while stack:
        edge, above, weights = stack.pop()
        if weights is not None:
            weights = _fitted(weights, edge)
            if _size(edge) == 1:
                above, weights = above.times(_number(weights)), None
        below = _below(edge, above, weights)
        if below is None:
            leaf = _of_scores(edge, above, weights)
            # Each loss may have a softmax of its own.
            source = _inputs(leaf[0][0])[0] if _name(leaf[0][0]) == "LogSoftmax" else leaf[0]
            known = leaves.get(source)
            leaves[source] = leaf if known is None else _joined(known, leaf)
        stack += below or []
        if len(stack) + len(leaves) > TERMS:
            raise RuntimeError
    return [*leaves.values()]


def _below(edge: Edge, above: Term, weights: Weights) -> list[Read] | None:
    """What a node is linear in; None for one that is not."""
    node, _ = edge
    name, below = _name(node), _inputs(node)
    if name in ("Add", "Sub", "Rsub", "Neg"):
        return _added(edge, above, weights)
    if name in ("Mul", "Div"):
        return _multiplied(edge, above, weights)
    if _SAME.fullmatch(name):
        return [(below[0], above, weights)]
    if not _is_linear(edge):
        return None
    if name == "Mean":  # its own function divides again
        ratio = _size(below[0]) / _size(edge)
        if _name(below[0][0]) == "Stack" and ratio == len(_inputs(below[0][0])):
            above = replace(above.over(ratio), averaged=ratio)
        else:
            above = replace(above, size=above.size * ratio)
        weights = None if weights is None else weights * ratio
    if weights is None and name in ("Sum", "Mean", *_MOVES):
        return [(each, above, None) for each in below]
    pairs = zip(node.next_functions, _through(edge, weights), strict=False)
    return [
        (each, above, given) for each, given in pairs if each[0] is not None and given is not None
    ]


def _added(edge: Edge, above: Term, weights: Weights) -> list[Read] | None:
    """The terms of a sum or a difference."""
    node, _ = edge
    name, below = _name(node), _inputs(node)
    if any(_size(each) < _size(edge) for each in below):
        if any(not each.next_functions for each, _ in below):
            return None  # a bias
        weights = _ones(edge) if weights is None else weights
    alpha = float(_saved(node, "alpha") or 1)
    signs = {"Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0), "Neg": (-1.0,)}.get(name, (1.0, alpha))
    return [
        (each, above if sign == 1 else above.times(sign), weights)
        for each, sign in zip(node.next_functions, signs, strict=False)
        if each[0] is not None
    ]


def _multiplied(edge: Edge, above: Term, weights: Weights) -> list[Read] | None:
    """What is multiplied or divided by a constant: by a number, or by a mask."""
    node, _ = edge
    other, below = _constant(node), _inputs(node)[0]
    scale = above.times if _name(node) == "Mul" else above.over
    if other is None:
        return None
    if not torch.is_tensor(other) or (other.numel() == 1 and _size(below) == _size(edge)):
        return [(below, scale(_number(other)), weights)]
    if _name(node) == "Div" or _classes(below):
        return None  # a mean of each row; probabilities
    other = other.double()
    # A mask has one number beside 0. Others, such as advantages, hide no element.
    is_mask = ((other == 0) | (other == other.max())).all()
    above = replace(above, own=above.own + (~is_mask).double())
    weights = torch.where(is_mask, other, 1.0) * (_ones(edge) if weights is None else weights)
    return [(below, above, weights)]


def _is_linear(edge: Edge) -> bool:
    """Whether a node adds, moves or selects elements, or is a product with a mask."""
    node, _ = edge
    name, below = _name(node), _inputs(node)
    if name in ("Sum", "Mean"):  # not those over classes
        return _size(below[0]) != _size(edge) * _classes(below[0])
    if name == "Index":
        return [each.dtype for each in _saved(node, "indices") if each is not None] == [torch.bool]
    if name in _PRODUCTS:  # as einsum has those of vectors
        return _size(edge) == (_shape(edge)[0] if name == "Bmm" else 1) and len(below) == 1
    is_known = name in _MOVES or _SELECTS.fullmatch(name)
    return bool(is_known) and not (name == "Where" and len(below) > 1)


def _through(edge: Edge, weights: Weights) -> tuple[Weights, ...]:
    """The weights of the inputs of a linear node, which its own function computes."""
    node, index = edge
    if sum(map(_size, _inputs(node))) > ELEMENTS:
        raise RuntimeError
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            _saved(node, name.removeprefix("_raw_saved_"))  # refuses what a hook has packed
    weights = _ones(edge) if weights is None else weights
    outputs = node._input_metadata
    if _name(node) in _PRODUCTS:
        weights = weights.to(outputs[index].dtype)
    if _name(node) in ("Index", "MaskedSelect"):
        return (_selected(edge, weights),)
    given = node(*[weights if i == index else None for i in range(len(outputs))])
    return given if isinstance(given, tuple) else (given,)


def _selected(edge: Edge, weights: torch.Tensor) -> torch.Tensor:
    """The weights of what a mask has selected from: the same for all that are; NaN if they differ.
    To put each in its place would wait for a device.
    """
    node, _ = edge
    mask = _saved(node, "indices")[0] if _name(node) == "Index" else _saved(node, "mask")
    shape = _shape(_inputs(node)[0])
    mask = mask.reshape(*mask.shape, *[1] * (len(shape) - mask.dim())).expand(shape)
    one = weights.sum() / max(weights.numel(), 1)
    is_lone = ((weights - one).abs() <= one.abs() * 1e-4).all()
    result: torch.Tensor = torch.where(is_lone, one, math.nan) * mask
    return result


def _fitted(weights: torch.Tensor, edge: Edge) -> torch.Tensor:
    """Weights of what was broadcast, or of a view."""
    shape = _shape(edge)
    is_view = weights.numel() == math.prod(shape)
    return weights.reshape(shape) if is_view else weights.sum_to_size(shape)


def _ones(edge: Edge) -> torch.Tensor:
    device = edge[0]._input_metadata[0].device
    return torch.ones(_shape(edge), dtype=torch.float64, device=device)


# --- the targets


def _scores(edge: Edge) -> Any:
    """The node that scores come from, without what leaves their values as they are."""
    node, _ = edge
    while _SAME.fullmatch(_name(node)) or _name(node) in ("Neg", *_MOVES[:3]):
        node, _ = _inputs(node)[0]
    return node


def _classes(edge: Edge) -> int:
    """Over how many classes an edge has log-probabilities; 0 if it has something else."""
    node = _scores(edge)
    if _name(node) != "LogSoftmax":
        return 0
    return _shape((node, 0))[_signed(_saved(node, "dim"))]


def _of_classes(edge: Edge, above: Term, weights: Weights) -> tuple[Term, Weights]:
    """The weights of rows in a cross entropy: those that it ignores have none."""
    (ignored,) = _hidden(edge)
    hits = (~ignored).double()
    above = replace(above, name="NllLoss").times(-1.0)
    if _saved(edge[0], "reduction") == _MEAN:
        above = above.over(_number(hits.sum()))
    return above, hits if weights is None else hits * weights.reshape(hits.shape)


def _of_scores(edge: Edge, above: Term, weights: Weights) -> Read:
    """A leaf of reading. That of a function of log-probabilities is the node of their softmax, with
    a weight for each row: losses with the same scores are of the same targets.
    """
    node, _ = edge
    name, below = _name(node).removesuffix("2D"), _inputs(node)
    if _saved(node, "weight") is not None:
        return edge, above, weights
    if name == "NllLoss":
        above, weights = _of_classes(edge, above, weights)
    source = edge if name == "LogSoftmax" or not below else below[0]
    classes = _classes(source)
    if not classes or name not in ("Mul", "LogSoftmax", "Sum", "Mean", "Gather", "NllLoss"):
        return edge, above, weights
    if name == "Gather" and _size(edge) * classes != _size(source):
        return edge, above, weights  # several of a row
    scores = _scores(source)
    if name == "Sum":
        above = above.times(float(classes))
    if name in ("Mul", "LogSoftmax"):
        weights = _ones(edge) if weights is None else weights
        weights = weights * _constant(node) if name == "Mul" else weights
        dim = _signed(_saved(scores, "dim"))
        weights = weights.reshape(_shape((scores, 0))).sum(dim)
    return (scores, 0), above, None if weights is None else weights.flatten()


def _joined(one: Read, other: Read) -> Read:
    """What two parts of a loss give the same elements together."""
    edge, above, weights = one
    _, second, others = other
    factors = tuple((Counter(above.factors) & Counter(second.factors)).elements())
    divisors = tuple((Counter(above.divisors) & Counter(second.divisors)).elements())
    first, then = (
        math.prod((*each.factors, *divisors)) / math.prod((*each.divisors, each.size, *factors))
        for each in (above, second)
    )
    above = Term(above.name or second.name, factors, divisors, own=above.own + second.own)
    if weights is None and others is None:
        return edge, above.over(1 / (first + then)), None
    parts = (1.0 if weights is None else weights, 1.0 if others is None else others)
    return edge, above, parts[0] * first + parts[1] * then


def _term(edge: Edge, above: Term, weights: Weights) -> Term:
    """The term of a leaf, whose elements are targets, or those that a loss function reduces."""
    node, _ = edge
    name, shape = _name(node), _shape(edge)
    term = replace(above, name=above.name or name, head=_head(node))
    reduction = _saved(node, "reduction") if _LOSSES.fullmatch(name) else _NONE
    if not reduction and _is_of_parameters(edge):
        return replace(term, counts=((above.size, 1.0),), own=1.0)  # a penalty
    is_own = isinstance(node, BackwardCFunction) or _saved(node, "weight") is not None
    if is_own or _SCATTERS.match(name) or not (shape or reduction):
        return term
    if name == "LogSoftmax":
        shape.pop(_signed(_saved(node, "dim")))
        shape = [math.prod(shape)]
    elif name.startswith("NllLoss"):
        shape = [*_saved(node, "target").shape]
    elif reduction:
        shape = _shape(_inputs(node)[0])
        if reduction == _MEAN:
            term = replace(term, size=term.size * math.prod(shape))
    counts = _counts(shape, weights, _hidden(edge), term.size)
    if weights is not None:  # a mask of one number beside 0 multiplies by it
        most = weights.abs().max()
        term = term.over(1 / torch.where(most > 0, most, 1.0))
    return replace(term, counts=counts, rows=float(shape[0]))


def _counts(
    shape: Sequence[int], weights: Weights, hidden: Sequence[torch.Tensor], size: float
) -> tuple[tuple[Number, Number], ...]:
    """The sum of the weights of elements, and what may be meant by the number of targets: elements
    that no mask hides, or all that a mean divides by. It is NaN if weights differ, or are of
    elements that a mask below has hidden.
    """
    if weights is None and not hidden:
        whole = float(math.prod(shape))
        return ((whole, whole),)
    if weights is None:
        weights = torch.ones(shape, dtype=torch.float64, device=hidden[0].device)
    values = weights.abs()
    is_hit = values > values.max() * 1e-6
    is_known = (~is_hit | (values > values.max() * (1 - 1e-4))).all()
    for mask in hidden:
        is_known = is_known & ~(mask & is_hit.reshape(shape)).any()
    count = is_hit.sum()
    counts = ((torch.where(is_known, count, math.nan), count),)
    return counts if hidden or size == 1 else (*counts, (size, size))


def _hidden(edge: Edge, depth: int = 0) -> list[torch.Tensor]:
    """Masks of elements that are constants, below functions of each element by itself."""
    node, _ = edge
    name, below = _name(node), _inputs(node)
    if name.startswith("NllLoss"):
        return [_saved(node, "target") == _signed(_saved(node, "ignore_index"))]
    if name == "MaskedFill":
        return [_saved(node, "mask")]
    if name == "Where" and len(below) == 1:
        return [_saved(node, "condition") ^ (node.next_functions[0] == below[0])]
    is_loss = _LOSSES.fullmatch(name)
    if depth == DEPTH or not (is_loss or _EACH.fullmatch(name)):
        return []
    other = _constant(node)
    masks = [other == 0] if torch.is_tensor(other) and other.numel() > 1 else []
    for each in below[:1] if is_loss else below:
        masks += _hidden(each, depth + 1)
    return masks


def _head(node: Any) -> int:
    """Which parameter is next to a node: losses of one head have the same."""
    queue = [node]
    for each in queue:
        if not each.next_functions:
            return id(getattr(each, "variable", None))
        queue += [below for below, _ in _inputs(each)] if len(queue) < NODES else []
    return 0


# --- what lies below: rows that are compared


def _below_of(nodes: Sequence[Any]) -> Iterator[Any]:
    """Nodes, and what they are computed from, the nearest first."""
    queue, seen = [*nodes], {*nodes}
    for node in queue:
        yield node
        for each, _ in node.next_functions:
            if each is not None and each not in seen and len(seen) < NODES:
                seen.add(each)
                queue.append(each)


def _compares_rows(node: Any) -> bool:
    """Whether a node takes a statistic over the first axis, or multiplies rows by rows."""
    name, below = _name(node), _inputs(node)
    shape = _shape((node, 0))
    if _STATISTICS.fullmatch(name) and below:
        return _is_over_rows(node, _shape(below[0])) and not _is_of_parameters(below[0])
    if name in ("Mm", "Addmm", "Cdist") or (name == "Bmm" and shape[0] == 1):
        # As many columns as rows may be scores of rows against rows that have no gradient.
        is_square = shape[-1] == shape[-2] > 1
        return all(
            not _is_of_parameters((each, i)) if each is not None else is_square
            for each, i in node.next_functions[-2:]
        )
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
    for number, node in enumerate(_below_of([edge[0]])):
        below = _inputs(node)
        # Data stand beside parameters, and have more axes.
        has_data = len(below) < len(node.next_functions) and not (
            _EACH.fullmatch(_name(node)) and _shape((node, 0)) == _shape(below[0])
        )
        if has_data or number > 16 or "Embedding" in node.name():
            return False
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


def _size(edge: Edge) -> int:
    return math.prod(_shape(edge))


def _saved(node: Any, name: str) -> Any:
    # A hook may unpack but once, or compute a checkpoint again.
    if getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None:
        raise RuntimeError
    return getattr(node, f"_saved_{name}", None)


def _signed(index: int) -> int:
    """A number that a node saves without a sign."""
    return index - 2**64 if index >= 2**63 else index


def _constant(node: Any) -> Any:
    """What a product multiplies by, or a quotient divides by; None if that has a gradient too."""
    if _name(node) not in ("Mul", "Div") or len(_inputs(node)) != 1:
        return None
    if node.next_functions[0][0] is not None:
        return _saved(node, "other")
    return _saved(node, "self") if _name(node) == "Mul" else None


def _number(value: Any) -> Number:
    """A number as it is now: one of a device is copied there, and not waited for."""
    if not torch.is_tensor(value) or value.device.type == "cpu":
        return float(value)
    return value.detach().reshape(()).clone()
