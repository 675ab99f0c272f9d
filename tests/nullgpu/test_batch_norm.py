"""Batch norm over all ranks reads and writes little more than one rank's own would."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tools import nullgpu
from trainer.comm.protocol import Comm
from trainer.model.sync_batch_norm import RunningStatistics, synchronise_batch_norm


class Twice:
    """Collectives of two ranks, which take no launch."""

    world = SimpleNamespace(size=2, rank=0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty(2 * len(tensor), *tensor.shape[1:])

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize(
    ("layout", "launches"), [(torch.contiguous_format, 8), (torch.channels_last, 10)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_passes_take_few_launches_and_read_the_input_twice(
    gpu: Comm, dtype: torch.dtype, layout: torch.memory_format, launches: int
) -> None:
    """Each pass reads the input twice, the backward pass its gradient, too. One launch counts batches."""
    norm = nn.Sequential(nn.BatchNorm2d(64, device="cuda"))
    synchronise_batch_norm(norm, cast("Comm", Twice()))
    x = torch.empty(64, 64, 56, 56, device="cuda", dtype=dtype).to(memory_format=layout).requires_grad_()
    towards = torch.empty_like(x)

    def passes() -> Any:
        norm(x).backward(towards)
        x.grad = None
        norm.zero_grad(set_to_none=True)

    passes()
    with nullgpu.watch() as seen:
        passes()
    with nullgpu.BytesMoved() as traffic:
        passes()
    assert not seen.waits, seen.table()
    assert seen["launches"] <= launches, seen.table()
    assert traffic.bytes <= 9.1 * x.nbytes


def test_putting_statistics_back_takes_few_launches_for_any_number_of_layers(gpu: Comm) -> None:
    statistics = RunningStatistics(nn.Sequential(*[nn.BatchNorm2d(64) for _ in range(50)]).cuda())
    finite = torch.ones((), dtype=torch.bool, device="cuda")
    with nullgpu.watch() as seen:
        statistics.put_back_unless(finite, statistics.copy())
    assert not seen.waits, seen.table()
    assert seen["launches"] <= 16
