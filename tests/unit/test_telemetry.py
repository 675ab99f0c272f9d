"""Console lines and metrics of a run while it trains."""

import json
import resource
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from trainer.telemetry.metrics import Clock, Telemetry
from trainer.telemetry.pictures import Picture
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


def test_a_resumed_run_forgets_the_steps_that_come_again_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 1}\n{"step": 2, "lo')
    with Telemetry(path, 10, steps_done=2, generation=2) as telemetry:
        telemetry.event({"step": 3, "loss": 1.5})
    assert lines_of(path) == [
        {"step": 1, "loss": 3},
        {"step": 2, "loss": 2},
        {"step": 3, "loss": 1.5, "generation": 2},
    ]


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


def test_time_is_split_into_parts_that_add_up_to_the_step() -> None:
    clock = Clock()
    with clock.spent_on("data_s"):
        time.sleep(0.02)
    time.sleep(0.01)
    clock.step_done()
    clock.step_done()
    parts = clock.pop(comm_s=0.004).per_step()
    assert parts["data_s"] >= 0.01
    assert parts["comm_s"] == 0.002
    shares = ("data_s", "compute_s", "comm_s", "checkpoint_s")
    assert sum(parts[part] for part in shares) == pytest.approx(parts["step_s"])


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


class Writer:
    """Writer that fails, or knows what it was told."""

    def __init__(self, name: str, problem: Exception | None = None) -> None:
        self.name, self.problem = name, problem
        self.heard: list[str] = []

    def _hear(self, told: str) -> None:
        if self.problem:
            raise self.problem
        self.heard.append(told)

    def write(self, values: Mapping[str, object]) -> None:
        self._hear("write")

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        self._hear("show")

    def close(self, error: BaseException | None) -> None:
        self._hear("close")


@pytest.mark.parametrize("told", ["write", "show", "close"])
def test_services_that_fail_end_no_run_are_named_once_and_the_others_are_told(
    told: str, caplog: pytest.LogCaptureFixture
) -> None:
    full, gone = OSError(ENOSPC, "No space left on device"), RuntimeError("the service is gone")
    last = Writer("MLflow")
    with Telemetry(None, 10, writers=[Writer("W&B", full), Writer("SwanLab", gone), last]) as telemetry:
        for step in (1, 2):
            if told == "write":
                telemetry.event({"step": step})
            elif told == "show":
                telemetry.show(step, [Picture(b"", "", 1, ())])
    assert last.heard == ([] if told == "close" else [told, told]) + ["close"]
    assert [record.message for record in caplog.records] == [
        NOT_WRITTEN.format(full, "W&B"),
        NOT_WRITTEN.format(gone, "SwanLab"),
    ]


def test_what_cannot_be_a_line_of_metrics_jsonl_is_raised(tmp_path: Path) -> None:
    with pytest.raises(TypeError), Telemetry(tmp_path / "metrics.jsonl", 10) as telemetry:
        telemetry.event({"step": 1, "loss": object()})
