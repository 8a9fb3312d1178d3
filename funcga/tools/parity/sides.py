"""One framework's side of a problem in one dtype: its gradients of the batch, of micro-batches,
and accumulated.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np

from funcga._accumulate import accumulate
from funcga._backend import Backend
from funcga._backend.dispatch import load
from funcga._backend.prefixes import paths_and_leaves
from funcga._call.arguments import Arguments, Split, read_arguments, starts
from funcga._fold import kind
from funcga._grad import value_and_grad
from funcga._types import Args, Array, Dtype, Kwargs, Scalar, Tree, TreeFn
from funcga.errors import FuncgaError
from funcga.folds import Fold, sum
from funcga.tools.compare import compare, tolerances
from funcga.tools.compare.report import Report
from funcga.tools.compare.row import Row
from funcga.tools.parity import Problem
from funcga.tools.trees import to_jax, to_numpy, to_torch, walked
from funcga.tools.verify import Verdict, verify
from funcga.trees import match

FRAMEWORKS = {"torch": "torch", "jax": "JAX"}
"""The frameworks, as they are imported and as they are written."""


Leaves = dict[str, Array]
"""NumPy arrays by their dotted paths."""


class Result(NamedTuple):
    """What one run found, as NumPy arrays: the loss, and the gradient of every leaf by its
    dotted path.
    """

    loss: Array
    gradient: Leaves


class Part(NamedTuple):
    """A micro-batch: the arguments of the gradient function, its rows, and its weight."""

    args: Args
    rows: int
    weight: Scalar


@dataclass(frozen=True)
class Side:
    """One framework's side of a problem in one dtype, and in the precision that the dtype needs.

    Args:
        problem: The problem.
        framework: "torch" or "jax".
        dtype: The dtype of all floats.
        n: The number of `micro_batches`.
        device: The device of the arrays.

    Raises:
        FuncgaError: If the loss, the fold or the weight do not fit their arguments; the error says
            in which framework.
    """

    problem: Problem
    framework: str
    dtype: str
    n: int = 1
    device: str = "cpu"

    @cached_property
    def whole(self) -> Result:
        """The loss and gradients of the whole batch, divided by hand: no fold takes part."""
        with self.running():
            # This is what accumulation is measured by, so it uses none of it: one call and one
            # division.
            return self._full(self.arguments.cut(0, self.arguments.rows(), []))

    def nearby(self, dtype: str) -> Result:
        """The loss and gradients of the whole batch at arguments whose floats are moved by up to
        half an epsilon of a dtype, as rounding would.
        """
        random = np.random.default_rng(0)

        def moved(leaf: Array) -> Array:
            # Relative to each element, at most half a unit in its last place in that dtype.
            shift = tolerances.epsilon(dtype) * (random.random(leaf.shape) - 0.5)
            return leaf * (1 + shift).astype(leaf.dtype) if is_float(leaf.dtype) else leaf

        with self.running():
            return self._full(self.placed(_mapped(moved, self.args)))

    def _full(self, args: Args) -> Result:
        # A sum that is normalised is divided by its weight; a sum over nothing is 0 and stays so.
        weight = float(self.weight(args, self.arguments.rows())) or 1
        divisor = weight if named(self.problem.fold) == "per_weight()" else 1
        # `nearby` runs the same program, which is compiled once.
        return self.result(self.compiled(*args), divisor)

    def accumulated(self, n: int) -> Result:
        """The loss and gradients, accumulated over n micro-batches."""
        with self.running():
            step = accumulate(self.gradient, n, **self.options)
            return self.result(self.own.compiled(step)(*self.args))

    @property
    def options(self) -> Kwargs:
        """The options of `accumulate` and `verify` that the problem has."""
        problem = self.problem
        return {"fold": problem.fold, "weight": problem.weight, "in_axes": problem.in_axes}

    @cached_property
    def micro_batches(self) -> list[Result]:
        """What the gradient function itself returns for each of n micro-batches, neither folded
        nor divided.
        """
        with self.running():
            return [self.result(self.compiled(*part.args)) for part in self.parts]

    def weight(self, args: Args, rows: int) -> Scalar:
        """The weight of a micro-batch of so many rows."""
        weight = self.problem.weight
        return rows if weight is None else weight(*self.arguments.split_args(args))

    @property
    def reduction(self) -> int:
        """How many terms an element of a gradient is a sum of, forth and back: rows or tokens,
        and a longest axis.
        """
        if self.problem.reduction is not None:
            return self.problem.reduction
        # Forward it is a sum over an axis of a parameter, and backward one over rows or tokens.
        axes = [max(leaf.shape, default=1) for leaf in self.named(self.args[0]).values()]
        arrays = [leaf for leaf, _ in self.arguments if self.backend.arrays.is_array(leaf)]
        tokens = [math.prod(leaf.shape) for leaf in arrays if kind(leaf.dtype) == "int"]
        return int(max([self.arguments.rows(), *tokens]) + max(axes, default=0))

    @cached_property
    def arguments(self) -> Arguments:
        """The params and the batch, and how they are split."""
        return read_arguments(self.args, self.problem.in_axes, self.gradient, self.backend)

    @cached_property
    def parts(self) -> list[Part]:
        """The n micro-batches."""
        sizes = starts(Split(self.n).groups(self.arguments.rows()))
        with self.running():
            cut = [(self.arguments.cut(start, size, []), size) for start, size in sizes]
            return [Part(args, rows, self.weight(args, rows)) for args, rows in cut]

    @property
    def label(self) -> str:
        """The framework's name as it is written."""
        return FRAMEWORKS[self.framework]

    @cached_property
    def gradient(self) -> TreeFn:
        """The gradient function that is folded."""
        return value_and_grad(self.problem.losses[self.framework])

    @cached_property
    def compiled(self) -> TreeFn:
        """The gradient function as this framework's users run it."""
        gradient: TreeFn = self.own.compiled(self.gradient)
        return gradient

    @property
    def backend(self) -> Backend:
        """The backend of the framework."""
        return load(self.framework)

    @property
    def own(self) -> Any:
        """What the framework has for problems: its losses, optimizers and precision."""
        return importlib.import_module(f"funcga.tools.parity.in_{self.framework}")

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which arrays of this dtype exist, and errors say which framework they
        come from.
        """
        with self.own.precision(self.dtype == "float64"):
            try:
                yield
            # Contexts are nested, and each error is to be prefixed once.
            except FuncgaError as error:
                where = f"{self.label}, {self.dtype}: "
                if str(error).startswith(where):
                    raise
                raise FuncgaError(f"{where}{error}") from error

    @cached_property
    def args(self) -> Args:
        """The params and the batch in this framework and dtype."""
        problem = self.problem
        with self.running():
            # Both frameworks get the same data, by way of NumPy.
            given = {"params": problem.params, "batch": problem.batch}
            params, batch = _mapped(self._cast, given).values()
            # Params in a structure of JAX's own take their values from it.
            if self.framework == "jax" and problem.jax_params is not None:
                params = match(params, problem.jax_params, rules=problem.rules)
            return (self.placed(params), *map(self.placed, batch))

    def _cast(self, array: Array) -> Array:
        """An array with floats in the dtype of the side, integers in the usual one."""
        if is_float(array.dtype):
            if self.dtype == "bfloat16":
                importlib.import_module("ml_dtypes")  # which brings the name
            return array.astype(self.dtype)
        if array.dtype.name not in ("int32", "int64"):
            return array
        # torch's losses and indices want 64 bits, and JAX has 32 by default.
        is_narrow = self.framework == "jax" and (abs(array) < 2**31).all()
        return array.astype("int32" if is_narrow else "int64")

    def placed(self, tree: Tree) -> Tree:
        """The tree in this framework, on its device."""
        convert = {"torch": to_torch, "jax": to_jax}[self.framework]
        return convert(tree, device=self.device)

    def named(self, tree: Tree) -> Leaves:
        """The arrays of a tree of parameters, as NumPy's, by their dotted paths in this
        framework.
        """
        leaves = paths_and_leaves(tree, self.backend.trees.children)
        return {path: to_numpy(leaf) for path, leaf in leaves if self.backend.arrays.is_array(leaf)}

    def report(self, left: Result, right: Result, names: tuple[str, str]) -> Report:
        """The Report of two results: the loss, then the gradients in the order in which the
        parameters were given.
        """
        report = self.compared(left.gradient, right.gradient, names, self.reduction)
        losses = {"loss": left.loss}, {"loss": right.loss}
        loss = compare(*losses, rtol=report.rtol, check_dtype=False)
        return replace(report, rows=(*loss.rows, *report.rows))

    def compared(
        self,
        left: Leaves,
        right: Leaves,
        names: tuple[str, str],
        reduction: int,
    ) -> Report:
        """The Report of the leaves of two trees, in the order of the left one.

        The limit is what rounding in sums explains. In float64 depth may add to it, and a mistake
        still shows there: it is larger by orders of magnitude. A leaf that is a sum of what cancels
        may be apart by 4 epsilons of what it is a sum of, for which the largest leaf stands; if it
        is 0 but for that, its difference is said relative to the largest leaf.
        """
        is_between = names == tuple(FRAMEWORKS.values())
        limit = tolerances.limit(self.dtype, reduction)
        if self.dtype == "float64":
            limit = max(limit, 1e-12 if is_between else 1e-13)
        # In a sum that cancels, rounding is relative to the terms, and not to what is left of them.
        largest = largest_of(right)
        report = compare(
            left,
            right,
            rtol=limit,
            atol=4 * tolerances.epsilon(self.dtype) * largest if np.isfinite(largest) else 0.0,
            rules=self.problem.rules if is_between else (),
            names=names,
            check_dtype=False,
        )
        # `compare` has the order of the right tree.
        order = {path: position for position, path in enumerate(left)}
        rows = sorted(report.rows, key=lambda row: order.get(row.left_path, len(order)))
        return replace(report, rows=tuple(_by_largest(row, largest) for row in rows))

    def verified(self, n: int | Sequence[int] | None) -> Verdict:
        """The verdict of `verify` on the loss and the fold."""
        with self.running():
            return verify(self.gradient, *self.args, n=n, **self.options)

    def result(self, value_and_gradient: Tree, divisor: float = 1) -> Result:
        """The loss and the gradient that a gradient function has returned, divided."""
        loss, gradient = to_numpy(value_and_gradient[0]), self.named(value_and_gradient[1])

        def divided(leaf: Array) -> Array:
            return leaf / leaf.dtype.type(divisor)

        return Result(divided(loss), {path: divided(leaf) for path, leaf in gradient.items()})


def _mapped(function: Callable[[Array], Array], tree: Tree) -> Tree:
    """The tree with a function applied to each of its arrays, as NumPy's."""
    walk = walked(to_numpy(tree, copy=None))
    return walk.rebuilt([function(leaf) for leaf, _ in walk.arrays.values()])


def largest_of(leaves: Leaves) -> float:
    """The largest absolute value of all leaves; NaN if there is one."""
    return float(np.max([float(np.abs(x).max(initial=0)) for x in leaves.values()], initial=0))


def is_float(dtype: Dtype) -> bool:
    """Whether it is a float, also one that NumPy has by extension."""
    return tolerances.epsilon(dtype.name) > 0 and dtype.kind != "c"


def _by_largest(row: Row, largest: float) -> Row:
    """The row of a leaf that is 0 but for rounding with its difference relative to the largest
    leaf.
    """
    # Rows with a status of their own, such as NaN, stay as they are.
    is_zero = row.atol > 0 and row.largest <= row.atol and row.status in ("within", "beyond")
    if not is_zero:
        return row
    return replace(row, relative=row.absolute / largest, largest=largest, limit=0.0)


def named(fold: object) -> str:
    """A stock fold as it is written. Raises FuncgaError for another one."""
    name = _NAMES.get(fold.name) if isinstance(fold, Fold) else None
    if name is None:
        raise FuncgaError(
            f"fold is {fold!r}, and parity knows what the whole batch's gradient is for mean(), "
            "per_weight() and sum(). Compare with one of them."
        )
    return name


_NAMES = {
    "weighted, by_weight": "mean()",
    "sum, by_weight": "per_weight()",
    "sum, identity": "sum()",
}


Folded = tuple[Leaves, Leaves]
"""What became of the micro-batches: by the problem's fold, and as plain sums."""


def fold_in_framework(side: Side, stacked: Leaves, weights: Sequence[float]) -> Folded:
    """The Folded of a framework, by the loop that accumulates gradients: a row is the gradient
    of a micro-batch.
    """
    dtype = "float64" if side.dtype == "float64" else "float32"

    def first(gradients: Leaves, weights: Array) -> Tree:
        gradient = {path: leaf[0] for path, leaf in gradients.items()}
        return gradient, gradient

    with side.running():
        batch = side.placed((stacked, np.asarray(weights, dtype)))
        folds = (side.problem.fold, sum())
        step = accumulate(
            first, len(weights), fold=folds, weight=lambda gradients, weights: weights[0], in_axes=0
        )
        folded, sums = to_numpy(side.own.compiled(step)(*batch))
        return folded, sums


def fold_by_hand(fold: Fold, stacked: Leaves, weights: Sequence[float]) -> Folded:
    """The Folded of NumPy: the fold in float64; the sums one after the other, in the dtype of
    the accumulators.
    """
    factors = np.asarray(weights, np.float64) if named(fold) == "mean()" else np.ones(len(weights))
    divisor = 1.0 if named(fold) == "sum()" else float(np.sum(weights))
    folded, sums = {}, {}
    for path, leaf in stacked.items():
        total = np.tensordot(factors, leaf.astype(np.float64), 1)
        # A mean of nothing is 0.
        folded[path] = (total / divisor if divisor else np.zeros_like(total)).astype(leaf.dtype)
        # In the order and precision of the loops, so that plain sums agree bit for bit.
        first, *rest = leaf if leaf.dtype.itemsize >= 4 else leaf.astype(np.float32)
        sums[path] = reduce(np.add, rest, first).astype(leaf.dtype)
    return folded, sums
