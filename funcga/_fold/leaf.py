"""A fold bound to one leaf of grad_fn's output: dtypes decided once, then the mathematics of that leaf, in order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcga import reducers
from funcga._backend.protocols import Arrays
from funcga._fold.tally import Tally, total
from funcga.errors import FuncgaError
from funcga.folds import Fold


@dataclass(frozen=True)
class LeafFold:
    """`identity`, `lift`, `combine` and `normalize` of one leaf, with the casts that keep sums in enough bits."""

    fold: Fold
    accumulator_dtype: Any
    result_dtype: Any
    arrays: Arrays

    @property
    def is_narrow(self) -> bool:
        """Whether what is accumulated is in float32, which holds fewer weights than a Python number."""
        sizes = {"float": 4, "complex": 8}
        return bool(sizes.get(self.arrays.kind(self.accumulator_dtype)) == self.accumulator_dtype.itemsize)

    def identity(self, like: Any) -> Any:
        """The reduced value of no micro-batch at all; `like` gives the shape."""
        xp = self.arrays.xp
        zeros = xp.zeros_like(like, dtype=self.accumulator_dtype)
        return self.fold.reducer.monoid.identity(xp, self.fold.reducer.lift(xp, zeros, 0))

    def lift(self, value: Any, weight: Any) -> Any:
        """What one micro-batch's value contributes."""
        if self.arrays.is_array(weight):
            weight = self.arrays.cast(weight, self.accumulator_dtype)
        elif isinstance(weight, int):
            weight = float(weight)  # an int of more than 31 bits is no operand in JAX
        return self.fold.reducer.lift(self.arrays.xp, self.arrays.cast(value, self.accumulator_dtype), weight)

    def combine(self, a: Any, b: Any) -> Any:
        """What both contribute."""
        return self.fold.reducer.monoid.combine(self.arrays.xp, a, b)

    def normalize(self, reduced: Any, tally: Tally) -> Any:
        """The result, in the dtype that the caller is to see."""
        scalars = Tally(self._scalar(total(tally)), self._scalar(tally.steps))
        return self._cast(self.fold.normalizer.apply(self.arrays.xp, reduced, scalars))

    def _scalar(self, amount: Any) -> Any:
        return self.arrays.cast(amount, self.accumulator_dtype) if self.arrays.is_array(amount) else float(amount)

    def _cast(self, result: Any) -> Any:
        if isinstance(result, tuple):
            parts = (self._cast(part) for part in result)
            return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
        kinds = [self.arrays.kind(dtype) for dtype in (result.dtype, self.result_dtype)]
        if kinds == ["int", "bool"]:  # of a maximum of no values at all, which is the lowest number, False
            result = result > 0
        return self.arrays.cast(result, self.result_dtype)


def bind(fold: Fold, like: Any, where: Callable[[], str], arrays: Arrays) -> LeafFold:
    """The fold for a leaf of `like`'s dtype, which stands at the path `where()`.

    Raises FuncgaError if the fold cannot take that dtype, or its dtype is not one of the framework's.
    """
    reducer, normalizer = fold.reducer, fold.normalizer
    own = like.dtype
    accumulator = _named(reducer.dtype, arrays) if reducer.dtype is not None else own
    kind = arrays.kind(accumulator)
    if kind not in reducer.kinds or kind not in normalizer.kinds:
        raise _unfit(where(), like, kind, arrays)
    if reducer.dtype is None and reducer.monoid.widens:
        accumulator = arrays.accumulator_dtype(own)
    if normalizer.dtype is not None:
        result = _named(normalizer.dtype, arrays)
    else:
        selects = reducer.dtype is None and reducer.unweighted and reducer.monoid.collective != "sum"
        result = own if selects or arrays.kind(own) == arrays.kind(accumulator) else accumulator
        if normalizer.wide:
            result = arrays.as_dtype("float32") if arrays.kind(accumulator) == "int" else accumulator
    return LeafFold(fold, accumulator, result, arrays)


_STACKS = {
    reducers.pairs: "{}.stack([correct, counted]) for ratio()",
    reducers.pooled: "funcga.batch_moments makes them for pooled()",
}


def check_shape(fold: Fold, like: Any, where: Callable[[], str], arrays: Arrays) -> None:
    """Raises FuncgaError if the leaf lacks the axis that the fold collects along, or is not the stack that it takes."""
    axis, stacked = fold.reducer.monoid.axis, fold.reducer.stacked
    if stacked is not None and like.shape[:1] != (stacked,):
        raise FuncgaError(
            f"{where()} is {arrays.describe(like)}, and the fold `{fold.name}` takes leaves of {stacked} arrays that "
            f"are stacked on axis 0: {_STACKS.get(fold.reducer, 'stack them').format(arrays.xp.__name__)}."
        )
    if axis is not None and not -len(like.shape) <= axis < len(like.shape):
        raise FuncgaError(
            f"{where()} is {arrays.describe(like)}: it has no axis {axis} for concat(axis={axis}) to collect along. "
            f"Fold it with funcga.mean() or funcga.sum(), or return one value for each example."
        )


def _named(dtype: Any, arrays: Arrays) -> Any:
    try:
        return arrays.as_dtype(dtype)
    except TypeError as error:
        raise FuncgaError(
            f"the fold asks for dtype {dtype!r}, which the framework of this call does not have ({error}). Give one "
            f'that it has by name, which both frameworks understand: funcga.mean(dtype="float32")'
        ) from error


def _unfit(path: str, like: Any, kind: str, arrays: Arrays) -> FuncgaError:
    if kind in ("bool", "int"):
        why, instead = (
            f"{'integers' if kind == 'int' else 'bools'} are not averaged silently",
            "Count it with funcga.sum(), in a tree of folds such as fold=((funcga.mean(), funcga.sum()), "
            'funcga.mean()); or average it in floats: funcga.mean(dtype="float32")',
        )
    elif kind == "other":
        why, instead = (
            "it holds no numbers that this fold could combine",
            "Thread a random key by funcga.carry(), or collect keys by funcga.concat(). The gradient of an integer is "
            "nothing: pass integers as another argument, whole, in_axes=(None, None, 0)",
        )
    else:
        why, instead = (
            f"this fold is not defined for {kind} values",
            "Fold it with funcga.sum() or funcga.mean(), or cast it",
        )
    return FuncgaError(f"{path} is {arrays.describe(like)}, and {why}. {instead}.")
