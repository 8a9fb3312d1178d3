"""The losses that `python -m funcga parity` compares, written as this framework's users write
them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import lax

from funcga._transform import Transform
from funcga._types import Tree, TreeFn
from funcga.tools.parity.problems import OPTIMIZERS, PAD
from funcga.tools.verify import in_jax
from jax_backend.transforms import apply_updates as apply_updates


@contextmanager
def precision(precise: bool) -> Iterator[None]:
    """A context in which floats are computed with in all of their bits, and with `precise`
    float64 exists.
    """
    # As optax needs it.
    with in_jax.precision(precise), jax.numpy_dtype_promotion("standard"):
        yield


def optimizer(name: str) -> Transform:
    """The transform of this name, with the options that both frameworks share."""
    options = {**OPTIMIZERS[name]}
    kind = {"adam": optax.adam, "adamw": optax.adamw}.get(name, optax.sgd)
    transform: Transform = kind(options.pop("lr"), **options)
    return transform


def compiled(step: TreeFn) -> TreeFn:
    """The step as this framework's users run it."""
    return jax.jit(step)


def digits_loss(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of an MLP with one tanh layer, in the dtype of the parameters: for
    `funcga.mean()`.

    images: float[rows, 64]; labels: int[rows], 0 to 9; params: `hidden` and `output`, each a
    `weight` [in, out] and a `bias` [out].
    """
    logits = _linear(jnp.tanh(_linear(images, params["hidden"])), params["output"])
    return jnp.mean(_cross_entropies(logits, labels))


def cnn_loss(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy of two convolutions and a linear layer, with GELU: for
    `funcga.mean()`.

    images: float[rows, 8, 8]; labels: int[rows], 0 to 9; params: `conv1`, `conv2` and `output` in
    this framework's layout, each a `kernel` and a `bias`.
    """
    x = jax.nn.gelu(_conv(images[..., None], params["conv1"]), approximate=False)
    x = x.reshape(-1, 4, 2, 4, 2, x.shape[-1]).mean((2, 4))
    x = jax.nn.gelu(_conv(x, params["conv2"]), approximate=False)
    logits = x.mean((1, 2)) @ params["output"]["kernel"] + params["output"]["bias"]
    return jnp.mean(_cross_entropies(logits, labels))


def _conv(x: jax.Array, layer: Tree) -> jax.Array:
    dimensions = ("NHWC", "HWIO", "NHWC")
    output = lax.conv_general_dilated(
        x, layer["kernel"], (1, 1), "SAME", dimension_numbers=dimensions
    )
    return jnp.asarray(output + layer["bias"])


def _linear(x: jax.Array, layer: Tree) -> jax.Array:
    return jnp.asarray(x @ layer["weight"] + layer["bias"])


_cross_entropies = optax.softmax_cross_entropy_with_integer_labels


def text_loss(params: Tree, tokens: jax.Array) -> jax.Array:
    """The sum of the next-token cross-entropies of a causal transformer, PAD left out: for
    `funcga.per_weight()`.

    tokens: int[rows, length], padded with PAD at the end; params: `embed` (`token` [256, width],
    which is also the output layer, and `position` [length - 1, width]), `blocks` (each leaf has the
    blocks on its first axis) and `norm`. The result has the dtype of the parameters, and is 0 where
    every target is PAD.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embed"]["token"][inputs] + params["embed"]["position"][: inputs.shape[1]]
    x, _ = lax.scan(_block, x, params["blocks"])
    x = jax.nn.standardize(x) * params["norm"]["scale"] + params["norm"]["bias"]
    logits = x @ params["embed"]["token"].T
    return jnp.sum(_cross_entropies(logits, targets), where=targets != PAD)


def _block(x: jax.Array, block: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    query, key, value = jnp.split(jax.nn.standardize(x) @ block["qkv"], 3, axis=-1)
    # Not jax.nn.dot_product_attention, which takes the softmax in float32 whatever the dtype of its
    # arguments.
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    # Padding stands at the end, so that causality already hides it from every token that counts.
    causal = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    mixed = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ value
    x = x + mixed @ block["out"]
    hidden = jax.nn.gelu(jax.nn.standardize(x) @ block["up"], approximate=False)
    return x + hidden @ block["down"], None
