"""Console lines and metrics of a run while it trains."""

import json
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from trainer.telemetry.metrics import Telemetry
from trainer.telemetry.records import Record

RECORD = Record(
    step=20, epoch=1, samples=640, loss=1.25, lr=5e-4, grad_norm=0.5, logit_scale=14.3,
    samples_per_s=320.0, step_s=0.1, data_s=0.01, compute_s=0.07, comm_s=0.02, checkpoint_s=0.0,
)  # fmt: skip


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_is_a_line_of_the_console_in_fixed_order_and_one_of_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with Telemetry(tmp_path / "metrics.jsonl", 1000) as telemetry:
        telemetry.write(RECORD)
        telemetry.event({"step": 20, "zero_shot_top1": 0.5})
    with Telemetry(None, 10) as other_rank:
        other_rank.write(RECORD)
    (record,) = caplog.records
    assert record.getMessage() == (
        "step   20/1000  epoch 2  loss 1.2500  lr 5.00e-04  grad 0.500  scale 14.30  320 samples/s  data "
        "10% comm 20% ckpt 0%  ETA 1:38"
    )
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [(line["step"], line.get("loss")) for line in lines] == [(20, 1.25), (20, None)]


def test_a_start_holds_no_file_of_metrics_in_memory(tmp_path: Path) -> None:
    """Nor does it write the record of its first step again."""
    path = tmp_path / "ranks.jsonl"
    line = json.dumps({"step": 1, "loss": 1.5, "data_s": [0.125] * 4_000}) + "\n"
    size = 100 * len(line)
    path.write_text(line * 100 + '5\n{"depth": ' + "[" * 100_000 + '\n{"step": 2, "loss": 1}\n{"st')
    tracemalloc.start()
    try:
        with Telemetry(path, 10, 1, record={"step": 1, "loss": 7.0}):
            pass
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert path.read_text() == line * 100
    with Telemetry(path, 10, 2, record={"step": 2, "loss": 7.0}):
        pass
    assert lines_of(path)[-1] == {"step": 2, "loss": 7.0, "generation": 1}


NOT_WRITTEN = "metrics      NOT WRITTEN: {}. The run goes on, but {} will have gaps."


def test_full_disk_costs_the_numbers_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Telemetry(tmp_path / "metrics.jsonl", 10) as telemetry:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as on a full file system
        try:
            for step in (1, 2):
                telemetry.event({"step": step})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = NOT_WRITTEN.format("[Errno 27] File too large", "metrics.jsonl")
    assert [record.message for record in caplog.records] == [said]


def test_what_cannot_be_a_line_of_metrics_jsonl_is_raised(tmp_path: Path) -> None:
    with pytest.raises(TypeError), Telemetry(tmp_path / "metrics.jsonl", 10) as telemetry:
        telemetry.event({"step": 1, "loss": object()})
