"""Calls outside of jit are compiled: arrays are traced, and all else is part of the program."""

import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import jax

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._types import GradFn, Tree
from jax_backend import arrays, trees
from jax_backend._private import is_tracing
from jax_backend.trees import Static, split


def compiled(
    function: Callable[..., Tree],
    *,
    keep_unused: bool = False,
    numbers: "Numbers | None" = None,
    is_checked: bool = False,
) -> Callable[..., Tree]:
    """`f(settings, *args)`: `function(*settings, *args)`, jitted for calls outside of any trace,
    and unchanged inside of jit, vmap, grad or shard_map.

    Settings are static. In args, arrays are traced and all else is static; `numbers` are those
    among args, which are (args, kwargs). If it `is_checked`, `function` returns (result,
    conditions for it to be lost). Raises FuncgaError for an argument that is neither an array nor
    hashable, and if the host sees that a result is lost.
    """

    def run(settings: tuple[Hashable, ...], static: Static, arrays: Sequence[jax.Array]) -> Tree:
        return function(*settings, *static.tree(arrays))

    of_arrays = jax.jit(run, static_argnums=(0, 1), keep_unused=keep_unused)

    def call(settings: tuple[Hashable, ...], *args: Tree) -> Tree:
        if is_tracing():
            result = function(*settings, *args)
            return result[0] if is_checked else result
        static, leaves = split(args)
        result = of_arrays(settings, static, leaves)
        if numbers is not None and static.others:
            numbers.note(static, *args)
        if not is_checked:
            return result
        result, lost = result
        # The host does not wait for an accelerator. The same call without jit raises, with the
        # path of the leaf.
        if any(arrays.scalar(is_lost) is True for is_lost in lost):
            function(*settings, *args)
        return result

    return call


def inlined(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """The function, jitted as `compiled` is, of which no call remains in a program: it is traced
    once for all programs that it is in.
    """

    def run(static: Static, arrays: Sequence[jax.Array]) -> Tree:
        return function(*static.tree(arrays))

    of_arrays = jax.jit(run, static_argnums=0, inline=True)
    return lambda *args: of_arrays(*split(args))


# -- numbers, of which each value makes a program

# How many programs are compiled for the values of one number before a warning.
_MOST_PROGRAMS = 5


@dataclass
class Numbers:
    """The Python numbers among the arguments that a step was called with: those that were seen at
    an index of a structure, as they are written.
    """

    grad_fn: GradFn
    seen: dict[tuple[Hashable, int], set[str]] = field(default_factory=dict)

    def note(self, static: Static, args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> None:
        """Warns, once, of an argument that has had five values; `static` is of (args, kwargs)."""
        for leaf_index, _, leaf in static.others:
            if isinstance(leaf, bool) or not isinstance(leaf, int | float | complex):
                continue
            seen = self.seen.setdefault((static.structure, leaf_index), set())
            if len(seen) == _MOST_PROGRAMS or repr(leaf) in seen:
                continue
            seen.add(repr(leaf))
            if len(seen) == _MOST_PROGRAMS:
                names = argument_names(self.grad_fn, len(args))
                named = [*zip(names, args, strict=True), *sorted(kwargs.items())]
                paths = [path for name, arg in named for path in leaf_paths(arg, trees, name)]
                warnings.warn(
                    f"`{paths[leaf_index]}` was {_MOST_PROGRAMS} different numbers, and each has "
                    "compiled the step anew: outside of jit a Python number is part of the "
                    f"program. Pass an array, jnp.asarray({paths[leaf_index]}), or call the step "
                    "inside of jax.jit.",
                    stacklevel=_outside(),
                )


def _outside() -> int:
    """The stacklevel of the call of funcga, for a warning of the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        level, frame = level + 1, frame.f_back
    return level


_PACKAGES = ("funcga", "jax_backend")
