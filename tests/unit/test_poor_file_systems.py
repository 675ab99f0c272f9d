"""File systems that lack an operation or room: a run says so before its first step, or does without.

gcsfuse renames no folder that holds a file, an old CIFS flushes no folder, FAT has no links, some stores
mounted by FUSE rename nothing. In these tests the calls of this process are refused as they refuse them.
"""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.checkpoint.files import Folder
from trainer.cli.main import main
from trainer.comm.protocol import Comm
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.run.checkpoints import newest_step
from trainer.train.run_folder import open_run

Refuse = Callable[..., None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Refuses a call of a module with an error; with `folders`, only where its first argument is a folder."""

    def set_up(module: Any, name: str, number: int, *, folders: bool = False) -> None:
        call = getattr(module, name)

        def refused(first: Any, *rest: Any, **more: Any) -> Any:
            if not folders or stat.S_ISDIR(os.stat(first).st_mode):
                raise OSError(number, os.strerror(number))
            return call(first, *rest, **more)

        monkeypatch.setattr(module, name, refused)

    return set_up


@pytest.fixture
def poor(refuse: Refuse) -> None:
    """A file system that can do the least with which a run goes on."""
    refuse(os, "rename", errno.EMFILE, folders=True)
    refuse(os, "fsync", errno.EINVAL, folders=True)
    refuse(os, "link", errno.EPERM)
    refuse(fcntl, "lockf", errno.ENOLCK)


def publish(checkpoints: Path, *steps: int) -> None:
    for step in steps:
        folder = Folder(checkpoints, step)
        for name in ("model.pt", "zzz.pt"):
            folder.write(name, Path.touch)
        folder.publish(["model.pt", "zzz.pt"], {}, 1.0)


def job_file(folder: Path, **sections: Any) -> str:
    job = tiny_job(**{"config": "ViT-B-32", "logging": {"runs": str(folder / "runs")}, **sections})
    (folder / "job.toml").write_text(dump_job(job))
    (folder / "runs").mkdir(exist_ok=True)
    return str(folder / "job.toml")


CLUSTER: dict[str, Any] = {"slurm": {"gpus": "none"}, "resources": {"nodes": 2, "gpus_per_node": 1}}


@pytest.mark.usefixtures("poor")
def test_a_checkpoint_without_its_last_files_is_none_where_folders_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 2)
    replace, moved = os.replace, []

    def killed(source: Path, target: Path) -> None:
        if Path(target).parent.name == "step-00000004":
            moved.append(Path(target).name)
            if len(moved) == 3:
                raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, 4)
    assert moved[-1] == "manifest.json"
    assert newest_step(tmp_path) == 2


@pytest.mark.usefixtures("poor")
def test_check_names_what_a_run_does_without_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(tmp_path)
    assert main(["check", path, "--json"]) == 0
    warnings = " ".join(json.loads(capsys.readouterr().out)["warnings"])
    for what in ("rename folders", "flush folders", "link files", "lock files"):
        assert f"{tmp_path / 'runs'}: its file system cannot {what} (" in warnings
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSYS, "Function not implemented"), (errno.EROFS, "Read-only file system")]
)
def test_a_place_where_nothing_can_be_saved_is_refused_before_the_first_step(
    tmp_path: Path, refuse: Refuse, capsys: pytest.CaptureFixture[str], alone: Comm, number: int, says: str
) -> None:
    """It is a problem where the run folder is this machine's, else a finding; --no-data does not look."""
    here, job = job_file(tmp_path), tiny_job(logging={"runs": str(tmp_path / "other")})
    refuse(os, "replace", number)
    sentence = f"a run cannot write a file and rename it in {tmp_path / 'runs'}: {says}"
    assert main(["check", here]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["run", here, "--nproc", "1"]) == 2
    assert sentence in capsys.readouterr().err
    with pytest.raises(InputError, match=f"a run cannot write a file and rename it in .*other.*: {says}"):
        open_run(job, alone)
    assert main(["check", here, "--no-data"]) == 0
    assert "rename" not in "".join(capsys.readouterr())
    assert main(["check", job_file(tmp_path, **CLUSTER)]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.parametrize(("earlier", "room_gb", "code"), [(0, 3, 2), (0, 4, 0), (1, 1, 2), (1, 3, 0)])
def test_a_disk_without_room_for_a_checkpoint_beside_the_last_one_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    earlier: int,
    room_gb: int,
    code: int,
) -> None:
    """A checkpoint of ViT-B-32 takes 1.82 GB."""
    room = SimpleNamespace(free=room_gb * 10**9, total=0, used=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    path = job_file(tmp_path, checkpoint={"keep": 1})
    publish(tmp_path / "runs" / "tiny" / "checkpoints", *range(1, earlier + 1))
    shutil.copy(path, tmp_path / "runs" / "tiny" / "job.toml") if earlier else None
    assert main(["check", path]) == code
    printed = capsys.readouterr()
    says = f"no room for a checkpoint beside the last one: each takes 1.82 GB, and {tmp_path / 'runs'}"
    assert (says in printed.err) == (code == 2)
    assert "lower checkpoint.keep" not in printed.out + printed.err
