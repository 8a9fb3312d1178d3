"""Windows of an optimizer in the style of optax: n jitted calls, with what each replaces donated."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from benchmarks.jax_problem import Optimization


class Window(NamedTuple):
    """What a window leaves behind; `updates` are still to be added, if there are any."""

    params: Any
    updates: Any = None


Run = Callable[[], Window]


def applied(tx: Any, problem: Optimization) -> Run:
    """Each call applies the updates that it computes; the parameters and the state are donated."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = problem.fresh(), problem.grads
    carry = [params, tx.init(params)]
    program = problem.programs.compiled(step, *carry, grads, donate=(0, 1), times=problem.n)

    def window() -> Window:
        for _ in range(problem.n):
            carry[:] = program(*carry, grads)
        jax.block_until_ready(carry)
        return Window(carry[0])

    return window


def returned(tx: Any, problem: Optimization) -> Run:
    """Each call returns the updates; the state is donated."""
    params, grads = problem.params, problem.grads
    carry = [None, tx.init(problem.fresh())]
    program = problem.programs.compiled(tx.update, grads, carry[1], params, donate=(1,), times=problem.n)

    def window() -> Window:
        for _ in range(problem.n):
            carry[:] = program(grads, carry[1], params)
        jax.block_until_ready(carry)
        return Window(params, carry[0])

    return window


def split(tx: Any, problem: Optimization) -> Run:
    """N calls of `accumulate`, and one of `flush`, which are jitted apart and donate what they replace."""

    def flush(params: Any, state: Any) -> Any:
        updates, state = tx.flush(state, params)
        return optax.apply_updates(params, updates), state

    params, grads = problem.fresh(), problem.grads
    carry = [params, tx.init(params)]
    accumulating = problem.programs.compiled(tx.accumulate, grads, carry[1], donate=(1,), times=problem.n)
    flushing = problem.programs.compiled(flush, *carry, donate=(0, 1))

    def window() -> Window:
        for _ in range(problem.n):
            carry[1] = accumulating(grads, carry[1])
        carry[:] = flushing(*carry)
        jax.block_until_ready(carry)
        return Window(carry[0])

    return window
