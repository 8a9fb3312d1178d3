"""Functions of autograd that are written in Python: they may run backward passes of their own.

A reentrant checkpoint does. A pass that is restricted to the leaves skips such a function silently
if none of its inputs leads to a leaf, and some functions refuse a restricted pass. So the whole
pass is run, as in a loop by hand, and no leaf but the window's has another `.grad` afterwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_backend.engine.guards.aside import gradients_aside
from torch_backend.engine.guards.recompute import recomputed
from torch_backend.graphs import Reached
from torch_backend.modules.closures import reachable


def leaves_around(loss_fn: object, originals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a loss leads to, and those that the leaves of a window are made of."""
    return [
        tensor
        for tensor in (*reachable(loss_fn), *originals)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf
    ]


@contextmanager
def others_aside(window: Any, found: Reached, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context of a pass that is not restricted to these leaves of a window: all others have their
    own `.grad`s afterwards. `found`: what the graph leads to.

    Raises FuncgaError if a tensor that a leaf is made of got a gradient instead of its leaf.
    """
    own_ids, in_graph = {*map(id, leaves)}, {*map(id, found.foreign)}
    # Only passes that functions run by themselves reach what is not in the graph.
    around = [*found.foreign, *(window.around if found.custom else ())]
    others = {id(leaf): leaf for leaf in around if id(leaf) not in own_ids}
    with gradients_aside(others.values()):
        yield
        written = {key for key, leaf in others.items() if leaf.grad is not None} - in_graph
    if not written.isdisjoint(map(id, window.leaves.originals)):
        raise recomputed()
