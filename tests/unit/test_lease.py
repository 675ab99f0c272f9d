"""Lease of a rank: it ends itself if its supervisor stands still."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.support.processes import ended_on_failure
from trainer.world import heartbeat
from trainer.world.heartbeat import Heartbeat
from trainer.world.lease import Lease, watch

RANK = """
import subprocess, sys, time
from pathlib import Path
from trainer.world.heartbeat import Heartbeat
from trainer.world.lease import watch
loader = subprocess.Popen(["sleep", "600"])
print(loader.pid, flush=True)
heartbeat = Heartbeat.open({"CLIPSHIP_RANK_DIR": sys.argv[1]})
watch(heartbeat.lease, poll_s=0.02)
time.sleep(600)
"""


def looks(lease: Lease, renewals: dict[float, float], until: float, turn_s: float = 0.5) -> list[float]:
    """Times of the looks at which the lease of 6 s has run out; `renewals` says when it was renewed last."""
    times = [turn_s * number for number in range(1, int(until / turn_s) + 1)]
    return [
        now for now in times if lease.has_run_out(max(at for at in renewals.values() if at <= now), 6.0, now)
    ]


def test_lease_that_is_not_renewed_runs_out() -> None:
    lease = Lease(0.0)
    assert looks(lease, {0: 0.0, 1: 3.0}, 20.0)[0] == 9.5


def test_lease_that_is_renewed_never_runs_out() -> None:
    lease = Lease(0.0)
    assert looks(lease, {number: 5.0 * number for number in range(200)}, 900.0) == []


def test_time_in_which_the_rank_itself_was_stopped_does_not_count() -> None:
    lease = Lease(0.0)
    assert not lease.has_run_out(0.0, 6.0, 0.5)
    assert not lease.has_run_out(0.0, 6.0, 3600.0), "the whole node was suspended"
    assert not lease.has_run_out(3600.1, 6.0, 3600.5)


def test_no_lease_never_runs_out() -> None:
    lease = Lease(0.0)
    assert not any(lease.has_run_out(0.0, 0.0, now) for now in range(1000))


def test_supervisor_renews_the_lease_through_the_heartbeat(tmp_path: Path) -> None:
    memory = heartbeat.make(tmp_path)
    rank = Heartbeat(memory, {})
    assert rank.lease() == (0.0, 0.0)
    heartbeat.renew_lease(memory, 60.0)
    before = rank.lease()
    heartbeat.renew_lease(memory, 60.0)
    assert before[1] == rank.lease()[1] == 60.0
    assert 0.0 < before[0] <= rank.lease()[0] <= time.monotonic()
    rank.begin_phase("step", 3)
    rank.reach("stepped")
    assert rank.lease()[1] == 60.0, "what the rank writes does not touch it"
    assert not rank.stop_requested


def test_rank_whose_supervisor_stands_still_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    heartbeat.renew_lease(heartbeat.make(tmp_path), 0.2)
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    with ended_on_failure(
        subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    ) as process:
        assert process.stdout is not None
        loader = int(process.stdout.readline())
        assert process.wait(60) == -signal.SIGKILL
        while Path(f"/proc/{loader}").exists() and " Z " not in Path(f"/proc/{loader}/stat").read_text():
            time.sleep(0.02)


def test_watch_goes_on_while_the_lease_is_renewed() -> None:
    ended = threading.Event()
    renewals = iter([(1.0, 0.001), (2.0, 0.001), (3.0, 0.001)])
    last = [(3.0, 0.001)]
    watch(lambda: next(renewals, last[0]), ended.set, poll_s=0.01).join(60)
    assert ended.is_set()
    assert next(renewals, None) is None
