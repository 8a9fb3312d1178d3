"""Functions of autograd that are written in Python: they may run backward passes of their own.

A reentrant checkpoint does. A pass that is restricted to the leaves skips such a function silently
if none of its inputs leads to a leaf, and some functions refuse a restricted pass. So the whole
pass is run, as in a loop by hand, and no leaf but the window's has another `.grad` afterwards.
"""

from collections.abc import Sequence

import torch

from torch_backend import graphs
from torch_backend.engine.guards.aside import gradients_aside
from torch_backend.engine.guards.recompute import recomputed
from torch_backend.modules.closures import reachable


def run_unrestricted(
    loss: torch.Tensor,
    cotangent: torch.Tensor,
    on_host: bool,
    leaves: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    loss_fn: object,
) -> None:
    """`torch.autograd.backward(loss, cotangent)`, after which other leaves have their own `.grad`s.

    `originals`: the tensors that the leaves are made of. Raises FuncgaError if one of these got a
    gradient instead of its leaf.
    """
    own_ids = {*map(id, leaves)}
    in_graph = {id(leaf): leaf for leaf in graphs.reach(loss, own_ids).foreign}
    around = {
        id(tensor): tensor
        for tensor in (*reachable(loss_fn), *originals)
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_leaf
    }
    others = {key: leaf for key, leaf in (in_graph | around).items() if key not in own_ids}
    with gradients_aside(others.values()):
        graphs.run(loss, cotangent, (), on_host)
        written = {key for key, leaf in others.items() if leaf.grad is not None} - in_graph.keys()
    if not written.isdisjoint(map(id, originals)):
        raise recomputed()
