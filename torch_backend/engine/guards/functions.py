"""Functions of autograd that are written in Python: they may run backward passes of their own.

A reentrant checkpoint does. A pass that is restricted to the leaves skips such a function silently
if none of its inputs leads to a leaf, and some functions refuse a restricted pass. So the whole
pass is run, as in a loop by hand, and no leaf but the window's has another `.grad` afterwards.

The same look at a graph tells whether the loss leads to a leaf at all.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from funcga._grad import evaluations
from torch_backend import graphs
from torch_backend.engine.guards.grads import gradients_aside
from torch_backend.engine.guards.recompute import recomputed
from torch_backend.gradients import is_constant
from torch_backend.graphs import Reached
from torch_backend.modules.closures import reachable


def restriction(
    window: Any, loss: torch.Tensor, leaves: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...], AbstractContextManager[None]]:
    """(the leaves that a pass of a window is restricted to, none if it runs as a whole; the context
    of the pass).
    """
    found = graphs.reach(loss, {*map(id, leaves)})
    if found.own or found.custom:
        window.gradient.reached.add(True)
    else:
        window.unreached = True
    if window.runs_whole or found.custom:
        return (), _others_aside(window, found, leaves)
    return leaves, nullcontext()


def note_constant(
    window: Any, loss: torch.Tensor, leaves: Sequence[torch.Tensor], seed: float
) -> None:
    """Notes a loss that has no graph, if it should lead to leaves, and counts.

    It is explained by being 0, as where all is masked, or by a gradient inside of the loss, such as
    that of a linear function.
    """
    is_asked = leaves and seed and not window.gradient.reached
    if is_asked and evaluations() == window.evaluations:
        window.unreached |= is_constant(loss)


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
