"""What is dropped in JAX: a loop selects what it carries.

With drop="window" it counts the micro-batches that it rejects, and keeps the threaded state from
before the first.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from funcga._fold import Tally
from funcga._fold.outputs import Outputs
from funcga._types import Tree
from funcga.tools.dropping import DroppingStep
from jax_backend.loop import is_float
from jax_backend.merge import Folded


def begun(folded: Folded, dropping: DroppingStep) -> Folded:
    """What is folded before the first micro-batch."""
    if dropping.scope == "microbatch":
        return folded
    # Copied, as what is carried may be donated.
    before = [jnp.array(leaf, copy=True) for leaf in folded.state]
    return folded._replace(rejected=jnp.int32(0), state_before=before)


def tested(
    run: Callable[..., tuple[Tree, Tally]], outputs: Outputs, dropping: DroppingStep
) -> Callable[..., tuple[Tree, Tally, jax.Array]]:
    """`run`, which returns (value, tally, whether it is kept), with a derivative only where the
    value counts: that of a NaN would be NaN, even times 0.
    """

    def kept(*operands: Tree) -> tuple[Tree, Tally, jax.Array]:
        value, tally = run(*operands)
        leaves = outputs.leaves(value, "a later micro-batch")
        keep = dropping.test_of(outputs)(leaves, tally.total)
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


def selected(
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


def unless_rejected(
    folded: Folded, normalised: list[Tree], collected: list[jax.Array], state: list[jax.Array]
) -> tuple[Tree, Tree, Tree]:
    """The parts of a result; zeros, and the state that came in, if the window is dropped."""
    if folded.rejected is None:
        return normalised, collected, state
    is_whole = folded.rejected == 0
    normalised = jax.tree.map(
        lambda leaf: jnp.where(is_whole, leaf, jnp.zeros_like(leaf)), normalised
    )
    collected = [jnp.where(is_whole, leaf, jnp.nan) for leaf in collected]
    return (
        normalised,
        collected,
        jax.tree.map(partial(jnp.where, is_whole), state, folded.state_before),
    )
