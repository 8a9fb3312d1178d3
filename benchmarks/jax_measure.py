"""What JAX has compiled: counted in the program, and by XLA's own analyses of it."""

import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

import jax_backend


class _Part(NamedTuple):
    program: Any
    times: int


class Programs:
    """The programs that a contender runs, each of which is compiled here, once.

    `figures` says of an update: `peak_bytes`, the temporaries of the largest program; `compile_seconds`, lowering and
    compiling; `ops`, instructions; `bytes_accessed` as XLA's cost analysis estimates them, for which the body of a loop
    runs once and of two branches the costlier one; `collectives`, as often as they run, and `wire_bytes`, what those
    are given on one device.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.parts: list[_Part] = []

    def compiled(
        self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), times: int = 1
    ) -> Callable[..., Any]:
        """The function as a program for arguments such as these, which an update runs so many times."""
        start = time.perf_counter()
        program = jax.jit(function, donate_argnums=donate).lower(*args).compile()
        self.seconds += time.perf_counter() - start
        self.parts.append(_Part(program, times))
        return program

    def figures(self, turns: tuple[int, ...] = (1,)) -> dict[str, Any]:
        """What is counted; `turns` says how often an update runs what is in 0, 1, ... loops."""
        found = [(c, part.times * turns[c.depth]) for part in self.parts for c in _collectives(part.program)]
        return {
            "peak_bytes": max(part.program.memory_analysis().temp_size_in_bytes for part in self.parts),
            "compile_seconds": self.seconds,
            "ops": sum(instructions(part.program.as_text()) for part in self.parts),
            "bytes_accessed": sum(part.times * _bytes_accessed(part.program) for part in self.parts),
            "collectives": sum(runs for _, runs in found),
            "wire_bytes": sum(runs * collective.bytes for collective, runs in found),
        }


def _collectives(program: Any) -> list[jax_backend.hlo.Collective]:
    """Of a program that is compiled already, as it would be again."""
    return jax_backend.collectives(SimpleNamespace(lower=lambda: SimpleNamespace(compile=lambda: program)))


def _bytes_accessed(program: Any) -> float:
    costs = program.cost_analysis()
    return (costs[0] if isinstance(costs, list) else costs or {}).get("bytes accessed", 0.0)


_NO_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "")
_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?([\w.\-]+)\s.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?[\w.\-]+ = .*?\s([a-z][\w\-]*)\(")
_PART = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")


def instructions(text: str) -> int:
    """How many instructions a compiled program has: a fusion is one, and what only names a value is none."""
    parts, here, count = set(_PART.findall(text)), "", 0
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            here = header[1]
        elif here not in parts and (found := _INSTRUCTION.match(line)):
            count += found[1] not in _NO_WORK
    return count
