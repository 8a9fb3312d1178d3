"""A recurrent network of equinox, accumulated over micro-batches with different numbers of time steps.

    python examples/equinox_jax.py

An equinox module is a tree already; eqx.partition takes the arrays out, which are differentiated. The loss is a mean
over the steps that are not padding, so a micro-batch weighs as many. The gradients must be those of the whole batch.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import funcga


class Net(eqx.Module):
    """A GRU that predicts one number at each step."""

    cell: eqx.nn.GRUCell
    output: eqx.nn.Linear

    def __init__(self, width, key):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, width, key=first)
        self.output = eqx.nn.Linear(width, 1, key=second)

    def __call__(self, xs):
        """The predictions, [steps], of a sequence, [steps, 2]."""
        start = jnp.zeros(self.cell.hidden_size)
        _, hidden = jax.lax.scan(lambda h, x: (self.cell(x, h),) * 2, start, xs)
        return jax.vmap(self.output)(hidden)[:, 0]


def sequences(count, longest):
    """Random sequences that get shorter, what is to be predicted of them, and which steps there are."""
    xs = jax.random.normal(jax.random.key(0), (count, longest, 2))
    there = jnp.arange(longest) < jnp.linspace(longest, 1, count)[:, None]
    return xs, jnp.cumsum(xs[..., 0] * xs[..., 1], axis=1), there


def main():
    """The whole batch and four micro-batches, compared parameter by parameter."""
    params, static = eqx.partition(Net(8, jax.random.key(1)), eqx.is_inexact_array)

    def mean_loss(params, xs, ys, there):
        errors = (jax.vmap(eqx.combine(params, static))(xs) - ys) ** 2
        return jnp.where(there, errors, 0).sum() / there.sum()

    gradient, batch = jax.value_and_grad(mean_loss), sequences(12, 10)
    accumulated = funcga.accumulate(gradient, n=4, weight=lambda xs, ys, there: there.sum())(params, *batch)

    report = funcga.compare(accumulated, jax.jit(gradient)(params, *batch), names=("accumulated", "whole"))
    report.assert_close()
    print(report)


if __name__ == "__main__":
    main()
