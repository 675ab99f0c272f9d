"""Skips what a machine cannot run: tests marked `horovod` where Horovod was not built. No torch."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the skip here, so that a test needs no more than its mark."""
    if importlib.util.find_spec("horovod") is not None:
        return
    for item in items:
        if item.get_closest_marker("horovod"):
            item.add_marker(pytest.mark.skip(reason="Horovod is not installed: `make horovod`"))
