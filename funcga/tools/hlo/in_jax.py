"""The collectives of a compiled step, by the depth of the loops around them."""

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import jax

from funcga._types import Tree


class Collective(NamedTuple):
    """One collective of a compiled program.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
            "collective-broadcast" or "ragged-all-to-all".
        depth: How many loops it is in, 0 for none.
        bytes: The size of its operands, on one device.

    Example:
        >>> jax_backend.hlo.Collective("all-reduce", depth=0, bytes=4096)
        Collective(kind='all-reduce', depth=0, bytes=4096)
    """

    kind: str
    depth: int
    bytes: int


def collectives(fn: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> list[Collective]:
    """The collectives of a function as XLA compiles it for these arguments, in the order of the
    program.

    Nothing is run. It shows whether gradients are reduced once an update, or in every micro-batch
    and layer.

    Args:
        fn: Any function of arrays, jitted or not.
        *args: What it is called with.
        **kwargs: What it is called with by keyword.

    Returns:
        A Collective for each, which says how many loops it is in.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> grad_fn = jax.value_and_grad(lambda w, x: (w * x).mean())
        >>> step = jax_backend.replicated(funcga.accumulate(grad_fn, 2, across="data"), mesh)
        >>> found = jax_backend.collectives(step, jnp.ones(()), jnp.ones(8))
        >>> {collective.depth for collective in found}  # none is in a loop: one reduction an update
        {0}
    """
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    text = jitted.lower(*args, **kwargs).compile().as_text()
    return list(_collectives(text or ""))


class _Instruction(NamedTuple):
    name: str
    type: str
    operation: str
    operands: str
    attributes: str


_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
# Tuple types and tiles, `{1,0:T(8,128)}`, have parentheses, too.
_START = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*?)\s([a-z][\w\-]*)\((.*?)\)(,\s.*)?$")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|\w*computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,<=]*)\]")


def _collectives(text: str) -> Iterator[Collective]:
    entry, computations = _computations(text)
    depths = _depths(entry, computations)
    for computation, instructions in computations.items():
        types = {instruction.name: instruction.type for instruction in instructions}
        for instruction in instructions:
            # An asynchronous collective is two instructions, "-start" and "-done"; the first has
            # the operands.
            kind = instruction.operation.removesuffix("-start")
            if kind in _KINDS and computation in depths:
                operands = re.findall(r"%([\w.\-]+)", instruction.operands)
                size = sum(_bytes(types.get(name, "")) for name in operands)
                yield Collective(kind, depths[computation], size)


# The text is a list of computations, "name (parameters) -> type {", with a line for each
# instruction, "name = type operation(operands), attributes", of which some call other computations.


def _computations(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    """The name of the computation that runs first, and the instructions of each."""
    entry, here = "", list[_Instruction]()
    computations: dict[str, list[_Instruction]] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            here = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif start := _START.match(line):
            here.append(_Instruction(*start.groups("")))
    return entry, computations


def _depths(entry: str, computations: dict[str, list[_Instruction]]) -> dict[str, int]:
    """How many loops each computation that runs is in, at most."""
    # From the entry, so that unused computations have no depth.
    depths: dict[str, int] = {}
    waiting = [(entry, 0)]
    while waiting:
        name, depth = waiting.pop()
        # The deepest call counts.
        if name not in computations or depths.get(name, -1) >= depth:
            continue
        depths[name] = depth
        for instruction in computations[name]:
            inside = depth + (instruction.operation == "while")
            for _, called in _CALLED.findall(instruction.attributes):
                waiting += [(other.strip(" %"), inside) for other in called.strip("{}").split(",")]
    return depths


def _bytes(type: str) -> int:
    """The bytes of the arrays in a type such as `(f32[8,3]{1,0}, s32[])`."""
    return sum(
        -(-_bits(name) * prod(int(size.strip("<=")) for size in sizes.split(",") if size) // 8)
        for name, sizes in _ARRAY.findall(type)
    )


def _bits(name: str) -> int:
    """The bits of an element: `f32` has 32, `pred` 8, `f8e4m3fn` 8, `c64` 64, a token none."""
    if name == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", name)
    return int(digits[1]) if digits else 0
