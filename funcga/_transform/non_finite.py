"""Dropping: what becomes of a micro-batch whose gradients are not finite."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from funcga._backend.protocols import Arrays, Backend
from funcga._transform.window import Dropped
from funcga.errors import FuncgaError


@dataclass(frozen=True)
class Dropping:
    """What is dropped: the "microbatch", the whole "window" or nothing; and by which test, if not for NaN and inf."""

    scope: str | None
    test: Callable[[Any], Any] | None

    def __post_init__(self) -> None:
        if self.scope not in (None, "microbatch", "window"):
            raise FuncgaError(
                f'drop is {self.scope!r}: write "microbatch" to leave out what is not finite, "window" to make no '
                f"update of a window that has such a micro-batch, or None to pass it on."
            )
        if self.test is not None and (self.scope is None or not callable(self.test)):
            raise FuncgaError(
                f'drop_if is {self.test!r} and drop is {self.scope!r}: write drop="microbatch" or drop="window", and a '
                f"function of the gradients that says whether to drop them: drop_if=lambda grads: norm(grads) > 100."
            )

    def is_kept(self, grads: Any, leaves: list[Any], backend: Backend) -> Any:
        """Whether a micro-batch is folded: a bool, or an array of one that the host does not see."""
        if self.scope is None:
            return True
        if self.test is None:
            return _seen(backend.transforms.finite(leaves), backend.arrays)
        drop = _seen(_as_bool(self.test(grads), backend.arrays), backend.arrays)
        return backend.arrays.xp.logical_not(drop) if backend.arrays.is_array(drop) else not drop

    def is_emitted(self, there: Any, steps: Any, rejected: Any, arrays: Arrays) -> Any:
        """Whether there is an update at the end of a window, if something is `there`; so many folded, so many not."""
        if self.scope is None:
            return there
        return _seen((steps > 0) & (rejected == 0) if self.scope == "window" else steps > 0, arrays)

    def counted(self, dropped: Dropped, emitted: Any, steps: Any, rejected: Any, late: bool, arrays: Arrays) -> Dropped:
        """The counts at the end of a window, and what went with it. `late`: those rejected were not counted before."""
        if self.scope is None:
            return dropped
        microbatches, windows = dropped.microbatches + (rejected if late else 0), dropped.windows
        if self.scope == "window":
            none, keep = arrays.integer(0), arrays.as_array(emitted)
            there = arrays.as_array(steps + rejected > 0)  # an empty one may be flushed inside of jit
            microbatches = microbatches + arrays.xp.where(keep, none, arrays.integer(steps))
            windows = windows + arrays.xp.where(keep, none, arrays.cast(there, none.dtype))
        return Dropped(microbatches, windows)


def _as_bool(drop: Any, arrays: Arrays) -> Any:
    """What a test returned, as a bool or a 0-d array of one. Raises FuncgaError for what says no yes or no."""
    if arrays.is_array(drop) and drop.shape == ():
        return drop if arrays.kind(drop.dtype) == "bool" else drop != 0
    if isinstance(drop, bool | int | float):
        return bool(drop)
    raise FuncgaError(
        f"drop_if returned {arrays.describe(drop)}: it is asked of a whole micro-batch, for one bool, or a 0-d array "
        f"of one. Reduce it: drop_if=lambda grads: ... .any()."
    )


def _seen(condition: Any, arrays: Arrays) -> Any:
    return arrays.scalar(condition) if arrays.is_array(condition) else condition
