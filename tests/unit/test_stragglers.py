"""Time that counts as a rank's own work on a GPU.

The time of communication there is known only when it is asked for.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.comm.protocol import Comm
from trainer.config.recovery import Health
from trainer.telemetry.stragglers import CONDEMNED_EXCHANGES, EVERY, StragglerDetector
from trainer.world.condemned import condemned


class GpuComm:
    """Two ranks, a GPU, and so many seconds of communication a step."""

    world = SimpleNamespace(rank=0, size=2, node="here")
    device = SimpleNamespace(type="cuda")

    def __init__(self) -> None:
        self.seconds = 0.0

    def all_gather_object(self, value: object) -> list[object]:
        return [value, value]

    def pop_seconds(self) -> float:
        found, self.seconds = self.seconds, 0.0
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("trainer.telemetry.stragglers.time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


@pytest.mark.parametrize("logged_after", [None, 1, 3, EVERY])
def test_communication_never_counts_as_a_ranks_own_work(clock: Any, logged_after: int | None) -> None:
    comm = GpuComm()
    detector = StragglerDetector(Health(slow_rank_factor=1.5), cast(Comm, comm))
    logged = 0.0
    for step in range(1, EVERY + 1):
        with detector.step():
            clock.s += 1.0
            comm.seconds += 0.4
        if step == logged_after:
            logged = detector.pop_comm_s()
    assert detector.contribution() == [pytest.approx(0.6), 0.0]
    assert logged == pytest.approx(0.4 * (logged_after or 0))
    assert logged + detector.pop_comm_s() == pytest.approx(0.4 * EVERY)


def test_communication_outside_of_steps_counts_for_no_step(clock: Any) -> None:
    """An evaluation after the third step of a window."""
    comm = GpuComm()
    detector = StragglerDetector(Health(slow_rank_factor=1.5), cast(Comm, comm))
    for step in range(1, EVERY + 1):
        with detector.step():
            clock.s += 1.0
            comm.seconds += 0.4
        if step == 3:
            with detector.aside():
                clock.s += 100.0
                comm.seconds += 50.0
    assert detector.contribution() == [pytest.approx(0.6), 0.0]
    assert detector.pop_comm_s() == pytest.approx(0.4 * EVERY)


def test_node_whose_rank_stays_slow_is_condemned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    monkeypatch.setenv("CLIPSHIP_RANK_DIR", str(tmp_path))
    detector = StragglerDetector(Health(slow_rank_factor=1.5), cast(Comm, GpuComm()))
    for _ in range(CONDEMNED_EXCHANGES - 1):
        assert not list(tmp_path.iterdir())
        list(detector.receive([1.0, 3.0]))
    list(detector.receive([1.0, 1.0]))
    for _ in range(CONDEMNED_EXCHANGES - 1):
        list(detector.receive([1.0, 3.0]))
    assert condemned(tmp_path) == {}, "it was well in between"
    list(detector.receive([1.0, 3.0]))
    assert condemned(tmp_path) == {"here": "rank 1 there took 3.0 times the median for 100 steps"}
