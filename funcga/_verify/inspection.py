"""Inspection: mistakes that give the same result for one micro-batch as for n, or none."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from funcga import normalizers, reducers
from funcga._accumulate import accumulate
from funcga._backend.prefixes import leaf_paths
from funcga._call.arguments import CARRY
from funcga._grad import GradientFunction
from funcga._verify.constants import Variant, variants
from funcga._verify.naming import is_linear
from funcga._verify.parameters import shifted
from funcga._verify.probe import Probe, Rows
from funcga._verify.tolerance import Limit
from funcga._verify.verdict import Cause
from funcga.folds import Fold, concat


def per_example(probe: Probe, part: Rows) -> tuple[list[Cause], Any]:
    """Outputs that have a row for each example without a fold that keeps it; and the tree of folds that does."""
    try:
        shapes = zip(probe.shapes(probe.every), probe.shapes(part), strict=True)
    except Exception:  # a loss that refuses some batches, of which the splits tell
        return [], probe.program.fold
    folds, causes = list(probe.folds), []
    for i, (whole, some) in enumerate(shapes):
        if whole == some or whole is None or some is None or not _joins(probe.folds[i]):
            continue
        axis = next((k for k, (x, y) in enumerate(zip(whole, some, strict=False)) if x != y), 0)
        folds[i] = concat(axis)
        causes.append(
            Cause(
                "per-example output",
                f"{probe.paths[i]} has a row for each example, and the fold would add up the rows of different "
                f"micro-batches.",
                f"a tree of folds with funcga.concat({axis or ''}) in its place, such as fold=((funcga.mean(), "
                f"funcga.concat()), funcga.mean()) for ((loss, outputs), grads)",
                f"its shape is {list(whole)} for {probe.rows} rows and {list(some)} for {len(part)}",
            )
        )
    structure = probe.backend.trees.flatten(probe.output_like)[1]
    tree = probe.backend.trees.unflatten(structure, folds) if causes else probe.program.fold
    return causes[:1], tree


def _joins(fold: Fold) -> bool:
    return fold.reducer.monoid.axis is None and fold.reducer.lift is not reducers.carry.lift


def unused(probe: Probe) -> list[Cause]:
    """Parameters that the loss does not use: every gradient is zero, and nothing changes with them."""
    gradients = _gradients(probe)
    whole = probe.values(probe.every)
    if not gradients or any(np.any(whole[i]) for i in gradients):
        return []
    changed = [shifted(arg, probe) if whole_arg else arg for arg, whole_arg in _whole(probe)]
    after = probe.numbers(probe.raw(*changed, **probe.kwargs))
    if any(x is not None and not np.array_equal(x, y, equal_nan=True) for x, y in zip(whole, after, strict=True)):
        return []
    torch = probe.backend.name == "torch"
    return [
        Cause(
            "params unused",
            "Every gradient is exactly zero, and nothing changes with the parameters: the loss does not use its "
            "argument, but closes over parameters of its own.",
            "loss_fn = torch_backend.pure_loss(module, lambda module, x, y: ...)"
            if torch
            else "use the argument: model.apply(params, x), not a model that holds its own",
            f"{len(gradients)} gradients are zero, and stay so with every parameter changed",
        )
    ]


def _whole(probe: Probe) -> list[tuple[Any, bool]]:
    """The arguments, and whether each is passed whole and has arrays."""
    return [(part.value, not part.axes) for part in probe.arguments.parts]


def _gradients(probe: Probe) -> list[int]:
    """The leaves of the output that are gradients of what is passed whole, as far as can be told: same names."""
    found = []
    for part in probe.arguments.parts:
        if part.axes and CARRY not in part.axes:
            continue
        names = leaf_paths(part.value, probe.backend.trees)
        for i, path in enumerate(probe.paths):
            if any(path.endswith(name) for name in names) and is_linear(probe.folds[i]):
                leaf = probe.values(probe.every)[i]
                if leaf is not None and (leaf.ndim or names == [""]) and path != "output[0]":
                    found.append(i)
    return found


def has_gradients(probe: Probe) -> bool:
    """Whether the output may have gradients: an array in the shape of one that is passed whole."""
    if isinstance(probe.program.grad_fn, GradientFunction):
        return True
    arrays, flatten = probe.backend.arrays, probe.backend.trees.flatten
    whole = [leaf for value, is_whole in _whole(probe) if is_whole for leaf in flatten(value)[0]]
    params = {tuple(leaf.shape) for leaf in whole if arrays.is_array(leaf) and arrays.kind(leaf.dtype) != "int"}
    shapes = {leaf.shape for leaf in probe.values(probe.every) if leaf is not None}
    return bool(params & shapes) if params == {()} else bool((params - {()}) & shapes)


def divided(probe: Probe, n: int | None, limit: Limit) -> tuple[list[Cause], list[str]]:
    """A loss that is divided by the number of micro-batches already: the cause, or a note where n may be chance."""
    averaged = [i for i, fold in enumerate(probe.folds) if is_linear(fold)]
    whole = probe.values(probe.every)
    averaged = [i for i in averaged if whole[i] is not None and np.any(whole[i])]
    averaged = [i for i in averaged if i in _gradients(probe)] or averaged
    if not averaged:
        return [], []
    grad_fn, sizes = partial(probe.program.grad_fn, **probe.kwargs), _sizes(probe)
    for variant in sorted(variants(grad_fn, n), key=lambda variant: variant.doubt):
        try:
            step = accumulate(variant.function, 1, fold=probe.plain, in_axes=probe.program.in_axes)
            found = probe.numbers(step(*probe.gathered(probe.every)))
        except Exception:  # with this number the function is another one
            continue
        if _scaled(whole, found, averaged, 0.5 if variant.value > 1 else 2.0, limit):
            summed = any(probe.folds[i].normalizer.apply is normalizers.identity.apply for i in averaged)
            sure = variant.doubt == 0 or (variant.doubt == 1 and variant.value not in sizes)
            return ([_division(variant, summed)], []) if sure else ([], [_doubt(variant)])
    return [], []


def _sizes(probe: Probe) -> set[int]:
    """The sizes of all axes of the arrays that are split: a loss may well divide by one of them."""
    split = [leaf for leaf, axis in probe.arguments if axis is not None and axis is not CARRY]
    return {size for leaf in split for size in getattr(leaf, "shape", ())}


def _division(variant: Variant, summed: bool) -> Cause:
    fold = " and write fold=funcga.mean(), the default" if summed else ""
    doubt = ", if it stands for the number of micro-batches" if variant.name == repr(variant.value) else ""
    return Cause(
        "divided by n",
        "The loss is divided by the number of micro-batches, which is right for this n alone, and only if all are "
        "equal."
        if summed
        else "The loss is divided by the number of micro-batches already. The fold divides by what was folded, so "
        "gradients are n times too small, for every n.",
        f"drop `{_operation(variant)}` from the loss{fold}{doubt}",
        f"with {variant.name} = {2 * variant.value:g} instead of {variant.value:g} all of the output is "
        f"{'half' if variant.value > 1 else 'twice'} as large",
    )


def _doubt(variant: Variant) -> str:
    return (
        f"the whole loss has the factor `{_operation(variant)}`: if it stands for the number of micro-batches, drop it "
        f"(the fold divides by what was folded); if it merely equals n, all is well"
    )


def _operation(variant: Variant) -> str:
    return f"{'/' if variant.value > 1 else '*'} {variant.name}"


def _scaled(before: Sequence[Any], after: Sequence[Any], leaves: Sequence[int], factor: float, limit: Limit) -> bool:
    """Whether arrays, or where there are none the scalars, are this many times as large."""
    arrays = [i for i in leaves if before[i].ndim] or leaves
    apart = [np.abs(after[i] - factor * before[i]).max() for i in arrays]
    sizes = [np.abs(before[i]).max() for i in arrays]
    return bool(max(apart) <= limit.relative * max(sizes) and max(sizes) > 0)
