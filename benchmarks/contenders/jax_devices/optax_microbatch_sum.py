"""optax's microbatch on every device, and sums over the devices by hand, for code that counts the items itself."""

from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.jax_problem import Problem, Step

NAME, AGAINST = "`optax.microbatch`, SUM, in shard_map", "funcga"
SOURCE = "https://docs.jax.dev/en/latest/notebooks/shard_map.html"


def make(problem: Problem) -> Step:
    """The sum over items and devices, divided by how many items there are."""
    summed = lambda params, rows: problem.loss(params, rows) * problem.count(rows)
    sums = optax.microbatch(jax.value_and_grad(summed), argnums=1, microbatch_size=problem.size)

    def local(params: Any, batch: jax.Array) -> Any:
        totals, count = lax.psum((sums(params, batch), problem.count(batch)), "data")
        return jax.tree.map(lambda total: (total / count).astype(total.dtype), totals)

    # unchecked, as else each micro-batch's gradient would be reduced
    return jax.shard_map(local, mesh=problem.mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
