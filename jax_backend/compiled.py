"""Calls outside of jit are compiled: arrays are traced, and all else is part of the program."""

from collections.abc import Callable, Hashable, Sequence

import jax

from funcga._types import Tree
from jax_backend import arrays
from jax_backend._private import is_tracing
from jax_backend.trees import Static, nnx, split


class Compiled:
    """`f(settings, *args)`: `function(*settings, *args)`, jitted for calls outside of any trace,
    and unchanged inside of jit, vmap, grad or shard_map.

    Settings are static. In args, arrays are traced and all else is static. If it `is_checked`,
    `function` returns (result, conditions for it to be lost). Raises FuncgaError for an argument
    that is neither an array nor hashable, and if the host sees that a result is lost.
    """

    def __init__(
        self, function: Callable[..., Tree], is_checked: bool = False, keep_unused: bool = False
    ):
        def run(
            settings: tuple[Hashable, ...], static: Static, arrays: Sequence[jax.Array]
        ) -> Tree:
            return function(*settings, *static.tree(arrays))

        self.function, self.is_checked = function, is_checked
        self.of_arrays = jax.jit(run, static_argnums=(0, 1), keep_unused=keep_unused)

    def __call__(self, settings: tuple[Hashable, ...], *args: Tree) -> Tree:
        """The result of the function."""
        if is_tracing():
            if checks := nnx():
                checks.check_unshared(args)  # as `split` does
            result = self.function(*settings, *args)
            return result[0] if self.is_checked else result
        static, leaves = split(args)
        result = self.of_arrays(settings, static, leaves)
        if not self.is_checked:
            return result
        result, lost = result
        # The host does not wait for an accelerator. The same call without jit raises, with the
        # path of the leaf.
        if any(arrays.scalar(is_lost) is True for is_lost in lost):
            self.function(*settings, *args)
        return result


def inlined(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """The function, jitted as `compiled` is, of which no call remains in a program: it is traced
    once for all programs that it is in.
    """

    def run(static: Static, arrays: Sequence[jax.Array]) -> Tree:
        return function(*static.tree(arrays))

    of_arrays = jax.jit(run, static_argnums=0, inline=True)
    return lambda *args: of_arrays(*split(args))
