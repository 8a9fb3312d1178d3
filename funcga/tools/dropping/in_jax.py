"""What is dropped in JAX: a loop selects what it carries.

With drop="window" it counts the micro-batches that it rejects, and keeps the threaded state from
before the first.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from funcga._fold.outputs import Outputs
from funcga._types import Array, Scalar, Tree
from funcga.tools.dropping import Dropping, selected
from jax_backend.merge import Folded


def begun(folded: Folded, dropping: Dropping) -> Folded:
    """What is folded before the first micro-batch."""
    if dropping.scope == "microbatch":
        return folded
    # Copied, as what is carried may be donated.
    before = [jnp.array(leaf, copy=True) for leaf in folded.state]
    return folded._replace(rejected=jnp.zeros_like(folded.total.weight[0]), state_before=before)


def kept(
    dropping: Dropping,
    outputs: Outputs,
    leaves: Sequence[Array],
    weight: Scalar,
    before: Folded,
    after: Folded,
    collected: list[jax.Array],
) -> tuple[Folded, list[jax.Array]]:
    """What is folded after a micro-batch of these leaves, if it is kept, or not."""
    keep = jnp.asarray(dropping.test_of(outputs)(leaves, weight))
    chosen = selected(keep, after, before, outputs.backend)
    if before.rejected is not None:
        count = (~keep).astype(before.rejected.dtype)
        chosen = chosen._replace(rejected=before.rejected + count)
    # Only observers collect here.
    return chosen, [jnp.where(keep, leaf, jnp.nan) for leaf in collected]


def unless_rejected(
    outputs: Outputs,
    folded: Folded,
    normalised: list[Tree],
    collected: list[jax.Array],
    state: list[jax.Array],
) -> tuple[Tree, Tree, Tree]:
    """The parts of a result; zeros, and the state that came in, if the window is dropped."""
    if folded.rejected is None:
        return normalised, collected, state
    # Only observers collect here.
    dropped = jax.tree.map(jnp.zeros_like, normalised)
    unknown = [jnp.full_like(leaf, jnp.nan) for leaf in collected]
    parts: tuple[Tree, Tree, Tree] = selected(
        folded.rejected == 0,
        (normalised, collected, state),
        (dropped, unknown, folded.state_before),
        outputs.backend,
    )
    return parts
