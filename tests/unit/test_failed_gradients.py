"""A reduction of gradients that fails leaves its rank in the collective, so that it is no first cause."""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import tiny_job
from trainer.comm.torch_backend import TorchBackend, _Reducer
from trainer.world import heartbeat
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World

Future = torch.futures.Future[Tensor]


@pytest.fixture
def memory(tmp_path: Path) -> mmap.mmap:
    return heartbeat.make(tmp_path)


@pytest.fixture
def comm(tmp_path: Path, memory: mmap.mmap) -> Iterator[TorchBackend]:
    own = Heartbeat.open({"CLIPSHIP_RANK_DIR": str(tmp_path)})
    backend = TorchBackend(tiny_job(), World(0, 1, 0, 1, "here", "test"), torch.device("cpu"), own)
    yield backend
    backend.close()


def at_once(_state: object, _bucket: object) -> Future:
    raise RuntimeError("Connection closed by peer")


def later(_state: object, _bucket: object) -> Future:
    future = Future()
    future.set_exception(RuntimeError("Connection reset by peer"))  # type: ignore[arg-type]
    return future


@pytest.mark.parametrize("hook", [at_once, later])
def test_a_rank_whose_backward_pass_meets_a_lost_peer_waits_in_the_collective(
    comm: TorchBackend, memory: mmap.mmap, hook: Callable[[object, object], Future]
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    reducer = _Reducer(model, tiny_job().comm.torch, False, comm._timer, torch.device("cpu"))
    reducer.module(torch.ones(2, 3)).sum().backward()
    assert heartbeat.read(memory).waiting
    reducer.finish()
    state = heartbeat.read(memory)
    assert (state.collective, state.waiting) == ("all_reduce of gradients", False)
    reducer._hook = hook
    loss = reducer.module(torch.ones(2, 3)).sum()
    assert not heartbeat.read(memory).waiting
    with pytest.raises(RuntimeError, match="by peer"):
        loss.backward()
    state = heartbeat.read(memory)
    assert (state.collective, state.waiting) == ("all_reduce of gradients", True)
