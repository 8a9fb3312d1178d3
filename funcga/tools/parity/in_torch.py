"""The losses that `python -m funcga parity` compares, written as this framework's users write
them.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch users know

from funcga._transform import Transform
from funcga._types import Tree, TreeFn
from funcga.tools.optimizers.in_torch import from_optimizer
from funcga.tools.parity.problems import OPTIMIZERS, PAD
from funcga.tools.verify.in_torch import precision as precision
from torch_backend.parameters import apply_updates as apply_updates

_KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def optimizer(name: str) -> Transform:
    """The transform of this name, with the options that both frameworks share."""
    return from_optimizer(_KINDS.get(name, torch.optim.SGD), **OPTIMIZERS[name])


def compiled(step: TreeFn) -> TreeFn:
    """The step as this framework's users run it."""
    return step


def digits_loss(params: Tree, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of an MLP with one tanh layer, in the dtype of the parameters: for
    `funcga.mean()`.

    images: float[rows, 64]; labels: int[rows], 0 to 9; params: `hidden` and `output`, each a
    `weight` [in, out] and a `bias` [out].
    """
    logits = _linear(torch.tanh(_linear(images, params["hidden"])), params["output"])
    return F.cross_entropy(logits, labels.long())


def cnn_loss(params: Tree, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of two convolutions and a linear layer, with GELU: for
    `funcga.mean()`.

    images: float[rows, 8, 8]; labels: int[rows], 0 to 9; params: `conv1`, `conv2` and `output` in
    this framework's layout, each a `weight` and a `bias`.
    """
    x = F.gelu(F.conv2d(images[:, None], **params["conv1"], padding="same"))
    x = F.gelu(F.conv2d(F.avg_pool2d(x, 2), **params["conv2"], padding="same"))
    logits = F.linear(x.mean((2, 3)), **params["output"])
    return F.cross_entropy(logits, labels.long())


def _linear(x: torch.Tensor, layer: Tree) -> torch.Tensor:
    return F.linear(x, layer["weight"].T, layer["bias"])


def text_loss(params: Tree, tokens: torch.Tensor) -> torch.Tensor:
    """The sum of the next-token cross-entropies of a causal transformer, PAD left out: for
    `funcga.per_weight()`.

    tokens: int[rows, length], padded with PAD at the end; params: `embed` (`token` [256, width],
    which is also the output layer, and `position` [length - 1, width]), `blocks` (each leaf has the
    blocks on its first axis) and `norm`. The result has the dtype of the parameters, and is 0 where
    every target is PAD.
    """
    inputs, targets = tokens[:, :-1].long(), tokens[:, 1:].long()
    x = (
        F.embedding(inputs, params["embed"]["token"])
        + params["embed"]["position"][: inputs.shape[1]]
    )
    for weights in zip(*params["blocks"].values(), strict=True):
        x = _block(dict(zip(params["blocks"], weights, strict=True)), x)
    x = F.layer_norm(x, x.shape[-1:], params["norm"]["scale"], params["norm"]["bias"])
    logits = F.linear(x, params["embed"]["token"])
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
    )


def _block(block: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    query, key, value = F.linear(F.layer_norm(x, x.shape[-1:]), block["qkv"].T).chunk(3, -1)
    # Padding stands at the end, so that causality already hides it from every token that counts.
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + F.linear(mixed, block["out"].T)
    hidden = F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), block["up"].T))
    return x + F.linear(hidden, block["down"].T)
