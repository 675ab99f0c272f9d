"""The digits to learn, and a queue that each test leaves empty."""

from collections.abc import Iterator

import pytest

from tests.cluster.slurm.cluster import Cluster
from tests.cluster.slurm.runs import Demo


@pytest.fixture(scope="module")
def demo(slurm: Cluster) -> Demo:
    return Demo.make(slurm)


@pytest.fixture(autouse=True)
def _nothing_else_runs(demo: Demo) -> Iterator[None]:
    yield
    demo.cluster.clear()
