"""The context of a call, which tells other replicas of an error."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from funcga._call import Memory
from torch_backend.reduce.agreement import Histories

# What begins a window, which is a context.
Begin = Callable[[], AbstractContextManager[object]]


class _EndedError(Exception):
    """Ends a window in which nothing was folded."""


@contextmanager
def telling(windows: Sequence[tuple[Memory, Begin]]) -> Iterator[None]:
    """A context of one call of a step, in which other replicas are told of an error.

    `windows` are those of the call, in their order: where each is counted, and what begins it. One
    that has not begun begins then, and ends: the others have begun as many, and wait in one of
    them.
    """
    counted = [(memory.keep(Histories), begin) for memory, begin in windows]
    for histories, _ in counted:
        histories.begun = 0
    try:
        yield
    except BaseException:
        for histories, begin in counted:
            if not histories.begun:
                with suppress(Exception), begin():
                    raise _EndedError from None
            for history in histories.values():
                if history.running is not None:
                    history.running.abort()
                # The others may have the result already. Each header says what is finished here, so
                # that the next window is refused on all of them.
                history.finished = min(history.finished, history.begun - 1)
                if history.differs:
                    raise  # the others may have other windows in this call, and wait in none
        raise
