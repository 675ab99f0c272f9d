"""What one-process tests share."""

from collections.abc import Iterator

import pytest
import torch

from tests.jobs import tiny_job
from trainer.comm.protocol import Comm
from trainer.comm.torch_backend import TorchBackend
from trainer.health.pulse import Pulse
from trainer.world import World


@pytest.fixture
def alone() -> Iterator[Comm]:
    """A real process group of one rank."""
    comm = TorchBackend(tiny_job(), World(0, 1, 0, 1, "here", "test"), torch.device("cpu"), Pulse.open({}))
    yield comm
    comm.close()
