"""The memory of a window, found without running it: as XLA lays out the compiled program."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from funcga._backend import Backend
from funcga._call import Program
from funcga._replicas import Memory
from funcga._types import Tree
from funcga.errors import FuncgaError
from jax_backend import trees


def is_shape(leaf: Any) -> bool:
    """Whether the leaf only stands for an array of this framework: it has a shape and a dtype, and no numbers."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def rows(program: Program, args: tuple[Tree, ...], backend: Backend) -> int:
    """How many rows the arguments of a call have."""
    found: list[int] = []
    _Call(args, {}).shapes(lambda args, kwargs: found.append(program.read(args, backend).rows()))
    return found[0]


def nbytes(tree: Tree) -> int:
    """The bytes that the arrays of a tree take; memory that several of them share is counted once."""
    return sum({id(leaf): _size(leaf) for leaf in _Call((tree,), {}).arrays}.values())


def _size(leaf: Any) -> int:
    return int(math.prod(leaf.shape)) * int(leaf.dtype.itemsize)


def free_memory(tree: Tree) -> int | None:
    """The bytes that are free on the device of these arrays; None if that is the host."""
    held = [leaf for leaf in _Call((tree,), {}).arrays if isinstance(leaf, jax.Array)]
    devices = {device for leaf in held for device in leaf.devices()} or {*jax.local_devices()[:1]}
    stats = [device.memory_stats() for device in devices if device.platform != "cpu"]
    return min([each["bytes_limit"] - each["bytes_in_use"] for each in stats if each], default=None)


def peak(
    program: Program,
    window: Callable[[Program], Callable[..., Any]],
    args: tuple[Tree, ...],
    kwargs: dict[str, Tree],
    backend: Backend,
) -> dict[str, int]:
    """What `window(program)(args, kwargs)` holds when it holds most, in bytes, by what it is."""
    if program.across is not None:
        raise FuncgaError(
            "the plan of a step with across= was asked for, whose axis has a meaning inside of shard_map alone. Plan "
            "the step of one replica: without across=, and with its own rows."
        )
    call, whole = _Call(args, kwargs), dict[int, int]()

    def run(args: tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
        parts = program.read(args, backend).parts
        traced = [part.value for part in parts if not part.axes], kwargs
        whole.update({id(leaf): _size(leaf) for leaf in trees.flatten(traced)[0] if isinstance(leaf, jax.Array)})
        return window(replace(program, memory=Memory()))(args, kwargs)

    sizes = call.lowered(run).compile().memory_analysis()
    if sizes is None:
        raise FuncgaError(
            "XLA does not say on this platform how much memory a compiled program takes. Let the step try sizes when "
            'it runs: n="auto".'
        )
    parameters = min(sum(whole.values()), sizes.argument_size_in_bytes)
    return {
        "parameters": parameters,
        "batch": sizes.argument_size_in_bytes - parameters,
        "results": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
    }


class _Call:
    """A call as a function of its arrays, which may be shapes; all else is part of the program."""

    def __init__(self, args: tuple[Tree, ...], kwargs: dict[str, Tree]):
        self.leaves, self.structure = trees.flatten((args, kwargs))
        self.places = [index for index, leaf in enumerate(self.leaves) if hasattr(leaf, "shape")]
        self.arrays = [self.leaves[index] for index in self.places]

    def _of_arrays(self, function: Any) -> Any:
        def run(arrays: list[Any]) -> Any:
            by_place = dict(zip(self.places, arrays, strict=True))
            leaves = [by_place.get(index, leaf) for index, leaf in enumerate(self.leaves)]
            return function(*trees.unflatten(self.structure, leaves))

        return run

    def shapes(self, function: Any) -> Any:
        """The shapes that `function(args, kwargs)` returns."""
        return jax.eval_shape(self._of_arrays(function), self.arrays)

    def lowered(self, function: Any) -> Any:
        """`function(args, kwargs)`, lowered by jax.jit."""
        return jax.jit(self._of_arrays(function), keep_unused=True).lower(self.arrays)
