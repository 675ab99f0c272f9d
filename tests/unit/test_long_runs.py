"""Looking at a run and starting it again take no longer for many steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.report_pages import state
from trainer.telemetry.goodput_recorder import GoodputRecorder
from trainer.telemetry.metrics import Telemetry
from trainer.telemetry.records import Lap, Record

STEPS = 800


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
    """A run that evaluates every 200 steps and was started again after half of them."""
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
                if not step % 200:
                    telemetry.event({"step": step, "zero_shot_top1": step / STEPS})
                    recorder.save(step)
    return tmp_path


def test_status_sums_up_a_long_run_without_reading_all_of_it(run: Path, parsed: list[int]) -> None:
    parsed.clear()
    found = state(run)
    assert len(parsed) < STEPS / 4
    assert (found["step"], found["evaluation"]) == (STEPS, {"step": STEPS, "zero_shot_top1": 1})
    assert (found["reading"]["requests"], found["reading"]["bytes"]) == (2 * STEPS, 1000 * STEPS)
    assert found["energy_j"] == STEPS / 2
    lines = [json.loads(line) for line in (run / "goodput.jsonl").read_text().splitlines()]
    each = [{name: value for name, value in line.items() if name != "so_far"} for line in lines]
    (run / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
    of_all_lines = state(run)
    assert found["useful_share"] == pytest.approx(of_all_lines["useful_share"])
    assert found["lost_s"] == pytest.approx(of_all_lines["lost_s"])
    assert found["lost_s"]["redone"] > 0
