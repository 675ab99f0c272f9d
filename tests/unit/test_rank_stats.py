"""The figures of all ranks, and what they say together."""

import sys
from types import SimpleNamespace

import pytest
import torch

from trainer.telemetry.rank_stats import Machine, summarize

QUIET = [0.0, 0.1, 0.0, 0.0, 1.0, 1e9, 0.0, 0.0, 0.0]


def test_figures_of_gpus_are_the_most_bytes_the_least_load_and_the_sum_of_energy() -> None:
    found = summarize([[*QUIET[:6], share, size, 5.0] for share, size in ((0.9, 7.0), (0.5, 9.0))])
    assert (found["gpu_bytes_max"], found["gpu_share_min"], found["gpu_joules"]) == (9.0, 0.5, 10.0)


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
