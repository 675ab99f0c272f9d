"""Cases that ranks run in the tests of communication, one after the other.

`python -m tests.support.rank_cases BACKEND CASE ...` runs them. Each case is a function of this
module, which asserts on every rank; rank 0 tells which have passed.
"""

import copy
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import tiny_job
from tests.support.rank import joined, tell
from trainer.comm.autograd import gather_with_grad
from trainer.comm.protocol import Comm
from trainer.comm.reducers import DeterministicReducer
from trainer.comm.replicas import ReplicaError, broadcast_replicas, check_replicas
from trainer.comm.shards import WholeModel
from trainer.config.optimizers import OPTIMIZERS
from trainer.model.optimizer import build_optimizer
from trainer.model.sync_batch_norm import synchronise_batch_norm


def collectives(comm: Comm) -> None:
    """Known values, in the types that the trainer sends."""
    rank, size = comm.world.rank, comm.world.size
    for dtype in (torch.float32, torch.float64, torch.int64):
        own = torch.full((2, 3), rank + 1, dtype=dtype, device=comm.device)
        gathered = comm.all_gather(own)
        assert gathered.tolist() == [[r + 1] * 3 for r in range(size) for _ in range(2)], gathered
        assert comm.all_reduce(own).tolist() == [[size * (size + 1) / 2] * 3] * 2
        parts = (torch.arange(2 * size, device=comm.device)[:, None].expand(-1, 3) + rank).to(dtype)
        rows = [2 * rank, 2 * rank + 1]
        others = size * (size - 1) // 2
        assert comm.reduce_scatter(parts).tolist() == [[size * row + others] * 3 for row in rows]
        assert own.tolist() == [[rank + 1] * 3] * 2, "the input is left alone"
    tensor = torch.full((4,), float(rank), device=comm.device)
    comm.broadcast_(tensor, root=size - 1)
    assert tensor.tolist() == [size - 1.0] * 4
    partner = size - 1 - rank
    assert (
        comm.exchange(torch.full((2, 2), float(rank), device=comm.device), partner).tolist()
        == [[float(partner)] * 2] * 2
    )
    for dtype in (torch.float32, torch.float64):
        own = torch.full((3, 2), float(rank), dtype=dtype, device=comm.device).T  # not contiguous
        started = comm.start_all_gather(own)
        between = comm.all_reduce(torch.ones(2, device=comm.device))
        assert (
            started().tolist()
            == comm.all_gather(own).tolist()
            == [[r] * 3 for r in range(size) for _ in "ab"]
        )
        assert between.tolist() == [size] * 2
    total = comm.start_all_reduce(torch.tensor([1.0, float(rank)]))
    assert total().tolist() == [size, size * (size - 1) / 2]


def objects(comm: Comm) -> None:
    """Each rank sends an object of another type and size; some ranks send None."""
    rank, size = comm.world.rank, comm.world.size
    own = [None, "text" * 1000, {"from": rank}][rank % 3]
    for root in range(size):
        assert comm.broadcast_object(own, root) == [None, "text" * 1000, {"from": root}][root % 3]
    assert comm.all_gather_object(own) == [[None, "text" * 1000, {"from": r}][r % 3] for r in range(size)]


def gradients_through_collectives(comm: Comm) -> None:
    """Each rank's loss is a share of a sum.

    The gradients that all shares owe to a row are added up, not averaged, on the rank that owns the row.
    """
    rank, size = comm.world.rank, comm.world.size
    own = torch.full((2, 1), float(rank), dtype=torch.float64, device=comm.device, requires_grad=True)
    weights = torch.arange(2.0 * size, dtype=torch.float64, device=comm.device)[:, None]
    (gather_with_grad(comm, own) * weights * (rank + 1)).sum().backward()
    total = size * (size + 1) / 2
    assert own.grad is not None
    assert own.grad[:, 0].tolist() == [total * (2 * rank), total * (2 * rank + 1)], own.grad


def batch_norm(comm: Comm) -> None:
    """Statistics, results and gradients are those of one batch norm that sees the samples of all ranks."""
    rank, size = comm.world.rank, comm.world.size
    torch.manual_seed(0)
    whole = (torch.randn(3 * size, 4, 5, 5, dtype=torch.float64) + 100).to(comm.device)
    towards = torch.randn_like(whole)
    own = slice(3 * rank, 3 * rank + 3)
    for affine in (True, False):
        expected = nn.BatchNorm2d(4, affine=affine, dtype=torch.float64, device=comm.device)
        for parameter in expected.parameters():
            nn.init.normal_(parameter)
        found = nn.Sequential(copy.deepcopy(expected))
        synchronise_batch_norm(found, comm)
        inputs = [whole.clone().requires_grad_(), whole[own].clone().requires_grad_()]
        results = [expected(inputs[0]), found(inputs[1])]
        results[0].backward(towards)
        results[1].backward(towards[own])
        assert inputs[0].grad is not None
        torch.testing.assert_close(results[1], results[0][own], rtol=1e-12, atol=1e-11)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad[own], rtol=1e-12, atol=1e-11)
        torch.testing.assert_close(dict(found[0].named_buffers()), dict(expected.named_buffers()))
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(comm.all_reduce(one.grad), other.grad, rtol=1e-12, atol=1e-11)


def reducer_averages(comm: Comm) -> None:
    """Passes inside `accumulate` stay local, the last one sends everything; twice, since hooks live on."""
    comm.pop_seconds()
    _assert_averages(comm, comm.reducer)
    assert (comm.pop_seconds() > 0) is (comm.world.size > 1), "a single rank sends nothing"


def buckets_average(comm: Comm) -> None:
    """Gradients of many parameters, some in the layout of images, are the mean's bits in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 20_000))
    model.extend([nn.Linear(20_000, 64), nn.Linear(64, 4)]).to(memory_format=torch.channels_last).to(
        comm.device
    )
    reducer = comm.reducer(model)
    for step in range(3):
        torch.manual_seed(10 * step + comm.world.rank)
        images = torch.randn(2, 3, 8, 8, device=comm.device)
        own = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
        wanted = [comm.all_reduce(gradient / comm.world.size) for gradient in own]
        model.zero_grad(set_to_none=True)
        reducer.module(images).square().sum().backward()
        reducer.finish()
        for parameter, mean in zip(model.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()
            assert torch.equal(parameter.grad, mean), (step, (parameter.grad - mean).abs().max())


def fixed_reducer_averages(comm: Comm) -> None:
    """The same of the reducer that repeats itself bit for bit."""
    _assert_averages(comm, lambda model: DeterministicReducer(model, comm.all_reduce, comm.world.size))


def fixed_reducer_needs_every_gradient(comm: Comm) -> None:
    """Unless it is told to find out which ones there are, for which the host waits."""
    model = _Branches().to(comm.device)
    reducer = DeterministicReducer(model, comm.all_reduce, comm.world.size)
    reducer.module([0, 2]).backward()
    with pytest.raises(RuntimeError, match=r"no gradient for weights\.1: set comm\.find_unused_parameters"):
        reducer.finish()


def _assert_averages(comm: Comm, reducer_of: Callable[[nn.Module], Any]) -> None:
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64, device=comm.device)
    with torch.no_grad():
        model.weight.fill_(1.0)
    reducer = reducer_of(model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with reducer.accumulate():
            reducer.module(torch.full_like(model.weight, 1.0 + comm.world.rank)).sum().backward()
        reducer.module(torch.full_like(model.weight, 10.0)).sum().backward()
        reducer.finish()
        assert model.weight.grad is not None
        assert model.weight.grad[0].tolist() == [10.0 + (comm.world.size + 1) / 2] * 2, model.weight.grad


class _Branches(nn.Module):
    """Three parameters, of which a pass takes those that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1, dtype=torch.float64) for _ in range(3))

    def forward(self, wanted: list[int]) -> Tensor:
        return torch.stack([self.weights[number].sum() for number in wanted]).sum()


def unused_parameters(comm: Comm) -> None:
    """One parameter that all ranks use, one that only the last does, one that nobody does."""
    model = _Branches().to(comm.device)
    reducer = comm.reducer(model)
    last = comm.world.rank == comm.world.size - 1
    reducer.module([0, 1] if last else [0]).backward()
    reducer.finish()
    everyone, one, nobody = (weight.grad for weight in model.weights)
    assert everyone is not None
    assert one is not None
    assert (everyone.item(), one.item()) == (1.0, 1.0 / comm.world.size)
    assert nobody is None or nobody.item() == 0.0


def replicas(comm: Comm) -> None:
    """Different weights and optimizer states become those of rank 0.

    Then one bit changes on the last rank, and every rank names that rank.
    """
    torch.manual_seed(comm.world.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(comm.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (comm.world.rank + 1))
    if comm.world.rank == 0:  # the others have no state at all yet, as after a resume that rank 0 read
        model(torch.randn(4, 3, device=comm.device)).sum().backward()
        optimizer.step()
    broadcast_replicas(comm, model, optimizer)
    check_replicas(comm, WholeModel(model), optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1 * (comm.world.rank + 1), "settings stay each rank's own"
    assert all(int(state["step"]) == 1 for state in optimizer.state.values())

    last = comm.world.size - 1
    with torch.no_grad():
        if comm.world.rank == last:
            bits = model.get_parameter("0.weight").view(torch.int32)
            bits[1, 1] ^= 1
    with pytest.raises(ReplicaError, match=rf"rank {last}: 0\.weight$"):
        check_replicas(comm, WholeModel(model), optimizer)


def states_of_optimizers(comm: Comm) -> None:
    """The state of each of the job's optimizers becomes rank 0's, and the next update is the same."""
    for name in OPTIMIZERS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 16), nn.LayerNorm(16)).to(comm.device)
        settings = tiny_job(optim={"optimizer": name}).optim
        optimizer = build_optimizer(dict(model.named_parameters()), settings)
        inputs = torch.randn(4, 24, device=comm.device)
        for is_whole in (False, True):
            if is_whole or comm.world.rank == 0:
                optimizer.zero_grad()
                model(inputs).square().sum().backward()
                optimizer.step()
            if not is_whole:
                broadcast_replicas(comm, model, optimizer)
            check_replicas(comm, WholeModel(model), optimizer)
            assert all(optimizer.state[parameter] for parameter in model.parameters()), name


def barrier_times_out(comm: Comm) -> None:
    """Rank 0 never comes to the collective, and rank 1 stops waiting for it.

    The case ends without leaving the group in order, because the group is broken.
    """
    folder = comm.broadcast_object(tempfile.mkdtemp() if comm.world.rank == 0 else "")
    stopped = Path(folder, "stopped")
    if comm.world.rank == 0:
        limit = time.monotonic() + 60
        while not stopped.exists() and time.monotonic() < limit:
            time.sleep(0.05)
        shutil.rmtree(folder)
    else:
        with pytest.raises(TimeoutError, match="within 2 s"):
            comm.barrier(2.0)
        print(f"rank {comm.world.rank} stopped waiting", flush=True)
        stopped.touch()
    sys.stdout.flush()
    os._exit(0)


def main(backend: str, *cases: str) -> None:
    job = tiny_job(comm={"backend": backend, "find_unused_parameters": "unused_parameters" in cases})
    with joined(job) as comm:
        if backend == "horovod" and comm.device.type == "cpu":
            assert os.environ["HOROVOD_CYCLE_TIME"] == "5"
        for case in cases:
            globals()[case](comm)
            comm.barrier(60)
            if comm.world.rank == 0:
                tell([case, comm.world.size])


if __name__ == "__main__":
    main(*sys.argv[1:])
