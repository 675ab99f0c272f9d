"""Fixtures that several unit tests share. Imports no torch: most tests need none."""

import inspect
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support import clock
from tests.support.jobs import tiny_job
from trainer.data import files
from trainer.run import exit_files, retry
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

if TYPE_CHECKING:
    from trainer.comm.protocol import Comm


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an asynchronous test in an event loop whose clock jumps."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    clock.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that fails is asked again at once, and otherwise after waits that are the same each time."""
    monkeypatch.setattr(retry, "jitter", lambda: 0.0)
    monkeypatch.setattr(files, "WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(files, "STORE_WAITS_S", (0.0, 0.0))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is busy with other things keeps no start from leaving its word."""
    monkeypatch.setattr(exit_files, "WAIT_S", 60.0)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Undoes what a start of a rank does to the log of its process; nothing else may change the log."""
    root = logging.getLogger()
    handlers, level, filters = list(root.handlers), root.level, list(root.filters)
    yield
    added = [handler for handler in root.handlers if handler not in handlers]
    assert root.filters == filters
    assert root.level == level or added, "the level of the log was changed"
    for handler in added:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


@pytest.fixture
def alone() -> "Iterator[Comm]":
    """A real process group of one rank."""
    import torch

    from trainer.comm.torch_backend import TorchBackend

    comm = TorchBackend(
        tiny_job(), World(0, 1, 0, 1, "here", "test"), torch.device("cpu"), Heartbeat.open({})
    )
    yield comm
    comm.close()
