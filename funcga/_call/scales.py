"""The loss scale: what a loss is multiplied by before its backward pass, so that small gradients survive in float16."""

import numbers
from typing import Any

from funcga._backend.protocols import Arrays
from funcga._fold.tally import as_number, is_quantity
from funcga.errors import FuncgaError


def check_loss_scale(scale: Any, arrays: Arrays) -> Any:
    """The loss scale as a Python number where the host can see it, else as the 0-d array that it is.

    Raises FuncgaError if it is no number, no scalar, or seen to be none that can be divided by: it must be finite and
    above 0.
    """
    if scale is None:
        raise FuncgaError(
            "the gradient function was made with scaled=True, and the call has no loss_scale. Pass the one of the "
            "state that divides by it: step(params, batch, loss_scale=state.scale)."
        )
    scale = as_number(scale)
    if arrays.is_array(scale) and scale.shape == () and arrays.kind(scale.dtype) in ("int", "float"):
        scale = arrays.scalar(scale)
        if arrays.is_array(scale):
            return scale
    if not is_quantity(scale):
        found = repr(scale) if isinstance(scale, numbers.Number) else arrays.describe(scale)
        raise FuncgaError(
            f"loss_scale is {found}: it must be a finite number above 0, or a 0-d array of one, such as the scale of "
            f"funcga.loss_scaled: loss_scale=state.scale."
        )
    return float(scale)


def scaled_loss(loss: Any, scale: Any, arrays: Arrays) -> Any:
    """The loss times its scale, in at least float32, where 65,536 is a number: in float16 it is infinite.

    As it is, if the scale is None.
    """
    if scale is None:
        return loss
    dtype = arrays.accumulator_dtype(loss.dtype)
    wide = arrays.cast(loss, dtype)
    return wide * (arrays.cast(scale, dtype) if arrays.is_array(scale) else scale)
