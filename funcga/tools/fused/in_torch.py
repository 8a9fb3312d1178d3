"""Gradients of large weights, added to the sums inside of the backward pass.

Autograd computes the gradient of a weight into new memory, writes it, reads it again, and adds it
to `.grad`; of an embedding it fills a table with zeros, to add a few rows. Here the graph of the
loss is walked after the forward pass. Nodes that use a large weight get a prehook, which adds the
product, or the rows, to the `.grad` of the weight. The weight is left out of the inputs of the
pass, so that autograd computes no gradient of it, and the nodes are named there, so that they run.

Nothing in torch is replaced. A weight that something else uses as well is left to autograd, and so
is one whose rows are packed by hooks, as within a checkpoint: they can be unpacked only once.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from torch_backend import _private, graphs
from torch_backend.engine.plan import run_backward

# Elements of a weight whose gradient is added in the backward pass. For a smaller one that takes
# longer than the memory traffic that it saves: docs/concepts/cost.md.
LARGE = 2**19
# The same on a device. Reckoned from bytes, and not measured.
LARGE_ON_DEVICE = 2**23

# The last one has no numbers: `funcga.plan` runs a step on it, to count bytes.
_DENSE = torch.Tensor, torch.nn.Parameter, _private.FAKE


_enabled = ContextVar("_enabled", default=True)


class fused_gradients(AbstractContextManager["fused_gradients"]):  # noqa: N801 - used as torch.set_grad_enabled is
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
        self.before = _enabled.set(enabled)

    def __exit__(self, *error: object) -> None:
        _enabled.reset(self.before)


def run(
    loss: torch.Tensor, cotangent: torch.Tensor, leaves: tuple[torch.Tensor, ...], on_host: bool
) -> None:
    """One backward pass that adds the gradients of large weights among the leaves by itself."""
    # A node of our own: from hooks of the loss other passes may run through the graph.
    with torch.enable_grad():
        root: Any = loss.view_as(loss)
    weights = {id(leaf) for leaf in leaves if _is_large(leaf)}
    uses = uses_of(root.grad_fn, weights) if weights and _enabled.get() else []
    fused = {id(use.weight) for use in uses}
    inputs: list[Any] = [leaf for leaf in leaves if id(leaf) not in fused]
    tasks = set[int]()
    handles = [root.grad_fn.register_prehook(lambda _: tasks.add(_private.graph_task()))]
    try:
        for use in uses:
            handles.append(use.node.register_prehook(partial(_add, tasks, use)))
            inputs.append(GradientEdge(use.node, 0))
        run_backward(root, cotangent, tuple(inputs), on_host)
    finally:
        # A prehook holds its own node, and after an error no node may live on.
        for handle in handles:
            handle.remove()
        del root, uses, inputs


def _is_large(leaf: torch.Tensor) -> bool:
    return (
        leaf.numel() >= (LARGE if leaf.is_cpu else LARGE_ON_DEVICE)
        and type(leaf) in _DENSE
        and leaf.is_contiguous()
        and leaf.grad_dtype in (leaf.dtype, None)
        and not (_private.has_hooks(leaf) or _private.has_hooks_on_grad(leaf))
    )


class Use(NamedTuple):
    """A node that uses a weight, as a factor of a product or as a table of rows. `saved`: the name
    of the other factor, or of the indices, among what the node has saved.
    """

    weight: torch.Tensor
    node: Any
    saved: str
    is_transposed: bool


# What uses a weight, where that stands among its arguments, and what else it has saved.
_USES = {
    ("AddmmBackward0", 2): "mat1",
    ("MmBackward0", 1): "self",
    ("EmbeddingBackward0", 0): "indices",
}
# What may stand between a weight and its use, and whether that is a transposed view, or the cast of
# autocast.
_BETWEEN = {"TBackward0": True, "ToCopyBackward0": False}


def uses_of(root: Any, weight_ids: Collection[int]) -> list[Use]:
    """The uses of those weights that are used in no other way."""
    uses = list[Use]()
    for node in graphs.nodes_of(root):
        name: Any = node.name()
        for position, (source, _) in enumerate(node.next_functions if name not in _BETWEEN else ()):
            weight, is_transposed = _weight_behind(source)
            if id(weight) in weight_ids:
                uses.append(Use(weight, node, _USES.get((name, position), ""), is_transposed))
    used_otherwise = {id(use.weight) for use in uses if not _is_plain(use)}
    return [use for use in uses if id(use.weight) not in used_otherwise]


def _weight_behind(node: Any, is_transposed: bool = False) -> tuple[Any, bool]:
    """(the leaf that a node leads to without a use, whether it is transposed there)."""
    if not node or node.name() not in _BETWEEN:
        leaf = node.variable if type(node) is graphs.AccumulateGrad else None  # type: ignore[attr-defined]
        return leaf, is_transposed
    return _weight_behind(node.next_functions[0][0], is_transposed ^ _BETWEEN[node.name()])


def _is_plain(use: Use) -> bool:
    node = use.node
    # A hook packs what a node has saved within a checkpoint, and only the node itself may unpack
    # it.
    if not use.saved or getattr(node, f"_raw_saved_{use.saved}").unpack_hook:
        return False
    saved = getattr(node, f"_saved_{use.saved}")
    if saved.layout is not torch.strided or saved.device != use.weight.device:
        return False
    if use.saved == "indices":
        return not (use.is_transposed or node._saved_sparse or node._saved_scale_grad_by_freq)
    return getattr(node, "_saved_alpha", 1) == 1


@torch.no_grad()
def _add(tasks: set[int], use: Use, gradients: tuple[torch.Tensor | None, ...]) -> None:
    """Adds what this use contributes to the gradient of a weight, in passes of these tasks."""
    gradient, weight, total = gradients[0], use.weight, use.weight.grad
    if gradient is None or _private.graph_task() not in tasks:
        return
    saved: torch.Tensor = getattr(use.node, f"_saved_{use.saved}")
    if use.saved == "indices":
        if total is None:
            weight.grad = total = torch.zeros_like(weight)
        index, rows = saved.reshape(-1), gradient.reshape(-1, total.shape[1]).to(total.dtype)
        padding = use.node._saved_padding_idx  # a large number where there is none
        if padding < len(total):
            rows = rows.masked_fill((index == padding)[:, None], 0)
        if total.is_cuda:  # where index_add_ adds in any order
            total.index_put_((index,), rows, accumulate=True)
        else:
            total.index_add_(0, index, rows)
        return
    left, right = (gradient.t(), saved.conj()) if use.is_transposed else (saved.mH, gradient)
    if total is None:
        weight.grad = (left @ right).to(weight.dtype)
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and total.dtype is torch.float32:
        _add_wide(total, left, right)
    else:
        total.add_(left @ right)


# Devices and dtypes whose products torch has refused to add in float32: it is asked once.
_REFUSED = set[tuple[torch.device, torch.dtype]]()


def _add_wide(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds a product of 16-bit factors to a sum in float32. Nothing is rounded to 16 bits, and
    nothing of the weight's size is in between.
    """
    kind = left.device, left.dtype
    if kind not in _REFUSED:
        try:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
            return
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            _REFUSED.add(kind)
    total.addmm_(left.to(total.dtype), right.to(total.dtype))
