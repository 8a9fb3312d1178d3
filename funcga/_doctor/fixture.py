"""A fixture of pytest, which finds it by the entry point of the package."""

from collections.abc import Iterator

import pytest

from funcga._doctor import watch


@pytest.fixture
def watch_exact() -> Iterator[watch]:
    """The test is watched, and fails at its end unless every training loop in it is exact."""
    with watch() as watched:
        yield watched
    watched.assert_exact()
