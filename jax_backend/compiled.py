"""Calls outside of jit are compiled: arrays are traced, and all else is part of the program."""

import sys
import warnings
from collections.abc import Callable, Hashable, Sequence

import jax

from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import argument_names
from funcga._types import GradFn, Tree
from jax_backend import arrays, trees
from jax_backend._private import is_tracing
from jax_backend.trees import Static, split


def jitted(
    function: Callable[..., Tree],
    *,
    inline: bool = False,
    keep_unused: bool = False,
    numbers: "Numbers | None" = None,
) -> Callable[..., Tree]:
    """`f(settings, *args)`: `function(*settings, *args)`, jitted. Settings are static. In args,
    arrays are traced and all else is static. Raises FuncgaError for an argument that is neither
    an array nor hashable. `numbers`: those among args, which are (args, kwargs).
    """

    def run(settings: tuple[Hashable, ...], static: Static, arrays: Sequence[jax.Array]) -> Tree:
        return function(*settings, *static.tree(arrays))

    of_arrays = jax.jit(run, static_argnums=(0, 1), inline=inline, keep_unused=keep_unused)

    def call(settings: tuple[Hashable, ...], *args: Tree) -> Tree:
        static, leaves = split(args)
        result = of_arrays(settings, static, leaves)
        if numbers is not None and static.others:
            numbers.note(static, *args)
        return result

    return call


def compiled(
    function: Callable[..., Tree], *, keep_unused: bool = False, numbers: "Numbers | None" = None
) -> Callable[..., Tree]:
    """The function, `jitted` for calls outside of any trace, and unchanged inside of jit, vmap,
    grad or shard_map.
    """
    outside = jitted(function, keep_unused=keep_unused, numbers=numbers)
    return lambda settings, *args: (
        function(*settings, *args) if is_tracing() else outside(settings, *args)
    )


def checked(
    function: Callable[..., tuple[Tree, list[jax.Array]]], *, numbers: "Numbers | None" = None
) -> Callable[..., Tree]:
    """The result of a `compiled` function that returns (result, conditions for it to be lost);
    FuncgaError if the host sees that it is.
    """
    run = compiled(function, numbers=numbers)

    def call(settings: tuple[Hashable, ...], *args: Tree) -> Tree:
        result, lost = run(settings, *args)
        # The host does not wait for an accelerator. The same call without jit raises, with the
        # path of the leaf.
        if any(arrays.scalar(is_lost) is True for is_lost in lost):
            function(*settings, *args)
        return result

    return call


# -- numbers, of which each value makes a program

# How many programs are compiled for the values of one number before a warning.
_MOST_PROGRAMS = 5


class Numbers:
    """The Python numbers among the arguments that a step was called with."""

    def __init__(self, grad_fn: GradFn):
        self.grad_fn = grad_fn
        self.seen: dict[tuple[Hashable, int], set[str]] = {}

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
