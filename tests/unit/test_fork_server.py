"""Processes of ranks: those of a fork server are like those started anew, and generations share nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.config.loader import dump_job
from trainer.model import build, light_import
from trainer.supervise.rank import generation
from trainer.supervise.rank.fork_server import ForkServer
from trainer.supervise.rank.generation import RankOfGeneration, fresh_variables
from trainer.sysinfo.forks import adopt_orphans
from trainer.train.preload import preload
from trainer.world import rank_process

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


def begin(fork_server: ForkServer, says: Path, **variables: str) -> tuple[Any, dict[str, Any]]:
    """Starts a rank; returns it and what it says about itself."""
    says.unlink(missing_ok=True)
    rank = fork_server.start({**os.environ, "CLIPSHIP_SAYS": str(says), **variables})
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


def test_forked_ranks_are_like_one_that_was_started_until_a_library_needs_another_variable(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    before, says = children(), tmp_path / "says"
    started = first(fork_server, says, CLIPSHIP_A="1", CLIPSHIP_B="2", OMP_NUM_THREADS="1", MASTER_PORT="1")
    changed = {"CLIPSHIP_A": "other", "CLIPSHIP_C": "3", "OMP_NUM_THREADS": "1", "MASTER_PORT": "2"}
    rank, forked = begin(fork_server, says, **changed)
    assert rank.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.05)
    rank_process.end_rank(rank)
    assert rank.returncode == -signal.SIGKILL
    assert (started["forked"], started["imported here"]) == (False, True)
    assert (forked["forked"], forked["imported here"]) == (True, False)
    for facts in (started, forked):
        assert facts["parent"] == os.getpid()
        assert facts["session"] == facts["group"] == facts["pid"]
        assert {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR2"} <= set(facts["ignored"])
    for same in ("ignored", "folder", "streams", "open"):
        assert started[same] == forked[same]
    del started["environ"]["CLIPSHIP_B"]
    assert forked["environ"] == {**started["environ"], **changed}
    assert not first(fork_server, says, OMP_NUM_THREADS="2")["forked"]
    fork_server.close()
    assert children() == before, "neither the fork server nor a rank is left, not even as a zombie"


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


def test_a_process_with_a_thread_leaves_none_and_goes_on(fork_server: ForkServer, tmp_path: Path) -> None:
    rank, _ = begin(fork_server, tmp_path / "says", THREAD="yes")
    assert not fork_server._is_ready()
    assert rank.poll() is None
    rank_process.end_rank(rank)


def test_a_spare_supervisor_has_a_fork_server_and_no_rank(fork_server: ForkServer, tmp_path: Path) -> None:
    says, before = tmp_path / "says", children()
    fork_server.fill({**os.environ, "CLIPSHIP_SAYS": str(says)})
    until(fork_server._is_ready)
    assert not says.exists()
    assert said(fork_server, says)["forked"]
    fork_server.close()
    assert children() == before


def children() -> set[int]:
    """Children of this process, ended ones that nobody has waited for included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


# A generation of ranks shares nothing with the one before it: process, folder, heartbeat, meeting place.


STUCK = """
import ctypes, os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
open(os.environ["CLIPSHIP_RANK_DIR"] + "/stuck", "w").close()
ctypes.PyDLL(None).pause()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_rank_that_can_do_nothing_itself_is_ended(stopped: bool) -> None:
    """No thread of it runs Python any more and it takes no signal, as in a library that hangs."""
    its = RankOfGeneration(1, ForkServer([sys.executable, "-c", STUCK], use=False), os.environ, is_root=True)
    try:
        until((its.folder / "stuck").exists)
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


# The preload loads what a rank of a job needs, and leaves to the rank what it cannot load.


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(dump_job(tiny_job()))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["FILE", "--set", "model.name=hf-hub:nobody/nothing"],
        ["FILE", "--set", "model.name=no-such-model"],
        ["FILE.none"],
        [],
    ],
)
def test_a_model_or_a_job_that_is_not_here_is_left_to_the_rank(job_file: Path, words: list[str]) -> None:
    build._tokenizer.cache_clear()
    preload([word.replace("FILE", str(job_file)) for word in words])
    assert build._tokenizer.cache_info().currsize == 0


def test_a_module_is_imported_as_if_a_package_were_not_installed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("")
    (tmp_path / "user.py").write_text("try:\n    import slow\nexcept ImportError:\n    slow = None\n")
    program = (
        "from trainer.model.light_import import import_without\n"
        "import_without(['slow'], 'user')\n"
        "import user, slow\n"
        "print(user.slow is None, slow.__name__)\n"
        "import_without(['slow'], 'user')\n"
        "assert slow is __import__('slow')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True slow\n"


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ((), {"wandb", "horovod", "transformers"}),
        (("comm.backend=horovod",), {"wandb", "transformers"}),
        (("model.name=roberta-ViT-B-32",), {"wandb", "horovod"}),
        (("model.teacher=xlm-roberta-base-ViT-B-32", "model.teacher_pretrained=x"), {"wandb", "horovod"}),
        (("model.name=coca_ViT-B-32",), {"wandb", "horovod"}),
        (("model.name=hf-hub:nobody/nothing",), {"wandb", "horovod"}),
        (("seed=-1",), {"wandb"}),
    ],
)
def test_what_the_models_of_a_job_do_not_need_is_not_imported(
    job_file: Path, change: Sequence[str], left_out: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[set[str], str]] = []
    monkeypatch.setattr(
        light_import, "import_without", lambda absent, name: asked.append((set(absent), name))
    )
    words = [str(job_file), *(word for each in change for word in ("--set", each))]
    preload(words)
    assert asked == [(left_out, "open_clip")]
