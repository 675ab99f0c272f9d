"""A generation of ranks shares nothing with the one before it: process, folder, heartbeat, meeting place."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.supervise.rank import generation
from trainer.supervise.rank.fork_server import ForkServer
from trainer.supervise.rank.generation import RankOfGeneration, fresh_variables
from trainer.world import heartbeat

RANK = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
open(os.environ["CLIPSHIP_RANK_DIR"] + "/says", "w").write(os.environ["CLIPSHIP_GENERATION"])
time.sleep(600)
"""


def started(env: Mapping[str, str], number: int, program: str = RANK) -> RankOfGeneration:
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
    first = started(env, 1)
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
    second = started(env, 2)
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
    its = started(os.environ, 1, STUCK)
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
