"""A request to stop: all ranks save at the same step and leave with exit code 75.

This holds for every rank that is asked, and under every launcher.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ends import (
    CLIPSHIP,
    HOROVOD_MPIRUN,
    MPIRUN,
    Running,
    begin,
    full,
    losses,
    ranks_left,
    starts,
)
from tests.support.terminal import REPEAT_S

LONG = 100_000
NOTICE_S = 30.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, float]]:
    """Losses on a backend of twelve steps that nothing disturbs: a launcher and loaders change none."""
    known: dict[str, dict[int, float]] = {}

    def run(backend: str) -> dict[int, float]:
        if backend not in known:
            folder = tmp_path_factory.mktemp("whole")
            end = begin(folder, backend, "clipship", steps=12, deterministic=True).end()
            known[backend] = losses(end.folder)
        return known[backend]

    return run


@pytest.mark.fault("SIGTERM to the launcher")
@starts(CLIPSHIP)
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=full), pytest.param(signal.SIGUSR2, marks=full)],
)
def test_signal_to_the_run_saves_and_leaves_with_75(
    tmp_path: Path, backend: str, launcher: str, number: int
) -> None:
    running = begin(tmp_path, backend, launcher, steps=LONG)
    running.reached(3)
    first = time.monotonic()
    for _ in range(3):  # schedulers repeat themselves
        if (
            time.monotonic() - first < REPEAT_S - 1
        ):  # where this process gets no CPU for so long, it would ask to leave at once
            running.process.send_signal(number)
        time.sleep(0.2)
    end = running.all_end(75)
    assert time.monotonic() - first < NOTICE_S, "a spot instance or a KillWait would have ended it"
    assert "is saved, and the run can go on (exit code 75)" in end.errors
    step = int(end.output.partition("asked to stop: step ")[2].split()[0])
    assert f"step-{step:08d}" in end.checkpoints


@pytest.mark.fault("SIGTERM to the launcher", goes_on=True)
@starts(MPIRUN)
def test_run_that_was_stopped_goes_on_with_the_losses_of_one_that_was_not(
    tmp_path: Path, whole: Callable[[str], dict[int, float]], backend: str, launcher: str
) -> None:
    def start(fault: str = "") -> Running:
        return begin(tmp_path, backend, launcher, fault, steps=12, deterministic=True)

    stopped = start("wait:0:step:4")
    stopped.reached(3)
    stopped.process.send_signal(signal.SIGTERM)
    stopped.go()
    stopped.end(75)
    again = start().end()
    assert losses(again.folder) == whole(backend)


@pytest.mark.fault("SIGTERM to the launcher")
@starts(CLIPSHIP)
def test_a_run_whose_storage_is_silent_saves_the_step_before_and_goes_on_with_the_same_losses(
    tmp_path: Path, whole: Callable[[str], dict[int, float]], backend: str, launcher: str
) -> None:
    """Rank 1's batch never comes; rank 0 has its own and waits for rank 1 in the step."""

    def start(fault: str = "") -> Running:
        how: dict[str, Any] = {"checkpoint": {"every_steps": 1000}, "data": {"workers": 1}}
        return begin(tmp_path, backend, launcher, fault, steps=12, deterministic=True, **how)

    silent = start("worker-stop:1:step:3")
    silent.has_fault()
    time.sleep(1)  # the batches that were ready are trained on
    silent.process.send_signal(signal.SIGTERM)
    end = silent.all_end(75)
    step = int(end.output.partition("asked to stop: step ")[2].split()[0])
    assert 3 <= step < 12
    assert f"step-{step:08d}" in end.checkpoints
    again = start().end()
    assert losses(again.folder) == whole(backend)


@pytest.mark.fault("the whole run SIGSTOPped for longer than a limit", goes_on=True)
@starts(CLIPSHIP)
def test_run_that_was_suspended_for_longer_than_a_limit_goes_on(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    """As Slurm suspends a job; the launcher waits outside."""
    limits = {"step_s": 12.0, "data_s": 10.0, "eval_s": 12.0, "checkpoint_s": 12.0}
    running = begin(tmp_path, backend, launcher, "wait:0:step:4", steps=12, timeouts=limits)
    running.reached(3)
    all_of_it = ranks_left(running)
    for number, then_s in ((signal.SIGSTOP, 16.0), (signal.SIGCONT, 0.0)):
        for process in all_of_it:
            os.kill(process, number)
        time.sleep(then_s)
    running.go()
    running.all_end()


@pytest.mark.fault("SIGTERM or SIGUSR2 to one rank")
@starts(HOROVOD_MPIRUN)
@pytest.mark.parametrize("deed", ["signal", pytest.param("signal-all", marks=full)])
def test_signal_to_a_ranks_supervisor_stops_all_ranks(
    tmp_path: Path, backend: str, launcher: str, deed: str
) -> None:
    """As srun, mpirun and Kubernetes pass it on."""
    end = begin(tmp_path, backend, launcher, f"{deed}:1:step:3", steps=LONG).all_end(75)
    assert end.checkpoints


@pytest.mark.fault("SIGTERM to the launcher")
def test_run_of_one_rank_has_as_long_for_its_checkpoint_as_any_other(tmp_path: Path) -> None:
    """The launcher alone would kill it after 5 s."""
    running = begin(tmp_path, "torch", "clipship", "nap:0:checkpoint:2", ranks=1, steps=LONG)
    running.has_fault()
    running.process.send_signal(signal.SIGTERM)
    end = running.all_end(75)
    assert end.checkpoints


@pytest.mark.fault("second SIGTERM after a while")
def test_second_signal_after_a_while_leaves_at_once(tmp_path: Path) -> None:
    running = begin(
        tmp_path, "torch", "clipship", "slow:1:checkpoint:2", steps=LONG, timeouts={"checkpoint_s": 60.0}
    )
    running.has_fault()
    running.process.send_signal(signal.SIGTERM)
    time.sleep(REPEAT_S + 3)
    assert running.process.poll() is None
    while running.process.poll() is None:  # the first one may have been heard late
        running.process.send_signal(signal.SIGTERM)
        time.sleep(REPEAT_S + 1)
    running.all_end(128 + signal.SIGTERM)


@pytest.mark.fault("save on request takes too long")
def test_save_that_takes_too_long_is_ended_and_named(tmp_path: Path) -> None:
    running = begin(
        tmp_path,
        "torch",
        "clipship",
        "slow:1:evaluation:2",
        steps=LONG,
        timeouts={"eval_s": 200.0, "checkpoint_s": 6.0, "shutdown_s": 2.0},
    )
    running.has_fault()
    running.process.send_signal(signal.SIGTERM)
    end = running.all_end(124)
    assert "the run was asked to stop and had not ended after 8 s" in end.errors
    assert end.diagnosis["late"] == [1]
