"""What a contender in JAX is made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.jax_measure import Programs

Step = Callable[[Any, jax.Array], Any]


class Problem(NamedTuple):
    """A loss, and how its gradient is to be accumulated.

    `loss(params, rows)` is the mean over what `weight(rows)` counts, or over the rows if that is None. A window has
    `size` rows a micro-batch, and `n` micro-batches are planned. With a `mesh`, whose only axis is "data", each of its
    devices has such a window, which is its part of the batch's rows.
    """

    loss: Callable[[Any, jax.Array], jax.Array]
    n: int
    size: int
    weight: Callable[[jax.Array], jax.Array] | None = None
    mesh: Any = None

    def count(self, rows: jax.Array) -> Any:
        """Over how much the loss of these rows is a mean."""
        return len(rows) if self.weight is None else self.weight(rows)


class Optimization(NamedTuple):
    """A window of n calls of an optimizer, each with these gradients; no model.

    Contenders compile with `programs`, which keeps what was compiled for the figures.
    """

    tx: optax.GradientTransformation
    n: int
    params: Any
    grads: Any
    programs: Programs

    def fresh(self) -> Any:
        """The parameters, for a contender that donates them."""
        return jax.tree.map(jnp.copy, self.params)
