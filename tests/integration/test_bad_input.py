"""Mistakes of a user, through the real command, before ranks start and in them.

Each ends with one message and exit code 2, without a traceback, and nothing is written.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.pictures import picture as square
from tests.support.runs import TinyRun, clipship, tiny_run
from trainer.data.pack import PackedSample, write_shards

whatever_the_backend = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.full])]
)


def sample(number: int, picture: bytes | None = None) -> PackedSample:
    return f"{number:03d}", {"png": picture or square(number, 32), "txt": f"number {number}".encode()}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def refused(folder: Path, job: Path, *words: str) -> str:
    """Returns stderr of `clipship run` with two ranks, which must refuse the job and write nothing."""
    before = files(folder)
    done = clipship("run", job, "--nproc", "2", *words, code=2)
    assert "Traceback" not in done.stderr
    assert all(line.startswith("index ") for line in done.stdout.splitlines()), done.stdout
    written = {path for path in files(folder) if Path(path).is_file()} - before.keys()
    left = {path for path in written if ".clipship-index" not in path}
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


@whatever_the_backend
def test_run_folder_that_only_rank_0_finds_unwritable_is_refused_by_all(tmp_path: Path, backend: str) -> None:
    job = TinyRun(tmp_path).write(comm={"backend": backend}, logging={"runs": "/proc/clipship"})
    message = refused(tmp_path, job)
    assert "/proc" in message


def test_too_many_bad_samples_end_the_run_with_examples(tmp_path: Path) -> None:
    samples = [sample(number, b"not a picture" if number % 2 else None) for number in range(32)]
    run = tiny_run(tmp_path, data=shards_of(tmp_path, samples))
    done = run.start(1, code=2)
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
    run.start(2, "--set", "resources.device=cpu")
    assert run.result()["device"] == "cpu"
