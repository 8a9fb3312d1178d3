"""Claim: over four devices `accumulate` reduces once an update, outside of every loop, at the cost of doing so by hand.

    python -m benchmarks.replicas_jax

The rivals: a `lax.scan` under plain jit, over a batch that is sharded by its rows and cut so that no row moves, where
XLA places the reductions; and `optax.microbatch` inside shard_map with one psum after it, by hand. The same model, the
same arrays on the same devices, jitted and compiled ahead of time. Reductions are counted as often
as they run; time is ours over theirs.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import funcga
import jax_backend
from benchmarks.fold_jax import attention
from benchmarks.measure import ratio

DEVICES = 4


def scanned(layers: int, width: int, batch: int):
    """Equal layers with tanh, scanned, and a mean-square loss."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = jax.random.normal(keys[0], (layers, width, width)) / width**0.5
    loss = lambda params, x: jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)
    return params, jax.random.normal(keys[1], (batch, width)), loss


def plain(gradient, n):
    """The scan by hand over a batch whose rows are sharded: micro-batch i has the i-th rows of every device."""

    def step(params, batch):
        micro = batch.reshape(DEVICES, n, -1, *batch.shape[1:]).swapaxes(0, 1)
        micro = micro.reshape(n, -1, *batch.shape[1:])
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradient, params, micro[0]))
        add = lambda total, rows: (jax.tree.map(jnp.add, total, gradient(params, rows)), None)
        return jax.tree.map(lambda t: t / n, lax.scan(add, zeros, micro)[0])

    return step


def microbatched(gradient, n, mesh, rows):
    """optax.microbatch on every device, and the mean over the devices."""

    def local(params, batch):
        size = rows // DEVICES // n
        out = optax.microbatch(gradient, 1, size, optax.microbatching.AccumulationType.MEAN)(params, batch)
        return lax.pmean(out, "data")

    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)


def reductions(step, params, batch, n, layers):
    """How often an update reduces: each all-reduce as often as the loops around it turn."""
    turns = [1, n, n * layers]
    return sum(turns[c.depth] for c in jax_backend.collectives(step, params, batch) if c.kind == "all-reduce")


def main(n: int = 8) -> None:
    """Prints one line a workload and rival."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    print(f"jax {jax.__version__} on {DEVICES} {jax.devices()[0].platform} devices, n={n}")
    print(f"{'workload':12} {'rival':16} {'reductions ours':>16} {'theirs':>8} {'time ratio (quartiles)':>26}")
    for name, layers, (params, batch, loss) in (
        ("transformer", 4, attention(batch=64)),
        ("8x512 mlp", 8, scanned(8, 512, 256)),
        ("4x64 mlp", 4, scanned(4, 64, 256)),
    ):
        gradient = jax.value_and_grad(loss)
        params = jax.device_put(params, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        ours = jax.jit(jax_backend.replicated(funcga.accumulate(gradient, n, across="data"), mesh))
        for rival, theirs in (
            ("plain jit", jax.jit(plain(gradient, n))),
            ("optax.microbatch", jax.jit(microbatched(gradient, n, mesh, len(batch)))),
        ):
            counts = [reductions(f, params, batch, n, layers) for f in (ours, theirs)]
            runs = [partial(f.lower(params, batch).compile(), params, batch) for f in (ours, theirs)]
            pairs = zip(*(jax.tree.leaves(run()) for run in runs), strict=True)
            assert all(jnp.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)
            low, median, high = ratio(*(lambda run=run: jax.block_until_ready(run()) for run in runs))
            print(f"{name:12} {rival:16} {counts[0]:16} {counts[1]:8} {median:12.3f} ({low:.3f}-{high:.3f})")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
