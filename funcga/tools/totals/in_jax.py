"""The count of a batch and its fold in JAX: one program."""

from funcga._backend import Backend
from funcga._call import Program
from funcga._types import Args, Kwargs, TreeFn
from jax_backend.loop import Result, accumulated
from jax_backend.sharding import Spread, spread_of_call
from jax_backend.trees import Compiled


def accumulate(counting: Program, program: Program, backend: Backend) -> TreeFn:
    """f(args, kwargs): the fold of the program over a batch, once that is counted."""

    def both(spread: Spread, args: Args, kwargs: Kwargs) -> Result:
        totals, _ = accumulated(counting, backend, spread, args, {})
        return accumulated(program, backend, spread, args, dict(**kwargs, totals=totals))

    step = program.memory.keep(Compiled, both, True)
    return lambda args, kwargs: step((spread_of_call(program, args, backend),), args, kwargs)
