"""What a backward pass would reach: the graph of a loss, looked at before the pass.

Only torch has this file: JAX differentiates a program, which has no tensors of somebody else's.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

# What adds to the `.grad` of a leaf.
_Accumulates: Any = type(get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)


class Reach(NamedTuple):
    """What a graph has beside the leaves of the window."""

    foreign: list[torch.Tensor]  # other leaves, whose `.grad` a pass without `inputs=` would write to
    custom: bool  # whether a function written in Python has a say, which may run backward passes of its own


class Graphs:
    """The graphs of the losses of one window, which has these leaves.

    To look at every one costs as much as to restrict the pass to `inputs=`, which one without foreign leaves does
    not need.
    """

    def __init__(self, leaves: Iterable[torch.Tensor]):
        self.own = {*map(id, leaves)}
        self.ends: set[Any] = {None}  # the nodes of own leaves: kept, and so no longer looked at

    def reach(self, loss: torch.Tensor, moving: Sequence[torch.Tensor] = ()) -> Reach:
        """What the graph of a loss reaches, beside the leaves of the window and those `moving` with the micro-batch."""
        nodes: list[Any] = [loss.grad_fn]
        seen = self.ends.union(nodes)
        for node in nodes:  # which grow meanwhile
            for after, _ in node.next_functions:
                if after not in seen:
                    seen.add(after)
                    nodes.append(after)
        kinds = {*map(type, nodes)}
        foreign = self._foreign(nodes, moving) if _Accumulates in kinds else []
        return Reach(foreign, any(issubclass(kind, BackwardCFunction) and not _is_compiled(kind) for kind in kinds))

    def _foreign(self, nodes: list[Any], moving: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ends: list[Any] = [node for node in nodes if type(node) is _Accumulates]
        self.ends.update([node for node in ends if id(node.variable) in self.own])
        own = self.own.union(map(id, moving)) if moving else self.own
        return [node.variable for node in ends if id(node.variable) not in own]


def _is_compiled(kind: Any) -> bool:
    """Whether this is what torch.compile has made of a graph, which runs no backward pass of its own."""
    return str(kind._forward_cls.__module__).startswith("torch._functorch._aot_autograd.")


@contextmanager
def left_alone(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """These leaves have no `.grad` in this context, and their own again afterwards."""
    before = [(tensor, tensor.grad) for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient
