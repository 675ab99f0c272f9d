"""Processes of ranks: those of a fork server are like those started anew, and generations share nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ended_on_failure
from trainer.supervise.rank import generation
from trainer.supervise.rank.fork_server import ForkServer
from trainer.supervise.rank.generation import RankOfGeneration, fresh_variables
from trainer.sysinfo.forks import adopt_orphans
from trainer.world import heartbeat, rank_process

PROGRAM = """
import json, os, signal, sys, threading, time
from trainer.supervise.rank.rank_start import leave_fork_server

def preload():
    if "THREAD" in os.environ:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()

imported_by = os.getpid()
forked = leave_fork_server(preload)
facts = {
    "forked": forked,
    "imported here": imported_by == os.getpid(),
    "pid": os.getpid(),
    "parent": os.getppid(),
    "session": os.getsid(0),
    "group": os.getpgid(0),
    "ignored": [s.name for s in signal.Signals if signal.getsignal(s) == signal.SIG_IGN],
    "folder": os.getcwd(),
    "streams": [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)],
    "open": sorted(os.listdir("/proc/self/fd")),
    "environ": dict(os.environ),
}
with open(os.environ["CLIPSHIP_SAYS"] + ".new", "w") as file:
    json.dump(facts, file)
os.rename(file.name, os.environ["CLIPSHIP_SAYS"])
deed, _, number = os.environ.get("CLIPSHIP_DEED", "sleep:600").partition(":")
if deed == "sleep":
    time.sleep(float(number))
if deed == "signal":
    os.kill(os.getpid(), int(number))
sys.exit(int(number))
"""
COMMAND = [sys.executable, "-c", PROGRAM]


@pytest.fixture(autouse=True)
def adopts_no_longer() -> Iterator[None]:
    """A test's process that goes on adopting orphans would keep those of later tests as zombies."""
    yield
    adopt_orphans(False)


@pytest.fixture(autouse=True)
def answers_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process may wait for seconds before it answers, and a rank be started anew."""
    monkeypatch.setattr("trainer.supervise.rank.fork_server._ANSWER_S", 60.0)


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    its = ForkServer(COMMAND)
    its.keep_if(True)
    yield its
    its.close()


def until(arrived: Callable[[], Any], limit_s: float = 30.0) -> Any:
    limit = time.monotonic() + limit_s
    while not (value := arrived()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    return value


def begin(
    fork_server: ForkServer, says: Path, keep: Any = None, **variables: str
) -> tuple[Any, dict[str, Any]]:
    """Starts a rank; returns it and what it says about itself. `keep` is told to the server meanwhile."""
    says.unlink(missing_ok=True)
    rank = fork_server.start({**os.environ, "CLIPSHIP_SAYS": str(says), **variables})
    if keep is not None:
        fork_server.keep_if(keep)
    until(says.exists)
    facts: dict[str, Any] = json.loads(says.read_text())
    assert facts["pid"] == rank.pid
    return rank, facts


def said(fork_server: ForkServer, says: Path, **variables: str) -> dict[str, Any]:
    """Starts and ends a rank; returns what it said."""
    rank, facts = begin(fork_server, says, **variables)
    rank_process.end_rank(rank)
    return facts


def first(fork_server: ForkServer, says: Path, **variables: str) -> dict[str, Any]:
    """Likewise, of a rank that leaves a fork server behind."""
    rank, facts = begin(fork_server, says, **variables)
    until(fork_server._is_ready)
    rank_process.end_rank(rank)
    return facts


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_forked_rank_is_like_one_that_was_started(fork_server: ForkServer, tmp_path: Path) -> None:
    says = tmp_path / "says"
    started = first(fork_server, says, CLIPSHIP_A="1", CLIPSHIP_B="2")
    forked = said(fork_server, says, CLIPSHIP_A="other", CLIPSHIP_C="3")
    assert (started["forked"], started["imported here"]) == (False, True)
    assert (forked["forked"], forked["imported here"]) == (True, False)
    for facts in (started, forked):
        assert facts["parent"] == os.getpid()
        assert facts["session"] == facts["group"] == facts["pid"]
        assert {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR2"} <= set(facts["ignored"])
    for same in ("ignored", "folder", "streams", "open"):
        assert started[same] == forked[same]
    assert started["environ"]["CLIPSHIP_A"] == "1"
    del started["environ"]["CLIPSHIP_A"], started["environ"]["CLIPSHIP_B"]
    assert forked["environ"] == {**started["environ"], "CLIPSHIP_A": "other", "CLIPSHIP_C": "3"}


def test_supervisor_gets_the_exit_code_of_a_forked_rank(fork_server: ForkServer, tmp_path: Path) -> None:
    first(fork_server, tmp_path / "says")
    told: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda *_: told.append(1))
    try:
        for deed, code in {"exit:0": 0, "exit:7": 7, "signal:9": -9, "signal:11": -11}.items():
            told.clear()
            rank, facts = begin(fork_server, tmp_path / "says", CLIPSHIP_DEED=deed)
            assert facts["forked"]
            assert rank.wait(20) == rank.poll() == rank.returncode == code
            assert told
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_many_generations_come_from_one_fork_server(fork_server: ForkServer, tmp_path: Path) -> None:
    before = children()
    first(fork_server, tmp_path / "says")
    for number in range(3):
        rank, facts = begin(fork_server, tmp_path / "says", CLIPSHIP_GENERATION=str(number))
        assert (facts["forked"], facts["environ"]["CLIPSHIP_GENERATION"]) == (True, str(number))
        assert rank.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.05)
        rank_process.end_rank(rank)
        assert rank.returncode == -signal.SIGKILL
    fork_server.close()
    assert children() == before, "neither the fork server nor a rank is left, not even as a zombie"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_fork_server_delays_a_start_and_does_not_prevent_it(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    first(fork_server, tmp_path / "says")
    os.kill(fork_server._pid, number)
    if number == signal.SIGSTOP:
        monkeypatch.setattr("trainer.supervise.rank.fork_server._ANSWER_S", 0.2)
    assert not first(fork_server, tmp_path / "says")["forked"]
    monkeypatch.setattr("trainer.supervise.rank.fork_server._ANSWER_S", 60.0)
    assert said(fork_server, tmp_path / "says")["forked"], "the next one has another"


@pytest.mark.parametrize(
    ("before", "then", "forked"),
    [
        ({"MASTER_PORT": "1"}, {"MASTER_PORT": "2", "HOROVOD_SIZE": "3", "CLIPSHIP_GENERATION": "2"}, True),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {}, False),
        ({}, {"RANKS": "1"}, False),
    ],
)
def test_variables_that_libraries_read_when_imported_need_a_new_process(
    fork_server: ForkServer, tmp_path: Path, before: dict[str, str], then: dict[str, str], forked: bool
) -> None:
    first(fork_server, tmp_path / "says", **before)
    facts = said(fork_server, tmp_path / "says", **then)
    assert facts["forked"] is forked
    assert then.items() <= facts["environ"].items()


def test_a_process_with_a_thread_leaves_none_and_goes_on(fork_server: ForkServer, tmp_path: Path) -> None:
    rank, _ = begin(fork_server, tmp_path / "says", THREAD="yes")
    assert not fork_server._is_ready()
    assert rank.poll() is None
    rank_process.end_rank(rank)


def test_a_run_without_restarts_keeps_no_fork_server(fork_server: ForkServer, tmp_path: Path) -> None:
    before = children()
    fork_server.keep_if(False)
    rank, facts = begin(fork_server, tmp_path / "says", keep=False)
    assert "CLIPSHIP_FORK_SERVER" not in facts["environ"]
    assert children() - before == {rank.pid}
    rank_process.end_rank(rank)


def test_a_spare_supervisor_has_a_fork_server_and_no_rank(fork_server: ForkServer, tmp_path: Path) -> None:
    says, before = tmp_path / "says", children()
    fork_server.fill({**os.environ, "CLIPSHIP_SAYS": str(says)})
    until(fork_server._is_ready)
    assert not says.exists()
    assert said(fork_server, says)["forked"]
    fork_server.close()
    assert children() == before


SUPERVISOR = f"""
import json, os, sys, time
from pathlib import Path
from trainer.supervise.rank import generation
from trainer.supervise.rank.fork_server import ForkServer
from trainer.supervise.rank.generation import RankOfGeneration, fresh_variables
fork_server = ForkServer({COMMAND!r})
fork_server.keep_if(True)
says = Path(sys.argv[1])
def start():
    rank = fork_server.start({{**os.environ, "CLIPSHIP_SAYS": str(says)}})
    while not says.exists():
        time.sleep(0.01)
    says.unlink()
    return rank
first = start()
while not fork_server._is_ready():
    time.sleep(0.01)
second = start()
print(json.dumps([first.pid, fork_server._pid, second.pid]), flush=True)
time.sleep(600)
"""


def test_killed_supervisor_leaves_neither_a_rank_nor_a_fork_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "says")]
    with ended_on_failure(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        assert len({*pids}) == 3
        assert all(map(lives, pids))
        process.kill()
        process.wait()
        until(lambda: not any(map(lives, pids)))


def test_processes_of_an_ended_rank_leave_no_zombie(tmp_path: Path) -> None:
    adopt_orphans()
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        rank.wait()
        assert child in children()
        os.killpg(rank.pid, signal.SIGKILL)
        until(lambda: not lives(child))
        rank_process.reap_group(rank)
        assert child not in children()


def children() -> set[int]:
    """Children of this process, ended ones that nobody has waited for included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


# A generation of ranks shares nothing with the one before it: process, folder, heartbeat, meeting place.

RANK = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
open(os.environ["CLIPSHIP_RANK_DIR"] + "/says", "w").write(os.environ["CLIPSHIP_GENERATION"])
time.sleep(600)
"""


def generation_of(env: Mapping[str, str], number: int, program: str = RANK) -> RankOfGeneration:
    command = ForkServer([sys.executable, "-c", program], use=False)
    return RankOfGeneration(number, command, env, is_root=True)


def says(generation: RankOfGeneration) -> str:
    """Waits until the rank has said its generation."""
    file = generation.folder / "says"
    while not (file.exists() and file.read_text()):
        assert generation.rank.poll() is None
        time.sleep(0.02)
    return file.read_text()


def is_group(pid: int) -> bool:
    """Returns whether a process of the group is left."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_next_generation_has_a_process_a_folder_and_a_heartbeat_of_its_own(tmp_path: Path) -> None:
    env = {**os.environ, "CLIPSHIP_EXIT_DIR": str(tmp_path)}
    first = generation_of(env, 1)
    try:
        assert says(first) == "1"
        heartbeat.request_stop(first.memory)
        asyncio.run(asyncio.wait_for(first.end(), 20))
        assert first.rank.returncode == -9
        limit = time.monotonic() + 20
        while is_group(first.rank.pid):  # what the rank started ends with it
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert not first.folder.exists()
        assert heartbeat.published_state(tmp_path) == (None, True)
    finally:
        first.close()
    second = generation_of(env, 2)
    try:
        assert says(second) == "2"
        assert second.folder != first.folder
        assert not heartbeat.Heartbeat(second.memory, {}).stop_requested
        assert os.readlink(tmp_path / "heartbeat") == str(second.folder / "heartbeat")
        assert not second.ending
    finally:
        second.close()
    assert not second.folder.exists()


STUCK = """
import ctypes, os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
open(os.environ["CLIPSHIP_RANK_DIR"] + "/says", "w").write("stuck")
ctypes.PyDLL(None).pause()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_rank_that_can_do_nothing_itself_is_ended(stopped: bool) -> None:
    """No thread of it runs Python any more and it takes no signal, as in a library that hangs."""
    its = generation_of(os.environ, 1, STUCK)
    try:
        assert says(its) == "stuck"
        os.kill(its.rank.pid, signal.SIGTERM)
        if stopped:
            os.kill(its.rank.pid, signal.SIGSTOP)
        asyncio.run(asyncio.wait_for(its.end(), 20))
        assert its.rank.returncode == -signal.SIGKILL
    finally:
        its.close()


def test_rank_that_cannot_be_started_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def noted(**where: Any) -> str:
        made.append(make(**where))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    with pytest.raises(OSError, match="no-such-program"):
        RankOfGeneration(1, ForkServer(["/no-such-program"], use=False), os.environ, is_root=False)
    assert [Path(folder).exists() for folder in made] == [False]


def test_ranks_meet_at_a_new_port_that_rank_0_serves() -> None:
    agents = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables = fresh_variables(agents)
    assert int(variables.pop("MASTER_PORT")) > 1
    assert variables == {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert fresh_variables({}) == {}


def test_ranks_of_horovod_meet_at_an_address_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "own_ipv4", lambda: "127.0.0.1")
    lost = {"MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "1"}
    assert fresh_variables(lost, "::1")["MASTER_ADDR"] == "::1"
    assert fresh_variables({**lost, "CLIPSHIP_MEETS": "1"}, "::1")["MASTER_ADDR"] == "127.0.0.1"
    assert fresh_variables({**lost, "CLIPSHIP_MEETS": "1"}, "127.0.0.2")["MASTER_ADDR"] == "127.0.0.2"
