"""The probe: what a gradient function returns for any rows of the batch, and which differences are
rounding.

Everything that is compared is a NumPy array of float64 or complex128, whatever the framework
computes in.
"""

import copy
import importlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from funcga._accumulate import accumulate
from funcga._backend import Backend
from funcga._backend.prefixes import leaf_paths
from funcga._call import Memory, Program
from funcga._call.arguments import CARRY
from funcga._compare.tolerances import epsilon
from funcga._fold.outputs import broadcast_folds
from funcga._grad import GradientFunction
from funcga._trees import to_numpy
from funcga._types import Array, Namespace, Scalar, Tree, WeightFn
from funcga.errors import FuncgaError
from funcga.folds import Fold, mean, sum

Rows = tuple[int, ...]

# The leaves of an output as NumPy arrays; None for a leaf that is no number.
Leaves = list[Array]


class Probe:
    """A gradient function and its arguments, ready to be called with any rows of them.

    Each choice of rows is computed once. `precise` says that the arguments were cast to float64,
    and `subject` whether the function returns a "loss" and its gradient, or a "summary".
    """

    def __init__(
        self,
        program: Program,
        backend: Backend,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        precise: bool,
        subject: str = "loss",
    ):
        self.program, self.backend, self.precise, self.subject = program, backend, precise, subject
        self.framework = importlib.import_module(f"funcga._verify.in_{backend.name}")
        self.args, self.kwargs = _copied((args, kwargs), backend, precise, self.framework.copy)
        self.arguments = program.read(self.args, backend)
        self.rows = self.arguments.rows()
        self.every: Rows = tuple(range(self.rows))
        self.threaded = any(axis is CARRY for _, axis in self.arguments)
        # Under these folds the step over one micro-batch returns what grad_fn itself returns.
        self.plain = self._each_fold(lambda fold: fold if fold.reducer.monoid.ordered else sum())
        if program.totals is not None:
            # Any rows have the totals of the whole batch, as a micro-batch has.
            self.kwargs = {**self.kwargs, "totals": self.count(self.every)}
        self.raw = accumulate(program.grad_fn, 1, fold=self.plain, in_axes=program.in_axes)
        self.output: Tree = None  # of the first call
        self._values: dict[Rows, Leaves] = {}

    def _each_fold(self, change: Callable[[Fold], Fold]) -> Tree:
        folds, structure = self.backend.trees.flatten(self.program.fold)
        changed = [change(fold) if isinstance(fold, Fold) else fold for fold in folds]
        return self.backend.trees.unflatten(structure, changed)

    def gathered(self, rows: Rows) -> tuple[Tree, ...]:
        """The arguments with these rows, in this order; rows may repeat."""
        take = lambda array, axis, start, size: self.framework.take(array, axis, start)
        return self.arguments.cut([*rows], len(rows), self.arguments.state, take)

    def call(self, rows: Rows) -> Leaves:
        """The leaves of grad_fn's output for these rows, computed anew."""
        output = self.raw(*self.gathered(rows), **self.kwargs)
        # The structure of the first output is that of all.
        if self.output is None:
            self.output = output
        return self.numbers(output)

    def values(self, rows: Rows) -> Leaves:
        """The leaves of grad_fn's output for these rows, computed once."""
        if rows not in self._values:
            self._values[rows] = self.call(rows)
        return self._values[rows]

    def try_values(self, rows: Rows) -> Leaves | None:
        """The same; None where grad_fn raises an error, as some losses refuse some batches."""
        try:
            return self.values(rows)
        except Exception:
            return None

    def takes_a_row_fewer(self) -> bool:
        """Whether grad_fn can be evaluated with one row fewer than all."""
        return self.rows > 1 and self.try_values(self.every[:-1]) is not None

    @property
    def whole(self) -> Leaves:
        """The leaves of grad_fn's output for the whole batch."""
        return self.values(self.every)

    def numbers(self, tree: Tree) -> Leaves:
        """The leaves of a tree as NumPy arrays."""
        return [as_numbers(leaf, self.backend) for leaf in self.backend.trees.flatten(tree)[0]]

    def loss(self, rows: Rows) -> float:
        """The value of the loss, of the function whose gradient grad_fn is, or in its output;
        NaN where none is.
        """
        grad_fn = self.program.grad_fn
        scalars = [i for i in self.additive() if self.whole[i].ndim == 0]
        # What is called may not be the loss, or may refuse these rows.
        try:
            if scalars and not isinstance(grad_fn, GradientFunction):
                return float(np.real(self.values(rows)[scalars[0]]))
            loss_fn = (
                grad_fn.loss_fn
                if isinstance(grad_fn, GradientFunction)
                else inspect.unwrap(grad_fn)
            )
            numbers = self.numbers(loss_fn(*self.gathered(rows), **self.kwargs))
        except Exception:
            return math.nan
        return next(
            (float(np.real(leaf)) for leaf in numbers if leaf is not None and leaf.ndim == 0),
            math.nan,
        )

    def weigh(self, rows: Rows) -> float:
        """The weight of these rows."""
        return float(self.program.weigh(self.arguments, self.gathered(rows), len(rows)))

    def count(self, rows: Rows) -> Tree:
        """What totals= counts of these rows."""
        counting = replace(self.program, n=1, memory=Memory()).counting(self.backend)
        return self.backend.loop.accumulate(counting, self.backend)(self.gathered(rows), {})

    def accumulated(self, n: int) -> Leaves:
        """What `accumulate` itself gives over n micro-batches."""
        fold, program, kwargs = self._each_fold(_leaf_for_leaf), self.program, {**self.kwargs}
        totals = None
        if program.totals is not None:
            totals = program.totals.function
            del kwargs["totals"]
        step = accumulate(
            program.grad_fn,
            n,
            fold=fold,
            weight=program.weight,
            in_axes=program.in_axes,
            totals=totals,
        )
        return self.numbers(step(*self.args, **kwargs))

    def given(self, **kwargs: Tree) -> "Probe":
        """The same function with other keyword arguments."""
        changed = copy.copy(self)
        changed.kwargs, changed._values = {**self.kwargs, **kwargs}, {}
        return changed

    def under(self, fold: Tree, weight: WeightFn | None) -> "Probe":
        """The Probe of the same function with another fold and weight."""
        program = replace(self.program, fold=fold, weight=weight)
        changed = Probe(program, self.backend, self.args, self.kwargs, self.precise, self.subject)
        changed.values(changed.every)
        return changed

    def moved(self, change: Callable[[list[Array]], list[Array]] | None = None) -> "Probe | None":
        """The same function at other parameters; None where those are split, or cannot be changed.

        `change` makes the new leaves of the old ones. By default it moves every array of floats.
        """
        grad_fn, trees = self.program.grad_fn, self.backend.trees
        trained = (
            grad_fn.arg_indices(len(self.args)) if isinstance(grad_fn, GradientFunction) else (0,)
        )
        if any(self.arguments.parts[i].axes for i in trained):
            return None
        leaves, structure = trees.flatten(tuple(self.args[i] for i in trained))
        changed = dict(
            zip(trained, trees.unflatten(structure, (change or self._shifted)(leaves)), strict=True)
        )
        # A copy, not a new Probe: in JAX the step is compiled already.
        moved = copy.copy(self)
        moved.args = tuple(changed.get(i, arg) for i, arg in enumerate(self.args))
        try:
            moved.arguments = self.program.read(moved.args, self.backend)
        except FuncgaError:
            return None
        moved._values = {}
        return moved

    def _shifted(self, leaves: list[Array]) -> list[Array]:
        arrays = self.backend.arrays
        is_float = [arrays.is_array(leaf) and arrays.kind(leaf.dtype) == "float" for leaf in leaves]
        return [
            leaf * 1.25 + 0.1 if moves else leaf
            for leaf, moves in zip(leaves, is_float, strict=True)
        ]

    @cached_property
    def folds(self) -> list[Fold]:
        """The Fold of every leaf."""
        leaves = self.backend.trees.flatten(self.output)[0]
        return [
            at_leaf.value
            for at_leaf in broadcast_folds(
                self.program.fold, self.output, len(leaves), self.backend
            )
        ]

    @cached_property
    def paths(self) -> list[str]:
        """The path of every leaf."""
        return leaf_paths(
            self.output, self.backend.trees, "output" if self.subject == "loss" else self.subject
        )

    @property
    def dtype(self) -> str:
        """The dtype of the arguments, in words."""
        return "float64" if self.precise else "the arguments' own dtypes"

    @cached_property
    def epsilon(self) -> float:
        """The machine epsilon of the coarsest dtype of the leaves, that of float64 at least."""
        leaves = filter(self.backend.arrays.is_array, self.backend.trees.flatten(self.output)[0])
        return max(
            [2.0**-52, *(epsilon(str(leaf.dtype).removeprefix("torch.")) for leaf in leaves)]
        )

    def additive(self, leaves: Sequence[int] | None = None) -> list[int]:
        """Those of these leaves, or of all, whose fold adds up values, as it must for a loss and
        its gradients.
        """
        indices = range(len(self.folds)) if leaves is None else leaves
        return [i for i in indices if self.whole[i] is not None and self.folds[i].reducer.additive]

    def gradient_leaves(self) -> list[int]:
        """The leaves that have the shape of a parameter, as gradients have; if some have its
        name as well, these.
        """
        parameters = [*self._parameters()]
        shapes = {shape for _, shape in parameters}
        # A scalar is the value of a loss, unless all parameters are scalars; then the first one is.
        if shapes != {()}:
            shapes -= {()}
        shaped = [i for i in self.additive() if self.whole[i].shape in shapes]
        shaped = [i for i in shaped if self.whole[i].ndim or self.paths[i] != "output[0]"]
        named = [
            i
            for i in shaped
            if any(
                self.paths[i].endswith(name) and self.whole[i].shape == shape
                for name, shape in parameters
            )
        ]
        return named or shaped

    def _parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of the arrays of numbers that are passed whole."""
        trees, arrays = self.backend.trees, self.backend.arrays
        for value in (part.value for part in self.arguments.parts if not part.axes):
            for name, leaf in zip(leaf_paths(value, trees), trees.flatten(value)[0], strict=True):
                if arrays.is_array(leaf) and arrays.kind(leaf.dtype) in ("float", "complex"):
                    yield name, tuple(leaf.shape)


def _leaf_for_leaf(fold: Fold) -> Fold:
    """A fold whose result has one array for each leaf of grad_fn's output."""
    if fold.reducer.over_steps:
        return mean()
    if fold.reducer.stacked is None:
        return fold

    def stacked(xp: Namespace, reduced: Tree, tally: Scalar) -> Array:
        result = fold.normalizer.apply(xp, reduced, tally)
        return xp.stack(result) if isinstance(result, tuple) else result

    return replace(fold, normalizer=replace(fold.normalizer, apply=stacked))


def _copied(tree: Tree, backend: Backend, precise: bool, copy: Callable[[Array], Array]) -> Tree:
    """A copy of the tree, detached from all graphs; with `precise`, its floats in 64 bits."""
    arrays = backend.arrays

    def copied(leaf: Array) -> Array:
        if not arrays.is_array(leaf):
            return leaf
        wide = {"float": "float64", "complex": "complex128"}.get(arrays.kind(leaf.dtype))
        own = copy(leaf)
        return arrays.cast(own, arrays.as_dtype(wide)) if precise and wide is not None else own

    leaves, structure = backend.trees.flatten(tree)
    return backend.trees.unflatten(structure, [copied(leaf) for leaf in leaves])


def as_numbers(leaf: object, backend: Backend) -> Array:
    """The leaf as a NumPy array of float64 or complex128; None for anything that is not a
    number.
    """
    arrays = backend.arrays
    if leaf is None or not (arrays.is_array(leaf) or isinstance(leaf, int | float | complex)):
        return None
    array = arrays.as_array(leaf)
    kind = arrays.kind(array.dtype)
    if kind == "other":
        return None
    # NumPy has no bfloat16.
    if kind == "float":
        array = arrays.cast(array, arrays.accumulator_dtype(array.dtype))
    return to_numpy(array, copy=None).astype(np.complex128 if kind == "complex" else np.float64)


RandomStates = tuple[object, ...]


def random_states(probe: Probe) -> RandomStates:
    """The states of all global random generators."""
    return probe.framework.random_state(), np.random.get_state(), random.getstate()


def restore(probe: Probe, states: RandomStates) -> None:
    """None; puts the global random generators back to these states."""
    of_framework, of_numpy, of_python = states
    probe.framework.restore(of_framework)
    np.random.set_state(of_numpy)  # type: ignore[arg-type]
    random.setstate(of_python)  # type: ignore[arg-type]


class Limit(NamedTuple):
    """How far two results may be apart: rounding, and no more.

    A leaf is compared `relative` to the largest of what was added up to it, so that gradients which
    cancel are not accused. The bias of an attention key has a gradient that is nothing but rounding
    of much larger numbers, so a `share` of the largest of all leaves counts as well. A `floor` is
    for where every gradient is zero but for rounding.
    """

    relative: float
    share: float
    floor: float

    def scales(self, parts: Sequence[Leaves]) -> list[float]:
        """What a difference in each leaf is relative to, from its values in several parts of the
        batch.
        """
        sizes = [
            max((_largest(part[i]) for part in parts), default=0.0) for i in range(len(parts[0]))
        ]
        arrays = [
            size
            for size, leaf in zip(sizes, parts[0], strict=True)
            if leaf is not None and leaf.ndim
        ]
        top = max(arrays or sizes, default=0.0)
        return [size + self.share * top + self.floor / self.relative for size in sizes]

    def differences(self, left: Leaves, right: Leaves) -> list[float]:
        """The relative difference of every leaf of two results; 0 for one that is no number."""
        pairs = zip(left, right, self.scales([left, right]), strict=True)
        return [0.0 if x is None else relative(x, y, scale) for x, y, scale in pairs]


def limit_of(eps: float) -> Limit:
    """The Limit for what is computed with this machine epsilon.

    float64 has room: a mistake is rarely below 1e-6, rounding rarely above 1e-13. In float32 sums
    of some thousand terms are 1e-5 off. In 16 bits a sum over rows that is rounded once differs by
    one or two epsilons.
    """
    # float64, float32, then 16 bits.
    if eps < 1e-12:
        return Limit(1e-9, 1e-3, 8 * eps)
    if eps < 1e-5:
        return Limit(1e-4, 0.1, 8 * eps)
    return Limit(8 * eps, 0.5, 8 * eps)


def relative(left: Array, right: Array, scale: float) -> float:
    """The largest difference over the scale; infinite if the shapes differ, NaN if an element of
    one alone is.
    """
    if left.shape != right.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        return float(np.where(same, 0.0, np.abs(left - right)).max(initial=0.0)) / scale


def _largest(leaf: Array | None) -> float:
    return 0.0 if leaf is None else float(np.abs(leaf[np.isfinite(leaf)]).max(initial=0.0))


def largest(leaves: Leaves) -> float:
    """The largest element of all arrays, or of all scalars where there are none."""
    numbers = [leaf for leaf in leaves if leaf is not None]
    return max(map(_largest, [leaf for leaf in numbers if leaf.ndim] or numbers), default=0.0)
