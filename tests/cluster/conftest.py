"""Clusters for tests, made once for all tests that need one, and taken down after them."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.cluster.slurm.cluster import Cluster, missing_programs


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Two nodes. Not in /tmp, of which each has its own.

    What is not there fails the tests: nobody asks for them by chance.
    """
    if os.geteuid():
        pytest.fail("these tests start Slurm's daemons in namespaces of their own, and need root for it")
    if missing := missing_programs():
        pytest.fail(
            f"{', '.join(missing)} not found: `make test-slurm` installs Debian's slurm-wlm and munge"
        )
    folder = Path(tempfile.mkdtemp(prefix="clipship-slurm-", dir="/var/tmp"))
    pyxis = os.environ.get("CLIPSHIP_PYXIS")
    cluster = Cluster(folder, pyxis=Path(pyxis) if pyxis else None)
    signal.signal(signal.SIGTERM, _interrupt)  # `kill` tidies up as Ctrl-C does
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
