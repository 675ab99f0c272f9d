"""One supervisor with a rank of its own, both real processes: it ends, whatever fails in them."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer.supervise import messages
from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine
from trainer.supervise.supervisor import Supervisor
from trainer.sysinfo.addresses import free_port
from trainer.world import heartbeat
from trainer.world.console import rank_formatter
from trainer.world.launchers import World
from trainer.world.rendezvous import Rendezvous

SUPERVISOR = """
import os, signal, subprocess, sys, threading, time
from errno import ENOSPC
from trainer.run import exit_record
from trainer.supervise.coordinate import coordinator
from trainer.supervise import supervisor
from trainer.supervise.limits import Limits
from trainer.world.launchers import World

number = 0
def limits():
    return Limits(init_s=20.0, run_folder=sys.argv[2])
{harm}
command = [sys.executable, "-c", sys.argv[1]]
world = World(number, number + 1, 0, 1, "here", "by hand")
sys.exit(supervisor.supervise(world, command, os.environ, limits))
"""
BROKEN = """
async def broken(self, *_):
    raise RuntimeError("broken on purpose")
coordinator.Coordinator._decide_on_first_cause = broken
"""
BROKEN_CALLBACK = """
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
def full(path, value):
    raise OSError(ENOSPC, "No space left on device", str(path))
exit_record.write_json = full
"""
STOPPED_EARLY = """
def limits():
    os.kill(os.getpid(), signal.SIGTERM)
    return Limits()
"""
LARGER_CHILD = """
subprocess.run([sys.executable, "-c", "bytearray(b'x' * 2**28)"], check=True)
"""
UNJOINED = """
def ask():
    for _ in range(2):
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGINT)
number, supervisor.REPEAT_S = 1, 0.5
threading.Thread(target=ask, daemon=True).start()
"""
WAITS_FOR_STOP = """
import os, sys, time
from trainer.world.heartbeat import Heartbeat
heartbeat = Heartbeat.open(os.environ)
end = time.monotonic() + 20
while not heartbeat.stop_requested and time.monotonic() < end:
    time.sleep(0.02)
sys.exit(75 if heartbeat.stop_requested else 3)
"""
KILLED = "import os, time; time.sleep(0.8); os.kill(os.getpid(), {})"
ASKS = "import os, time; os.kill(os.getppid(), 15); time.sleep(60)"
FAILED = "its supervisor failed: RuntimeError: broken on purpose"
TWICE = "a second signal (2) came before it had joined the others"


def meeting() -> dict[str, str]:
    return dict(Rendezvous("127.0.0.1", free_port("127.0.0.1"), "a token").variables())


ENDS: dict[str, tuple[str, str, Mapping[str, str], int, str]] = {
    "an error in a task of its own": (BROKEN, "raise SystemExit(3)", {}, 1, FAILED),
    "an error in a callback of its own": (BROKEN_CALLBACK, ASKS, {}, 1, FAILED),
    "no thread that was not there before": (NO_THREADS, "raise SystemExit(3)", {}, 3, "exited with code 3"),
    "a full disk of the launcher": (FULL_DISK, "raise SystemExit(75)", {"CLIPSHIP_EXIT_DIR": "/tmp"}, 75, ""),
    "a stop that comes while it starts": (STOPPED_EARLY, WAITS_FOR_STOP, {}, 75, ""),
    "such a stop where others would meet it": (STOPPED_EARLY, WAITS_FOR_STOP, meeting(), 75, ""),
    "a second signal before it has joined the others": (UNJOINED, WAITS_FOR_STOP, meeting(), 130, TWICE),
    "a killed rank beside a larger child": (LARGER_CHILD, KILLED.format(9), {}, 1, "held 0.0 GiB at its"),
    "a signal without a name": ("", KILLED.format(35), {}, 1, "killed by signal 35 in"),
}


@pytest.mark.parametrize(("harm", "rank", "env", "code", "said"), ENDS.values(), ids=ENDS)
def test_a_supervisor_ends_with_a_code_and_says_why(
    harm: str, rank: str, env: Mapping[str, str], code: int, said: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SUPERVISOR.format(harm=harm), rank, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "its supervisor failed" not in done.stderr or said == FAILED
    assert "Traceback" not in done.stderr or said == FAILED
    if harm is not STOPPED_EARLY:  # it has not heard of the run folder
        assert said in (tmp_path / "exit.json").read_text()


def member_1() -> Supervisor:
    env = Rendezvous("127.0.0.1", 1, "a token").variables()
    return Supervisor(World(1, 2, 0, 1, "n1", "by hand"), None, pytest.fail, Limits(), env, Machine())


async def test_a_second_signal_waits_for_the_next_parent_where_one_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    its = member_1()
    its._has_joined = True
    sent: list[messages.Message] = []
    monkeypatch.setattr(its._context.tree, "up", sent.append)
    its.on_signal(signal.SIGINT)
    its.on_signal(signal.SIGINT)
    assert not sent, "what came at once is one request, of which it tells when it joins"
    assert its._joined() == messages.Joined(1, "n1", idle=True, asked=True, signalled=True)
    monkeypatch.setattr("trainer.supervise.supervisor.REPEAT_S", 0.0)
    its.on_signal(signal.SIGINT)
    assert sent == [messages.StopRequest(2, 1, "n1", again=True)]


AS_IT_IMPORTS = """
import os, runpy, signal, sys

class Asks:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "trainer.supervise.main":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Asks)
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize("module", ["trainer.rank", "trainer.evaluate", "trainer.preflight"])
def test_a_stop_that_comes_while_a_supervisor_imports_does_not_kill_it(module: str) -> None:
    """Who keeps supervisors going starts one again that a signal has killed."""
    done = subprocess.run(
        [sys.executable, "-c", AS_IT_IMPORTS, module, "no-such-job.toml"], capture_output=True, text=True
    )
    assert done.returncode == 75, done.stderr


def test_spare_nodes_that_leave_no_rank_are_refused_in_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.rank", "no-such-job.toml"],
        env={**os.environ, "CLIPSHIP_SPARE_NODES": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("clipship: CLIPSHIP_SPARE_NODES=1 leaves no rank")
    assert len(done.stderr.splitlines()) == 1


# The end of a rank, and of the launcher of supervisors.

RANK = """
import gc, os, resource, sys
from trainer.errors import InputError, Preempted
from trainer.sysinfo import collector
from trainer.world.console import run_rank

collector.begin_without()
assert not gc.isenabled(), "while a rank imports"

def work(world, heartbeat):
    assert gc.isenabled() and gc.get_freeze_count() > 10_000
    if "CLIPSHIP_RANK_DIR" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as on a full file system
    raise {error}

run_rank(sys.stdout, work)
"""


@pytest.mark.parametrize(
    ("error", "code", "out", "err"),
    [
        ("InputError('no data')", 2, "", "clipship: no data"),
        ("Preempted('asked to stop')", 75, "preempted    asked to stop", ""),
        ("ValueError('no such class')", 1, "on n7 failed\nTraceback (most", ""),
    ],
)
def test_a_rank_without_a_supervisor_says_why_it_ends(error: str, code: int, out: str, err: str) -> None:
    env = {**os.environ, "CLIPSHIP_NODE": "n7"}
    command = [sys.executable, "-c", RANK.format(error=error)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == code
    assert out in done.stdout
    assert err in done.stderr
    assert out or not done.stdout


def test_a_rank_that_cannot_record_its_end_says_it_and_keeps_its_exit_code(tmp_path: Path) -> None:
    heartbeat.make(tmp_path)
    env = {**os.environ, "CLIPSHIP_NODE": "n7", "CLIPSHIP_RANK_DIR": str(tmp_path)}
    command = [sys.executable, "-c", RANK.format(error="Preempted('asked to stop')")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 75
    assert "clipship: why rank 0 on n7 ends cannot be recorded: [Errno 27]" in done.stderr
    assert "clipship: asked to stop (exit code 75)" in done.stderr.splitlines()


def test_what_is_wrong_names_its_generation_from_the_second_on() -> None:
    as_it_was, told = "step 4", "[generation 2] step 4"
    lines = ((1, logging.ERROR, as_it_was), (2, logging.INFO, as_it_was), (2, logging.ERROR, told))
    for generation, level, text in lines:
        record = logging.LogRecord("clipship", level, "", 0, "step %d", (4,), None)
        its = rank_formatter(World(0, 1, 0, 1, "a", "test", generation), "%(levelname)s ")
        for _ in range(2):  # several handlers format one record
            assert its.format(record) == f"{logging.getLevelName(level)} {text}"


LAUNCHER = """
import os, signal, sys
from pathlib import Path
from trainer.launch import processes

os.isatty, processes.SECOND_S = lambda _: True, 0.1
folder = Path(sys.argv[2])
heard = folder / "heard"
env = {**os.environ, "LAUNCHER": str(os.getpid()), "HEARD": str(heard), "MARK": str(folder)}
code = processes.supervise(["sh", "-c", sys.argv[1]], env, folder, lambda _: heard.touch() is None)
os.kill(os.getpid(), signal.SIGTERM)
print(code, "and it can still say so")
"""
TWICE_MEANT = (
    "kill -INT $LAUNCHER; until [ -e $HEARD ]; do sleep 0.05; done; kill -INT $LAUNCHER; exec sleep 1000"
)
ENDS_ITSELF = "kill -TERM $LAUNCHER; sleep 0.5; exit 75"


@pytest.mark.parametrize(
    ("program", "code"),
    [(TWICE_MEANT, 130), (ENDS_ITSELF, 143)],
    ids=["supervisors that take requests and do nothing", "a signal that is repeated after the end"],
)
def test_signals_end_the_launcher_of_supervisors_with_their_code(
    program: str, code: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LAUNCHER, program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"{code} and it can still say so\n"), done.stderr
