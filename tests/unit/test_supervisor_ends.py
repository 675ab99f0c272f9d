"""A supervisor ends whatever fails in it: a task, a thread that cannot be had, a coordinator that hangs."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainer.errors import EXIT_BAD_INPUT
from trainer.launch import processes
from trainer.run.exit_record import EXIT_DIR, RANK_DIR, first_cause
from trainer.run.file_work import FileWork
from trainer.supervise.background import on_error, spawn
from trainer.supervise.machine import Machine
from trainer.supervise.messages import Late, Message
from trainer.supervise.network.tree import Tree
from trainer.supervise.rank.rank_report import STACK_FILE, python_stack
from trainer.sysinfo.addresses import free_port
from trainer.world import console
from trainer.world.launchers import World
from trainer.world.rendezvous import Rendezvous

SUPERVISOR = """
import os, sys, threading
from trainer.supervise.coordinate import coordinator
from trainer.supervise import supervisor
from trainer.supervise.limits import Limits
from trainer.world.launchers import World

def limits():
    return Limits(run_folder=sys.argv[2])

{harm}
command = [sys.executable, "-c", sys.argv[1]]
sys.exit(supervisor.supervise(World(0, 1, 0, 1, "here", "by hand"), command, os.environ, limits))
"""
IN_A_TASK = """
async def broken(self):
    raise RuntimeError("broken on purpose")
coordinator.Coordinator._decide_on_first_cause = broken
"""
IN_A_CALLBACK = """
def broken(self, number):
    raise RuntimeError("broken on purpose")
supervisor.Supervisor.on_signal = broken
"""
NO_THREADS = """
started = []
def no_more(thread):
    if started:
        raise RuntimeError("can't start new thread")
    started.append(thread)
    start(thread)
start, threading.Thread.start = threading.Thread.start, no_more
"""

FULL_DISK = """
from errno import ENOSPC
from trainer.run import exit_record
def full(path, value):
    raise OSError(ENOSPC, "No space left on device", str(path))
exit_record.write_json = full
"""


def ended(harm: str, rank: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", SUPERVISOR.format(harm=harm), rank, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize(
    ("harm", "rank"),
    [
        (IN_A_TASK, "raise SystemExit(3)"),
        (IN_A_CALLBACK, "import os, time; os.kill(os.getppid(), 15); time.sleep(60)"),
    ],
    ids=["in a task", "in a callback"],
)
def test_an_error_of_its_own_ends_a_supervisor_and_is_recorded(harm: str, rank: str, tmp_path: Path) -> None:
    done = ended(harm, rank, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "its supervisor failed: RuntimeError: broken on purpose" in done.stderr
    assert "broken on purpose" in (tmp_path / "exit.json").read_text()


@pytest.mark.parametrize("console", ["full", "gone"])
def test_a_console_that_is_lost_changes_no_exit_code(console: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUPERVISOR.format(harm=""), "raise SystemExit(75)", str(tmp_path)]
    reader, gone = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(gone, "w") as pipe:
        done = subprocess.run(
            command,
            stderr=full if console == "full" else pipe,
            env={**os.environ, EXIT_DIR: str(tmp_path)},
            timeout=50,
        )
    assert done.returncode == 75
    cause = first_cause(tmp_path)
    assert cause is not None
    assert cause.exit_code == 75


def test_a_full_disk_of_the_launcher_changes_no_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXIT_DIR, str(tmp_path))
    done = ended(FULL_DISK, "raise SystemExit(75)", tmp_path / "run")
    assert (done.returncode, "its supervisor failed" in done.stderr) == (75, False), done.stderr


def test_a_rank_that_cannot_record_why_it_ends_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-00000.json").mkdir()  # nothing takes its place
    monkeypatch.setenv(RANK_DIR, str(tmp_path))
    monkeypatch.setattr(console, "exit_now", sys.exit)

    with pytest.raises(SystemExit) as ends:
        console._exit(World(0, 1, 0, 1, "here", "by hand"), EXIT_BAD_INPUT, "the data are gone")
    assert ends.value.code == EXIT_BAD_INPUT
    assert "ended the run with exit code 2: the data are gone" in capsys.readouterr().err


def test_a_rank_that_a_signal_without_a_name_ends_is_recorded(tmp_path: Path) -> None:
    done = ended("", "import os; os.kill(os.getpid(), 35)", tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "killed by signal 35 in" in (tmp_path / "exit.json").read_text()


def test_an_end_needs_no_thread_that_was_not_there_before(tmp_path: Path) -> None:
    done = ended(NO_THREADS, "raise SystemExit(3)", tmp_path)
    assert (done.returncode, "exited with code 3" in (tmp_path / "exit.json").read_text()) == (3, True)


def test_file_work_waits_for_a_busy_thread_if_there_can_be_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, done, busy = FileWork(), threading.Semaphore(0), threading.Event()
    workers.prepare()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def wait() -> None:
        busy.wait(30)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    workers.do(wait)
    for _ in range(2):
        workers.do(done.release)
    busy.set()
    assert all(done.acquire(timeout=30) for _ in range(2))


def test_a_caller_that_cannot_be_accepted_ends_no_supervisor(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[BaseException] = []

    async def work() -> None:
        on_error(heard.append)
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        loop.call_exception_handler({"message": "accept failed", "exception": OSError(24, "files")})
        spawn(asyncio.sleep(60), tasks)
        next(iter(tasks)).cancel()
        loop.call_soon(int, "x")
        await asyncio.sleep(0.01)

    asyncio.run(work())
    assert [type(error) for error in heard] == [ValueError]


@pytest.mark.parametrize(
    ("received", "since_first_s", "at_keyboard", "meant"),
    [
        ([2], 0.0, True, False),
        ([2, 2], 0.1, True, True),
        ([2, 2], 0.1, False, False),
        ([2, 2], 6.0, False, True),
        ([15, 2], 6.0, True, False),
        ([2, 15], 6.0, True, False),
    ],
)
def test_a_second_ctrl_c_is_meant_at_a_keyboard_or_after_a_while(
    received: list[int],
    since_first_s: float,
    at_keyboard: bool,
    meant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: at_keyboard)
    assert processes.is_second(received, since_first_s) is meant


TWICE = """
import os, sys
from pathlib import Path
from trainer.errors import EXIT_BAD_INPUT
from trainer.launch import processes

os.isatty, processes.SECOND_S = lambda _: True, 0.1
folder = Path(sys.argv[1])
heard = folder / "heard"
once = f"kill -INT {os.getpid()}"
send = f"{once}; until [ -e '{heard}' ]; do sleep 0.05; done; {once}; exec sleep 1000"
env = {**os.environ, "MARK": str(folder)}
print(processes.supervise(["sh", "-c", send], env, folder, lambda _: heard.touch() is None))
"""


def test_the_second_ctrl_c_ends_a_run_whose_supervisors_take_requests_and_do_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWICE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "130\n", done.stderr


def test_what_raises_over_a_message_of_another_supervisor_is_heard() -> None:
    heard: list[BaseException] = []

    async def scene() -> None:
        on_error(heard.append)
        meeting = Rendezvous("127.0.0.1", free_port("127.0.0.1"), "token")
        root, child = Tree(meeting, 0, "a", 6.0, Machine()), Tree(meeting, 1, "b", 6.0, Machine())

        def at_root(message: Message) -> None:
            if isinstance(message, Late):
                raise RuntimeError("broken on purpose")

        root.at_root = at_root
        await root.join(5)
        await child.join(5)
        child.up(Late(1, "what"))
        async with asyncio.timeout(5):
            while not heard:
                await asyncio.sleep(0.01)
        await child.leave()
        await root.leave()

    asyncio.run(scene())
    assert [str(error) for error in heard] == ["broken on purpose"]


def test_a_rank_that_ends_while_it_is_asked_for_its_stack_ends_no_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / STACK_FILE).touch()
    monkeypatch.setattr(os, "kill", lambda *_: (tmp_path / STACK_FILE).unlink())
    told = asyncio.run(python_stack(os.getpid(), tmp_path))
    assert told == "no Python stack: the process has ended"
