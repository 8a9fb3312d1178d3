"""Embeddings with max_norm, which shorten rows of their weights in the forward pass: a pure loss must not."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from funcga.errors import FuncgaError
from torch_backend.modules.visits import owners

Bounded = list[tuple[str, Any]]


def bounded(parts: list[tuple[str, nn.Module]]) -> Bounded:
    """The embeddings among the parts of a module that have a max_norm, by name."""
    found = {
        id(layer): (prefix.removesuffix("."), layer)  # once, though it be used in several places
        for prefix, layer in parts
        if layer.__dict__.get("max_norm") is not None and isinstance(layer, _EMBEDDINGS)
    }
    return [*found.values()]


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@contextmanager
def within_norm(embeddings: Bounded) -> Iterator[None]:
    """A context in which these layers leave their weights alone. Where they cannot, they raise FuncgaError."""
    before = [(layer, layer.__dict__.get("forward")) for _, layer in embeddings]
    for name, layer in embeddings:
        layer.__dict__["forward"] = partial(_checked, name, layer, layer.forward)
    try:
        yield
    finally:
        for layer, forward in before:
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward


def _checked(name: str, layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward pass of an embedding whose rows are within the norm already, so that there is nothing to shorten."""
    bound, weight = layer.max_norm, layer.weight.detach()
    rows = weight[args[0] if args else kwargs["input"]]
    norms = torch.linalg.vector_norm(rows, layer.norm_type, dim=-1)
    if bool((norms > bound * (1 + 2 * torch.finfo(weight.dtype).eps)).any()):
        raise FuncgaError(
            f"{_called(name)} has max_norm={bound}, and this micro-batch uses a row of norm "
            f"{float(norms.max()):.4g}: torch would shorten it in place, and a pure loss changes no parameter. Shorten "
            f"the rows between two steps, in torch.no_grad(): embedding.weight.renorm_({layer.norm_type}, 0, {bound})."
        )
    layer.max_norm = None
    try:
        return forward(*args, **kwargs)
    finally:
        layer.max_norm = bound


def _called(name: str) -> str:
    return f"the embedding `{name}`" if name else "the embedding"


def check_unbounded(module: nn.Module) -> None:
    """Raises FuncgaError if there is one where torch.compile compiles, in which norms are not known."""
    for name, layer in bounded([*owners(module)]):
        raise FuncgaError(
            f"{_called(name)} has max_norm={layer.max_norm}, and is in a function that torch.compile compiles, "
            f"where norms are not known. Call the step without torch.compile; the loss itself may be compiled."
        )
