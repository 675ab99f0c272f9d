"""Who is slow: told by all ranks every few steps, named when it lasts, and not for trifles.

A rank's own work is its time without communication, which on a GPU is known only when it is asked for.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.comm.protocol import Comm
from trainer.config.recovery import Health
from trainer.telemetry.stragglers import StragglerDetector
from trainer.world.condemned import condemned

EVERY = 5
HEALTH = Health(slow_rank_factor=1.5)


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
    monkeypatch.setattr("trainer.telemetry.stragglers.time", SimpleNamespace(perf_counter=lambda: now.s))
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
        assert condemned(tmp_path) == {}
        list(its.receive([1.0, 1.0]))
    for _ in range(20):
        list(its.receive([1.0, 3.0]))
    assert condemned(tmp_path) == {"here": "rank 1 there took 3.0 times the median for 100 steps"}
    assert its.slow_ranks == {1: 28}
    said = "slow rank    rank 1 on here works 3.000 s per step, the median of all ranks is 1.000 s: all ranks"
    assert caplog.records[-1].getMessage().startswith(said)
