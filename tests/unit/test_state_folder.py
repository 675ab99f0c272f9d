"""Folders of supervisors in /dev/shm: of a rank, and of a node whose ranks keep their newest steps.

The next supervisor removes the folder of one that was killed, but not that of a living one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ended_on_failure
from trainer.safe_io import folders
from trainer.world import rank_process, state_folder, state_parts
from trainer.world.rendezvous import Rendezvous

RUN = Rendezvous("here", 4711, "secret")
ENV = RUN.variables()
OTHER = Rendezvous("here", 4711, "another secret").variables()
OF_A_NODE, OF_A_RANK = (
    f"""
import sys, time
from pathlib import Path
from trainer.world import rank_process, state_folder
env = dict(CLIPSHIP_SUPERVISORS="here:4711", CLIPSHIP_TOKEN="old secret")
with {folder} as folder:
    print(getattr(folder, "path", folder), flush=True)
    time.sleep(600)
"""
    for folder in (
        'state_folder.state_folder(env, "a", Path(sys.argv[1]))',
        "rank_process.rank_folder(Path(sys.argv[1]))",
    )
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_TRIES", 3)


@contextmanager
def held(program: str, place: Path) -> Iterator[tuple[Any, Path]]:
    """A process that has such a folder, and the folder."""
    started: Any = subprocess.Popen(
        [sys.executable, "-c", program, str(place)], stdout=subprocess.PIPE, text=True
    )
    with ended_on_failure(started) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def killed(process: Any) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


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
    with held(OF_A_RANK, tmp_path) as (process, folder), rank_process.rank_folder(tmp_path) as own:
        left, lasting = (tmp_path / f"sem.{its.name}-abcdefgh" for its in (folder, own))
        left.touch()
        lasting.touch()
        rank_process.sweep(tmp_path, tmp_path)
        assert folder.exists()
        killed(process)
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


# The folder of a node, in which ranks keep their newest steps.


def header(
    step: int, part: int = 0, parts: int = 1, start: str = RUN.start, buffer: int = 0
) -> state_parts.Header:
    return state_parts.Header(start, "0123456789abcdef", buffer, step, part, parts, "sum")


def newest(folder: Path) -> int:
    return state_parts.newest_step(folder, RUN.start)


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
