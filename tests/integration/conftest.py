"""Ranks, and what starts them, are forks of an interpreter that has imported torch already.

What only a new interpreter shows has a start without: see `tests.support.warm.client`.
"""

from collections.abc import Iterator

import pytest

from tests.support.warm.start import warm_starts


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    with warm_starts() as problem:
        if problem:
            print(f"each rank imports torch by itself, which takes seconds: {problem}")
        yield
