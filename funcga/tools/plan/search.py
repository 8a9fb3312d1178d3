"""`n="auto"`: the smallest number of micro-batches that fits in memory, planned, then tried out."""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from funcga._backend import Backend
from funcga._backend.dispatch import load_imported
from funcga._call import Memory, Program, owner_of
from funcga._call.arguments import Split
from funcga._types import Args, Kwargs, TreeFn
from funcga.errors import FuncgaError
from funcga.tools.plan import planned, side

# How many shapes of arguments are remembered.
_SHAPES = 256


class Search:
    """A loop that folds a program with the smallest n that fits; what fitted is remembered for each
    shape of arguments.

    A window that runs out of memory is dropped and replayed from its start with more micro-batches.
    So no part of it is counted twice, and the result is that of the n that ran to its end.
    """

    # A weak reference to the step, whose `n` is that of the last call; set by `funcga.accumulate`.
    step: Any

    def __init__(self, counting: Any = None):
        """`counting`: the program that counts a batch first."""
        self.counting = counting
        # Imported now, as torch.compile cannot trace an import.
        self.sides = {backend.name: side(backend) for backend in load_imported()}
        self.fitted: dict[Any, int] = {}
        self.programs: dict[int, Program] = {}

    def accumulate(self, program: Program, backend: Backend) -> TreeFn:
        """f(args, kwargs): the fold of the program over the micro-batches cut from args."""
        return partial(self._fold, program, backend)

    def _fold(
        self,
        program: Program,
        backend: Backend,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """The result. Raises what the framework raises if not even one row at a time fits."""
        own = self.sides.get(backend.name) or side(backend)
        if own.is_compiling():
            raise FuncgaError(
                'n="auto" tries sizes out when it is called, which cannot be done in a program '
                "that is being compiled. "
                "Call the step outside of jax.jit or torch.compile, or give a number: n=8."
            )
        leaves = filter(backend.arrays.is_array, backend.trees.flatten((args, kwargs))[0])
        key = backend.name, *[(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]
        owner = owner_of(program.grad_fn)
        undo = None if owner is None else owner.snapshot()

        def run(n: int) -> Any:
            if undo is not None:  # an earlier attempt may have written to the module's buffers
                undo()
            of_n = self.programs.setdefault(n, replace(program, split=Split(n), memory=Memory()))
            loop = self.counting or backend.loop
            result = loop.accumulate(of_n, backend)(args, kwargs)
            # JAX raises when the result is waited for.
            for leaf in backend.trees.flatten(result)[0]:
                if hasattr(leaf, "block_until_ready"):
                    leaf.block_until_ready()
            return result

        fitted = self.fitted.get(key)
        if fitted is None:
            # An invalid call raises in the attempt, too.
            with suppress(Exception):
                counting = self.counting
                fitted = planned(program, backend, args, kwargs, counting=counting).n
        rows = program.read(args, backend).rows()
        n, result = smallest(run, rows, own.is_out_of_memory, fitted)
        if len(self.fitted) > _SHAPES:
            self.fitted.clear()
        self.fitted[key] = self.step().n = n
        return result


def smallest(
    run: Callable[[int], Any],
    most: int,
    is_out_of_memory: Callable[[BaseException], bool],
    fitted: int | None = None,
) -> tuple[int, Any]:
    """The smallest n from 1 to `most` for which `run(n)` has enough memory, and what it returns.

    `fitted`, at most `most`, had enough before. It is tried first, and is the answer if it still
    has.
    """
    # Invariant: `too_few` micro-batches are taken not to fit, and `enough` fit, once that is known.
    # Double until something fits, then halve the gap below it.
    n = fitted or 1
    too_few, enough, result = n - 1, None, None
    while enough is None or enough - too_few > 1:
        result = None  # frees its memory for the next attempt
        try:
            result = run(n)
            enough = n
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if n == most:
                error.add_note(
                    f"funcga: tried up to n={n}, one row a micro-batch, and that does not fit "
                    "either."
                )
                raise
            too_few = n
        # Not in the `except` block, where the error still references frames and their arrays.
        if too_few == n:
            gc.collect()
        n = min(2 * n, most) if enough is None else (enough + too_few) // 2
    # If the last attempt did not fit, the result of n is gone: run it again.
    if result is None:
        return smallest(run, most, is_out_of_memory, enough)
    return enough, result
