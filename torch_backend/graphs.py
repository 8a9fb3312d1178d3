"""The graph of a loss: which leaves it leads to, and how its backward pass is run.

The graph of a loss is no structure of a call: a loss may build another one each time. To walk each
would take a few percent of the time of a loop over small layers. What a walk is for are functions
that are written in Python, and each node of one holds a reference to its class. So where no such
node is alive, none is in the graph, and it is not walked.
"""

import sys
from collections.abc import Collection
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

# The type of the nodes that end a graph: each adds to the `.grad` of one leaf.
AccumulateGrad = type(get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)


class _Unused(torch.autograd.Function):
    """A function that is never applied."""


# How many references there are to the class of a function of which no node is alive.
NO_NODES = sys.getrefcount(ref(_Unused._backward_cls)())


def kinds_of_functions() -> list[Any]:
    """The classes of the nodes of functions written in Python that may run a backward pass of their
    own, as weak references.
    """
    return [ref(kind) for kind in BackwardCFunction.__subclasses__() if _is_foreign(kind)]


def _is_foreign(kind: Any) -> bool:
    """Whether it is not torch's own, which run no pass of their own but for checkpoints."""
    module: str = kind._forward_cls.__module__
    return not module.startswith("torch.") or module == "torch.utils.checkpoint"


class Reached(NamedTuple):
    """What a graph leads to.

    `own`: whether that is a leaf of the window. `foreign`: the other leaves. `custom`: whether a
    function written in Python is in it, which may run a backward pass of its own, as a reentrant
    checkpoint does.
    """

    own: bool
    foreign: list[torch.Tensor]
    custom: bool


def nodes_of(root: Node) -> list[Node]:
    """The nodes of a graph, breadth first."""
    nodes, seen = [root], {None, root}
    for node in nodes:  # the list grows while it is walked through
        for after, _ in node.next_functions:
            if after not in seen:
                seen.add(after)
                nodes.append(after)  # type: ignore[arg-type]
    return nodes


def reach(loss: torch.Tensor, own_ids: Collection[int]) -> Reached:
    """What the graph of a loss leads to; `own_ids` are the ids of the window's leaves."""
    if loss.grad_fn is None:  # a leaf itself, or a constant
        is_own = id(loss) in own_ids
        return Reached(is_own, [loss] if loss.requires_grad and not is_own else [], False)
    nodes = nodes_of(loss.grad_fn)
    leaves = [node.variable for node in nodes if type(node) is AccumulateGrad]  # type: ignore[attr-defined]
    foreign = [leaf for leaf in leaves if id(leaf) not in own_ids]
    kinds = {*map(type, nodes)}
    custom = any(issubclass(kind, BackwardCFunction) and _is_foreign(kind) for kind in kinds)
    return Reached(len(foreign) < len(leaves), foreign, custom)
