"""The runs: the same gradients in torch and in JAX, of the whole batch and accumulated, and how far they are apart."""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from funcga.accumulation import accumulate
from funcga.backend import load
from funcga.errors import FuncgaError
from funcga.gradients import value_and_grad
from funcga.interop import to_jax, to_numpy, to_torch
from funcga.parity.differences import Difference, difference
from funcga.parity.problems import Problem

Result = dict[str, Any]  # the NumPy arrays of one run: the loss, then the gradient of every leaf by its path


class Comparison(NamedTuple):
    """Two runs, each a framework and 'accumulated' or 'full', and the limit of their relative difference by dtype."""

    name: str
    left: tuple[str, str]
    right: tuple[str, str]
    limits: dict[str, float]


_OF_ONE_FRAMEWORK = {"float32": 2e-6, "float64": 1e-13}
_OF_TWO_FRAMEWORKS = {"float32": 5e-6, "float64": 1e-12}

COMPARISONS = (
    Comparison("torch: accumulated vs full", ("torch", "accumulated"), ("torch", "full"), _OF_ONE_FRAMEWORK),
    Comparison("JAX: accumulated vs full", ("jax", "accumulated"), ("jax", "full"), _OF_ONE_FRAMEWORK),
    Comparison("torch vs JAX (accumulated)", ("torch", "accumulated"), ("jax", "accumulated"), _OF_TWO_FRAMEWORKS),
    Comparison("torch vs JAX (full)", ("torch", "full"), ("jax", "full"), _OF_TWO_FRAMEWORKS),
)


class Row(NamedTuple):
    """One leaf: the loss, or the gradient of a parameter. `differences` are in the order of COMPARISONS."""

    leaf: str
    shape: tuple[int, ...]
    differences: list[Difference]


class Case(NamedTuple):
    """One problem in one dtype and number of micro-batches; `rows` has the loss first.

    microbatch_rows, microbatch_items: how many rows, and items such as tokens, each micro-batch has.
    losses: the loss of each run, by '<framework> <accumulated or full>'.
    """

    problem: str
    dtype: str
    n: int
    microbatch_rows: list[int]
    microbatch_items: list[int]
    losses: dict[str, float]
    rows: list[Row]

    @property
    def ok(self) -> bool:
        """Whether every difference is within its limit."""
        return all(difference.ok for row in self.rows for difference in row.differences)


def check_counts(problem: Problem, ns: Sequence[int]) -> None:
    """Raises FuncgaError if a number of micro-batches is more than the problem has rows."""
    rows = len(problem.items)
    for n in ns:
        if n > rows:
            raise FuncgaError(f"--n: {n} micro-batches are more than the {rows} rows of the problem {problem.name!r}")


def run(problem: Problem, dtypes: Iterable[str], ns: Sequence[int]) -> list[Case]:
    """The Cases of a problem, for every dtype and every number of micro-batches."""
    cases = []
    for dtype in dtypes:
        results = _results("torch", problem, dtype, ns) | _results("jax", problem, dtype, ns)
        cases += [_case(problem, dtype, n, results) for n in ns]
    return cases


def _results(framework: str, problem: Problem, dtype: str, ns: Sequence[int]) -> dict[tuple[str, int | str], Result]:
    """What a framework finds: by (framework, n) accumulated, and by (framework, 'full') for the whole batch."""
    losses = importlib.import_module(f"{load(framework).name}_backend.problems")
    convert = {"torch": to_torch, "jax": to_jax}[framework]
    gradient = value_and_grad(getattr(losses, problem.loss))
    with losses.precision(dtype):
        args = convert(cast((problem.params, *problem.batch), dtype))
        whole = _named(gradient(*args))
        # Divided here and not by a fold, so that the fold is compared with something that it has no part in.
        found: dict[tuple[str, int | str], Result] = {
            (framework, "full"): {leaf: array / np.asarray(problem.divisor, dtype) for leaf, array in whole.items()}
        }
        for n in ns:
            step = accumulate(gradient, n, fold=problem.fold, weight=problem.weight)
            found[framework, n] = _named(step(*args))
    return found


def cast(tree: Any, dtype: str) -> Any:
    """The tree with its floats in a dtype."""
    if isinstance(tree, dict):
        return {key: cast(child, dtype) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(cast(child, dtype) for child in tree)
    return tree.astype(dtype) if tree.dtype.kind == "f" else tree


def _named(value_and_gradient: Any) -> Result:
    value, gradient = to_numpy(value_and_gradient)
    return {"loss": value, **leaves_of(gradient)}


def leaves_of(tree: Any, path: str = "") -> Result:
    """The arrays of a tree of dicts by their dotted paths."""
    if not isinstance(tree, dict):
        return {path: tree}
    found: Result = {}
    for key, child in tree.items():
        found |= leaves_of(child, f"{path}.{key}" if path else key)
    return found


def _case(problem: Problem, dtype: str, n: int, results: dict[tuple[str, int | str], Result]) -> Case:
    def result(framework: str, how: str) -> Result:
        return results[framework, n if how == "accumulated" else how]

    def row(leaf: str) -> Row:
        pairs = [(result(*c.left)[leaf], result(*c.right)[leaf], c.limits[dtype]) for c in COMPARISONS]
        return Row(leaf, pairs[0][1].shape, [difference(*pair) for pair in pairs])

    runs = [(framework, how) for framework in ("torch", "jax") for how in ("full", "accumulated")]
    return Case(
        problem.name,
        dtype,
        n,
        [len(part) for part in np.array_split(problem.items, n)],
        [int(part.sum()) for part in np.array_split(problem.items, n)],
        {f"{framework} {how}": float(result(framework, how)["loss"]) for framework, how in runs},
        [row(leaf) for leaf in ("loss", *leaves_of(problem.params))],
    )
