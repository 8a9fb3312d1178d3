"""Widening: what a wrapped transform sees has floats of at least 32 bits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from funcga._backend.protocols import Arrays, Backend
from funcga._fold.leaf import LeafFold


def widened(params: Any, backend: Backend) -> Any:
    """The params with floats of less than 32 bits as float32, and numbers as arrays."""
    leaves, structure = backend.trees.flatten(params)
    return backend.trees.unflatten(structure, [_wide(leaf, backend.arrays) for leaf in leaves])


def _wide(leaf: Any, arrays: Arrays) -> Any:
    leaf = arrays.as_array(leaf) if isinstance(leaf, int | float | complex) else leaf
    if not arrays.is_array(leaf) or arrays.kind(leaf.dtype) not in ("float", "complex"):
        return leaf
    wide = arrays.accumulator_dtype(leaf.dtype)
    return leaf if leaf.dtype == wide else arrays.cast(leaf, wide)


def result_folds(folds: Sequence[LeafFold | None], params: Sequence[Any], arrays: Arrays) -> list[LeafFold | None]:
    """The folds of the gradients, whose results are in the dtypes that the wrapped transform sees of these params."""
    return [_result_fold(fold, param, arrays) for fold, param in zip(folds, params, strict=True)]


def _result_fold(fold: LeafFold | None, param: Any, arrays: Arrays) -> LeafFold | None:
    dtype = getattr(param, "dtype", None)
    if fold is None or dtype is None or dtype == fold.result_dtype or fold.fold.normalizer.dtype is not None:
        return fold
    return replace(fold, result_dtype=arrays.accumulator_dtype(dtype))
