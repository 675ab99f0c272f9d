"""Children end: those of a test that fails, and those that a server forked for one that is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ended_on_failure
from trainer.sysinfo import children

DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); "
    "time.sleep(60)"
)


def test_a_failed_assertion_ends_a_child_that_sleeps() -> None:
    process = subprocess.Popen(["sleep", "60"])
    with pytest.raises(AssertionError, match="failed"), ended_on_failure(process, to_end_s=60):
        raise AssertionError("failed")
    assert process.returncode == -signal.SIGTERM


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    with pytest.raises(AssertionError, match="failed"), ended_on_failure(process, to_end_s=0.1):
        raise AssertionError("failed")
    assert process.returncode == -signal.SIGKILL


def test_a_child_ends_by_itself_where_nothing_fails() -> None:
    with ended_on_failure(subprocess.Popen(["sh", "-c", "sleep 0.2; exit 3"])) as process:
        pass
    assert process.returncode == 3


POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from trainer.sysinfo.parent import end_with_parent
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


def test_a_process_ends_when_the_one_that_asked_for_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(POOL)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "program.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert Path(f"/proc/{child}").exists()
        finally:
            parent.kill()
    limit = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists(), f"process {child} outlives the one that asked for it"


# Processes fork where a child is whole, and note which of their children have ended.


def ended(code: int) -> int:
    child = os.posix_spawnp("sh", ["sh", "-c", f"exit {code}"], os.environ)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.001)
    return child


def test_children_that_have_ended_are_reaped_with_their_codes() -> None:
    first, second = ended(3), ended(0)
    assert children.reap(first) | children.reap(second) == {first: 3, second: 0}
    assert not children.is_child(first)


def test_one_of_others_that_ends_meanwhile_is_left_to_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    children.reap()  # what other tests have left
    own = subprocess.Popen(["sleep", "60"])
    orphan = ended(3)
    look = os.waitid

    def look_and_end_own(kind: int, which: int, options: int) -> Any:
        found = look(kind, which, options)
        own.send_signal(9)
        while look(os.P_PID, own.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
        return found

    monkeypatch.setattr(os, "waitid", look_and_end_own)
    assert children.reap(but={own.pid}) == {orphan: 3}
    assert own.wait() == -9


PROGRAM = """
import sys, threading
from pathlib import Path
from trainer.sysinfo.forks import can_fork

def idle(name):
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    named.set()
    threading.Event().wait()

for name in ("jemalloc_bg_thd", "worker"):
    print(can_fork())
    named = threading.Event()
    threading.Thread(target=idle, args=(name,), daemon=True).start()
    named.wait()
print(can_fork())
"""


def test_a_process_forks_unless_a_thread_would_be_lost() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]


# Signals that are ignored or blocked stay so across exec


ROOT = Path(__file__).parents[2]
_SHOW = "import signal; print(signal.getsignal(signal.SIGCHLD).name, *signal.pthread_sigmask(0, ()))"


def started(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """The command as a shell starts it that ignores what children do, and blocks requests to stop."""

    def spoil() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))

    return subprocess.run(command, preexec_fn=spoil, capture_output=True, text=True, cwd=ROOT)


def test_the_launcher_sees_a_child_that_fails() -> None:
    launcher = [sys.executable, "-m", "trainer.launch.ranks.localrun", "--ranks", "1", "--"]
    assert started([*launcher, sys.executable, "-c", "raise SystemExit(7)"]).returncode == 7


def test_a_rank_begins_with_no_signal_blocked(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(_SHOW)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['', 'shows']\n"
    program += "from trainer.supervise.rank.rank_start import main; main()"
    assert started([sys.executable, "-c", program]).stdout == "SIG_DFL\n"


@pytest.mark.parametrize("asks", [True, False])
def test_requests_to_stop_are_heard_but_by_a_rank(asks: bool) -> None:
    program = "import signal\nfrom trainer.sysinfo.signals import reset_inherited_signals\n"
    program += "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    program += f"reset_inherited_signals(asks={asks})\n"
    program += "print(signal.getsignal(signal.SIGTERM).name, signal.getsignal(signal.SIGHUP).name)"
    assert started([sys.executable, "-c", program]).stdout == f"SIG_{'DFL' if asks else 'IGN'} SIG_IGN\n"
