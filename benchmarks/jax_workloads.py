"""The workloads in JAX: each makes, from a seed, parameters, a batch and the loss of a micro-batch.

Each is a function of (n, value): n micro-batches, and the value along the axis for those that grow. Sizes are those of
the workload in torch of the same name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Workload(NamedTuple):
    """`loss(params, rows)` is the mean over the rows of a micro-batch, of which each has `size`."""

    params: Any
    batch: jax.Array
    size: int
    loss: Callable[[Any, jax.Array], jax.Array]
    layers: int = 1  # that the loss scans over


def tiny(n: int, value: int) -> Workload:
    """Twelve layers of 64 units with biases and tanh, 8 rows a micro-batch: bound by dispatch."""
    return _mlp(12, 64, n, bias=True)


def wide(n: int, value: int) -> Workload:
    """Eight layers of width 512, 8 rows a micro-batch: bound by memory's bandwidth. 8 MB of parameters."""
    return _mlp(8, 512, n)


def _mlp(layers: int, width: int, n: int, bias: bool = False) -> Workload:
    *keys, of_rows = jax.random.split(jax.random.key(0), layers + 1)
    params = [{"w": _matrix(key, width, width)} | ({"b": jnp.zeros(width)} if bias else {}) for key in keys]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer.get("b", 0.0))
        return jnp.mean(x**2)

    return Workload(params, jax.random.normal(of_rows, (8 * n, width)), 8, loss)


def _matrix(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def scanned(n: int, value: int) -> Workload:
    """The same eight layers of width 512, scanned over: one leaf of 8 MB."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = _matrix(keys[0], 8, 512, 512)
    loss = lambda params, x: jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)
    return Workload(params, jax.random.normal(keys[1], (8 * n, 512)), 8, loss, layers=8)


def transformer(n: int, value: int) -> Workload:
    """Four layers of width 128, 64 tokens, 4 rows a micro-batch: a mean over tokens."""
    *keys, first, last, of_rows = jax.random.split(jax.random.key(0), 7)
    params = {
        "embedding": jax.random.normal(first, (256, 128)),
        "layers": [_layer(key) for key in keys],
        "out": _linear(last, 128, 256),
    }

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens[:, :-1]]
        for layer in params["layers"]:
            x = _encoded(layer, x)
        logits = jax.nn.log_softmax(_applied(params["out"], x))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    return Workload(params, jax.random.randint(of_rows, (4 * n, 65), 0, 256), 4, loss)


def _layer(key: jax.Array) -> Any:
    keys = jax.random.split(key, 4)
    norm = {"scale": jnp.ones(128), "b": jnp.zeros(128)}
    sizes = {"qkv": (128, 384), "out": (128, 128), "up": (128, 512), "down": (512, 128)}
    return {name: _linear(k, *size) for k, (name, size) in zip(keys, sizes.items(), strict=True)} | {
        "before": norm,
        "between": jax.tree.map(jnp.copy, norm),
    }


def _linear(key: jax.Array, inputs: int, outputs: int) -> Any:
    return {"w": _matrix(key, inputs, outputs), "b": jnp.zeros(outputs)}


def _encoded(layer: Any, x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(_applied(layer["qkv"], _normalized(layer["before"], x)), 3, -1)
    heads = lambda t: t.reshape(*t.shape[:2], 4, -1)
    mixed = jax.nn.dot_product_attention(heads(q), heads(k), heads(v)).reshape(x.shape)
    x = x + _applied(layer["out"], mixed)
    return x + _applied(layer["down"], jax.nn.relu(_applied(layer["up"], _normalized(layer["between"], x))))


def _applied(linear: Any, x: jax.Array) -> jax.Array:
    return x @ linear["w"] + linear["b"]


def _normalized(norm: Any, x: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * norm["scale"] + norm["b"]


def rows(n: int, value: int) -> Workload:
    """The tiny layers, and `value` micro-batches of 8 rows."""
    return tiny(value, value)


def leaves(n: int, value: int) -> Workload:
    """`value` parameters of 16 elements, one multiplication each: side by side, as XLA is slow to compile a chain."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = list(1 + 0.01 * jax.random.normal(keys[0], (value, 16)))
    loss = lambda params, x: sum(jnp.mean((x * factor) ** 2) for factor in params) / value
    return Workload(params, jax.random.normal(keys[1], (4 * n, 16)), 4, loss)


def parameters(n: int, value: int) -> Workload:
    """Four equal layers without biases that have about `value` parameters, 8 rows a micro-batch."""
    return _mlp(4, round((value / 4) ** 0.5), n)


class Matrices(NamedTuple):
    """What an optimizer takes: parameters, and gradients of their shapes."""

    params: Any
    grads: Any


def matrices(side: int = 1024) -> Matrices:
    """Eight matrices of 1024 x 1024: 32 MB of parameters."""
    drawn = jax.random.normal(jax.random.key(0), (2, 8, side, side))
    return Matrices(*({f"w{i}": matrix for i, matrix in enumerate(half)} for half in drawn))


def small() -> Matrices:
    """The same of 64 x 64."""
    return matrices(64)
