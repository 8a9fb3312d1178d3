"""The probe: what a gradient function, or a step of `coupled`, returns for any rows of the batch.

Everything that is compared is a NumPy array of float64 or complex128, whatever the framework
computes in.
"""

import copy
import importlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from funcga._accumulate import accumulate
from funcga._backend.prefixes import leaf_paths, mapped
from funcga._call import Program, backend_of_call
from funcga._fold import accumulator_dtype, kind
from funcga._fold.outputs import broadcast_folds
from funcga._grad import GradientFunction
from funcga._types import Args, Array, Kwargs, Tree, TreeFn
from funcga.folds import Fold, sum
from funcga.normalizers import Moments, Pooled
from funcga.tools.coupled import Coupled, coupled
from funcga.tools.trees import to_numpy

Rows = tuple[int, ...]

# The leaves of an output as NumPy arrays, empty ones for leaves that are not numbers.
Leaves = list[Array]


class Probe:
    """A gradient function and its arguments, to be called with any rows of them. The results are
    cached.

    Attributes:
        program: That of `accumulate` for the function, or for summary_fn of a step of `coupled`.
        job: What the step of `coupled` computes; None for a gradient function.
        precise: Whether the arguments were cast to float64.
        subject: What the function returns: a "loss" and its gradient, or a "summary".
        counting: What counts the totals of a batch; None for a step without them.
    """

    def __init__(
        self,
        program: Program,
        job: Coupled | None,
        args: Args,
        kwargs: Kwargs,
        precise: bool,
        subject: str = "loss",
        counting: Any = None,
    ):
        self.program, self.job, self.precise, self.subject = program, job, precise, subject
        self.counting = counting
        self.grad_fn = grad_fn = program.grad_fn
        self.backend = backend_of_call(grad_fn, args, kwargs)
        self.framework = importlib.import_module(f"funcga.tools.verify.in_{self.backend.name}")
        gradient = grad_fn if job is None else job.gradient
        self.gradient = gradient if isinstance(gradient, GradientFunction) else None
        self.args, self.kwargs = self._copied((args, kwargs))
        self.arguments = program.read(self.args, self.backend)
        self.all_rows: Rows = tuple(range(self.arguments.rows()))
        # Any rows get the totals of the whole batch, as a micro-batch does.
        if counting is not None:
            self.kwargs = {**self.kwargs, "totals": self.count(self.all_rows)}
        self.raw = self.raw_step()
        self.output: Tree = None  # of the first call
        self._values: dict[Rows, Leaves] = {}

    def _copied(self, tree: Tree) -> Tree:
        """A copy of the tree, detached from all graphs; with `precise`, its floats in 64 bits."""
        arrays = self.backend.arrays

        def copied(leaf: Array, kind: str) -> Array:
            own = self.framework.copy(leaf)
            wide = {"float": "float64", "complex": "complex128"}.get(kind) if self.precise else None
            return arrays.as_array(own, arrays.as_dtype(wide)) if wide else own

        return self._map_arrays(copied, tree)

    def _map_arrays(self, function: Callable[[Array, str], Array], tree: Tree) -> Tree:
        """The tree with the function applied to each array and the kind of its dtype."""
        arrays = self.backend.arrays
        is_array = arrays.is_array
        each = lambda leaf: function(leaf, kind(leaf.dtype)) if is_array(leaf) else leaf
        return mapped(each, self.backend.trees, tree)

    @property
    def rows(self) -> int:
        """The rows of the batch."""
        return len(self.all_rows)

    @property
    def brings_parameters(self) -> bool:
        """Whether the first argument is the parameters of a module, with which the user's function
        is not called.
        """
        return hasattr(self.grad_fn, "brings_parameters")

    @property
    def has_state(self) -> bool:
        """Whether state is threaded from one micro-batch to the next."""
        return bool(self.arguments.state)

    # --- calls

    def raw_step(self) -> TreeFn:
        """The step over one micro-batch that returns what grad_fn itself returns."""
        fold = self.each_fold(lambda fold: fold if fold.reducer.monoid.ordered else sum())
        return self.step(n=1, fold=fold)

    def step(self, **options: Tree) -> TreeFn:
        """The step of `accumulate`, or of `coupled`, with these options."""
        options["in_axes"] = self.program.in_axes
        if self.job is None:
            return accumulate(self.grad_fn, **options)
        options |= {"fold": self.program.fold, "weight": self.program.weight}
        gradient = self.job.gradient
        loss_fn = gradient.loss_fn
        if gradient.has_aux:  # auxiliary results of loss_fn are not compared
            loss_fn = lambda *args: gradient.loss_fn(*args)[0]
        return coupled(self.grad_fn, loss_fn, argnums=gradient.argnums, **options)

    def each_fold(self, change: Callable[[Fold], Fold]) -> Tree:
        """The tree of folds, with `change` applied to each."""
        each = lambda fold: change(fold) if isinstance(fold, Fold) else fold
        return mapped(each, self.backend.trees, self.program.fold)

    def take_rows(self, rows: Rows) -> Args:
        """The arguments with these rows, in this order; rows may repeat."""
        take = lambda array, axis, start, size: self.framework.take(array, axis, start)
        return self.arguments.cut([*rows], len(rows), self.arguments.state, take)

    def values(self, rows: Rows) -> Leaves:
        """The leaves of the output for these rows, computed once."""
        if rows not in self._values:
            output = self.raw(*self.take_rows(rows), **self.kwargs)
            # The structure of the first output is that of all.
            if self.output is None:
                self.output = output
            self._values[rows] = self.numbers(output)
        return self._values[rows]

    def try_values(self, rows: Rows) -> Leaves | None:
        """As `values`; None if grad_fn raises an error, as some losses refuse some batches."""
        try:
            return self.values(rows)
        except Exception:
            return None

    def step_values(self, choices: Sequence[Rows], **cut: int) -> list[Leaves]:
        """The leaves of the result of the user's step for each choice of rows; cut: n= or
        microbatch_size=.
        """
        kwargs, options = {**self.kwargs}, Kwargs(cut)
        if self.counting is not None:
            del kwargs["totals"]
            options["totals"] = self.counting.function
        fold = self.each_fold(lambda fold: fold.plain)
        step = self.step(fold=fold, weight=self.program.weight, **options)
        return [self.numbers(step(*self.take_rows(rows), **kwargs)) for rows in choices]

    def loss(self, rows: Rows) -> float:
        """The value of the loss; NaN if there is none."""
        # What is called may not be the loss, or may refuse these rows.
        try:
            if self.job is not None:
                return float(self.values(rows)[0])
            loss_fn = self.gradient.loss_fn if self.gradient else inspect.unwrap(self.grad_fn)
            numbers = self.numbers(loss_fn(*self.take_rows(rows), **self.kwargs))
            return next(float(x.real) for x in numbers if x.ndim == 0)
        except Exception:
            return math.nan

    def weigh(self, rows: Rows) -> float:
        """The weight of these rows."""
        return float(self.program.weigh(self.arguments, self.take_rows(rows), len(rows)))

    def count(self, rows: Rows) -> Tree:
        """The totals of these rows."""
        count = self.backend.loop.accumulate(self.counting, self.backend)
        return count(self.take_rows(rows), {})

    def layers(self) -> str:
        """The first three layers that normalise over the batch, by path and type."""
        if self.backend.name == "jax":  # whose functions have no parts that are seen from outside
            return ""
        return ", ".join(self.framework.batch_normalisers(self.grad_fn)[:3])

    @contextmanager
    def random_kept(self) -> Iterator[None]:
        """A context after which all global random generators are as they were before it."""
        of_numpy, of_python = np.random.get_state(), random.getstate()
        with self.framework.random_kept():
            try:
                yield
            finally:
                np.random.set_state(of_numpy)
                random.setstate(of_python)

    # --- changed copies, which share the step that JAX has compiled

    def with_attributes(self, **attributes: Tree) -> "Probe":
        """A copy with other attributes."""
        changed = copy.copy(self)
        changed.__dict__ |= attributes
        return changed

    def with_folds(self, folds: list[Fold]) -> "Probe":
        """A copy with another Fold for each leaf."""
        program = replace(self.program, fold=self.like_output(folds))
        return self.with_attributes(program=program, folds=folds)

    def with_totals(self, factors: Sequence[int]) -> Leaves:
        """The leaves of the output for all rows, with each total multiplied by its factor; without
        the factors if the loss refuses such totals.
        """
        factor = iter(factors)
        multiplied = lambda total: total * next(factor)
        totals = mapped(multiplied, self.backend.trees, self.kwargs["totals"])
        changed = self.with_attributes(kwargs=self.kwargs | {"totals": totals}, _values={})
        return changed.try_values(self.all_rows) or self.whole

    def at_other_parameters(self) -> "Probe | None":
        """A copy with other values for all floats in the parameters; None if parameters are
        split.
        """
        args = [*self.args]
        moved = lambda leaf, kind: leaf * 1.25 + 0.1 if kind in ("float", "complex") else leaf
        for i in self.gradient.arg_indices(len(args)) if self.gradient else (0,):
            if self.arguments.parts[i].axes:
                return None
            args[i] = self._map_arrays(moved, args[i])
        return self._with_args(*args)

    def _with_args(self, *args: Tree) -> "Probe":
        arguments = self.program.read(args, self.backend)
        return self.with_attributes(args=args, arguments=arguments, _values={})

    def with_rows_apart(self, seed: int) -> "Probe":
        """A copy in which the rows of each array are in an order of its own: what two arrays count
        alike they no longer do.
        """
        permuted, take = np.random.default_rng(seed).permutation, self.framework.take
        apart = lambda array, axis, rows, _: take(array, axis, permuted(rows).tolist())
        return self._with_args(
            *self.arguments.cut([*self.all_rows], self.rows, self.arguments.state, apart)
        )

    # --- leaves

    def numbers(self, tree: Tree) -> Leaves:
        """The leaves of a tree as NumPy arrays. What a fold makes of one leaf is one."""
        is_leaf = lambda node: isinstance(node, Moments | Pooled)
        return [self._number(leaf) for leaf in self.backend.trees.flatten(tree, is_leaf)[0]]

    def _number(self, leaf: Array) -> Array:
        arrays = self.backend.arrays
        if isinstance(leaf, tuple):
            return np.stack([*map(self._number, leaf)])
        try:
            leaf = arrays.as_array(leaf)
        except TypeError:
            return np.zeros(0)
        kind_of = kind(leaf.dtype)
        if kind_of == "other":
            return np.zeros(0)
        # NumPy has no bfloat16.
        if kind_of == "float":
            leaf = arrays.as_array(leaf, accumulator_dtype(leaf.dtype, arrays))
        wide = "complex128" if kind_of == "complex" else "float64"
        return to_numpy(leaf, copy=None).astype(wide)

    @property
    def whole(self) -> Leaves:
        """The leaves of the output for the whole batch."""
        return self.values(self.all_rows)

    def like_output(self, leaves: list[Array]) -> Tree:
        """A tree of the structure of the output, with these leaves."""
        trees = self.backend.trees
        return trees.unflatten(trees.flatten(self.output)[1], leaves)

    @cached_property
    def folds(self) -> list[Fold]:
        """The Fold of every leaf; exact sums are replaced by plain ones."""
        fold = self.program.fold if self.job is None else sum()
        _ = self.whole  # which brings the output
        of_leaves = broadcast_folds(fold, self.output, len(self.whole), self.backend)
        return [at_leaf.value.plain for at_leaf in of_leaves]

    @cached_property
    def paths(self) -> list[str]:
        """The path of every leaf."""
        root = "output" if self.subject == "loss" else self.subject
        return leaf_paths(self.output, self.backend.trees, root)

    def additive(self) -> list[int]:
        """The leaves whose fold adds up values, as it must for a loss and its gradients."""
        return [
            i for i, fold in enumerate(self.folds) if self.whole[i].size and fold.reducer.additive
        ]

    def gradient_leaves(self) -> list[int]:
        """The leaves that are gradients, or have the shape of a parameter, for a function of the
        user's own.
        """
        if self.gradient is not None:
            numbered = self.like_output([*range(len(self.whole))])
            gradient = self.gradient.gradient_in(numbered)
            return sorted({*self.additive()}.intersection(self.backend.trees.flatten(gradient)[0]))
        parts = [part.value for part in self.arguments.parts if not part.axes]
        shapes = {leaf.shape for leaf in self.numbers(parts)}
        # A scalar is the value of a loss, unless all parameters are scalars.
        shapes = {shape for shape in shapes if shape} or shapes
        return [i for i in self.additive() if self.whole[i].shape in shapes]
