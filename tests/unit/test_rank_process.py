"""The folder of a supervisor and its rank.

The next supervisor removes the folder of one that was killed, but not that of a living one.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO

import pytest

from tests.support.processes import ended_on_failure
from trainer.safe_io import folders
from trainer.world.rank_process import rank_folder, sweep

HOLD = "import sys, time; from pathlib import Path; from trainer.world.rank_process import rank_folder\n"
HOLD += "with rank_folder(Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(600)"


@contextmanager
def hold(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has such a folder, and the folder."""
    command = [sys.executable, "-c", HOLD, str(place)]
    with ended_on_failure(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_killed_supervisors_folder_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    with hold(tmp_path) as (process, folder):
        sweep(tmp_path, tmp_path)
        assert folder.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert folder.exists()
    with rank_folder(tmp_path) as own:
        assert not folder.exists()
        assert own.exists()
    assert list(tmp_path.iterdir()) == []


def test_semaphores_of_killed_ranks_are_removed_with_their_folder(tmp_path: Path) -> None:
    others = {"sem.mp-abcdefgh", "sem.clipship-rank-other-1"}
    for name in others:
        (tmp_path / name).touch()
    with hold(tmp_path) as (process, folder), rank_folder(tmp_path) as own:
        left, lasting = (tmp_path / f"sem.{its.name}-abcdefgh" for its in (folder, own))
        left.touch()
        lasting.touch()
        process.send_signal(signal.SIGKILL)
        process.wait()
        sweep(tmp_path, tmp_path)
        assert not left.exists()
        assert lasting.exists(), "its supervisor lives"
    assert {path.name for path in tmp_path.iterdir()} == others


def test_folder_without_lock_is_swept_only_when_it_is_old(tmp_path: Path) -> None:
    young, old = tmp_path / "clipship-rank-young", tmp_path / "clipship-rank-old"
    for folder in (young, old, tmp_path / "another"):
        folder.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    sweep(tmp_path, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "clipship-rank-young"]


def test_supervisors_that_start_together_keep_each_others_folders(tmp_path: Path) -> None:
    def start(_: int) -> bool:
        with rank_folder(tmp_path) as folder:
            (folder / "heartbeat").touch()
            return (folder / "heartbeat").exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(start, range(400)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_folder_is_neither_opened_nor_removed(tmp_path: Path) -> None:
    """A FIFO there would hold up every start, and a stranger's file is none to lock."""
    folder = tmp_path / "clipship-rank-x"
    folder.mkdir()
    os.mkfifo(folder / "supervisor")
    (folder / "kept").touch()
    os.chown(folder, 65534, 65534)
    os.utime(folder, (time.time() - 3600,) * 2)
    within_limit(lambda: sweep(tmp_path, tmp_path))
    assert (folder / "kept").exists()


@pytest.mark.parametrize("lock", ["fifo", "link to a fifo", "folder"])
def test_a_lock_that_is_no_plain_file_delays_no_start(tmp_path: Path, lock: str) -> None:
    folder = tmp_path / "clipship-rank-x"
    folder.mkdir()
    if lock == "folder":
        (folder / "supervisor").mkdir()
    else:
        os.mkfifo(tmp_path / "fifo")
        (folder / "supervisor").symlink_to(tmp_path / "fifo") if "link" in lock else os.mkfifo(
            folder / "supervisor"
        )
    within_limit(lambda: sweep(tmp_path, tmp_path))


def test_a_link_to_a_folder_of_ones_own_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    place = tmp_path / "shm"
    place.mkdir()
    (place / "clipship-rank-x").symlink_to(elsewhere)
    os.utime(elsewhere, (time.time() - 3600,) * 2)
    sweep(place, place)
    assert (elsewhere / "kept").exists()


def within_limit(work: Callable[[], None]) -> None:
    """In a thread of its own: an open that blocks cannot be ended."""
    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive(), "it waits for a stranger"


def test_folder_made_again_while_its_old_lock_is_taken_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock, made = tmp_path / "clipship-rank-again", fcntl.flock, list[IO[str]]()
    folders.hold(path, "supervisor").close()

    def late(file: IO[str], how: int) -> None:
        if not made:  # another process has swept the folder, and its supervisor has made it again
            folders.remove_tree(path)
            monkeypatch.setattr(fcntl, "flock", flock)
            made.append(folders.hold(path, "supervisor"))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    sweep(tmp_path, tmp_path)
    made[0].close()
    assert path.is_dir()
