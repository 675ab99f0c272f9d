"""Copies of checkpoints: whole or not there, as many as are kept, fetched and checked."""

import json
import os
import shutil
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from tests.support.jobs import tiny_job
from trainer.checkpoint import files
from trainer.checkpoint.identity import RunIdentity
from trainer.cli.main import main
from trainer.copies.copied_run import CopiedRun
from trainer.copies.copier import Copier
from trainer.copies.place import check_place
from trainer.data import store
from trainer.errors import InputError
from trainer.run.layout import Run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.copies.copier._AGAIN", SimpleNamespace(wait_s=lambda _: 0.01))
    monkeypatch.setattr("trainer.copies.copier._AGAIN_AT_END_S", 0.01)
    monkeypatch.setattr("trainer.copies.copier._TOLD_EVERY_S", 0.01)


class Place:
    """A run folder with checkpoints that hold no weights, and its copy in another folder."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        keys = {"keep": 2, "copy_to": str(folder / "far"), **checkpoint}
        self.job = tiny_job(checkpoint=keys, logging={"runs": str(folder / "runs")})
        self.identity = RunIdentity(self.job, 64, order={"block_samples": 7, "lanes": 8})
        self.run = Run(folder / "runs" / "tiny")
        self.run.checkpoints.mkdir(parents=True)
        copy = CopiedRun.of(self.job)
        assert copy is not None
        self.copy = copy

    def save(self, step: int, content: str = "weights") -> Path:
        folder = files.Folder(self.run.checkpoints, step)
        names = ["model.pt", "optimizer.pt"]
        for name in names:
            folder.write(name, lambda path: write(path, f"{content} {step} {path.name}"))
        return folder.publish(names, self.identity.facts(), 5.0)

    def copied(self, step: int) -> None:
        """Copies the run with a checkpoint of the step."""
        self.copy.put_run(self.run.folder, self.job)
        self.copy.put_checkpoint(self.save(step))

    def save_and_offer(self, work: Copier, step: int) -> None:
        self.save(step)
        work.offer(step)

    def copier(self) -> Copier:
        return Copier(self.job, self.run, self.copy, [self.identity])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def write(path: Path, text: str) -> None:
    path.write_text(text * 100)


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> None:
    """Lets writes to addresses for which `fails` is true raise."""
    put = store.put

    def maybe(source: Any, address: str, *rest: Any, **more: Any) -> None:
        if fails(address):
            raise OSError(f"{address}: cannot be written: the store is gone")
        put(source, address, *rest, **more)

    monkeypatch.setattr("trainer.copies.copied_run.put", maybe)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def steps(*numbers: int) -> list[str]:
    return [folder_name(number) for number in numbers]


Resume = Callable[..., int]


@pytest.fixture
def resume(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resume:
    """Runs `clipship resume` with the copy's address in a new working folder; no rank is started."""
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    monkeypatch.setattr("trainer.launch.local.run", lambda *_, **__: 0)
    return lambda *words, of="": main(["resume", of or place.copy.address, "--nproc", "1", *words])


@pytest.mark.parametrize("anew", [False, True])
def test_a_copy_that_is_cut_half_way_is_never_taken_for_whole(
    place: Place, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    """Nor is a whole one, while the files of its step are replaced by those of another go."""
    if anew:
        place.copy.put_checkpoint(place.save(4))
    folder = place.save(4, "other weights")
    with monkeypatch.context() as cut:
        failing(cut, lambda address: address.endswith("optimizer.pt"))
        with pytest.raises(OSError, match="the store is gone"):
            place.copy.put_checkpoint(folder)
    there = Path(place.copy.address) / "checkpoints" / folder.name
    assert (there / "model.pt").is_file()
    assert place.copy.whole() == []
    place.copy.put_checkpoint(folder)
    assert place.copy.whole() == steps(4)
    files.verify(there)


def test_what_was_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = store._send

    def damaging(source: Any, address: str, **more: Any) -> None:
        sent.append(address)
        send(b"x" * len(source) if len(sent) == 1 else source, address, **more)

    monkeypatch.setattr(store, "_send", damaging)
    store.put(b"content", str(tmp_path / "deep" / "file"))
    assert (tmp_path / "deep" / "file").read_bytes() == b"content"
    assert len(sent) == 2, "what came back damaged is sent again"
    store.put(b"content", str(tmp_path / "deep" / "file"))
    assert len(sent) == 2, "what is there already is not sent again"
    sent.clear()
    with pytest.raises(InputError, match="its source here is damaged: its checksum is another"):
        store.put(b"content", str(tmp_path / "deep" / "other"), store.Seal(3, "another's"))
    assert len(sent) == 1, "sent again it would be damaged again"


@pytest.mark.parametrize("run", ["lr-?", "lr-[12]"])
def test_pruning_a_run_whose_name_looks_like_a_glob_leaves_the_copies_of_other_runs(
    tmp_path: Path, run: str
) -> None:
    root = f"memory://{tmp_path.name}"
    copies = {name: CopiedRun(f"{root}/{name}") for name in (run, "lr-1", "lr-2")}
    for copy in copies.values():
        for name in steps(10, 20):
            store.put(b"{}", f"{copy.address}/checkpoints/{name}/manifest.json")
    copies[run].prune(folder_name(20), 1, None)
    whole = {name: copy.whole() for name, copy in copies.items()}
    assert whole == {run: steps(20), "lr-1": steps(10, 20), "lr-2": steps(10, 20)}
    store.remove(root)


def test_what_a_user_keeps_beside_the_copies_is_neither_fetched_nor_removed(
    place: Place, tmp_path: Path
) -> None:
    place.copied(2)
    place.copied(4)
    far = Path(place.copy.address) / "checkpoints"
    shutil.copytree(far / folder_name(2), far / "step-00000002.keep")
    place.copy.prune(folder_name(4), 1, None)
    assert {path.name for path in far.iterdir()} == {"step-00000002.keep", folder_name(4)}
    assert place.copy.fetch(tmp_path / "new") == folder_name(4)


def test_a_write_that_a_store_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"memory://{tmp_path.name}/file"
    memory = fsspec.filesystem("memory")
    faults: list[Exception] = [ConnectionResetError("reset"), OSError("503 slow down")]
    pipe_file = type(memory).pipe_file

    def failing_now_and_then(self: Any, path: str, content: bytes, **more: Any) -> None:
        if faults:
            raise faults.pop()
        pipe_file(self, path, content, **more)

    monkeypatch.setattr(type(memory), "pipe_file", failing_now_and_then)
    store.put(b"content", address)
    assert store.read(address) == b"content"
    faults.append(PermissionError("Forbidden"))
    with pytest.raises(InputError, match="denies access"):
        store.put(b"other", address)
    assert store.read(address) == b"content"
    store.remove(f"memory://{tmp_path.name}")
    assert store.read(address) is None
    with pytest.raises(
        InputError, match="a web server takes no files: give a folder, or an address at s3://"
    ):
        store.put(b"content", "https://example.org/file")


def test_metrics_that_come_later_and_the_best_one_are_copied(place: Place) -> None:
    work = place.copier()
    for step in (2, 4, 6, 8):
        place.save(step)
        if step == 2:
            files.record_best(place.run.checkpoints, 2, "zero_shot_top1", 0.5)
        work.offer(step)
        assert work.finish(30.0) == {"copied_step": step, "copies_behind": 0}
    assert place.copy.whole() == steps(2, 6, 8)
    files.Folder(place.run.checkpoints, 8).record_metrics({"zero_shot_top1": 0.4})
    work.offer(8)
    work.finish(30.0)
    manifest = place.copy.manifest(folder_name(8))
    assert manifest is not None
    assert manifest["metrics"] == {"zero_shot_top1": 0.4}


def test_a_run_that_went_back_leaves_no_copy_of_a_later_step(place: Place) -> None:
    work = place.copier()
    for step in (4, 8, 6):
        if step == 6:
            files.set_aside(place.run.checkpoints, 4)
        place.save_and_offer(work, step)
        work.finish(30.0)
    assert place.copy.whole() == steps(4, 6)


def test_old_copies_that_cannot_be_removed_stay_and_are_told_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket may be locked: what is written there stays."""

    def denied(address: str) -> None:
        if folder_name(locked) in address and place.copy.manifest(folder_name(locked)):
            raise InputError(f"{address}: cannot be removed: access denied")
        store.remove(address)

    locked = 2
    monkeypatch.setattr("trainer.copies.copied_run.remove", denied)
    work = place.copier()
    for step in (2, 4, 6, 8):
        place.save_and_offer(work, step)
        if step > 2:
            assert work.finish(30.0) == {"copied_step": step, "copies_behind": 0}
    assert place.copy.whole() == steps(2, 6, 8)
    assert caplog.text.count("cannot be removed") == 2  # in one sentence
    assert "NOT COPIED" not in caplog.text
    locked = 8  # would be fetched in place of the step that the run went back to
    files.set_aside(place.run.checkpoints, 6)
    work.offer(6)
    assert "access denied" in work.finish(0.05)["copy_failed"]


def test_a_store_that_is_gone_stops_nothing_and_gets_the_newest(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = [True]
    failing(monkeypatch, lambda _: gone[0])
    work = place.copier()
    for step in (2, 4):
        place.save_and_offer(work, step)
        _until(lambda: "NOT COPIED" in caplog.text)
    ended = work.finish(0.05)
    assert "copied_step" not in ended
    assert ended["copies_behind"] == 2
    assert "the store is gone" in ended["copy_failed"]
    assert "the last checkpoint is NOT COPIED" in caplog.text
    told = json.loads((place.run.folder / "copies.json").read_text())
    assert told["step"] is None
    assert told["behind"] == 2
    assert "the store is gone" in told["failed"]
    gone[0] = False
    assert work.finish(30.0) == {"copied_step": 4, "copies_behind": 0}
    assert place.copy.whole() == steps(4)


def _until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit, "it never happens"
        time.sleep(0.005)


def test_a_copy_is_fetched_checked_and_without_secrets(place: Place, tmp_path: Path) -> None:
    env = {"HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz", "OMP_NUM_THREADS": "1"}
    job = place.job.model_copy(update={"env": env})
    place.run.metrics.write_text('{"step": 1, "loss": 1.0}\n')
    place.copy.put_run(place.run.folder, job)
    for step in (2, 4, 6):
        place.copy.put_checkpoint(place.save(step))
    files.record_best(place.run.checkpoints, 2, "zero_shot_top1", 0.5)
    place.copy.put_best(place.run.checkpoints)
    damaged = Path(place.copy.address) / "checkpoints" / folder_name(6) / "model.pt"
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    out = tmp_path / "here" / "tiny"
    assert place.copy.fetch(out) == folder_name(4)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["best.json", *steps(2, 4)]
    files.verify(out / "checkpoints" / folder_name(4))
    assert tomllib.loads((out / "job.toml").read_text())["env"] == {"OMP_NUM_THREADS": "1"}
    assert (out / "metrics.jsonl").read_text() == place.run.metrics.read_text()
    assert list(tmp_path.glob("here/.*")) == []


def test_the_copy_in_a_folder_is_fetched_and_not_trained_in(
    place: Place, resume: Resume, capsys: Capture
) -> None:
    place.copied(4)
    assert resume(of=f"{place.copy.address}/") == 0
    assert [folder.name for folder in files.newest_first(Path("runs/tiny/checkpoints"))] == steps(4)
    assert resume() == 2
    assert "runs/tiny is there already: `clipship resume runs/tiny` goes on" in capsys.readouterr().err


def test_a_secret_that_no_copy_has_is_asked_for(place: Place, resume: Resume, capsys: Capture) -> None:
    train = ("pipe:curl -H 'Authorization: Bearer abcdefghijklmnop' https://example.org/a.tar",)
    job = place.job.model_copy(update={"data": place.job.data.model_copy(update={"train": train})})
    place.copy.put_run(place.run.folder, job)
    place.copy.put_checkpoint(place.save(4))
    assert resume("--accept-code") == 2
    assert "runs/tiny/job.toml has *** in place of a secret" in capsys.readouterr().err
    assert "abcdefghijklmnop" not in (Path(place.copy.address) / "job.toml").read_text()


def test_where_no_copy_is_whole_nothing_is_left(place: Place, tmp_path: Path) -> None:
    place.copy.put_run(place.run.folder, place.job)
    with pytest.raises(InputError, match="there is no whole copy of a checkpoint"):
        place.copy.fetch(tmp_path / "here" / "tiny")
    assert not (tmp_path / "here").exists()


def test_copies_of_others_are_not_replaced_and_are_compared_with_their_own_stage(place: Place) -> None:
    place.copy.put_checkpoint(place.save(4))
    last = RunIdentity(place.job.model_copy(update={"seed": 1}), 64, begin=4)
    for identities in ([place.identity], [place.identity, last]):
        check_place(place.job, place.copy, identities, begins=False)
    with pytest.raises(InputError, match=r"has copies of a run of this name.*clipship resume .*far/tiny"):
        check_place(place.job, place.copy, (), begins=True)
    other = RunIdentity(place.job.model_copy(update={"seed": 3}), 64)
    for identities in ([other], [other, last]):
        with pytest.raises(InputError, match="has copies of another run: seed is 0 there"):
            check_place(place.job, place.copy, identities, begins=False)


def test_copies_do_not_go_into_the_run_folder_itself(tmp_path: Path) -> None:
    place = Place(tmp_path, copy_to=str(tmp_path / "runs"))
    with pytest.raises(InputError, match=r"is logging\.runs, too: give another folder"):
        check_place(place.job, place.copy, (), begins=False)
    (tmp_path / "file").write_text("")
    place = Place(tmp_path / "two", copy_to=str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"copies: .*file is a file.*--set checkpoint\.copy_to=\.\.\."):
        check_place(place.job, place.copy, (), begins=False)


@pytest.mark.parametrize(
    ("copy_to", "data", "problem"),
    [
        ("https://example.org/copies", {}, r"must be a folder, or an address that begins with s3://"),
        ("s3://", {}, "lacks the bucket: write it as s3://BUCKET/PREFIX"),
        ("s3://b/p", {"storage": {"anonymous": True}}, r"data\.storage\.anonymous = true asks without keys"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(copy_to: str, data: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        tiny_job(checkpoint={"copy_to": copy_to}, data=data)


def test_an_older_copy_is_fetched_where_the_newest_lacks_a_file(place: Place, resume: Resume) -> None:
    for step in (4, 8):
        place.copied(step)
    store.remove(f"{place.copy.address}/checkpoints/{folder_name(8)}/optimizer.pt")
    assert resume() == 0
    assert [folder.name for folder in files.newest_first(Path("runs/tiny/checkpoints"))] == steps(4)


def test_a_small_file_of_a_copy_has_a_limit(place: Place, tmp_path: Path) -> None:
    place.copied(4)
    os.truncate(f"{place.copy.address}/checkpoints/{folder_name(4)}/manifest.json", 2**26 + 1)
    with pytest.raises(InputError, match=r"manifest.json: its size in bytes is 67,108,865, above the limit"):
        place.copy.manifest(folder_name(4))


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"env": {"LD_PRELOAD": "/x.so", "NCCL_DEBUG": "INFO"}}, "LD_PRELOAD in [env]"),
        ({"env": {"PYTHONSTARTUP": "/x.py"}}, "PYTHONSTARTUP in [env]"),
        ({"env": {"PYTHONPATH": "/x"}}, "PYTHONPATH in [env]"),
        ({"env": {"NCCL_NET_PLUGIN": "/x.so"}}, "NCCL_NET_PLUGIN in [env]"),
        (
            {"data": {"train": ("pipe:touch x",), "stream_samples": 64, "format": "webdataset"}},
            "a stream (pipe:",
        ),
        ({"env": {"NCCL_DEBUG": "INFO"}}, ""),
    ],
)
def test_a_copy_whose_job_runs_code_is_refused_unless_that_is_accepted(
    place: Place, resume: Resume, capsys: Capture, sections: dict[str, Any], named: str
) -> None:
    place.job = tiny_job(**{"logging": {"runs": str(place.run.folder.parent)}, **sections})
    place.copied(4)
    if named:
        assert resume() == 2
        told = capsys.readouterr().err
        assert "its job runs code that whoever wrote the copy has chosen: " in told
        assert named in told
        assert not list(Path().glob("runs/*"))
    assert resume("--accept-code") == 0
    told = capsys.readouterr().err
    assert ("its job sets in [env]: " in told) == ("env" in sections)
    assert all(name in told for name in sections.get("env", {}))
