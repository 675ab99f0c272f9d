"""Looking at a run and starting it again take no longer for many steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.cli.main import main
from trainer.run import goodput_log
from trainer.run.layout import GOODPUT_FILE
from trainer.telemetry.goodput import goodput
from trainer.telemetry.goodput_recorder import GoodputRecorder
from trainer.telemetry.metrics import Telemetry, drop_after, evaluation_of, last_loss
from trainer.telemetry.records import Lap, Record

STEPS = 2000


def record(step: int) -> Record:
    return Record(step, 0, 8 * step, 1 / step, 0.1, 1.0, 14.0, 16.0, 0.5, 0.1, 0.4, 0.0, 0.0)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all JSON texts that are parsed."""
    found, loads = [], json.loads

    def counted(text: str | bytes, **how: Any) -> Any:
        found.append(len(text))
        return loads(text, **how)

    monkeypatch.setattr(json, "loads", counted)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that evaluates every 500 steps and was started again after half of them."""
    (tmp_path / "job.toml").write_text("[optim]\nsteps = 4000\n")
    clock = iter(range(10 * STEPS))
    for generation, begin in ((1, 0), (2, STEPS // 2)):
        with Telemetry(tmp_path / "metrics.jsonl", STEPS, begin, generation=generation) as telemetry:
            recorder = GoodputRecorder(
                tmp_path, start="s", generation=generation, ranks=2, from_step=begin, began=1.0,
                now=lambda: 10.0 + next(clock),
            )  # fmt: skip
            for step in range(begin + 1, begin + 1 + STEPS * (3 - generation) // 2 + 100 * (2 - generation)):
                telemetry.write(record(step), {"read_requests": 2, "read_bytes": 1000, "gpu_joules": 0.5})
                recorder.steps(step, Lap(1, 0.1, 0.4, 0.0, 0.0), 0.1, 0.05)
                if not step % 500:
                    telemetry.event({"step": step, "zero_shot_top1": step / STEPS})
                    recorder.save(step)
    return tmp_path


def test_status_sums_up_a_long_run_without_reading_all_of_it(
    run: Path, parsed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    parsed.clear()
    assert main(["status", str(run), "--json"]) == 0
    assert len(parsed) < STEPS / 4
    state = json.loads(capsys.readouterr().out)
    assert (state["step"], state["evaluation"]) == (STEPS, {"step": STEPS, "zero_shot_top1": 1})
    assert (state["reading"]["requests"], state["reading"]["bytes"]) == (2 * STEPS, 1000 * STEPS)
    assert state["energy_j"] == STEPS / 2


def test_a_start_cuts_files_of_steps_where_they_are(run: Path, parsed: list[int]) -> None:
    path = run / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 1800, "checkpoint": "step-1800"}\n{"step": 2')
    file_number = path.stat().st_ino
    parsed.clear()
    drop_after(path, STEPS - 10)
    assert (evaluation_of(path, STEPS), last_loss(path)) == (None, 1 / (STEPS - 10))
    assert len(parsed) < 100
    assert path.stat().st_ino == file_number
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1] == {"step": 1800, "checkpoint": "step-1800"}, (
        "it was written after the steps that it had"
    )
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS - 9))
    drop_after(path, 0)
    assert path.read_text() == ""


def test_the_time_of_a_long_run_is_that_of_all_its_lines(run: Path) -> None:
    told = goodput_log.read(run)
    assert len(told) < 50
    path = run / GOODPUT_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    each = goodput([{name: value for name, value in line.items() if name != "so_far"} for line in lines])
    merged = goodput(told)
    assert merged.useful_s == pytest.approx(each.useful_s)
    assert merged.lost_s == pytest.approx(each.lost_s)
    assert merged.lost_s["redone"] > 0
