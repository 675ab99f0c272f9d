"""Mistakes of a user, through the real command, before ranks start and in them.

Each ends with one message and exit code 2, without a traceback, and nothing is written.
"""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.runs import TinyRun
from trainer.data.index import FOLDER as INDEX
from trainer.data.indexed import LOST
from trainer.data.shard_files import PackedSample, write_shards

CLIPSHIP = [sys.executable, "-m", "trainer.cli.main"]
whatever_the_backend = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.full])]
)
both_backends = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
)


def sample(number: int, picture: bytes | None = None) -> PackedSample:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (number % 256, 0, 0)).save(file, "png")
    return f"{number:03d}", {"png": picture or file.getvalue(), "txt": f"number {number}".encode()}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def refused(folder: Path, job: Path, *words: str) -> str:
    """Returns stderr of `clipship run` with two ranks, which must refuse the job and write nothing."""
    before = files(folder)
    done = subprocess.run(
        [*CLIPSHIP, "run", str(job), "--nproc", "2", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.startswith("index ") for line in done.stdout.splitlines()), done.stdout
    left = {path for path in files(folder) if Path(path).is_file() and INDEX not in path} - before.keys()
    names = {Path(path).name for path in left if not Path(path).match("artefacts/start-*.toml")}
    assert names <= {"exit.json", "launcher.env", ".start.json"}, (
        "what was asked, its last word, and nothing of a run"
    )
    return done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("optim.lrr=1", "--set optim.lrr: unknown key; did you mean optim.lr?"),
        ("data={train='no/{00..01}.tar'}", "2 of 2 files are missing: 00.tar, 01.tar; there is no folder"),
        (
            "data={format='synthetic', synthetic_samples=15}",
            "15 samples, fewer than optim.global_batch_size = 16",
        ),
    ],
)
def test_bad_settings_are_refused_before_any_rank_starts(tmp_path: Path, words: str, said: str) -> None:
    message = refused(tmp_path, TinyRun(tmp_path).write(), "--set", words)
    assert message.startswith("clipship: ")
    assert said in message


def test_bad_tables_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(sample(0)[1]["png"])
    table = tmp_path / "table.csv"
    table.write_text("image,caption\n0.png,a\n7.png,b\n")
    message = refused(tmp_path, TinyRun(tmp_path).write(data={"format": "table", "train": [str(table)]}))
    assert "row 3" in message
    assert "7.png" in message


@pytest.mark.fault("job file edited, between two starts or while it trains")
def test_run_folder_of_another_job_is_left_as_it_is(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.run.mkdir(parents=True)
    job = run.write(optim={"lr": 0.5})
    (run.run / "job.toml").write_text(job.read_text())
    message = refused(tmp_path, run.write())
    assert "optim.lr is 0.5 there and 0.001 here" in message
    assert "--fresh" in message


def shards_of(folder: Path, samples: list[PackedSample]) -> dict[str, Any]:
    """Shards that nothing beside them counts, so that only a rank finds out what is in them."""
    (folder / "shards").mkdir()
    write_shards(samples, folder / "shards", 8)
    (folder / "shards" / "sizes.json").unlink()
    return {"format": "webdataset", "train": [str(folder / "shards" / "*.tar")]}


@whatever_the_backend
def test_too_few_samples_that_only_ranks_can_count_are_refused_by_all_of_them(
    tmp_path: Path, backend: str
) -> None:
    data = shards_of(tmp_path, [sample(number) for number in range(9)])
    message = refused(tmp_path, TinyRun(tmp_path).write(data=data, comm={"backend": backend}))
    assert "9 samples, fewer than optim.global_batch_size = 16" in message


@both_backends
def test_run_folder_that_only_rank_0_finds_unwritable_is_refused_by_all(tmp_path: Path, backend: str) -> None:
    job = TinyRun(tmp_path).write(comm={"backend": backend}, logging={"runs": "/proc/clipship"})
    message = refused(tmp_path, job)
    assert "/proc" in message


@pytest.mark.fault("shard corrupt, missing, unreadable for a while")
@both_backends
def test_broken_picture_in_one_ranks_share_ends_all_ranks_and_is_named(tmp_path: Path, backend: str) -> None:
    samples = [sample(number, b"not a picture" if number == 11 else None) for number in range(32)]
    run = TinyRun(tmp_path)
    run.write(data={**shards_of(tmp_path, samples), "on_bad_sample": "fail"}, comm={"backend": backend})
    done = run.start(2)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "shard-000001.tar: sample 011: the image has an unknown format" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run.run / "result.json").exists()


@pytest.mark.fault("shard corrupt, missing, unreadable for a while", goes_on=True)
def test_bad_samples_are_skipped_counted_and_named(tmp_path: Path) -> None:
    samples = [sample(number, b"not a picture" if number in (11, 20) else None) for number in range(32)]
    samples[5] = (samples[5][0], {**samples[5][1], "txt": b"\xff"})
    run = TinyRun(tmp_path)
    run.write(data=shards_of(tmp_path, samples), optim={"steps": 2}, logging={"every_steps": 1})
    done = run.start(2)
    assert done.returncode == 0, done.stdout + done.stderr
    bad = run.result()["bad_samples"]
    assert bad.keys() == {"not an image", "bad captions"}
    logs = "".join(path.read_text() for path in (run.run / "logs").iterdir())
    for named in (
        "shard-000001.tar: sample 011: ",
        "shard-000002.tar: sample 020: ",
        "shard-000000.tar: sample 005: captions are not UTF-8",
    ):
        assert named in logs, logs
    assert sum(bad.values()) == logs.count("skipped (") >= 3, "a substitute may be bad itself, and counts too"


@pytest.mark.fault("shard corrupt, missing, unreadable for a while")
@pytest.mark.fault("shard corrupt, missing, unreadable for a while", goes_on=True)
@whatever_the_backend
def test_damaged_shard_is_used_up_to_its_damage_or_refused_as_the_job_says(
    tmp_path: Path, backend: str
) -> None:
    samples = [sample(number) for number in range(32)]
    samples[7] = (samples[7][0], {"png": samples[7][1]["png"]})
    run = TinyRun(tmp_path)
    data = shards_of(tmp_path, samples)
    damaged = tmp_path / "shards" / "shard-000002.tar"
    os.truncate(damaged, damaged.stat().st_size // 2 + 100)
    refusal = refused(tmp_path, run.write(data={**data, "on_bad_sample": "fail"}, comm={"backend": backend}))
    assert f"{damaged}: damaged or cut off at byte" in refusal
    run.write(data=data, optim={"steps": 1}, comm={"backend": backend})
    done = run.start(2)
    assert done.returncode == 0, done.stdout + done.stderr
    lost = run.result()["left_out"][LOST]
    assert (run.result()["left_out"], 2 <= lost <= 6) == ({"no .txt": 1, LOST: lost}, True)
    assert f"{damaged}: damaged or cut off at byte" in done.stdout + done.stderr
    assert "shard-000000.tar: sample 007: no .txt" in (run.run / "logs" / "rank-00000.log").read_text()


def test_too_many_bad_samples_end_the_run_with_examples(tmp_path: Path) -> None:
    samples = [sample(number, b"not a picture" if number % 2 else None) for number in range(32)]
    run = TinyRun(tmp_path)
    run.write(data=shards_of(tmp_path, samples))
    done = run.start(1)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "data.max_bad_share = 0.01 allows 10" in done.stderr
    assert "not an image" in done.stderr


@whatever_the_backend
def test_a_run_that_asked_for_gpus_does_not_train_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """CUDA_VISIBLE_DEVICES hides all GPUs, so that torch finds none on any machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = TinyRun(tmp_path)
    job = run.write(resources={"gpus_per_node": 2}, comm={"backend": backend}, optim={"steps": 1})
    said = refused(tmp_path, job)
    assert "resources.gpus_per_node = 2, but rank " in said
    assert "CUDA_VISIBLE_DEVICES: ''" in said
    done = run.start(2, "--set", "resources.device=cpu")
    assert done.returncode == 0, done.stderr
    assert run.result()["device"] == "cpu"
