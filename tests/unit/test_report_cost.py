"""The report says what a run takes: time left and taken, hours of GPUs, energy."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.report_folders import long_run, restarted_run
from trainer.report.cost import energy_j, gpu_hours, left_s, samples_per_s, taken_s, total_steps
from trainer.report.folder import read_run
from trainer.report.headline import tiles
from trainer.report.wording import energy_of
from trainer.sysinfo.accelerators import CUDA
from trainer.telemetry.goodput import by_generation
from trainer.telemetry.rank_stats import Machine


def shown(folder: Path) -> dict[str, str]:
    return {tile.label: tile.value for tile in tiles(read_run(folder))}


def test_unfinished_run_has_the_time_left_and_a_finished_one_what_it_took(tmp_path: Path) -> None:
    going = long_run(tmp_path / "going", steps=100, every=50, finished=False)
    job = going / "job.toml"
    job.write_text(job.read_text().replace("steps = 100", "steps = 300"))
    facts = read_run(going)
    mean = sum(record["step_s"] for record in facts.metrics.records[1:]) / 2
    assert left_s(facts) == pytest.approx(200 * mean)
    assert "time left" in shown(going)
    done = long_run(tmp_path / "done")
    assert shown(done)["time"] == "41:00"
    assert "time left" not in shown(done)


def test_time_left_and_speed_leave_out_the_first_step_after_each_new_start(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", steps=1000, every=100, finished=False)
    took = {1: 90.5, 900: 0.5, 901: 60.5, 910: 0.5}
    lines = [
        {"step": step, "loss": 1.0, "step_s": seconds, "samples_per_s": 50 / seconds}
        for step, seconds in took.items()
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = [
        {"event": "begin", "start": start, "from_step": step, "time": 1000.0 + step}
        for start, step in (("a", 0), ("b", 900))
    ]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    facts = read_run(folder)
    assert left_s(facts) == 90 * 0.5
    assert samples_per_s(facts) == 100.0


def test_length_that_follows_from_epochs_is_in_the_log(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", finished=False)
    (folder / "job.toml").write_text("[optim]\nepochs = 2\n")
    assert total_steps(read_run(folder)) is None
    assert left_s(read_run(folder)) is None
    (folder / "logs" / "rank-00000.log").write_text("INFO step   20/4000  epoch 1\n")
    assert total_steps(read_run(folder)) == 4000


def test_steps_of_an_unfinished_run_of_several_stages_are_those_of_all(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run", steps=100, every=50, finished=False)
    (folder / "job.toml").write_text("[optim]\nsteps = 60\n[[stage]]\nsteps = 80\n")
    (folder / "logs" / "rank-00000.log").write_text("INFO step 100/140  epoch 1\n")
    assert [tile.note for tile in tiles(read_run(folder)) if tile.label == "steps"] == ["of 140"]


def test_each_generation_counts_with_the_gpus_that_it_had(tmp_path: Path) -> None:
    facts = read_run(restarted_run(tmp_path / "run"))
    first, second, third = (its.whole_s for its in by_generation(facts.times))
    assert gpu_hours(facts) == pytest.approx((4 * first + 6 * second + 4 * third) / 3600)
    assert taken_s(facts) == pytest.approx(first + second + third)


def test_each_start_counts_with_the_gpus_that_it_had(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")  # its last start had four
    lines = [
        {"event": "begin", "start": "a", "generation": 1, "ranks": 8, "began": 100.0, "time": 200.0},
        {"event": "end", "start": "a", "exit_code": 75, "time": 1000.0},
        {"event": "begin", "start": "b", "generation": 1, "ranks": 4, "began": 5000.0, "time": 5010.0},
        {"event": "end", "start": "b", "exit_code": 0, "time": 5100.0},
    ]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gpu_hours(read_run(folder)) == pytest.approx((8 * 900 + 4 * 100) / 3600)


def test_run_on_cpus_has_no_gpu_hours(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    assert gpu_hours(read_run(folder)) == pytest.approx(4 * 2460.5 / 3600)
    (folder / "environment.json").write_text(json.dumps([{"rank": "0", "device": "cpu"}]))
    assert gpu_hours(read_run(folder)) is None
    assert "GPU-hours" not in shown(folder)


def test_a_gpu_is_named_by_its_driver_in_what_a_rank_writes(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    own = [{"rank": "0", "device": "NVIDIA H100 80GB HBM3"}]
    (folder / "environment.json").write_text(json.dumps(own))
    assert gpu_hours(read_run(folder)) == pytest.approx(2460.5 / 3600)


def test_energy_is_the_sum_of_the_records(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    assert energy_j(read_run(folder)) is None
    lines = [{"step": step, "loss": 1.0, "gpu_joules": 1.8e6} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert shown(folder)["energy of GPUs"] == "1 kWh"
    assert [energy_of(joules) for joules in (1800, 9e6, 7.2e9)] == ["0.5 Wh", "2.5 kWh", "2 MWh"]


def test_epoch_counts_from_1_for_people(tmp_path: Path) -> None:
    notes = {
        tile.label: tile.note for tile in tiles(read_run(long_run(tmp_path / "run", steps=90, every=30)))
    }
    assert notes["samples"] == "epoch 1"


def test_joules_are_those_since_the_last_sample_and_none_where_a_gpu_counts_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NVMLError(Exception):
        pass

    counted = iter([5_000_000, 5_250_000, None, 5_500_000])

    def energy(_gpu: object) -> int:
        if (value := next(counted)) is None:
            raise NVMLError
        return value

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetMemoryInfo=lambda _gpu: SimpleNamespace(used=7),
        nvmlDeviceGetUtilizationRates=lambda _gpu: SimpleNamespace(gpu=50),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    machine = Machine(torch.device("cpu"))
    assert machine.sample()[4] == 0.0
    machine._monitor, machine._gpu = CUDA.monitor, object()
    machine._energy_mj = machine._counted_mj()
    samples = [machine.sample() for _ in range(3)]
    assert [sample[4] for sample in samples] == [250.0, 0.0, 0.0]
    assert samples[0][2:4] == (0.5, 7.0)
