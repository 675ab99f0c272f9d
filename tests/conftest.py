"""Skips tests marked `horovod` where Horovod is not built, and compares whole texts with goldens.

Tests for another release of open_clip than the imported one are left out.

Imports no torch. Torch's threads and Open MPI's ranks wait for each other without spinning, as several
processes share the cores.
What Clipship remembers of a user's runs, it remembers apart of the tests' runs.
"""

import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import goldens

os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="clipship-tests-")
GOLDENS = Path(__file__).parent / "unit" / "golden"
settings.register_profile(
    "busy-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # no test asserts a time
settings.load_profile("busy-machine")


def pytest_configure() -> None:
    """Lets Ctrl-C reach the processes that tests start.

    A shell that runs the tests in the background starts them with SIGINT ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keeps Python's garbage collector from scanning thousands of tests again and again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Removes what Clipship remembered of the tests' runs."""
    shutil.rmtree(STATE, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-goldens",
        action="store_true",
        help="Write what is rendered now over the golden files; read the diff.",
    )


@pytest.fixture(scope="session")
def rendered(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Texts of this session by name. `make goldens` writes them when all are there."""
    texts: dict[str, str] = {}
    yield texts
    if request.config.getoption("--rewrite-goldens"):
        goldens.write(GOLDENS, texts)


@pytest.fixture
def golden(request: pytest.FixtureRequest, rendered: dict[str, str]) -> Callable[[str, str], None]:
    """Compares a whole text with its golden; `make goldens` rewrites that instead."""

    def compare(name: str, text: str) -> None:
        rendered[name] = text
        if not request.config.getoption("--rewrite-goldens"):
            goldens.check(GOLDENS, name, text)

    return compare


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip or leave out tests here, so that each needs no more than its mark."""
    if importlib.util.find_spec("horovod") is None:
        for item in items:
            if item.get_closest_marker("horovod"):
                item.add_marker(pytest.mark.skip(reason="Horovod is not installed: `make horovod`"))
    if other := [item for item in items if _is_for_another_open_clip(item)]:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]


def _is_for_another_open_clip(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("open_clip")
    if marker is None:
        return False
    import open_clip  # the modules of these tests have imported it

    return bool(marker.args[0] != ("4" if hasattr(open_clip, "create_task") else "3.3"))
