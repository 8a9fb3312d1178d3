"""What a backward pass would reach: the graph of a loss, looked at before the pass.

Only torch has this file: JAX differentiates a program, which has no tensors of somebody else's.

To look at every graph would take 5 % of the time of a loop over small layers. It is only the functions written in
Python, each a torch.autograd.Function, that make a difference, and most losses apply none: so it is noted when one is.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

# What adds to the `.grad` of a leaf.
_Accumulates: Any = type(get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)
_LAST = [object()]  # another object whenever a function was applied, in any thread


def last_applied() -> object:
    """What is another object after a function written in Python was applied, whether autograd recorded it or not."""
    return _LAST[0] if _NOTED else object()


def _note(_: Any) -> None:
    _LAST[0] = object()


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


def _is_noted() -> bool:
    """Lets every node of such a function note that it is made. False if torch has another way to make them."""
    if "__init__" in vars(BackwardCFunction):
        return False
    BackwardCFunction.__init__ = _note  # type: ignore[assignment, method-assign]
    before = _LAST[0]
    _Probe.apply(torch.empty(0, device="cpu"))  # type: ignore[no-untyped-call]
    return _LAST[0] is not before


_NOTED = _is_noted()  # else every graph is looked at


def reach(loss: torch.Tensor, own: Collection[int]) -> tuple[list[torch.Tensor], bool]:
    """(the leaves other than those with these ids, whether a function has a say that may run a pass of its own)."""
    nodes: list[Any] = [loss.grad_fn]
    seen = {None, *nodes}
    for node in nodes:  # which grow meanwhile
        for after, _ in node.next_functions:
            if after not in seen:
                seen.add(after)
                nodes.append(after)
    leaves = [node.variable for node in nodes if type(node) is _Accumulates]
    custom = any(issubclass(kind, BackwardCFunction) and not _is_compiled(kind) for kind in {*map(type, nodes)})
    return [leaf for leaf in leaves if id(leaf) not in own], custom


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
