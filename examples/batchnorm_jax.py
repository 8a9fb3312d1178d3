"""BatchNorm's running statistics under accumulation, in three ways: threaded, frozen, or merged once for each window.

    python examples/batchnorm_jax.py

A micro-batch is always normalised by its own statistics; the question is what becomes of the running ones. Carried
through a loop, as `batch_stats` usually are, they are updated n times: n updates with momentum m are one with m**n, the
last micro-batches count most, and the variance lacks what the micro-batches differ by. Merged, what all of them saw is
pooled (Chan, Golub and LeVeque 1979), and there is one update: that of one batch. With momentum 0 what flax returns as
its running statistics are those of the micro-batch; the momentum is then an argument of the update. (Its fast variance,
E[x**2] - E[x]**2, loses the digits that mean and spread do not share, in one batch as in many.)

One update a window instead of n is also a slower average: to keep the decay that the loop had, take a share of
1 - momentum**n. And one value a channel, as of a last micro-batch of one row after a Dense layer, which torch refuses
to normalise, is made 0 here without a word: see that no micro-batch is that small.

The gradient is that of micro-batches that are normalised one by one, in any of these ways, and not that of one batch.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen

import funcga

MOMENTUM = 0.9


class Net(linen.Module):
    """A convolution, BatchNorm, and two classes."""

    momentum: float = MOMENTUM

    @linen.compact
    def __call__(self, x):
        """The logits, in training mode."""
        norm = linen.BatchNorm(use_running_average=False, momentum=self.momentum, use_fast_variance=False)
        return linen.Dense(2)(norm(linen.Conv(3, (3, 3))(x)).reshape(len(x), -1))


def data(rows=24):
    """Pictures [rows, 8, 8, 1], brighter from row to row as of a data set that is sorted, and their classes."""
    brightness = jnp.linspace(0, 3, rows)[:, None, None, None]
    return jax.random.normal(jax.random.key(0), (rows, 8, 8, 1)) + brightness, jnp.arange(rows) % 2


def loss_fn(params, batch_stats, x, y, momentum=MOMENTUM):
    """The mean over the rows, and the statistics after it."""
    logits, state = Net(momentum).apply({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state["batch_stats"]


def threaded(params, batch_stats, x, y, n=4):
    """The statistics after a window: each micro-batch updates those of the one before."""
    fold = ((funcga.mean(), funcga.carry()), funcga.mean())
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    step = funcga.accumulate(gradient, n, in_axes=(None, funcga.CARRY, 0, 0), fold=fold)
    (_loss, batch_stats), _grads = step(params, batch_stats, x, y)
    return batch_stats


def frozen(params, batch_stats, x, y, n=4):
    """The same: what the layers return is dropped."""
    gradient = jax.value_and_grad(lambda *args: loss_fn(*args)[0])
    _loss, _grads = funcga.accumulate(gradient, n, in_axes=(None, None, 0, 0))(params, batch_stats, x, y)
    return batch_stats


def merged(params, batch_stats, x, y, n=4):
    """The same: one update by what all micro-batches saw."""

    def observed(params, batch_stats, x, y):
        loss, seen = loss_fn(params, batch_stats, x, y, momentum=0.0)
        return loss, funcga.statistics.batch_moments(seen, len(x))

    fold = ((funcga.mean(), funcga.pooled()), funcga.mean())
    step = funcga.accumulate(jax.value_and_grad(observed, has_aux=True), n, in_axes=(None, None, 0, 0), fold=fold)
    (_loss, pooled), _grads = step(params, batch_stats, x, y)
    return funcga.statistics.running_statistics(batch_stats, pooled, share=1 - MOMENTUM, unbiased=False)


def main():
    """The statistics after a window of four micro-batches, against those after one batch."""
    x, y = data()
    variables = jax.jit(Net().init)(jax.random.key(1), x)
    params, batch_stats = variables["params"], variables["batch_stats"]
    _loss, whole = jax.jit(loss_fn)(params, batch_stats, x, y)
    for update in (merged, threaded, frozen):
        found = update(params, batch_stats, x, y)
        apart = max(jax.tree.leaves(jax.tree.map(lambda a, b: abs(a - b).max().item(), found, whole)))
        print(f"{update.__name__}: {apart:.0e} from the statistics of one batch; the same to 1e-6: {apart < 1e-6}")


if __name__ == "__main__":
    main()
