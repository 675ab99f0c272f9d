"""The folder of a node in which ranks keep their newest steps: who makes it, who removes it."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer.safe_io import folders
from trainer.world import state_folder as module
from trainer.world.rendezvous import Rendezvous
from trainer.world.state_folder import (
    STATE_DIR,
    folder_name,
    newest_kept,
    state_folder,
    sweep,
    with_state_folder,
)
from trainer.world.state_parts import Header, newest_step, whole_steps, write_header
from trainer.world.variables import STARTS_AGAIN

RUN = Rendezvous("here", 4711, "secret")
ENV = RUN.variables()
OTHER = Rendezvous("here", 4711, "another secret").variables()
HOLD = (
    "import sys, time; from pathlib import Path\n"
    "from trainer.world.state_folder import state_folder\n"
    "env = dict(CLIPSHIP_SUPERVISORS='here:4711', CLIPSHIP_TOKEN=sys.argv[2])\n"
    "with state_folder(env, 'a', Path(sys.argv[1])) as folder:\n"
    "    print(folder.path, flush=True); time.sleep(600)"
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_TRIES", 3)


def header(step: int, part: int = 0, parts: int = 1, start: str = RUN.start, buffer: int = 0) -> Header:
    return Header(start, "0123456789abcdef", buffer, step, part, parts, "sum")


def test_supervisors_of_a_node_share_a_private_folder_and_the_last_removes_it(tmp_path: Path) -> None:
    with state_folder(ENV, "a", tmp_path) as first, state_folder(ENV, "b", tmp_path) as elsewhere:
        assert first is not None
        assert elsewhere is not None
        assert first.path != elsewhere.path
        assert first.path.stat().st_mode & 0o777 == 0o700
        with state_folder(ENV, "a", tmp_path) as second:
            assert second is not None
            assert second.path == first.path
        assert first.path.is_dir(), "the first one still holds it"
    assert not list(tmp_path.iterdir())


def test_folder_of_killed_supervisors_is_removed_by_the_next_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), "old secret"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        sweep(tmp_path)
        assert folder.is_dir(), "it is held"
        process.kill()
    with state_folder(ENV, "a", tmp_path) as own:
        assert own is not None
        assert not folder.exists()


def test_folder_that_was_just_made_is_not_swept(tmp_path: Path) -> None:
    folder = tmp_path / folder_name("another start", "a")
    folder.mkdir()
    sweep(tmp_path)
    assert folder.is_dir(), "its supervisor has not taken the lock yet"
    os.utime(folder, (1.0, 1.0))
    sweep(tmp_path)
    assert not folder.exists()


def test_what_others_put_there_is_not_used(tmp_path: Path) -> None:
    name = folder_name(RUN.start, "a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with state_folder(ENV, "a", tmp_path) as folder:
        assert folder is None
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    (tmp_path / name).chmod(0o777)
    with state_folder(ENV, "a", tmp_path) as folder:
        assert folder is None, "others could write in it"
    (tmp_path / name).chmod(0o700)
    os.mkfifo(tmp_path / name / "supervisors")
    with state_folder(ENV, "a", tmp_path) as folder:
        assert folder is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user_is_not_used_and_not_removed(tmp_path: Path) -> None:
    for name in (folder_name(RUN.start, "a"), folder_name("an old start", "a")):
        (tmp_path / name).mkdir(mode=0o700)
        os.chown(tmp_path / name, 4711, 4711)
        os.utime(tmp_path / name, (1.0, 1.0))
    with state_folder(ENV, "a", tmp_path) as folder:
        assert folder is None
    assert len(list(tmp_path.iterdir())) == 2


def test_start_without_an_id_or_without_memory_has_none(tmp_path: Path) -> None:
    with state_folder({}, "a", tmp_path) as folder:
        assert folder is None
    with state_folder(ENV, "a", tmp_path / "missing") as folder:
        assert folder is None
    assert with_state_folder({STATE_DIR: "/an/outer/runs", "OTHER": "1"}, None) == {"OTHER": "1"}


def test_launcher_that_starts_again_keeps_the_folder_of_a_failed_run_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looped = {**ENV, STARTS_AGAIN: "always"}
    with state_folder(looped, "a", tmp_path) as folder:
        assert folder is not None
        write_header(folder.path, header(7))
        folder.failed = True
    with state_folder(OTHER, "a", tmp_path):
        assert folder.path.is_dir(), "the same start may come again"
    with state_folder(looped, "a", tmp_path) as again:
        assert again is not None
        env = with_state_folder(looped, again)
        assert newest_kept(env) == 7
        again.failed = True
    monkeypatch.setattr(module, "KEPT_S", 0.0)
    time.sleep(0.01)
    sweep(tmp_path)
    assert not folder.path.exists(), "it did not come"


def test_launcher_that_starts_again_leaves_nothing_of_a_run_that_is_done(tmp_path: Path) -> None:
    with state_folder({**ENV, STARTS_AGAIN: "always"}, "a", tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_step_is_whole_when_every_part_of_it_is_there(tmp_path: Path) -> None:
    assert newest_step(tmp_path / "missing", RUN.start) == 0
    write_header(tmp_path, header(3, 0, 2))
    assert newest_step(tmp_path, RUN.start) == 0
    write_header(tmp_path, header(3, 1, 2))
    assert newest_step(tmp_path, RUN.start) == 3
    write_header(tmp_path, header(4, 0, 2, buffer=1))
    assert newest_step(tmp_path, RUN.start) == 3, "rank 1 was killed while it wrote step 4"
    write_header(tmp_path, header(4, 1, 2, buffer=1))
    assert [whole.step for whole in whole_steps(tmp_path, RUN.start)] == [4, 3]
    write_header(tmp_path, header(5, 0, 2))
    assert newest_step(tmp_path, RUN.start) == 4
    assert [each.part for each in whole_steps(tmp_path, RUN.start)[0].headers] == [0, 1]


def test_headers_of_another_start_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    write_header(tmp_path, header(9, start="another"))
    damaged = header(8, buffer=1)
    (tmp_path / damaged.name).write_text('{"start": "')
    assert newest_step(tmp_path, RUN.start) == 0
    write_header(tmp_path, damaged)
    (tmp_path / damaged.name).rename(tmp_path / header(8).name)
    assert newest_step(tmp_path, RUN.start) == 0, "it says that it is of the other buffer"
    (tmp_path / header(7).name).write_text(json.dumps({**asdict(header(7)), "part": "0"}))
    assert newest_step(tmp_path, RUN.start) == 0, "its part is no number"
