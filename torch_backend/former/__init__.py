"""What every window does, and the window of a gradient that funcga itself made, on autograd.

Only torch has this package: XLA compiles the loop as a whole.
"""

from typing import Any, Protocol, Self

from funcga._call.arguments import Arguments
from funcga._types import Scalar, Tree


class Window(Protocol):
    """One window: every micro-batch is folded into it, then it gives the result.

    It is a context: leaving it undoes whatever it has changed, and tells the replicas that wait for
    it of an error.

    `records`: whether autograd records what is computed. `may_be_short`: whether other replicas may
    have more micro-batches, so there may be fewer than n here, or none. `looks_ahead`: whether
    `fold` must be told which micro-batch is the last.
    """

    records: bool
    looks_ahead: bool

    @property
    def may_be_short(self) -> bool:
        """Whether other replicas may have more micro-batches."""
        ...

    def __enter__(self) -> Self:
        """Begins the window, before its arguments are read."""
        ...

    def __exit__(self, *error: Any) -> None:
        """Ends it."""
        ...

    def detached(self, args: tuple[Tree, ...], leading: bool = False) -> tuple[Tree, ...]:
        """The arguments without graphs; `leading`: those before the micro-batch of a stream."""
        ...

    def fold(
        self,
        arguments: Arguments,
        args: tuple[Tree, ...],
        kwargs: dict[str, Tree],
        weight: Scalar,
        last: bool,
    ) -> list[Any]:
        """Folds one micro-batch in, which is `args`, and returns the state that is threaded to
        the next.
        """
        ...

    def result(self, state: list[Any]) -> Tree:
        """The normalised result, in the structure of grad_fn's output."""
        ...

    def result_without_microbatches(
        self, arguments: Arguments, kwargs: dict[str, Tree], state: list[Any]
    ) -> Tree:
        """The result where other replicas have micro-batches and this one has none; `state` is
        what came in.
        """
        ...
