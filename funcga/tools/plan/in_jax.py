"""The memory of a window in JAX: what XLA says of the compiled program, which is not run."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from funcga._backend import Backend
from funcga._call import Program
from funcga._types import Args, Kwargs, Tree, TreeFn
from jax_backend import trees
from jax_backend._private import is_tracing


def is_shape(leaf: Any) -> bool:
    """Whether the leaf is a shape without numbers: a meta tensor, or a ShapeDtypeStruct."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def rows(program: Program, args: Args, backend: Backend, on_each: Any) -> int:
    """The number of rows of the arguments of a call.

    They are those of one device if `on_each` runs it on every one of a mesh.
    """
    found: list[int] = []

    def count(args: Args, kwargs: Kwargs) -> None:
        found.append(program.read(args, backend).rows())

    static, arrays = trees.partition((args, {}))
    function = count if on_each is None else partial(on_each, count, out_specs=None)
    jax.eval_shape(lambda arrays: function(*static.tree(arrays)), arrays)
    return found[0]


def nbytes(tree: Tree) -> int:
    """The bytes of the arrays of a tree; shared memory is counted once.

    Of an array that is cut among several devices, the part on one of them counts.
    """
    sizes = {}
    for leaf in trees.partition(tree)[1]:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        sizes[id(leaf)] = math.prod(shape) * leaf.dtype.itemsize
    return sum(sizes.values())


def free_memory(leaves: Sequence[Any]) -> int | None:
    """The free bytes on the device of these arrays; None for the host."""
    held = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    devices = {device for leaf in held for device in leaf.devices()} or {*jax.local_devices()[:1]}
    stats = [device.memory_stats() for device in devices]
    return min([each["bytes_limit"] - each["bytes_in_use"] for each in stats if each], default=None)


is_compiling = is_tracing
"""Whether the call belongs to a program that is being compiled."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out."""
    ran_out = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return ran_out or isinstance(error, MemoryError)


def peak(
    program: Program,
    window: Callable[[Program], TreeFn],
    args: Args,
    kwargs: Kwargs,
    backend: Backend,
) -> dict[str, int]:
    """The peak memory of `window(program)(args, kwargs)`, in bytes by what they are."""
    step = window(program)
    static, arrays = trees.partition((args, kwargs))
    jitted = jax.jit(lambda arrays: step(*static.tree(arrays)), keep_unused=True)
    sizes: Any = jitted.lower(arrays).compile().memory_analysis()
    return {
        "arguments": sizes.argument_size_in_bytes,
        "results": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
    }
