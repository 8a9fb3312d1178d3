"""A fixture of pytest for `watch`, which pytest loads in every run: it imports nothing yet."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def watch_exact() -> Iterator[object]:
    """The test is watched, and fails at its end unless every training loop in it is exact."""
    import funcga

    with funcga.watch() as watched:
        yield watched
    # Without the lines of this file, which say nothing of the loop.
    if not watched.ok:
        pytest.fail(str(watched), pytrace=False)
