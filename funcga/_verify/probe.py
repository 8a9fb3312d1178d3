"""The probe: what grad_fn returns for any rows of the batch, as NumPy arrays."""

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from funcga import monoids, reducers
from funcga._accumulate import accumulate
from funcga._backend.prefixes import leaf_paths
from funcga._backend.protocols import Backend
from funcga._call.arguments import CARRY, Arguments
from funcga._call.program import Program
from funcga._fold.outputs import place
from funcga._trees.interop import to_numpy
from funcga.folds import Fold, mean, sum

Rows = tuple[int, ...]


class Probe:
    """A gradient function at some arguments. It evaluates any rows of them, each choice of rows once."""

    def __init__(self, program: Program, backend: Backend, args: Any, kwargs: Any, precise: bool):
        self.program, self.backend, self.precise = program, backend, precise
        self.own = importlib.import_module(f"funcga._verify.in_{backend.name}")
        self.args, self.kwargs = copied((args, kwargs), backend, precise)
        self.arguments: Arguments = program.read(self.args, backend)
        self.rows = self.arguments.rows()
        self.every: Rows = tuple(range(self.rows))
        self.threaded = any(axis is CARRY for _, axis in self.arguments)
        self.plain = self._mapped(_plain)
        self.raw = accumulate(program.grad_fn, 1, fold=self.plain, in_axes=program.in_axes)
        self._values: dict[Rows, list[Any]] = {}
        self.output_like: Any = None  # of grad_fn, once it was called

    def _mapped(self, function: Callable[[Fold], Fold]) -> Any:
        """The tree of folds with each one replaced."""
        leaves, structure = self.backend.trees.flatten(self.program.fold)
        replaced = [function(leaf) if isinstance(leaf, Fold) else leaf for leaf in leaves]
        return self.backend.trees.unflatten(structure, replaced)

    def gathered(self, rows: Sequence[int]) -> tuple[Any, ...]:
        """Copies of the arguments with these rows, which may repeat."""
        take = lambda leaf, axis, start, size: self.own.take(leaf, axis, start)
        return self.arguments.cut([*rows], len(rows), self.arguments.state, take)

    def values(self, rows: Rows) -> list[Any]:
        """The leaves of grad_fn's output for these rows, in float64 or complex128; None for what is no number."""
        if rows not in self._values:
            self._values[rows] = self.call(rows)
        return self._values[rows]

    def call(self, rows: Rows) -> list[Any]:
        """The same, whether it was called before or not."""
        output = self.raw(*self.gathered(rows), **self.kwargs)
        if self.output_like is None:
            self.output_like = output
        return self.numbers(output)

    def numbers(self, output: Any) -> list[Any]:
        """The leaves of an output as NumPy arrays."""
        return [as_numbers(leaf, self.backend) for leaf in self.backend.trees.flatten(output)[0]]

    def forget(self) -> None:
        """Drops the values that were computed, as when the arguments are others."""
        self._values = {}

    def weigh(self, rows: Rows) -> float:
        """The weight of these rows."""
        weight = self.program.weigh(self.arguments, self.gathered(rows), len(rows))
        return float(weight)

    def step(self, n: int) -> Callable[..., Any]:
        """The accumulation of grad_fn over n micro-batches, its leaves as grad_fn has them; of moments a mean."""
        fold, p = self._mapped(_leaf_for_leaf), self.program
        return accumulate(p.grad_fn, n, fold=fold, weight=p.weight, in_axes=p.in_axes)

    @cached_property
    def folds(self) -> list[Fold]:
        """The Fold of every leaf."""
        leaves = self.backend.trees.flatten(self.output_like)[0]
        return [placed.value for placed in place(self.program.fold, self.output_like, len(leaves), self.backend)]

    @cached_property
    def paths(self) -> list[str]:
        """The path of every leaf."""
        return leaf_paths(self.output_like, self.backend.trees, "output")

    @cached_property
    def dtypes(self) -> set[str]:
        """The names of the float dtypes of the leaves."""
        leaves = [
            leaf for leaf in self.backend.trees.flatten(self.output_like)[0] if self.backend.arrays.is_array(leaf)
        ]
        kind = self.backend.arrays.kind
        return {str(leaf.dtype).removeprefix("torch.") for leaf in leaves if kind(leaf.dtype) in ("float", "complex")}

    def shapes(self, rows: Rows) -> list[tuple[int, ...] | None]:
        """The shapes of the leaves for these rows."""
        return [None if leaf is None else leaf.shape for leaf in self.values(rows)]


def _plain(fold: Fold) -> Fold:
    """The fold that leaves a single value as it is."""
    keeps = fold.reducer.lift is reducers.carry.lift or fold.reducer.monoid.axis is not None
    return fold if keeps else sum()


def _leaf_for_leaf(fold: Fold) -> Fold:
    """The fold whose result has one leaf for each of grad_fn's output."""
    if is_pooled(fold):
        stack = lambda xp, reduced, tally: xp.stack(fold.normalizer.apply(xp, reduced, tally))
        return replace(fold, normalizer=replace(fold.normalizer, apply=stack))
    return mean() if is_moments(fold) else fold


def is_moments(fold: Fold) -> bool:
    """Whether the result depends on the number of micro-batches by definition."""
    return fold.reducer.monoid is monoids.moments and not is_pooled(fold)


def is_pooled(fold: Fold) -> bool:
    """Whether a leaf has several arrays stacked on its axis 0, of which the result makes a tuple."""
    return fold.reducer.lift is reducers.pooled.lift


def copied(tree: Any, backend: Backend, precise: bool) -> Any:
    """A copy of the tree, detached from all graphs; with `precise`, its floats in 64 bits."""
    leaves, structure = backend.trees.flatten(backend.transforms.detached(tree))
    return backend.trees.unflatten(structure, [_copy(leaf, backend, precise) for leaf in leaves])


def _copy(leaf: Any, backend: Backend, precise: bool) -> Any:
    arrays = backend.arrays
    if not arrays.is_array(leaf):
        return leaf
    wide = {"float": "float64", "complex": "complex128"}.get(arrays.kind(leaf.dtype))
    if precise and wide is not None and str(leaf.dtype).removeprefix("torch.") != wide:
        return arrays.cast(leaf, arrays.as_dtype(wide))
    return arrays.owned(leaf, (leaf,))


def as_numbers(leaf: Any, backend: Backend) -> Any:
    """The leaf as a NumPy array of float64 or complex128; None for what is no number."""
    arrays = backend.arrays
    if leaf is None or not (arrays.is_array(leaf) or isinstance(leaf, int | float | complex)):
        return None
    leaf = arrays.as_array(leaf)
    kind = arrays.kind(leaf.dtype)
    if kind == "other":
        return None
    if kind == "float":  # NumPy has no 16-bit floats but one
        leaf = arrays.cast(leaf, arrays.accumulator_dtype(leaf.dtype))
    return to_numpy(leaf, copy=None).astype(np.complex128 if kind == "complex" else np.float64)


def random_states(probe: Probe) -> Any:
    """The states of all global random generators."""
    return probe.own.random_state(), np.random.get_state(), random.getstate()


def restore(probe: Probe, states: Any) -> None:
    """Puts the global random generators back to these states."""
    probe.own.restore(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
