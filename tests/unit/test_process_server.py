"""The server of loader processes: a fork of the rank where that is safe, else a new interpreter."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ended_on_failure

PROGRAM = """
import logging, multiprocessing.forkserver, os, sys, threading, time
from pathlib import Path
from torch.utils.data import Dataset
from trainer.data.processes import load, start_process_server

class Squares(Dataset):
    def __getitem__(self, request):
        return request * request

if __name__ == "__main__":
    if sys.argv[1] == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    reading, writing = os.pipe()
    start_process_server()
    os.close(writing)
    os.read(reading, 1)  # ends only if the server has closed its copy
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    words = Path(f"/proc/{server}/cmdline").read_bytes()
    forked = words == Path("/proc/self/cmdline").read_bytes()
    squares = load(Squares(), [1, 2, 3], 1, pin_memory=False)
    first = next(squares)
    workers = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    found = [first, *squares]
    endless = load(Squares(), range(10**9), 1, pin_memory=False)
    next(endless)
    print(forked, *found, server, *workers, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """Folder of a rank in memory, under a name that no supervisor takes for an abandoned one of its own."""
    with tempfile.TemporaryDirectory(prefix="clipship-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.parametrize(("threads", "forks"), [("alone", "True"), ("thread", "False")])
def test_loader_processes_work_and_end_with_a_killed_rank(
    tmp_path: Path, memory_folder: Path, threads: str, forks: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = memory_folder.name
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    env = {
        **os.environ,
        "TMPDIR": str(elsewhere),
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "CLIPSHIP_RANK_DIR": str(memory_folder),
    }
    command = [sys.executable, str(program), threads]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    with ended_on_failure(started) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        forked, *squares = process.stdout.readline().split()
        assert (forked, squares[:3]) == (forks, ["1", "4", "9"])
        assert list(Path("/dev/shm").glob(f"sem.{folder}-*")), "its supervisor finds them by this name"
        assert not list(elsewhere.glob("pymp-*")), "its server has its socket in the folder, too"
        process.send_signal(signal.SIGKILL)
        process.wait()
        limit = time.monotonic() + 30
        while any(in_session(process.pid)):
            assert time.monotonic() < limit
            time.sleep(0.05)
        told = process.stderr.read()
        assert "resource_tracker" not in told
        assert ("a fork would lose 1 thread (python" in told) == (threads == "thread"), told
        assert not list(Path("/dev/shm").glob(f"sem.{folder}-*")), "the tracker has removed them"


def in_session(session: int) -> list[int]:
    """Processes of the session that have not ended."""
    return [
        int(entry.name)
        for entry in Path("/proc").glob("[0-9]*")
        if (fields := _stat(entry)) and fields[0] != "Z" and fields[3] == str(session)
    ]


def _stat(entry: Path) -> list[str]:
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
