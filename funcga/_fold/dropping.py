"""What is dropped: micro-batches, or whole windows, by a test of what they contribute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from funcga._backend import Arrays, Backend
from funcga._fold import as_number
from funcga._types import Array, Scalar, Tree
from funcga.errors import FuncgaError


@dataclass(frozen=True)
class Dropping:
    """What is dropped, a "microbatch", a whole "window" or nothing, and by which test. By
    default NaN and inf are.
    """

    scope: str | None
    test: Callable[[Tree], object] | None

    # How errors speak of what a window comes to when it is dropped, and of what is tested, with a
    # name for it.
    of_window: ClassVar[str] = "get zeros for"
    of_test: ClassVar[tuple[str, str]] = "what grad_fn returns", "output"

    def __post_init__(self) -> None:
        if self.scope not in (None, "microbatch", "window"):
            raise FuncgaError(
                f'drop is {self.scope!r}: write "microbatch" to leave out what is not finite, '
                '"window" to '
                f"{self.of_window} a window that has such a micro-batch, or None to pass it on."
            )
        if self.test is not None and (self.scope is None or not callable(self.test)):
            what, name = self.of_test
            raise FuncgaError(
                f'drop_if is {self.test!r} and drop is {self.scope!r}: write drop="microbatch" or '
                'drop="window", and a '
                f"function of {what} that says whether to drop it: drop_if=lambda {name}: "
                f"norm({name}) > 100."
            )

    def is_kept(self, value: Tree, leaves: Sequence[Array], backend: Backend) -> bool | Array:
        """Whether a micro-batch is folded: a bool, or an array of one that the host does not see.

        `value` is what a test of the user's is asked of, and `leaves` are what has to be finite
        without one.
        """
        # One answer for all leaves. Where the host sees it, it is a bool, and nothing is computed
        # for a dropped one.
        if self.test is None:
            return backend.arrays.scalar(backend.arrays.finite(leaves))
        try:
            answer = self.test(value)
        except Exception as error:
            error.add_note(
                "It was raised in drop_if. In JAX that is traced: return an array, without `if` or "
                "`not`."
            )
            raise
        drop = _as_bool(answer, backend.arrays)
        return backend.arrays.xp.logical_not(drop) if backend.arrays.is_array(drop) else not drop


def _as_bool(drop: Scalar, arrays: Arrays) -> bool | Array:
    """What a test returned, as a bool or a 0-d array of one that the host does not see.

    Raises FuncgaError for anything that is not one answer.
    """
    if arrays.is_array(drop) and drop.shape == () and arrays.kind(drop.dtype) == "bool":
        return arrays.scalar(drop)
    # What the user computed from a number on the host may be NumPy's: np.isnan(float(loss)) is no
    # bool of Python's.
    if isinstance(as_number(drop), bool):
        return bool(drop)
    # A loss, say, is no answer, although in Python it is true unless it is 0.
    raise FuncgaError(
        f"drop_if returned {arrays.describe(drop)}: it is asked of a whole micro-batch, for one "
        "bool, or a 0-d array of one. Compare a number, drop_if=lambda output: norm(output) > 100, "
        "and reduce bools by .any()."
    )
