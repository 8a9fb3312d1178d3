"""Gradients of large weights, added to the sums inside of the backward pass.

Autograd computes the gradient of a weight into new memory, writes it, reads it again, and adds it
to `.grad`; of an embedding it fills a table with zeros, to add a few rows. Here the graph of the
loss is walked after the forward pass. Nodes that use a large weight get a prehook, which adds the
product, or the rows, to the `.grad` of the weight. The weight is left out of the inputs of the
pass, so that autograd computes no gradient of it, and the nodes are named there, so that they run.

Nothing in torch is replaced. A weight that something else uses as well is left to autograd, and so
is one whose rows are packed by hooks, as within a checkpoint: they can be unpacked only once.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from torch_backend import _private, graphs

# Elements of a weight whose gradient is added in the backward pass. For a smaller one that takes
# longer than the memory traffic that it saves: docs/concepts/cost.md.
LARGE = 2**19
# The same on a device. Reckoned from bytes, and not measured.
LARGE_ON_DEVICE = 2**23

# The last one has no numbers: `funcga.plan` runs a step on it, to count bytes.
_DENSE = {torch.Tensor, torch.nn.Parameter, _private.FAKE}


class fused_gradients(AbstractContextManager[None]):  # noqa: N801 - used as torch.set_grad_enabled is
    """Sets whether gradients of large weights are added inside of the backward pass, as they are by
    default.

    As a function it sets that for this thread; as a context, inside of it.

    Args:
        enabled: False lets autograd compute each gradient and add it, as a `.backward()` loop
            does, to the bit: in windows that begin then.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50_000, 16), nn.Linear(16, 1))
        >>> loss_fn = lambda model, x, y: F.mse_loss(model(x), y)
        >>> step = funcga.accumulate(torch_backend.module_value_and_grad(model, loss_fn), n=4)
        >>> x, y = torch.randint(0, 50_000, (10,)), torch.randn(10, 1)
        >>> with torch_backend.fused_gradients(False):
        ...     loss, grads = step(x, y)
    """

    def __init__(self, enabled: bool):
        self.before, _SETTING.enabled = _SETTING.enabled, enabled

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        _SETTING.enabled = self.before


class _Setting(threading.local):
    enabled = True


_SETTING = _Setting()


class Use(NamedTuple):
    """A node that uses a weight, as a factor of a product or as a table of rows. `saved`: the name
    of the other factor, or of the indices, among what the node has saved.
    """

    node: Any
    saved: str
    is_transposed: bool


def run(
    loss: torch.Tensor, cotangent: torch.Tensor, leaves: tuple[torch.Tensor, ...], on_host: bool
) -> None:
    """One backward pass that adds the gradients of large weights among the leaves by itself."""
    weights = [leaf for leaf in leaves if _is_weight(leaf)] if _SETTING.enabled else []
    uses = uses_of(loss, weights)
    if not uses:
        graphs.run(loss, cotangent, leaves, on_host)
        return
    # A node of our own: from hooks of the loss other passes may run through the graph.
    with torch.enable_grad():
        root: Any = loss.view_as(loss)
    tasks = set[int]()
    handles = [root.grad_fn.register_prehook(lambda _: tasks.add(_private.graph_task()))]
    inputs: list[Any] = [leaf for leaf in leaves if id(leaf) not in uses]
    try:
        for weight in weights:
            for use in uses.get(id(weight), ()):
                handles.append(use.node.register_prehook(partial(_add, tasks, weight, use)))
                inputs.append(GradientEdge(use.node, 0))
        torch.autograd.backward(root, cotangent, inputs=inputs)
    finally:
        # A prehook holds its own node, and after an error no node may live on.
        for handle in handles:
            handle.remove()
        del uses, inputs, root


def _is_weight(leaf: torch.Tensor) -> bool:
    return (
        leaf.numel() >= (LARGE if leaf.is_cpu else LARGE_ON_DEVICE)
        and type(leaf) in _DENSE
        and leaf.ndim == 2
        and leaf.is_floating_point()
        and leaf.is_contiguous()
        and leaf.grad_dtype in (leaf.dtype, None)
        and not (_private.has_hooks(leaf) or _private.has_hooks_on_grad(leaf))
    )


def uses_of(loss: torch.Tensor, weights: Sequence[torch.Tensor]) -> dict[int, list[Use]]:
    """What uses each weight, by its id; without those that something else uses, or nothing."""
    if not weights or loss.grad_fn is None:
        return {}
    # Breadth first: the list grows while it is walked through.
    nodes: list[Any] = [loss.grad_fn]
    users: dict[Any, list[tuple[Any, int]]] = {}
    for node in nodes:
        for position, (after, _) in enumerate(node.next_functions):
            if after is not None and after not in users:
                nodes.append(after)
            users.setdefault(after, []).append((node, position))
    ids = {*map(id, weights)}
    ends: list[Any] = [node for node in nodes if type(node) is graphs.AccumulateGrad]
    found = {id(end.variable): _uses(end, users) for end in ends if id(end.variable) in ids}
    return {key: uses for key, uses in found.items() if uses}


# What may stand between a weight and its use: a transposed view, and the cast of autocast.
_TRANSPOSED, _CAST = "TBackward0", "ToCopyBackward0"
# What uses a weight, where that stands among its arguments, and what else it has saved.
_USES = {
    ("AddmmBackward0", 2): "mat1",
    ("MmBackward0", 1): "self",
    ("EmbeddingBackward0", 0): "indices",
}


def _uses(end: Any, users: dict[Any, list[tuple[Any, int]]]) -> list[Use]:
    """What uses the weight of this node; nothing if a use is of another kind."""
    uses, waiting = list[Use](), [(end, False)]
    for node, is_transposed in waiting:
        for user, position in users.get(node, ()):
            name, saved = user.name(), _USES.get((user.name(), position))
            # Of several uses of one cast autograd adds the gradients in the dtype of the cast.
            if name == _TRANSPOSED or (name == _CAST and len(users[user]) == 1):
                waiting.append((user, is_transposed ^ (name == _TRANSPOSED)))
            elif saved and _is_plain(user, saved, is_transposed):
                uses.append(Use(user, saved, is_transposed))
            else:
                return []
    return uses


def _is_plain(node: Any, saved: str, is_transposed: bool) -> bool:
    # A hook packs what a node has saved within a checkpoint, and only the node itself may unpack
    # it.
    if getattr(node, f"_raw_saved_{saved}").unpack_hook is not None:
        return False
    if saved == "indices":
        return not (is_transposed or node._saved_sparse or node._saved_scale_grad_by_freq)
    rows = getattr(node, f"_saved_{saved}")
    is_dense = rows is not None and rows.layout is torch.strided
    return is_dense and getattr(node, "_saved_alpha", 1) == 1


@torch.no_grad()
def _add(
    tasks: set[int], weight: torch.Tensor, use: Use, gradients: tuple[torch.Tensor | None, ...]
) -> None:
    """Adds what this use contributes to the gradient of a weight, in passes of these tasks."""
    gradient, total = gradients[0], weight.grad
    if gradient is None or _private.graph_task() not in tasks:
        return
    saved: torch.Tensor = getattr(use.node, f"_saved_{use.saved}")
    if use.saved == "indices":
        _add_rows(weight, saved, use.node._saved_padding_idx, gradient)
        return
    left, right = (gradient.t(), saved) if use.is_transposed else (saved.t(), gradient)
    if total is None:
        weight.grad = (left @ right).to(weight.dtype)
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and total.dtype is torch.float32:
        # Nothing is rounded to 16 bits, and nothing of the weight's size is in between.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


def _add_rows(
    weight: torch.Tensor, indices: torch.Tensor, padding: int, gradient: torch.Tensor
) -> None:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    total, index = weight.grad, indices.reshape(-1)
    rows = gradient.reshape(-1, gradient.shape[-1]).to(total.dtype)
    if 0 <= padding < len(weight):  # it is a large number where there is none
        rows = rows.masked_fill((index == padding)[:, None], 0)
    if total.is_cuda:  # where index_add_ adds in any order
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)
