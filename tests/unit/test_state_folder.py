"""Folders of supervisors in /dev/shm: of a rank, and of a node whose ranks keep their newest steps.

The next supervisor removes the folder of one that was killed, but not that of a living one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.processes import ended_on_failure
from trainer.safe_io import folders
from trainer.world import rank_process, state_folder, state_parts
from trainer.world.rendezvous import Rendezvous

RUN = Rendezvous("here", 4711, "secret")
ENV = RUN.variables()
OTHER = Rendezvous("here", 4711, "another secret").variables()
OF_A_RANK = """
import sys, time
from pathlib import Path
from trainer.world import rank_process
with rank_process.rank_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_TRIES", 3)


def within_limit(work: Callable[[], None]) -> None:
    """In a thread of its own: an open that blocks cannot be ended."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive(), "it waits for a stranger"


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
    command = [sys.executable, "-c", OF_A_RANK, str(tmp_path)]
    started: Any = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with ended_on_failure(started) as process, rank_process.rank_folder(tmp_path) as own:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        left, lasting = (tmp_path / f"sem.{its.name}-abcdefgh" for its in (folder, own))
        left.touch()
        lasting.touch()
        rank_process.sweep(tmp_path, tmp_path)
        assert folder.exists()
        process.kill()
        process.wait()
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


@pytest.mark.usefixtures("impatient")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_neither_opened_nor_removed(tmp_path: Path) -> None:
    """A FIFO there would hold up every start, and a stranger's file is none to lock."""
    folder = tmp_path / "clipship-rank-x"
    folder.mkdir()
    os.mkfifo(folder / "supervisor")
    (folder / "kept").touch()
    for name in (state_folder.folder_name(start, "a") for start in (RUN.start, "an old start")):
        (tmp_path / name).mkdir(mode=0o700)
    for each in tmp_path.iterdir():
        os.chown(each, 65534, 65534)
        os.utime(each, (time.time() - 3600,) * 2)
    within_limit(lambda: rank_process.sweep(tmp_path, tmp_path))
    with in_the(tmp_path) as own:
        assert own is None
    assert (folder / "kept").exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_links_are_not_followed_and_a_lock_that_is_no_plain_file_delays_no_start(tmp_path: Path) -> None:
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "shm"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    os.utime(elsewhere, (time.time() - 3600,) * 2)
    os.mkfifo(tmp_path / "fifo")
    for name in ("clipship-rank-x", "clipship-rank-y"):
        (place / name).mkdir(parents=True)
    os.mkfifo(place / "clipship-rank-x" / "supervisor")
    (place / "clipship-rank-y" / "supervisor").symlink_to(tmp_path / "fifo")
    (place / "clipship-rank-z").symlink_to(elsewhere)
    within_limit(lambda: rank_process.sweep(place, place))
    assert (elsewhere / "kept").exists()


# The folder of a node, in which ranks keep their newest steps.


def header(
    step: int, part: int = 0, parts: int = 1, start: str = RUN.start, buffer: int = 0
) -> state_parts.Header:
    return state_parts.Header(start, "0123456789abcdef", buffer, step, part, parts, "sum")


def newest(folder: Path) -> int:
    return state_parts.newest_step(folder, RUN.start)


def test_supervisors_of_a_node_share_a_private_folder_and_the_last_removes_it(tmp_path: Path) -> None:
    with in_the(tmp_path) as first:
        assert first.path.stat().st_mode & 0o777 == 0o700
        with in_the(tmp_path) as second:
            assert second.path == first.path
        assert first.path.is_dir(), "the first one still holds it"
    assert not list(tmp_path.iterdir())


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


def test_step_is_whole_when_every_part_of_it_is_there(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") == 0
    state_parts.write_header(tmp_path, header(3, 0, 2))
    assert newest(tmp_path) == 0
    state_parts.write_header(tmp_path, header(3, 1, 2))
    assert newest(tmp_path) == 3
    state_parts.write_header(tmp_path, header(4, 0, 2, buffer=1))
    assert newest(tmp_path) == 3, "rank 1 was killed while it wrote step 4"


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
