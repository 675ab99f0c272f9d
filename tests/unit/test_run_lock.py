"""The lock of a run folder, between real processes."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.command_line import clipship
from tests.support.jobs import TOY_JOB, tiny_job
from tests.support.processes import ended_on_failure
from trainer.comm.protocol import Comm
from trainer.errors import InputError, MachineError, Preempted
from trainer.run.exit_files import ExitFiles, remove_other_exit_files
from trainer.run.folder import move_aside
from trainer.run.lock import hold, who_holds
from trainer.train.run_folder import open_run

HOLDER = """
import sys, time
from pathlib import Path
from trainer.run.lock import hold
hold(Path(sys.argv[1]), sys.argv[2], "first", 1.0, print)
print("held", flush=True)
time.sleep(600)
"""


SEEN_BY_OTHERS = """
import sys
from pathlib import Path
from trainer.run.lock import who_holds
print(who_holds(Path(sys.argv[1])).node, who_holds(Path(sys.argv[1])).generation)
"""


@contextmanager
def other_start(folder: Path, node: str = "n1") -> "Iterator[subprocess.Popen[bytes]]":
    """A process that holds the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder), node]
    with ended_on_failure(subprocess.Popen(command, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process


def test_later_generation_of_the_same_start_takes_the_lock_of_a_lost_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.lock.FENCED_S", 0.2)
    with other_start(tmp_path) as other:
        with pytest.raises(MachineError):
            hold(tmp_path, "n2", "first", 0.5, lambda _: None, generation=1)
        with pytest.raises(MachineError):
            hold(tmp_path, "n2", "second", 0.5, lambda _: None, generation=2)
        hold(tmp_path, "n2", "first", 60.0, lambda _: None, generation=2)
        command = [sys.executable, "-c", SEEN_BY_OTHERS, str(tmp_path)]
        assert subprocess.run(command, capture_output=True, text=True).stdout == "n2 2\n"
        other.kill()


def test_another_start_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    said: list[str] = []
    assert who_holds(tmp_path) is None
    assert not (tmp_path / ".lock").exists()
    with other_start(tmp_path) as other:
        words = rf"process {other.pid} on n1 since 20\S+ is writing to .*{tmp_path.name}"
        with pytest.raises(MachineError, match=words):
            hold(tmp_path, "n2", "second", 0.3, said.append)
        assert len(said) == 1
        assert re.search(words, said[0])
        assert str(who_holds(tmp_path)).startswith(f"process {other.pid} on n1")
        with pytest.raises(InputError, match=r"cannot be moved aside: process .* is writing to it"):
            move_aside(tmp_path)
        other.kill()
    assert who_holds(tmp_path) is None
    hold(tmp_path, "n2", "second", 0.0, said.append)
    assert len(said) == 1


def test_a_second_start_on_the_same_machine_is_refused_at_once_by_process(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(f'{TOY_JOB}[logging]\nruns = "{tmp_path}"\n')
    (tmp_path / "toy").mkdir()
    with other_start(tmp_path / "toy", os.uname().nodename) as other:
        said = " ".join(clipship("run", tmp_path / "job.toml", "--nproc", "1", code=1).err.split())
        assert f"process {other.pid} on {os.uname().nodename} since 20" in said
        assert f"is writing to the run folder {tmp_path / 'toy'}: stop that start of the run first" in said
        other.kill()


def test_a_start_waits_for_the_end_of_the_one_before(tmp_path: Path) -> None:
    with other_start(tmp_path) as other:
        hold(tmp_path, "n1", "second", 60.0, lambda _: other.kill())
    assert '"start": "second"' in (tmp_path / ".lock").read_text()


def test_a_start_waits_no_longer_than_its_limit_allows(
    tmp_path: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of init may be over already: the ranks came late, or their connections took long."""
    job = tiny_job(logging={"runs": str(tmp_path)}, timeouts={"init_s": 600.0})
    alone.heartbeat.limits = job.timeouts.by_phase
    monkeypatch.setattr(alone.heartbeat, "_began", time.monotonic() - 598)
    (tmp_path / job.name).mkdir()
    caplog.set_level("INFO")
    with other_start(tmp_path / job.name) as other:
        with pytest.raises(MachineError, match=f"process {other.pid}"):
            open_run(job, alone)
        other.kill()
    assert re.search(r"waiting up to [0-2] s for it to end", caplog.text)


def test_a_waiting_start_obeys_a_request_to_stop(tmp_path: Path) -> None:
    with other_start(tmp_path) as other:
        with pytest.raises(Preempted, match=f"asked to stop while process {other.pid} .* was writing to"):
            hold(tmp_path, "n2", "second", 600.0, lambda _: None, lambda: True)
        other.kill()


def test_only_the_start_that_holds_the_folder_writes_and_keeps_exit_files(tmp_path: Path) -> None:
    with other_start(tmp_path) as other:
        end = {"reason": "refused"}
        assert asyncio.run(ExitFiles(str(tmp_path), "second").write("exit.json", end)) == ""
        assert asyncio.run(ExitFiles(str(tmp_path), "first").write("exit.json", end)) == str(
            tmp_path / "exit.json"
        )
        asyncio.run(ExitFiles(str(tmp_path), "second").remove_old())
        assert (tmp_path / "exit.json").exists()
        other.kill()
    remove_other_exit_files(tmp_path, "first")
    assert (tmp_path / "exit.json").exists()
    remove_other_exit_files(tmp_path, "second")
    assert not (tmp_path / "exit.json").exists()


READER = """
import os, sys
from pathlib import Path
from trainer.run import lock

def stand_still(_):
    print("looks", flush=True)
    sys.stdin.read()

os.close = stand_still
lock.who_holds(Path(sys.argv[1]))
"""


def test_whoever_looks_at_the_lock_never_counts_as_its_holder(tmp_path: Path) -> None:
    """A reader that stands still in the midst of its look takes nothing, whoever held the folder last."""
    with other_start(tmp_path) as other:
        other.kill()
    command = [sys.executable, "-c", READER, str(tmp_path)]
    pipe = subprocess.PIPE
    with ended_on_failure(subprocess.Popen(command, stdin=pipe, stdout=pipe)) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"looks\n"
        assert who_holds(tmp_path) is None
        said: list[str] = []
        hold(tmp_path, "n2", "third", 0.0, said.append)
        assert not said
        reader.kill()
