"""Ranks, and what starts them, are forks of an interpreter that has imported torch already.

What only a new interpreter shows has a start without: see `tests.support.warm.client`.
"""

import os
from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, browser
from tests.support.warm.start import warm_starts


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[None]:
    with warm_starts() as problem:
        if problem:
            print(f"each rank imports torch by itself, which takes seconds: {problem}")
        yield


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Fails a test that leaves a variable behind: no later start would be warm."""
    before = _variables()
    yield
    after = _variables()
    assert {name for name in before | after if before.get(name) != after.get(name)} == set()


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
