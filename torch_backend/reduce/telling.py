"""The context of a call, which tells other replicas of an error."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from torch_backend.reduce.agreement import Progress

# What begins a window, which is a context.
Begin = Callable[[], AbstractContextManager[object]]


class _EndedError(Exception):
    """Ends a window in which nothing was folded."""


@contextmanager
def telling(windows: Sequence[tuple[Progress, Begin]]) -> Iterator[None]:
    """A context of one call of a step, in which other replicas are told of an error.

    `windows` are those of the call, in their order: where each is counted, and what begins it. A
    window ends itself with an error that it sees. One that has not begun begins then, and ends: the
    others have begun as many, and wait in one of them.
    """
    begun = [progress.begun for progress, _ in windows]
    try:
        yield
    except BaseException:
        for (progress, begin), before in zip(windows, begun, strict=True):
            if progress.begun == before:
                with suppress(Exception), begin():
                    raise _EndedError from None
            for history in progress.groups.values():
                if history.running is not None:
                    history.running.abort()
                # The others may have the result already. Each header says what is finished here, so
                # that the next window is refused on all of them.
                history.finished = min(history.finished, history.begun - 1)
                if history.differs:
                    raise  # the others may have other windows in this call, and wait in none
        raise
