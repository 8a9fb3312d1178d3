"""Claim: in JAX, `accumulate` is the `lax.scan` that you would write: same time, same temporaries, one compile.

    python -m benchmarks.fold_jax

The rival reshapes the batch to [n, rows, ...], scans over it with the same gradient function, adds and divides once.
Both are jitted and compiled ahead of time; memory is `memory_analysis().temp_size_in_bytes`.
"""

import jax
import jax.numpy as jnp
from jax import lax

import funcga
from benchmarks.measure import ratio


def mlp(layers: int, width: int, batch: int):
    """Equal layers with tanh and a mean-square loss."""
    keys = jax.random.split(jax.random.key(0), layers + 1)
    params = {f"w{i}": jax.random.normal(keys[i], (width, width)) / width**0.5 for i in range(layers)}

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return params, jax.random.normal(keys[-1], (batch, width)), loss


def attention(width: int = 128, layers: int = 4, length: int = 64, batch: int = 32):
    """A causal transformer without biases, scanned over its layers, and its mean token loss."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shape = lambda *s: jax.random.normal(next(keys), s) * s[-2] ** -0.5
    params = {
        "embed": shape(256, width), "qkv": shape(layers, width, 3 * width), "out": shape(layers, width, width),
        "up": shape(layers, width, 4 * width), "down": shape(layers, 4 * width, width),
    }  # fmt: skip
    tokens = jax.random.randint(next(keys), (batch, length + 1), 0, 256)

    def norm(x):
        return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def layer(x, w):
        q, k, v = jnp.split(norm(x) @ w["qkv"], 3, -1)
        heads = lambda t: t.reshape(*t.shape[:2], 4, -1)
        x = x + jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"], None

    def loss(params, tokens):
        layers = {k: v for k, v in params.items() if k != "embed"}
        x, _ = lax.scan(layer, params["embed"][tokens[:, :-1]], layers)
        logits = jax.nn.log_softmax(norm(x) @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    return params, tokens, loss


def hand_written(gradient, n):
    """The scan by hand: rows must divide by n, weights are equal."""

    def step(params, batch):
        micro = batch.reshape(n, -1, *batch.shape[1:])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradient, params, micro[0]))
        add = lambda total, rows: (jax.tree.map(jnp.add, total, gradient(params, rows)), None)
        return jax.tree.map(lambda t: t / n, lax.scan(add, zeros, micro)[0])

    return step


def main(n: int = 8) -> None:
    """Prints one line a workload."""
    print(f"jax {jax.__version__} on {jax.devices()[0].platform}, n={n}")
    print(f"{'workload':12} {'time ratio (quartiles)':>28} {'temp bytes ours':>16} {'theirs':>12} {'traces':>7}")
    for name, make in {
        "transformer": attention,
        "wide mlp": lambda: mlp(8, 512, 64),
        "tiny mlp": lambda: mlp(12, 64, 64),
    }.items():
        params, batch, loss = make()
        traces = []

        def counted(*args, loss=loss, traces=traces):
            traces.append(1)
            return loss(*args)

        gradient = jax.value_and_grad(loss)
        ours = jax.jit(funcga.accumulate(jax.value_and_grad(counted), n)).lower(params, batch).compile()
        theirs = jax.jit(hand_written(gradient, n)).lower(params, batch).compile()
        a, b = ours(params, batch), theirs(params, batch)
        assert all(jnp.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))
        run = lambda f, p=params, x=batch: jax.block_until_ready(f(p, x))
        low, median, high = ratio(lambda f=ours, run=run: run(f), lambda f=theirs, run=run: run(f))
        temp = [f.memory_analysis().temp_size_in_bytes for f in (ours, theirs)]
        print(f"{name:12} {median:12.3f} ({low:.3f}-{high:.3f}) {temp[0]:16,} {temp[1]:12,} {len(traces):7}")


if __name__ == "__main__":
    main()
