"""One supervisor with a rank of its own, both real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.supervise.limits import Limits
from trainer.supervise.machine import Machine
from trainer.supervise.messages import Joined, Message, Stop, StopRequest
from trainer.supervise.rank.generation import RankOfGeneration
from trainer.supervise.supervisor import Supervisor
from trainer.sysinfo.addresses import free_port
from trainer.world.launchers import World
from trainer.world.rendezvous import Rendezvous

RANK = """
import os, sys, time
from trainer.world.heartbeat import Heartbeat
heartbeat = Heartbeat.open(os.environ)
end = time.monotonic() + 20
while not heartbeat.stop_requested and time.monotonic() < end:
    time.sleep(0.02)
sys.exit(75 if heartbeat.stop_requested else 3)
"""
SUPERVISOR = """
import os, signal, sys
from trainer.supervise.limits import Limits
from trainer.supervise.supervisor import supervise
from trainer.world.launchers import World

def limits():
    os.kill(os.getpid(), signal.SIGTERM)
    return Limits()

command = [sys.executable, "-c", sys.argv[1]]
sys.exit(supervise(World(0, 1, 0, 1, "here", "by hand"), command, os.environ, limits))
"""


@pytest.mark.parametrize("meets", [False, True], ids=["alone", "where others would meet it"])
def test_a_stop_that_comes_while_the_supervisor_starts_reaches_a_single_rank(meets: bool) -> None:
    rendezvous = Rendezvous("127.0.0.1", free_port("127.0.0.1"), "a token").variables() if meets else {}
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, RANK],
        env={**os.environ, **rendezvous},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 75, done.stderr


BESIDE_A_LARGER_CHILD = """
import os, subprocess, sys
from trainer.supervise.limits import Limits
from trainer.supervise.supervisor import supervise
from trainer.world.launchers import World

subprocess.run([sys.executable, "-c", "bytearray(b'x' * 2**30)"], check=True)
command = ["sh", "-c", "sleep 2; kill -KILL $$"]
sys.exit(supervise(World(0, 1, 0, 1, "here", "by hand"), command, os.environ, Limits))
"""


def test_a_killed_ranks_peak_is_its_own_and_not_that_of_the_largest_child() -> None:
    done = subprocess.run([sys.executable, "-c", BESIDE_A_LARGER_CHILD], capture_output=True, text=True)
    assert "killed by SIGKILL" in done.stderr
    assert "the rank held 0.0 GiB at its peak" in done.stderr


@pytest.mark.parametrize("signalled", [True, False])
async def test_a_supervisor_says_when_it_joins_whether_it_got_the_request_to_stop_itself(
    signalled: bool,
) -> None:
    env = Rendezvous("127.0.0.1", 1, "a token").variables()
    its = Supervisor(World(1, 2, 0, 1, "n1", "by hand"), None, RankOfGeneration, Limits(), env, Machine())
    if signalled:
        its.on_signal(signal.SIGINT)
    else:
        its._receive(Stop())
    assert its._joined() == Joined(1, "n1", idle=True, asked=True, signalled=signalled)


UNJOINED = """
import os, signal, sys, threading, time
from trainer.supervise import supervisor
from trainer.supervise.limits import Limits
from trainer.world.launchers import World

def ask():
    for _ in range(2):
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)

supervisor.REPEAT_S = 0.5
threading.Thread(target=ask, daemon=True).start()
command = [sys.executable, "-c", sys.argv[1]]
limits = Limits(init_s=20.0, run_folder=sys.argv[2])
sys.exit(supervisor.supervise(World(1, 2, 0, 1, "here", "by hand"), command, os.environ, lambda: limits))
"""


def test_a_second_signal_ends_a_supervisor_that_has_not_joined_the_others(tmp_path: Path) -> None:
    rendezvous = Rendezvous("127.0.0.1", free_port("127.0.0.1"), "a token").variables()
    done = subprocess.run(
        [sys.executable, "-c", UNJOINED, RANK, str(tmp_path)],
        env={**os.environ, **rendezvous},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130, done.stderr
    assert "a second signal (2) came before it had joined the others" in done.stderr


async def test_a_second_signal_waits_for_the_next_parent_where_one_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = Rendezvous("127.0.0.1", 1, "a token").variables()
    its = Supervisor(World(1, 2, 0, 1, "n1", "by hand"), None, RankOfGeneration, Limits(), env, Machine())
    its._has_joined = True
    sent: list[Message] = []
    monkeypatch.setattr(its._context.tree, "up", sent.append)
    its.on_signal(signal.SIGINT)
    its.on_signal(signal.SIGINT)
    assert not sent, "what came at once is one request, of which it tells when it joins"
    monkeypatch.setattr("trainer.supervise.supervisor.REPEAT_S", 0.0)
    its.on_signal(signal.SIGINT)
    assert sent == [StopRequest(2, 1, "n1", again=True)]


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


REPEATED = """
import os, signal, sys, tempfile
from pathlib import Path
from trainer.launch.processes import supervise

with tempfile.TemporaryDirectory() as folder:
    env = {**os.environ, "SIGNALS": str(os.getpid())}
    ask = lambda number: True
    code = supervise(["sh", "-c", "kill -TERM $SIGNALS; sleep 0.5; exit 75"], env, Path(folder), ask)
os.kill(os.getpid(), signal.SIGTERM)
print(code, "and it can still say so")
"""


def test_a_signal_that_is_repeated_when_the_run_has_ended_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "143 and it can still say so"), done.stderr
