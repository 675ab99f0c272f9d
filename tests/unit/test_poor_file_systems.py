"""File systems that lack an operation or room: a run says so before its first step, or does without.

gcsfuse renames no folder that holds a file, an old CIFS flushes no folder, FAT has no links, some stores
mounted by FUSE rename nothing. In these tests the calls of this process are refused as they refuse them.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from tests.support.command_line import clipship
from tests.support.jobs import VIT, tiny_job
from tests.support.steps import untrained
from tests.support.thread_ranks import run_ranks
from trainer.checkpoint.files import Folder
from trainer.comm.protocol import Comm
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.evaluate.evaluation import Evaluation
from trainer.run.checkpoints import newest_step
from trainer.safe_io.atomic import write_json, write_whole
from trainer.telemetry.profiler import Profiler
from trainer.train.monitors import NonFinite, NonFiniteGuard
from trainer.train.run_folder import open_run
from trainer.train.step import StepResult

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
def test_check_names_what_a_run_does_without_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    warnings = " ".join(json.loads(clipship("check", path, "--json", code=0).out)["warnings"])
    for what in ("rename folders", "flush folders", "link files", "lock files"):
        assert f"{tmp_path / 'runs'}: its file system cannot {what} (" in warnings
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSYS, "Function not implemented"), (errno.EROFS, "Read-only file system")]
)
def test_a_place_where_nothing_can_be_saved_is_refused_before_the_first_step(
    tmp_path: Path, refuse: Refuse, alone: Comm, number: int, says: str
) -> None:
    """It is a problem where the run folder is this machine's, else a finding; --no-data does not look."""
    here, job = job_file(tmp_path), tiny_job(logging={"runs": str(tmp_path / "other")})
    refuse(os, "replace", number)
    sentence = f"a run cannot write a file and rename it in {tmp_path / 'runs'}: {says}"
    assert sentence in clipship("check", here, code=2).err
    assert sentence in clipship("run", here, "--nproc", "1", code=2).err
    with pytest.raises(InputError, match=f"a run cannot write a file and rename it in .*other.*: {says}"):
        open_run(job, alone)
    unread = clipship("check", here, "--no-data", code=0)
    assert "rename" not in unread.out + unread.err
    assert sentence in " ".join(clipship("check", job_file(tmp_path, **CLUSTER), code=0).out.split())
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.parametrize(("earlier", "room_gb", "code"), [(0, 3, 2), (0, 4, 0), (1, 1, 2), (1, 3, 0)])
def test_a_disk_without_room_for_a_checkpoint_beside_the_last_one_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    printed = clipship("check", path, code=code)
    says = f"no room for a checkpoint beside the last one: each takes 1.82 GB, and {tmp_path / 'runs'}"
    assert (says in printed.err) == (code == 2)
    assert "lower checkpoint.keep" not in printed.out + printed.err


# A run goes on, and says so, if there is no room for a file beside its result.
# A file stands where the folder would be. Every rank has recorded the samples of a gradient that is no number
# before one of them ends the run.

LEFT_OUT = StepResult(torch.tensor(float("nan")), torch.tensor(float("nan")))


@pytest.fixture
def no_folder(tmp_path: Path) -> Path:
    """Nothing can be made in it."""
    (tmp_path / "file").touch()
    return tmp_path / "file"


def test_samples_that_cannot_be_recorded_are_left_out_all_the_same(
    no_folder: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    stop, skip = (tiny_job(health={"non_finite": ends}).health for ends in ("stop", "skip"))
    NonFiniteGuard(skip, no_folder, alone).check(3, LEFT_OUT, ["a"])
    assert "the samples of step 3 are NOT WRITTEN: " in caplog.text
    with pytest.raises(NonFinite, match=r"Its samples are not recorded \(.*Not a directory"):
        NonFiniteGuard(stop, no_folder, alone).check(3, LEFT_OUT, ["a"])


def test_a_trace_that_cannot_be_written_is_not_begun(
    no_folder: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = Profiler((1, 3), no_folder, alone)
    for step in (1, 2, 3):
        profiler.begin(step)
        profiler.end(step)
    assert caplog.text.count("NOT WRITTEN") == 1


def test_an_evaluation_whose_board_cannot_be_written_has_its_metrics(
    tmp_path: Path, no_folder: Path, alone: Comm, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        Image.new("RGB", (40, 40)).save(tmp_path / f"{name}.png")
    (tmp_path / "t.csv").write_text("image,caption\na.png,one\nb.png,two\n")
    job = tiny_job(config=VIT, eval={"retrieval": (str(tmp_path / "t.csv"),), "batch_size": 2})
    with caplog.at_level(logging.WARNING):
        metrics = Evaluation(job, alone, no_folder)(untrained(job))
    assert "retrieval_t2i_r1" in metrics
    assert "the retrieval board is NOT WRITTEN: " in caplog.text


@pytest.mark.parametrize(
    "health", [{}, {"non_finite": "skip", "non_finite_in_a_row": 1}], ids=["stop", "in a row"]
)
def test_no_rank_leaves_before_a_late_one_has_recorded_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: dict[str, Any]
) -> None:
    def write_late(path: Path, about: dict[str, Any]) -> None:
        time.sleep(0.2 * about["rank"])
        path.write_text(json.dumps(about))

    monkeypatch.setattr("trainer.train.monitors.write_json", write_late)

    def names_at_the_end(comm: Any) -> list[str]:
        with pytest.raises(NonFinite, match="the gradient of step 3 is NaN"):
            NonFiniteGuard(tiny_job(health=health).health, tmp_path, comm).check(3, LEFT_OUT, ["a"])
        return sorted(path.name for path in (tmp_path / "non-finite").glob("step-*"))

    names = [f"step-00000003-rank-{rank:05d}.json" for rank in (0, 1)]
    assert run_ranks(2, names_at_the_end) == [names, names]


# Files are whole or as they were; JSON holds no NaN.


def test_write_that_fails_leaves_the_older_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = "é" * 127
    write_whole(tmp_path / longest, "old")
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / longest, "new")
    assert (tmp_path / longest).read_text() == "old"
    assert os.listdir(tmp_path) == [longest]


def test_nan_and_infinity_become_null_in_json(tmp_path: Path) -> None:
    value = {"norm": float("inf"), "rows": ({"loss": float("nan")}, [1.5, -float("inf")]), "step": 3}
    write_json(tmp_path / "file", value)
    written = json.loads((tmp_path / "file").read_text())
    assert written == {"norm": None, "rows": [{"loss": None}, [1.5, None]], "step": 3}


def test_no_planted_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write in the folder of a report, too."""
    precious, report = tmp_path / "precious", tmp_path / "report.html"
    precious.write_text("mine")
    report.symlink_to(precious)
    write_whole(report, "new")
    assert (report.read_text(), report.is_symlink()) == ("new", False)
    monkeypatch.setattr(os, "urandom", lambda _: b"guessed")
    (tmp_path / f".report.html.{b'guessed'.hex()}.partial").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_whole(report, "newer")
    assert precious.read_text() == "mine"
