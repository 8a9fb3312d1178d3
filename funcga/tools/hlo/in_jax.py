"""The collectives of a compiled step, by the depth of the loops around them."""

import re
from math import prod
from typing import NamedTuple

import jax

from funcga._types import Tree, TreeFn


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


def collectives(fn: TreeFn, *args: Tree, **kwargs: Tree) -> list[Collective]:
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
    text = jitted.lower(*args, **kwargs).compile().as_text() or ""
    # The text is a list of computations, "name (parameters) -> type {", with a line for each
    # instruction, "name = type operation(operands), attributes", of which some call other
    # computations. What is called stands before what calls it.
    here = entry = ""
    calls = dict[str, list[tuple[str, bool]]]()  # what a computation calls, and whether in a loop
    sizes, found = dict[tuple[str, str], int](), list[tuple[str, str, list[str]]]()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            here = header[2]
            entry, calls[here] = here if header[1] else entry, []
        elif instruction := _INSTRUCTION.match(line):
            name, type_of_result, operation, operands, attributes = instruction.groups("")
            sizes[here, name] = _bytes(type_of_result)
            # An asynchronous collective is two instructions, "-start" and "-done"; the first has
            # the operands.
            kind = operation.removesuffix("-start")
            if kind in _KINDS:
                found.append((here, kind, re.findall(r"%([\w.\-]+)", operands)))
            for called in _CALLED.findall(attributes):
                names = called.strip("{}").split(",")
                calls[here] += [(name.strip(" %"), operation == "while") for name in names]
    depths = _depths(entry, calls)
    return [
        Collective(kind, depths[here], sum(sizes.get((here, name), 0) for name in operands))
        for here, kind, operands in found
        if here in depths
    ]


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
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*?)\s([a-z][\w\-]*)\((.*?)\)(,\s.*)?$"
)
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation|\w*computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\]")


def _depths(entry: str, calls: dict[str, list[tuple[str, bool]]]) -> dict[str, int]:
    """How many loops each computation that runs is in, at most."""
    # From the entry, so that unused computations have no depth.
    depths = {entry: 0}
    for caller in reversed(calls):
        for called, is_loop in calls[caller] if caller in depths else ():
            depths[called] = max(depths.get(called, 0), depths[caller] + is_loop)
    return depths


def _bytes(type_of_result: str) -> int:
    """The bytes of the arrays in a type such as `(f32[8,3]{1,0}, s32[])`: of an element `f32` has
    32 bits, `f8e4m3fn` 8, `c64` 64, and `pred` 8.
    """
    total = 0
    for _, bits, sizes in _ARRAY.findall(type_of_result):
        count = prod(int(size.strip("<=")) for size in sizes.split(",") if size)
        total += -(-int(bits or 8) * count // 8)
    return total
