"""Heartbeat and lease of a rank, and what its supervisor sees of its process from outside."""

import asyncio
import json
import math
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.jobs import tiny_job
from tests.support.processes import ended_on_failure
from trainer.comm.timer import CommTimer
from trainer.comm.torch_backend import TorchBackend, _Reducer
from trainer.safe_io import folders
from trainer.supervise.rank import rank_report
from trainer.world import heartbeat, rank_process, state_folder, state_parts
from trainer.world.heartbeat import Heartbeat
from trainer.world.launchers import World
from trainer.world.lease import Lease, watch
from trainer.world.rendezvous import Rendezvous


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


# Folders of supervisors in /dev/shm: of a rank, and of a node whose ranks keep their newest steps.
# The next supervisor removes the folder of one that was killed, but not that of a living one.

RUN = Rendezvous("here", 4711, "secret")
ENV = RUN.variables()
OTHER = Rendezvous("here", 4711, "another secret").variables()
OF_A_RANK = """
import sys, time
from pathlib import Path
from trainer.world import rank_process
with rank_process.rank_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_TRIES", 3)


def within_limit(work: Callable[[], None]) -> None:
    """In a thread of its own: an open that blocks cannot be ended."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive(), "it waits for a stranger"


def in_the(place: Path) -> Any:
    """The folder of a node's supervisors; None if there cannot be one."""
    return state_folder.state_folder(ENV, "a", place)


# The folder of a supervisor and its rank.


def test_killed_supervisors_folder_is_swept_with_its_semaphores_and_a_living_ones_is_not(
    tmp_path: Path,
) -> None:
    others = {"sem.mp-abcdefgh", "sem.clipship-rank-other-1", "another"}
    for name in others:
        (tmp_path / name).touch()
    command = [sys.executable, "-c", OF_A_RANK, str(tmp_path)]
    started: Any = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with ended_on_failure(started) as process, rank_process.rank_folder(tmp_path) as own:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        left, lasting = (tmp_path / f"sem.{its.name}-abcdefgh" for its in (folder, own))
        left.touch()
        lasting.touch()
        rank_process.sweep(tmp_path, tmp_path)
        assert folder.exists()
        process.kill()
        process.wait()
        assert folder.exists()
        with rank_process.rank_folder(tmp_path):
            assert not folder.exists(), "the next one sweeps"
        rank_process.sweep(tmp_path, tmp_path)
        assert not left.exists()
        assert lasting.exists(), "its supervisor lives"
    assert {path.name for path in tmp_path.iterdir()} == others


def test_folder_without_lock_is_swept_only_when_it_is_old(tmp_path: Path) -> None:
    young, old = tmp_path / "clipship-rank-young", tmp_path / "clipship-rank-old"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    rank_process.sweep(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["clipship-rank-young"]


def test_supervisors_that_start_together_keep_each_others_folders(tmp_path: Path) -> None:
    def start(_: int) -> bool:
        with rank_process.rank_folder(tmp_path) as folder:
            (folder / "heartbeat").touch()
            return (folder / "heartbeat").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(start, range(200)))


@pytest.mark.usefixtures("impatient")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_neither_opened_nor_removed(tmp_path: Path) -> None:
    """A FIFO there would hold up every start, and a stranger's file is none to lock."""
    folder = tmp_path / "clipship-rank-x"
    folder.mkdir()
    os.mkfifo(folder / "supervisor")
    (folder / "kept").touch()
    for name in (state_folder.folder_name(start, "a") for start in (RUN.start, "an old start")):
        (tmp_path / name).mkdir(mode=0o700)
    for each in tmp_path.iterdir():
        os.chown(each, 65534, 65534)
        os.utime(each, (time.time() - 3600,) * 2)
    within_limit(lambda: rank_process.sweep(tmp_path, tmp_path))
    with in_the(tmp_path) as own:
        assert own is None
    assert (folder / "kept").exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_links_are_not_followed_and_a_lock_that_is_no_plain_file_delays_no_start(tmp_path: Path) -> None:
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "shm"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    os.utime(elsewhere, (time.time() - 3600,) * 2)
    os.mkfifo(tmp_path / "fifo")
    for name in ("clipship-rank-x", "clipship-rank-y"):
        (place / name).mkdir(parents=True)
    os.mkfifo(place / "clipship-rank-x" / "supervisor")
    (place / "clipship-rank-y" / "supervisor").symlink_to(tmp_path / "fifo")
    (place / "clipship-rank-z").symlink_to(elsewhere)
    within_limit(lambda: rank_process.sweep(place, place))
    assert (elsewhere / "kept").exists()


# The folder of a node, in which ranks keep their newest steps.


def header(
    step: int, part: int = 0, parts: int = 1, start: str = RUN.start, buffer: int = 0
) -> state_parts.Header:
    return state_parts.Header(start, "0123456789abcdef", buffer, step, part, parts, "sum")


def newest(folder: Path) -> int:
    return state_parts.newest_step(folder, RUN.start)


def test_supervisors_of_a_node_share_a_private_folder_and_the_last_removes_it(tmp_path: Path) -> None:
    with in_the(tmp_path) as first:
        assert first.path.stat().st_mode & 0o777 == 0o700
        with in_the(tmp_path) as second:
            assert second.path == first.path
        assert first.path.is_dir(), "the first one still holds it"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("impatient")
def test_what_others_put_there_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / state_folder.folder_name(RUN.start, "a")
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with in_the(tmp_path) as folder:
        assert folder is None
    path.unlink()
    path.mkdir()
    path.chmod(0o777)
    with in_the(tmp_path) as folder:
        assert folder is None, "others could write in it"
    path.chmod(0o700)
    os.mkfifo(path / "supervisors")
    with in_the(tmp_path) as folder:
        assert folder is None


def test_launcher_that_starts_again_keeps_the_folder_of_a_failed_run_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looped = {**ENV, "CLIPSHIP_STARTS_AGAIN": "always"}
    with state_folder.state_folder(looped, "a", tmp_path) as folder:
        assert folder is not None
        state_parts.write_header(folder.path, header(7))
        folder.failed = True
    with state_folder.state_folder(OTHER, "a", tmp_path):
        assert folder.path.is_dir(), "the same start may come again"
    with state_folder.state_folder(looped, "a", tmp_path) as again:
        assert again is not None
        assert state_folder.newest_kept(state_folder.with_state_folder(looped, again)) == 7
        again.failed = True
    monkeypatch.setattr(state_folder, "KEPT_S", 0.0)
    time.sleep(0.01)
    state_folder.sweep(tmp_path)
    assert not folder.path.exists(), "it did not come"
    with state_folder.state_folder(looped, "a", tmp_path):
        pass
    assert not list(tmp_path.iterdir()), "nothing is left of a run that is done"


def test_step_is_whole_when_every_part_of_it_is_there(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") == 0
    state_parts.write_header(tmp_path, header(3, 0, 2))
    assert newest(tmp_path) == 0
    state_parts.write_header(tmp_path, header(3, 1, 2))
    assert newest(tmp_path) == 3
    state_parts.write_header(tmp_path, header(4, 0, 2, buffer=1))
    assert newest(tmp_path) == 3, "rank 1 was killed while it wrote step 4"


def test_headers_of_another_start_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    state_parts.write_header(tmp_path, header(9, start="another"))
    damaged = header(8, buffer=1)
    (tmp_path / damaged.name).write_text('{"start": "')
    assert newest(tmp_path) == 0
    state_parts.write_header(tmp_path, damaged)
    (tmp_path / damaged.name).rename(tmp_path / header(8).name)
    assert newest(tmp_path) == 0, "it says that it is of the other buffer"
    (tmp_path / header(7).name).write_text(json.dumps({**asdict(header(7)), "part": "0"}))
    assert newest(tmp_path) == 0, "its part is no number"
