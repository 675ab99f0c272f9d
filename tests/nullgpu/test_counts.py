"""The null GPU counts what torch asks of it, and gives back what is known."""

import inspect
from pathlib import Path

import pytest
import torch

from tools import nullgpu


def test_item_is_one_wait_with_its_line() -> None:
    value = torch.ones(4, device="cuda").sum()
    with nullgpu.watch() as seen:
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        value.item()
    (event,) = seen.waits
    assert event.place.endswith(f"{Path(__file__).name}:{line}")


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"),
    [
        (True, True, []),
        (False, True, ["pageable copy to the device"]),
        (False, False, ["cudaStreamSynchronize"]),
    ],
)
def test_copies_wait_unless_their_memory_is_pinned(
    pinned: bool, non_blocking: bool, waits: list[str]
) -> None:
    host = torch.ones(1000, pin_memory=pinned)
    torch.empty(1000, device="cuda")
    with nullgpu.watch() as seen:
        host.to("cuda", non_blocking=non_blocking)
    assert (seen["h2d_pinned"], seen["h2d_pageable"]) == (pinned, not pinned)
    assert [event.what for event in seen.waits][-1:] == waits


def test_products_and_kernels_are_counted() -> None:
    matrix = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    with nullgpu.watch() as seen:
        ((matrix @ matrix) @ (matrix @ matrix)).relu().sum()
    assert (seen["blas_calls"], seen["launches"]) == (3, 2)


def test_memory_costs_nothing_until_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    monkeypatch.setenv("NULLGPU_MEMORY_GB", "110")
    large = torch.empty(100 * 2**30, dtype=torch.uint8, device="cuda")
    assert nullgpu.peak_gib() == pytest.approx(100 + held / 2**30)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(5 * 2**30, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()


def test_the_host_reads_what_it_sent_and_constants_otherwise() -> None:
    sent = torch.tensor([1.5, 2.5]).cuda()
    assert sent.tolist() == [1.5, 2.5]
    sent.add_(1)
    assert sent.tolist() == [0, 0]
    assert torch.isfinite(sent).all().item()
    nullgpu.reads(1.0)
    assert sent.sum().item() == 1
    nullgpu.reads(0.0)


def test_a_graph_is_replayed_and_a_wait_breaks_its_capture() -> None:
    values = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with nullgpu.watch() as seen, torch.cuda.graph(graph):
        (values + values).relu()
    assert seen["launches"] == 0
    with nullgpu.watch() as seen:
        graph.replay()
        graph.replay()
    assert (seen["graph_launches"], seen["graph_kernels"]) == (2, 4)
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        values.sum().item()


def test_bytes_moved_leave_out_views() -> None:
    values = torch.ones(1000, device="cuda")
    with nullgpu.BytesMoved() as moved:
        values.view(10, 100).t()[2:]
        values + values
        values.add_(1)
    assert moved.by_op == {"add": 12000, "add_": 8000}
