"""Console lines and metrics of a run while it trains."""

import json
import logging
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.jobs import tiny_job
from trainer.comm.protocol import Comm
from trainer.telemetry.metrics import Telemetry
from trainer.telemetry.pictures import Picture
from trainer.telemetry.rank_stats import Machine, RankStats, StragglerDetector, summarize
from trainer.telemetry.records import Lap, Record
from trainer.train.loop import HostPace

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


@pytest.mark.parametrize("told", ["write", "show", "close"])
def test_services_that_fail_end_no_run_are_named_once_and_the_others_are_told(
    told: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[object] = []

    def refuse(*_: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    def writer(name: str, hear: Callable[..., None]) -> Any:
        return SimpleNamespace(name=name, write=hear, show=hear, close=hear)

    writers = [writer("W&B", refuse), writer("MLflow", lambda *what: heard.append(what))]
    with Telemetry(None, 10, writers=writers) as telemetry:
        for step in (1, 2):
            if told == "write":
                telemetry.event({"step": step})
            elif told == "show":
                telemetry.show(step, [Picture(b"", "", 1, ())])
    assert len(heard) == (1 if told == "close" else 3)
    said = NOT_WRITTEN.format("[Errno 28] No space left on device", "W&B")
    assert [record.message for record in caplog.records] == [said]


def test_what_cannot_be_a_line_of_metrics_jsonl_is_raised(tmp_path: Path) -> None:
    with pytest.raises(TypeError), Telemetry(tmp_path / "metrics.jsonl", 10) as telemetry:
        telemetry.event({"step": 1, "loss": object()})


# The figures of all ranks, and what they say together.

QUIET = [0.0, 0.1, 0.0, 0.0, 1.0, 1e9, 0.0, 0.0, 0.0]


def test_figures_of_gpus_are_the_most_bytes_the_least_load_and_the_sum_of_energy() -> None:
    found = summarize([[*QUIET[:6], share, size, 5.0] for share, size in ((0.9, 7.0), (0.5, 9.0))])
    assert (found["gpu_bytes_max"], found["gpu_share_min"], found["gpu_joules"]) == (9.0, 0.5, 10.0)


def test_each_record_is_a_row_and_a_resumed_run_has_each_step_once(
    alone: Comm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lap, path = Lap(10, 1.0, 3.0, 1.0, 0.0), tmp_path / "ranks.jsonl"
    first = RankStats(alone, tmp_path)
    counts = {"bad_samples": 3.0, "read_requests": 7.0}
    about, totals, values = first.gather(10, lap, counts, [torch.tensor(0.5)])()
    first.gather(20, lap, {})()
    assert (totals, values, about["comm_share"]) == (counts, [[0.5]], 0.2)
    whole = first.summary()
    assert (whole["data_share"], whole["step_s"], whole["slowest_share"]) == (0.2, 0.5, 1.0)
    again = RankStats(alone, tmp_path, steps_done=10)
    with path.open("a") as file:
        file.write('{"step": 10, "data')  # a row that a full disk has cut takes no other with it
    again.gather(20, lap, {})()
    one, _, two = path.read_text().splitlines()
    assert (json.loads(one)["step"], json.loads(two)["step"]) == (10, 20)
    assert json.loads(one)["compute_s"] == [0.3]
    path.unlink()
    path.mkdir()
    for _ in range(2):
        again.gather(30, lap, {})()
    (record,) = caplog.records
    assert record.message.startswith("metrics      NOT WRITTEN: [Errno ")
    assert record.message.endswith("The run goes on, but ranks.jsonl will have gaps.")


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


# Who is slow: told by all ranks every few steps, named when it lasts, and not for trifles.
# A rank's own work is its time without communication, which on a GPU is known only when it is asked for.

EVERY = 5
HEALTH = tiny_job(health={"slow_rank_factor": 1.5}).health


class GpuComm:
    """A rank with a GPU, and so many seconds of communication a step."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.world, self.seconds = SimpleNamespace(rank=rank, size=size, node="here"), 0.0

    def all_gather_object(self, value: object) -> list[object]:
        return [value] * self.world.size

    def pop_seconds(self) -> float:
        found, self.seconds = self.seconds, 0.0
        return found


def detector(comm: GpuComm) -> StragglerDetector:
    return StragglerDetector(HEALTH, cast(Comm, comm))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("trainer.telemetry.rank_stats.time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


@pytest.mark.parametrize("logged_after", [None, 1, 3, EVERY])
def test_communication_never_counts_as_a_ranks_own_work(clock: Any, logged_after: int | None) -> None:
    comm = GpuComm()
    its, logged = detector(comm), 0.0
    for step in range(1, EVERY + 1):
        assert its.contribution() == []
        with its.step():
            clock.s += 1.0
            comm.seconds += 0.4
        if step == 3:  # an evaluation is no step
            with its.aside():
                clock.s += 100.0
                comm.seconds += 50.0
        if step == logged_after:
            logged = its.pop_comm_s()
    assert its.contribution() == [pytest.approx(0.6), 0.0]
    assert logged == pytest.approx(0.4 * (logged_after or 0))
    assert logged + its.pop_comm_s() == pytest.approx(0.4 * EVERY)


def told(clock: Any, seconds: Sequence[float], exchanges: int) -> list[list[tuple[int, float, float]]]:
    """What the last rank is told at each exchange of ranks that take so many seconds a step."""
    ranks = [detector(GpuComm(rank, len(seconds))) for rank in range(len(seconds))]
    found = []
    for _ in range(exchanges):
        for its, own_s in zip(ranks, seconds, strict=True):
            for _ in range(EVERY):
                with its.step():
                    clock.s += own_s
        sums = [sum(shares) for shares in zip(*(its.contribution() for its in ranks), strict=True)]
        events = list(ranks[-1].receive(sums))
        found.append([(e["slow_rank"], round(e["own_s"], 3), round(e["median_s"], 3)) for e in events])
    return found


def test_rank_that_stays_slow_is_named_with_its_time_and_the_median(clock: Any) -> None:
    assert told(clock, [1.0, 1.1, 2.0], 3) == [[], [(2, 2.0, 1.1)], []], "not at each telling"
    assert told(clock, [1.0, 2.0], 2)[1] == [(1, 2.0, 1.0)], "of two ranks, the faster one is usual"
    assert told(clock, [0.001, 0.009], 2) == [[], []], "milliseconds"


def test_node_whose_rank_stays_slow_is_condemned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CLIPSHIP_RANK_DIR", str(tmp_path))
    its = detector(GpuComm())
    for seconds in (9.0, 1.0, 9.0):
        assert not list(its.receive([1.0, seconds])), "slow steps that do not follow each other"
    list(its.receive([1.0, 1.0]))
    for _ in range(2):
        for _ in range(19):
            list(its.receive([1.0, 3.0]))
        assert not (tmp_path / "condemned.json").exists()
        list(its.receive([1.0, 1.0]))
    for _ in range(20):
        list(its.receive([1.0, 3.0]))
    told = json.loads((tmp_path / "condemned.json").read_text())
    assert told == {"here": "rank 1 there took 3.0 times the median for 100 steps"}
    assert its.slow_ranks == {1: 28}
    said = "slow rank    rank 1 on here works 3.000 s per step, the median of all ranks is 1.000 s: all ranks"
    assert caplog.records[-1].getMessage().startswith(said)


# A host that its GPU waits for is told so once, and no other.


def said(
    pace: HostPace, laps: list[Lap], waited_s: float, elsewhere_s: float, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """Returns what is said over the laps, in each of which the host waits so long for the GPU."""
    caplog.set_level(logging.INFO, "clipship")
    for number, lap in enumerate(laps, 1):
        with pace.waiting():
            time.sleep(waited_s)
        pace.record(lap, 30.0 + number * elsewhere_s)
    return [record.getMessage() for record in caplog.records]


SHORT, LONG = Lap(10, compute_s=0.01), Lap(10, compute_s=0.5)


def test_a_host_that_never_waits_is_told_once_what_helps(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = said(HostPace(advises=True), [SHORT, *[LONG] * 12], 0.0, 0.0, caplog)
    assert message.startswith("speed        the GPU waits for the host, which needs 50.0 ms for a step: ")
    assert "model.cuda_graphs = true" in message


@pytest.mark.parametrize(
    ("advises", "laps", "waited_s", "elsewhere_s"),
    [
        (False, [LONG] * 13, 0.0, 0.0),
        (True, [LONG] * 5, 0.0, 0.0),
        (True, [SHORT] * 13, 0.001, 0.0),
        (True, [LONG] * 13, 0.0, 0.05),
        (True, [Lap(10, compute_s=0.5, data_s=0.25)] * 13, 0.0, 0.0),
    ],
    ids=["another rank", "too few steps", "a GPU that works", "waits in the reduction", "a slow loader"],
)
def test_others_are_told_nothing(
    advises: bool, laps: list[Lap], waited_s: float, elsewhere_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(HostPace(advises=advises), laps, waited_s, elsewhere_s, caplog) == []
