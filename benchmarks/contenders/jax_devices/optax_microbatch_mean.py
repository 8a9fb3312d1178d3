"""optax's microbatch on every device, and the mean over the devices by hand."""

from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.jax_problem import Problem, Step

NAME, AGAINST = "`optax.microbatch`, MEAN, in shard_map", "funcga"
SOURCE = "https://docs.jax.dev/en/latest/notebooks/shard_map.html"


def make(problem: Problem) -> Step:
    """The mean over micro-batches, then over devices."""
    mean = optax.microbatching.AccumulationType.MEAN
    means = optax.microbatch(jax.value_and_grad(problem.loss), 1, problem.size, mean)

    def local(params: Any, batch: jax.Array) -> Any:
        return lax.pmean(means(params, batch), "data")

    # unchecked, as else each micro-batch's gradient would be reduced
    return jax.shard_map(local, mesh=problem.mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
