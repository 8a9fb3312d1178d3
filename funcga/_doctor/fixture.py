"""A fixture of pytest, which finds it by the entry point of the package."""

from collections.abc import Callable, Iterator

import pytest

from funcga._doctor import Watched, watch


@pytest.fixture
def watch_exact() -> Iterator[Callable[..., Watched]]:
    """`funcga.watch`, and the test fails at its end unless all that was watched is exact."""
    opened: list[Watched] = []

    def watch_one(*args: object, **kwargs: object) -> Watched:
        opened.append(watch(*args, **kwargs))  # type: ignore[arg-type]
        return opened[-1]

    yield watch_one
    for watched in opened:
        watched.assert_exact()
