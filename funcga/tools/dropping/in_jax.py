"""What is dropped in a program of JAX: by selection, as the host does not see what is tested."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from funcga._fold import Tally
from funcga._fold.outputs import Outputs
from funcga._types import Tree
from jax_backend.loop import is_float
from jax_backend.merge import Folded


def tested(
    run: Callable[..., tuple[Tree, Tally]], outputs: Outputs, dropping: Any
) -> Callable[..., tuple[Tree, Tally, jax.Array]]:
    """`run`, which returns (value, tally, whether it is kept), with a derivative only where the
    value counts: that of a NaN would be NaN, even times 0.
    """

    def kept(*operands: Tree) -> tuple[Tree, Tally, jax.Array]:
        value, tally = run(*operands)
        leaves = outputs.leaves(value, "a later micro-batch")
        keep = dropping.keeps(outputs, dropping.tested(outputs), leaves, tally.total)
        return value, tally, jnp.asarray(keep)

    def differentiable(*operands: Tree) -> tuple[Tree, Tally, jax.Array]:
        # With all that it depends on as arguments, as custom_jvp requires.
        function, captured = jax.closure_convert(kept, *operands)
        run = jax.custom_jvp(function)

        @run.defjvp
        def _(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
            (value, tally, keep), derivative = jax.linearize(function, *primals)
            counts = keep & (tally.total != 0)
            # On both sides, for forward and reverse mode.
            only = partial(
                jax.tree.map, lambda leaf: jnp.where(counts, leaf, 0) if is_float(leaf) else leaf
            )
            return (value, tally, keep), only(derivative(*only(tangents)))

        result: tuple[Tree, Tally, jax.Array] = run(*operands, *captured)
        return result

    return differentiable


def unless_dropped(
    keep: jax.Array, before: Folded, after: Folded, collected: list[jax.Array]
) -> tuple[Folded, list[jax.Array]]:
    """What is folded after a micro-batch that is kept or not."""
    # Selected, as 0 * NaN is NaN. Only observers collect here.
    chosen = jax.tree.map(partial(jnp.where, keep), after, before)
    collected = [jnp.where(keep, leaf, jnp.nan) for leaf in collected]
    if before.rejected is not None:
        rejected = before.rejected + (~keep).astype(jnp.int32)
        chosen = chosen._replace(rejected=rejected)
    return chosen, collected
