"""The heartbeat, and what is seen of a process from outside."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.processes import ended_on_failure
from trainer.comm.timer import CommTimer
from trainer.run.exit_record import RANK_DIR
from trainer.supervise.rank.rank_report import STACK_FILE, python_stack, report, state_of
from trainer.world import heartbeat
from trainer.world.heartbeat import Heartbeat


def test_supervisor_reads_what_the_rank_writes(tmp_path: Path) -> None:
    memory = heartbeat.make(tmp_path)
    heartbeat.limit_init(memory, 30.0)
    before = heartbeat.read(memory)
    assert (before.phase, before.limit_s, before.collectives, before.late) == ("init", 30.0, 0, False)
    rank = Heartbeat.open({RANK_DIR: str(tmp_path)})
    rank.limits = {"evaluation": 0.0}
    rank.begin_phase("step", 7)
    rank.begin_collective("all_gather")
    state = heartbeat.read(memory)
    assert (state.phase, state.step, state.collectives, state.collective, state.waiting) == (
        "step",
        7,
        1,
        "all_gather",
        True,
    )
    assert state.limit_s == math.inf
    assert not state.late
    rank.set_waiting(False)
    rank.begin_phase("evaluation", 8)
    state = heartbeat.read(memory)
    assert state.late
    assert (state.collectives, state.waiting) == (1, False)


def test_a_wait_in_a_collective_that_began_before_another_one_is_named(tmp_path: Path) -> None:
    memory = heartbeat.make(tmp_path)
    timer = CommTimer(torch.device("cpu"), Heartbeat.open({RANK_DIR: str(tmp_path)}))
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


def test_the_limit_of_init_does_not_change_a_later_phase(tmp_path: Path) -> None:
    memory = heartbeat.make(tmp_path)
    rank = Heartbeat.open({RANK_DIR: str(tmp_path)})
    rank.limits = {"step": 9.0}
    rank.begin_phase("step", 1)
    heartbeat.limit_init(memory, 30.0)
    assert heartbeat.read(memory).limit_s == 9.0


def test_supervisor_reads_the_moments_of_the_rank_s_start(tmp_path: Path) -> None:
    memory = heartbeat.make(tmp_path)
    rank = Heartbeat.open({RANK_DIR: str(tmp_path)})
    before = time.monotonic()
    assert heartbeat.moments(memory) == {}
    rank.reach("running")
    rank.begin_phase("first step", 3)
    assert [*heartbeat.moments(memory)] == ["running", "restored"]
    heartbeat.request_stop(memory)
    rank.begin_phase("step", 4)
    rank.begin_phase("data", 5)
    moments = heartbeat.moments(memory)
    assert [*moments] == ["running", "restored", "stepped"]
    assert before <= moments["running"] <= moments["restored"] <= moments["stepped"] <= time.monotonic()
    assert rank.stop_requested
    assert heartbeat.read(memory).step == 5


def test_people_see_the_stage_of_a_rank_s_start(tmp_path: Path) -> None:
    memory = heartbeat.make(tmp_path)
    before = heartbeat.read(memory)
    assert (before.phase, before.stage) == ("init", "loading torch")
    Heartbeat.open({RANK_DIR: str(tmp_path)}).begin_stage("restoring state")
    state = heartbeat.peek(tmp_path / heartbeat.HEARTBEAT_FILE)
    assert (state.phase, state.stage) == ("init", "restoring state")
    assert before.stage_began <= state.stage_began <= time.monotonic()


def test_a_rank_without_a_supervisor_has_a_heartbeat_that_nobody_reads() -> None:
    alone = Heartbeat.open({})
    alone.begin_phase("step", 1)
    alone.begin_collective("all_reduce")
    assert not alone.stop_requested


def test_time_left_in_a_phase_counts_from_its_begin(tmp_path: Path) -> None:
    heartbeat.make(tmp_path)
    rank = Heartbeat.open({RANK_DIR: str(tmp_path)})
    assert rank.remaining_s == math.inf, "the job is not known yet"
    rank.limits = {"init": 600.0, "step": 0.0}
    assert 0.0 < rank.remaining_s < 600.0
    rank.begin_phase("step", 1)
    assert rank.remaining_s == 0.0


def test_no_reader_sees_half_of_a_write(tmp_path: Path) -> None:
    """Step and count move together in every block that is written."""
    memory = heartbeat.make(tmp_path)
    rank = Heartbeat.open({RANK_DIR: str(tmp_path)})
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
    while len(steps) < 50 and time.monotonic() < limit:
        state = heartbeat.read(memory)
        apart.add(state.step - state.collectives)
        steps.add(state.step)
    done.set()
    writer.join()
    assert apart == {0}
    assert len(steps) == 50


SLEEPER = "import time; print('begun', flush=True); time.sleep(60)"


@contextmanager
def sleeper(folder: Path, program: str = SLEEPER) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "sleeper.py").write_text(program)
    command = [sys.executable, "-m", "trainer.supervise.rank.rank_start", "sleeper"]
    env = {**os.environ, RANK_DIR: str(folder), "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
    with ended_on_failure(subprocess.Popen(command, env=env, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield process


def test_stack_of_a_sleeping_process_names_its_line(tmp_path: Path) -> None:
    """On a busy machine it answers late, or in pieces."""
    limit = time.monotonic() + 60
    with sleeper(tmp_path) as process:
        while 'sleeper.py", line 1' not in (stack := asyncio.run(python_stack(process.pid, tmp_path))):
            assert time.monotonic() < limit, stack
        process.kill()


def test_stopped_process_is_said_to_be_stopped(tmp_path: Path) -> None:
    memory = heartbeat.make(tmp_path)
    with sleeper(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        while state_of(process.pid) != "stopped by a signal":
            pass
        found = report(3, "n", process.pid, heartbeat.read(memory))
        stack = asyncio.run(python_stack(process.pid, tmp_path))
        process.kill()
    assert found.state == "stopped by a signal"
    assert stack == "no Python stack: the process is stopped by a signal"


def test_process_that_has_not_begun_is_not_asked(tmp_path: Path) -> None:
    assert not (tmp_path / STACK_FILE).exists()
    assert "has not started Python" in asyncio.run(python_stack(os.getpid(), tmp_path))


def test_process_that_is_gone_is_said_to_be_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert state_of(process.pid) == "gone"
