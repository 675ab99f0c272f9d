"""Console lines and metrics of a run while it trains."""

import json
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from errno import ENOSPC
from pathlib import Path

import pytest

from trainer.telemetry.metrics import Clock, Telemetry, console_line, drop_after, is_recorded, last_loss
from trainer.telemetry.pictures import Picture
from trainer.telemetry.records import Record
from trainer.text.wording import duration

RECORD = Record(
    step=20, epoch=1, samples=640, loss=1.25, lr=5e-4, grad_norm=0.5, logit_scale=14.3,
    samples_per_s=320.0, step_s=0.1, data_s=0.01, compute_s=0.07, comm_s=0.02, checkpoint_s=0.0,
)  # fmt: skip


def test_console_line_has_everything_in_fixed_order() -> None:
    assert console_line(RECORD, 1000) == (
        "step   20/1000  epoch 2  loss 1.2500  lr 5.00e-04  grad 0.500  scale 14.30  320 samples/s  data "
        "10% comm 20% ckpt 0%  ETA 1:38"
    )


def test_metrics_are_one_object_a_line(tmp_path: Path) -> None:
    with Telemetry(tmp_path / "metrics.jsonl", 1000) as telemetry:
        telemetry.write(RECORD)
        telemetry.event({"step": 20, "zero_shot_top1": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 20]
    assert lines[0]["loss"] == last_loss(tmp_path / "metrics.jsonl") == 1.25


def test_a_resumed_run_forgets_the_steps_that_come_again_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 1}\n{"step": 2, "lo')
    with Telemetry(path, 10, steps_done=2) as telemetry:
        telemetry.event({"step": 3, "loss": 1.5})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 3},
        {"step": 2, "loss": 2},
        {"step": 3, "loss": 1.5, "generation": 1},
    ]


def test_a_start_holds_no_file_of_metrics_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    line = json.dumps({"step": 1, "loss": 1.5, "data_s": [0.125] * 4_000}) + "\n"
    size = 100 * len(line)
    path.write_text(line * 100 + '5\n{"depth": ' + "[" * 100_000 + '\n{"step": 2, "loss": 1}\n{"st')
    tracemalloc.start()
    try:
        drop_after(path, 1)
        assert last_loss(path) == 1.5
        assert is_recorded(path, 1)
        assert not is_recorded(path, 2)
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()
    assert path.read_text() == line * 100


def test_each_line_says_the_generation_of_its_ranks(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for generation in (1, 2):
        with Telemetry(path, 10, generation - 1, generation=generation) as telemetry:
            telemetry.event({"step": generation, "loss": 1.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["generation"]) for line in lines] == [(1, 1), (2, 2)]


def test_ranks_without_a_path_stay_silent(caplog: pytest.LogCaptureFixture) -> None:
    with Telemetry(None, 10) as telemetry:
        telemetry.write(RECORD)
    assert caplog.records == []


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
    assert sum(parts[part] for part in ("data_s", "compute_s", "comm_s", "checkpoint_s")) == pytest.approx(
        parts["step_s"]
    )


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3723, "1:02:03")])
def test_duration_reads_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_full_disk_costs_the_numbers_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with Telemetry(None, 10) as telemetry:
        telemetry._file = open("/dev/full", "a")  # noqa: SIM115  # `telemetry` closes it
        for step in (1, 2):
            telemetry.event({"step": step})
    assert [record.message for record in caplog.records if "NOT WRITTEN" in record.message] == [
        (
            "metrics      NOT WRITTEN: [Errno 28] No space left on device. "
            "The run goes on, but metrics.jsonl will have gaps."
        )
    ]


class FullDisk:
    """Writer whose disk is full."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, values: Mapping[str, object]) -> None:
        raise OSError(ENOSPC, "No space left on device")

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        raise AssertionError

    def close(self, error: BaseException | None) -> None:
        raise OSError(ENOSPC, "No space left on device")


def test_each_writer_that_fails_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with Telemetry(None, 10, writers=[FullDisk("TensorBoard"), FullDisk("SwanLab")]) as telemetry:
        for step in (1, 2):
            telemetry.event({"step": step})
    named = [record.message.partition("goes on, but ")[2] for record in caplog.records]
    assert named == ["TensorBoard will have gaps.", "SwanLab will have gaps."]


class Raises(FullDisk):
    """Writer of a service whose client fails."""

    def write(self, values: Mapping[str, object]) -> None:
        raise RuntimeError("the service is gone")

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        raise RuntimeError("the service is gone")

    def close(self, error: BaseException | None) -> None:
        raise RuntimeError("the service is gone")


class Hears(FullDisk):
    """Writer that knows what it was told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.heard: list[str] = []

    def write(self, values: Mapping[str, object]) -> None:
        self.heard.append("write")

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        self.heard.append("show")

    def close(self, error: BaseException | None) -> None:
        self.heard.append("close")


@pytest.mark.parametrize("told", ["write", "show", "close"])
def test_a_service_that_fails_ends_no_run_and_the_others_are_told(
    told: str, caplog: pytest.LogCaptureFixture
) -> None:
    last = Hears("MLflow")
    with Telemetry(None, 10, writers=[Raises("SwanLab"), last]) as telemetry:
        if told == "write":
            telemetry.event({"step": 1})
        elif told == "show":
            telemetry.show(1, [Picture(b"", "", 1, ())])
    assert last.heard == ([] if told == "close" else [told]) + ["close"]
    assert [record.message for record in caplog.records] == [
        "metrics      NOT WRITTEN: the service is gone. The run goes on, but SwanLab will have gaps."
    ]


def test_what_cannot_be_a_line_of_metrics_jsonl_is_raised(tmp_path: Path) -> None:
    with pytest.raises(TypeError), Telemetry(tmp_path / "metrics.jsonl", 10) as telemetry:
        telemetry.event({"step": 1, "loss": object()})
