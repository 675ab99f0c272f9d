"""What ranks do in the tests of communication: `python -m tests.integration.rank_cases CASE BACKEND`. Each case asserts on every rank."""

import os
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.jobs import tiny_job
from trainer.comm.autograd import gather_with_grad, sum_with_grad
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.comm.replicas import ReplicaError, broadcast_replicas, check_replicas
from trainer.world import detect


def collectives(comm: Comm) -> None:
    """Known values, in the types that the trainer sends."""
    rank, size = comm.world.rank, comm.world.size
    for dtype in (torch.float32, torch.float64, torch.int64):
        own = torch.full((2, 3), rank + 1, dtype=dtype)
        gathered = comm.all_gather(own)
        assert gathered.tolist() == [[r + 1] * 3 for r in range(size) for _ in range(2)], gathered
        assert comm.all_reduce(own).tolist() == [[size * (size + 1) / 2] * 3] * 2
        assert own.tolist() == [[rank + 1] * 3] * 2, "the input is left alone"
    tensor = torch.full((4,), float(rank))
    comm.broadcast_(tensor, root=size - 1)
    assert tensor.tolist() == [size - 1.0] * 4
    assert comm.broadcast_object({"from": rank}, root=size - 1) == {"from": size - 1}
    assert comm.broadcast_object(("only", "here") if rank == 0 else None) == ("only", "here")
    assert comm.all_gather_object(("r", rank)) == [("r", r) for r in range(size)]


def gradients_through_collectives(comm: Comm) -> None:
    """Each rank's loss is a share of a sum: what every share owes to a row arrives at the rank that owns it, added up, not averaged."""
    rank, size = comm.world.rank, comm.world.size
    own = torch.full((2, 1), float(rank), dtype=torch.float64, requires_grad=True)
    weights = torch.arange(2.0 * size, dtype=torch.float64)[:, None]
    (gather_with_grad(comm, own) * weights * (rank + 1)).sum().backward()
    total = size * (size + 1) / 2
    assert own.grad is not None
    assert own.grad[:, 0].tolist() == [total * (2 * rank), total * (2 * rank + 1)], own.grad
    own.grad.zero_()
    (sum_with_grad(comm, own) * (rank + 1)).sum().backward()
    assert own.grad[:, 0].tolist() == [total, total], own.grad


def reducer_averages(comm: Comm) -> None:
    """Passes inside `accumulate` stay local, the last one sends everything; twice, since hooks live on."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1.0)
    reducer = comm.reducer(model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with reducer.accumulate():
            reducer.module(torch.full((1, 2), 1.0 + comm.world.rank, dtype=torch.float64)).sum().backward()
        reducer.module(torch.full((1, 2), 10.0, dtype=torch.float64)).sum().backward()
        reducer.finish()
        assert model.weight.grad is not None
        assert model.weight.grad[0].tolist() == [10.0 + (comm.world.size + 1) / 2] * 2, model.weight.grad
    assert comm.pop_seconds() > 0


def replicas(comm: Comm) -> None:
    """Different weights and optimizer states become rank 0's; then one bit changes on the last rank, and everybody names it."""
    torch.manual_seed(comm.world.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (comm.world.rank + 1))
    if comm.world.rank == 0:  # the others have no state at all yet, as after a resume that rank 0 read
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    broadcast_replicas(comm, model, optimizer)
    check_replicas(comm, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(int(state["step"]) == 1 for state in optimizer.state.values())

    last = comm.world.size - 1
    with torch.no_grad():
        if comm.world.rank == last:
            bits = model.get_parameter("0.weight").view(torch.int32)
            bits[1, 1] ^= 1
    with pytest.raises(ReplicaError, match=rf"rank {last}: 0\.weight$"):
        check_replicas(comm, model, optimizer)


def barrier_times_out(comm: Comm) -> None:
    """Rank 0 comes late on purpose; the others stop waiting. Ends without leaving the group in order: it is broken."""
    if comm.world.rank == 0:
        time.sleep(6)
    else:
        with pytest.raises(TimeoutError, match="within 2 s"):
            comm.barrier(2.0)
        print(f"rank {comm.world.rank} stopped waiting", flush=True)
    sys.stdout.flush()
    os._exit(0)


CASES: dict[str, Callable[[Comm], None]] = {
    case.__name__: case for case in (collectives, gradients_through_collectives, reducer_averages, replicas, barrier_times_out)
}


def main(case: str, backend: str) -> None:
    job = tiny_job(comm={"backend": backend})
    comm = connect(job, detect(os.environ, os.uname().nodename), os.environ)
    CASES[case](comm)
    comm.barrier(60)
    if comm.world.rank == 0:
        print(f"passed {case} on {comm.world.size} ranks with {comm.name}", flush=True)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
