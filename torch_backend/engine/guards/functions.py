"""Functions of autograd that are written in Python: they may run backward passes of their own.

A reentrant checkpoint does. A pass that is restricted to the leaves skips such a function silently
if none of its inputs leads to a leaf, and some functions refuse a restricted pass. So the whole
pass is run, as in a loop by hand, and no leaf but the window's has another `.grad` afterwards.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch

from torch_backend import graphs
from torch_backend.engine.guards import EVERY
from torch_backend.engine.guards.grads import gradients_aside
from torch_backend.engine.guards.recompute import recomputed
from torch_backend.graphs import Reached
from torch_backend.modules.closures import reachable, tensors_in

_MOST = 64  # numbers of nodes that are known


def restriction(
    window: Any, loss: torch.Tensor, leaves: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...], AbstractContextManager[None]]:
    """(the leaves that a pass of a window is restricted to, none if it runs as a whole; the context
    of the pass).
    """
    found = graphs.reach(loss, {*map(id, leaves)})
    if not (found.foreign or found.custom):
        window.plan.graphs.add(window.nodes)
    if window.runs_whole or found.custom:
        return (), _others_aside(window, found, leaves)
    return leaves, nullcontext()


class Graphs:
    """What the graphs of the losses of one plan are known by: their numbers of nodes.

    The graph of a loss is no structure of a call, and the number saves walks alone. A graph that
    led to no leaf but the window's is not walked again. Its pass is not restricted, so another
    graph of as many nodes has the right gradients, too.
    """

    def __init__(self, loss_fn: object = None):
        # What the loss closes over, and may lead to once it is not frozen any more.
        self.others = [*map(ref, tensors_in(loss_fn))]
        self.frozen, self.plain = self._frozen(), set[int]()

    def add(self, nodes: int) -> None:
        """Notes a graph that leads to leaves of the window alone, and has no functions."""
        if len(self.plain) < _MOST:
            self.plain.add(nodes)

    def known(self) -> Collection[int]:
        """The numbers of nodes of graphs that need not be walked now."""
        return () if EVERY or self._frozen() != self.frozen else self.plain

    def _frozen(self) -> list[bool]:
        others = [other() for other in self.others]
        return [other is None or not other.requires_grad for other in others]


@contextmanager
def _others_aside(window: Any, found: Reached, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context after which all other leaves have their own `.grad`s. `found`: what a graph leads
    to.

    Raises FuncgaError if a tensor that a leaf is made of got a gradient instead of its leaf.
    """
    own_ids, originals = {*map(id, leaves)}, window.leaves.originals
    in_graph = {id(leaf): leaf for leaf in found.foreign}
    # Only passes that functions run by themselves reach what is not in the graph.
    tensors: list[Any] = [*reachable(window.gradient), *originals] if found.custom else []
    around = {
        id(tensor): tensor
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf
    }
    others = {key: leaf for key, leaf in (in_graph | around).items() if key not in own_ids}
    with gradients_aside(others.values()):
        yield
        written = {key for key, leaf in others.items() if leaf.grad is not None} - in_graph.keys()
    if not written.isdisjoint(map(id, originals)):
        raise recomputed()
