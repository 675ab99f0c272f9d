"""The figures of all ranks, and what they say together."""

import json
import sys
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.comm.protocol import Comm
from trainer.telemetry.rank_stats import Machine, RankStats, summarize
from trainer.telemetry.records import Lap

QUIET = [0.0, 0.1, 0.0, 0.0, 1.0, 1e9, 0.0, 0.0, 0.0]
LAP = Lap(10, 1.0, 3.0, 1.0, 0.0)


def test_slowest_rank_is_that_of_the_most_work_not_of_the_longest_wait() -> None:
    waits, works = [0.0, 0.1, 0.4, *QUIET[3:]], [0.3, 0.2, 0.0, *QUIET[3:]]
    found = summarize([QUIET, waits, works])
    assert (found["slowest_rank"], found["slowest_by"]) == (2, 5.0)
    assert found["straggler_s"] == pytest.approx(0.4)
    assert (found["data_s_max"], found["data_s_median"], found["comm_s_min"]) == (0.3, 0.0, 0.0)
    assert not {"gpu_bytes_max", "gpu_joules"} & found.keys()
    of_two = summarize([QUIET, [0.0, 0.3, *QUIET[2:]]])
    assert of_two["slowest_by"] == pytest.approx(3.0), "it is compared with the other"
    alone = summarize([[0.2, *QUIET[1:]]])
    assert (alone["slowest_by"], alone["straggler_s"], alone["data_s_median"]) == (1.0, 0.0, 0.2)


def test_figures_of_gpus_are_the_most_bytes_the_least_load_and_the_sum_of_energy() -> None:
    found = summarize([[*QUIET[:6], share, size, 5.0] for share, size in ((0.9, 7.0), (0.5, 9.0))])
    assert (found["gpu_bytes_max"], found["gpu_share_min"], found["gpu_joules"]) == (9.0, 0.5, 10.0)


def test_each_record_is_a_row_and_a_resumed_run_has_each_step_once(alone: Comm, tmp_path: Path) -> None:
    first, path = RankStats(alone, tmp_path), tmp_path / "ranks.jsonl"
    alone.all_gather(torch.zeros(10))
    counts = {"bad_samples": 3.0, "read_requests": 7.0}
    about, totals, values = first.gather(10, LAP, counts, [torch.tensor(0.5)])()
    first.gather(20, LAP, {})()
    assert (totals, values) == (counts, [[0.5]])
    assert (about["comm_bytes"], about["comm_share"]) == (4, 0.2)
    assert about["rss_bytes_max"] > 1e6
    whole = first.summary()
    assert whole.pop("rss_bytes_max") > 1e6
    shares = {"data_share": 0.2, "comm_share": 0.2, "checkpoint_share": 0.0}
    assert whole == {**shares, "step_s": 0.5, "comm_bytes": 2, "slowest_rank": 0, "slowest_share": 1.0}
    again = RankStats(alone, tmp_path, steps_done=10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10]
    with path.open("a") as file:
        file.write('{"step": 10, "data')  # a row that a full disk has cut takes no other with it
    again.gather(20, LAP, {})()
    one, _, two = path.read_text().splitlines()
    assert [(json.loads(line)["step"], json.loads(line)["generation"]) for line in (one, two)] == [
        (10, 1), (20, 1)
    ]  # fmt: skip
    assert json.loads(one)["compute_s"] == [0.3]


def test_rows_that_a_full_disk_takes_are_told_once(
    alone: Comm, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.telemetry.rank_stats.append_line", full)
    stats = RankStats(alone, tmp_path)
    for step in (10, 20):
        stats.gather(step, LAP, {})()
    (record,) = caplog.records
    assert record.message.startswith("metrics      NOT WRITTEN: [Errno 28] No space left on device. The run")
    assert record.message.endswith("goes on, but ranks.jsonl will have gaps.")


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
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda _uuid: object(),
        nvmlDeviceGetTotalEnergyConsumption=energy,
        nvmlDeviceGetMemoryInfo=lambda _gpu: SimpleNamespace(used=7),
        nvmlDeviceGetUtilizationRates=lambda _gpu: SimpleNamespace(gpu=50),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert Machine(torch.device("cpu")).sample()[2:] == (0.0, 0.0, 0.0)
    monkeypatch.setattr("trainer.telemetry.rank_stats.uuid_of", lambda _device: "GPU-1")
    machine = Machine(torch.device("cuda"))
    assert [machine.sample()[2:] for _ in range(3)] == [(0.5, 7.0, joules) for joules in (250.0, 0.0, 0.0)]
