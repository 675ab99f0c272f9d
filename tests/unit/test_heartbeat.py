"""Heartbeat and lease of a rank, and what its supervisor sees of its process from outside."""

import asyncio
import math
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import tiny_job
from tests.support.processes import ended_on_failure
from trainer.comm.timer import CommTimer
from trainer.comm.torch_backend import TorchBackend, _Reducer
from trainer.supervise.rank import rank_report
from trainer.world import heartbeat
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World
from trainer.world.lease import Lease, watch


@pytest.fixture
def memory(tmp_path: Path) -> mmap.mmap:
    """The supervisor's side."""
    return heartbeat.make(tmp_path)


@pytest.fixture
def rank(tmp_path: Path, memory: mmap.mmap) -> Heartbeat:
    return Heartbeat.open({"CLIPSHIP_RANK_DIR": str(tmp_path)})


def test_supervisor_reads_what_the_rank_writes(memory: mmap.mmap, rank: Heartbeat) -> None:
    heartbeat.limit_init(memory, 30.0)
    before = heartbeat.read(memory)
    assert (before.phase, before.limit_s, before.collectives, before.late) == ("init", 30.0, 0, False)
    rank.limits = {"evaluation": 0.0}
    rank.begin_phase("step", 7)
    rank.begin_collective("all_gather")
    heartbeat.limit_init(memory, 30.0)
    state = heartbeat.read(memory)
    assert (state.phase, state.step, state.steps_done) == ("step", 7, 6)
    assert (state.collectives, state.collective, state.waiting) == (1, "all_gather", True)
    assert (state.limit_s, state.late) == (math.inf, False)
    rank.set_waiting(False)
    rank.begin_phase("evaluation", 8)
    state = heartbeat.read(memory)
    assert (state.collectives, state.waiting, state.late, state.steps_done) == (1, False, True, 8)
    rank.begin_phase("shutdown", 8)
    assert heartbeat.read(memory).steps_done == math.inf, "what it leaves for is not known"


def test_a_wait_in_a_collective_that_began_before_another_one_is_named(
    memory: mmap.mmap, rank: Heartbeat
) -> None:
    timer = CommTimer(torch.device("cpu"), rank)
    with timer.starting("all_gather of features", 8):
        pass
    assert not heartbeat.read(memory).waiting
    with timer.span("all_reduce", 4):
        pass
    with pytest.raises(ValueError, match="hung"), timer.waiting("all_gather of features"):
        raise ValueError("hung")
    state = heartbeat.read(memory)
    assert (state.collective, state.waiting, state.collectives) == ("all_gather of features", True, 2)
    assert timer.pop_bytes() == 12


def test_people_see_the_stage_of_a_rank_s_start(tmp_path: Path, memory: mmap.mmap, rank: Heartbeat) -> None:
    before = heartbeat.read(memory)
    assert (before.phase, before.stage) == ("init", "loading torch")
    rank.begin_stage("restoring state")
    state = heartbeat.peek(tmp_path / "heartbeat")
    assert (state.phase, state.stage) == ("init", "restoring state")
    assert before.stage_began <= state.stage_began <= time.monotonic()


def test_no_reader_sees_half_of_a_write(memory: mmap.mmap, rank: Heartbeat) -> None:
    """Step and count move together in every block that is written."""
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            rank._step = rank._collectives + 1
            rank.begin_collective("x")

    rank.begin_collective("x")
    rank._step = 1
    rank.set_waiting(False)
    writer = threading.Thread(target=write)
    writer.start()
    apart: set[int] = set()
    steps: set[int] = set()
    limit = time.monotonic() + 60
    while len(steps) < 20 and time.monotonic() < limit:
        state = heartbeat.read(memory)
        apart.add(state.step - state.collectives)
        steps.add(state.step)
    done.set()
    writer.join()
    assert apart == {0}
    assert len(steps) == 20


# A reduction of gradients that fails leaves its rank in the collective, so that it is no first cause.

Future = torch.futures.Future[Tensor]


@pytest.fixture
def comm(rank: Heartbeat) -> Iterator[TorchBackend]:
    backend = TorchBackend(tiny_job(), World(0, 1, 0, 1, "here", "test"), torch.device("cpu"), rank)
    yield backend
    backend.close()


def at_once(_state: object, _bucket: object) -> Future:
    raise RuntimeError("Connection closed by peer")


def later(_state: object, _bucket: object) -> Future:
    future = Future()
    future.set_exception(RuntimeError("Connection reset by peer"))  # type: ignore[arg-type]
    return future


@pytest.mark.parametrize("hook", [at_once, later])
def test_a_rank_whose_backward_pass_meets_a_lost_peer_waits_in_the_collective(
    comm: TorchBackend, memory: mmap.mmap, hook: Callable[[object, object], Future]
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    reducer = _Reducer(model, tiny_job().comm.torch, False, comm._timer, torch.device("cpu"))
    reducer.module(torch.ones(2, 3)).sum().backward()
    assert heartbeat.read(memory).waiting
    reducer.finish()
    state = heartbeat.read(memory)
    assert (state.collective, state.waiting) == ("all_reduce of gradients", False)
    reducer._hook = hook
    loss = reducer.module(torch.ones(2, 3)).sum()
    assert not heartbeat.read(memory).waiting
    with pytest.raises(RuntimeError, match="by peer"):
        loss.backward()
    state = heartbeat.read(memory)
    assert (state.collective, state.waiting) == ("all_reduce of gradients", True)


# The lease, by which a rank ends itself if its supervisor stands still.


def test_lease_runs_out_once_it_is_not_renewed_in_time_in_which_the_rank_itself_was_not_stopped() -> None:
    looks = [0.5 * number for number in range(1, 400)]
    for last, first in ((0.0, 7.0), (3.0, 9.5)):
        lease = Lease(0.0)
        ends = (now for now in looks if lease.has_run_out(last * (now >= last), 6.0, now))
        assert next(ends) == first
    lease = Lease(0.0)
    assert not any(lease.has_run_out(5.0 * (now // 5.0), 6.0, now) for now in looks), "it is renewed"
    lease = Lease(0.0)
    assert not lease.has_run_out(0.0, 6.0, 0.5)
    assert not lease.has_run_out(0.0, 6.0, 3600.0), "the whole node was suspended"
    assert not lease.has_run_out(3600.1, 6.0, 3600.5)
    assert not any(Lease(0.0).has_run_out(0.0, 0.0, now) for now in range(1000)), "there is no lease"


def test_watch_goes_on_while_the_lease_is_renewed() -> None:
    ended = threading.Event()
    renewals = iter([(1.0, 0.001), (2.0, 0.001), (3.0, 0.001)])
    watch(lambda: next(renewals, (3.0, 0.001)), ended.set, poll_s=0.01).join(60)
    assert ended.is_set()
    assert next(renewals, None) is None


# What a supervisor sees of its rank's process.

SLEEPER = "import time; print('begun', flush=True); time.sleep(60)"


@contextmanager
def sleeper(folder: Path) -> Iterator[Any]:
    (folder / "sleeper.py").write_text(SLEEPER)
    command = [sys.executable, "-m", "trainer.supervise.rank.rank_start", "sleeper"]
    path = f"{folder}:{Path(__file__).parents[2]}"
    env = {**os.environ, "CLIPSHIP_RANK_DIR": str(folder), "PYTHONPATH": path}
    started: Any = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    with ended_on_failure(started) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield process


def stack_of(pid: int, folder: Path) -> str:
    return asyncio.run(rank_report.python_stack(pid, folder))


def test_a_process_tells_its_stack_unless_it_is_stopped_or_gone(tmp_path: Path, memory: mmap.mmap) -> None:
    """On a busy machine it answers late, or in pieces."""
    assert "has not started Python" in stack_of(os.getpid(), tmp_path)
    limit = time.monotonic() + 60
    with sleeper(tmp_path) as process:
        while 'sleeper.py", line 1' not in (stack := stack_of(process.pid, tmp_path)):
            assert time.monotonic() < limit, stack
        assert not rank_report.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert rank_report.is_stopped(process.pid)
        found = rank_report.report(3, "n", process.pid, heartbeat.read(memory))
        assert found.state == "stopped by a signal"
        assert stack_of(process.pid, tmp_path) == "no Python stack: the process is stopped by a signal"
        process.kill()
    assert not rank_report.is_stopped(process.pid)
    assert rank_report.state_of(process.pid) == "gone"


def test_a_rank_that_ends_while_it_is_asked_for_its_stack_ends_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / rank_report.STACK_FILE
    file.touch()
    monkeypatch.setattr(os, "kill", lambda *_: file.unlink())
    assert stack_of(os.getpid(), tmp_path) == "no Python stack: the process has ended"


def test_only_a_process_that_stays_stopped_is_reported() -> None:
    now = 0.0
    watch = rank_report.StoppedRank(lambda: now)

    def after(seconds: float, pid: int = 1, *, is_stopped: bool = True) -> bool:
        nonlocal now
        now += seconds
        return watch.is_lasting(pid, is_stopped=is_stopped)

    lasting_s = rank_report.STOPPED_S
    assert [after(0.0), after(lasting_s - 0.1), after(0.1)] == [False, False, True]
    assert not after(0.0, is_stopped=False)  # somebody sent SIGCONT
    assert [after(0.0), after(lasting_s, pid=2), after(lasting_s, pid=2)] == [False, False, True]
    watch.forget()  # the supervisor itself was suspended
    assert [after(lasting_s, pid=2), after(lasting_s, pid=2)] == [False, True]
