"""Runs that are killed and started again, with real processes: what they would have done, they do."""

import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tests.support.pictures import encoded
from tests.support.processes import until
from tests.support.runs import TinyRun, clipship, kill_tree, tiny_run
from trainer.data.pack import PackedSample, write_shards

full = pytest.mark.full
DAMAGED = 29
"""A sample whose place in the order another one takes."""
EXACT: dict[str, dict[str, Any]] = {
    "comm": {"deterministic": True},
    "checkpoint": {"every_steps": 3},
    "optim": {"steps": 30},
}
"""More steps than a start does that a test kills, see `tests.support.runs.AHEAD`."""
STARTS = [
    pytest.param("torch", 1, id="torch-1", marks=full),
    pytest.param("torch", 2, id="torch-2", marks=full),  # as in test_killed_run
    pytest.param("horovod", 2, id="horovod-2", marks=pytest.mark.horovod),
    pytest.param("torch", 4, id="torch-4", marks=full),
    pytest.param("horovod", 1, id="horovod-1", marks=[pytest.mark.horovod, full]),
    pytest.param("horovod", 4, id="horovod-4", marks=[pytest.mark.horovod, full]),
]


def _photographs() -> Iterator[PackedSample]:
    """90 small pictures, each other than the rest; one of them is cut short."""
    draw = np.random.default_rng(0)
    for number in range(90):
        pixels = draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        image = encoded(Image.fromarray(pixels).resize((80, 60)), "jpeg")
        yield (
            f"{number:03d}",
            {
                "jpg": image[:300] if number == DAMAGED else image,
                "txt": f"picture {number}\n{number} again".encode(),
            },
        )


def _shards(folder: Path, **keys: Any) -> dict[str, Any]:
    """[data] of a job that reads the pictures from six shards, with a loader process for each rank."""
    folder.mkdir()
    names = write_shards(_photographs(), folder, 16)
    return {"format": "webdataset", "train": [str(folder / name) for name in names], "workers": 1, **keys}


def _job(backend: str, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {**EXACT, **sections, "comm": {**EXACT["comm"], "backend": backend}}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[int, float]]:
    """The losses of a run that nobody disturbs, one for each backend and world."""
    known: dict[tuple[str, int], dict[int, float]] = {}

    def losses(backend: str, ranks: int) -> dict[int, float]:
        if (backend, ranks) not in known:
            run = tiny_run(tmp_path_factory.mktemp("whole"), **_job(backend))
            run.start(ranks)
            known[backend, ranks] = run.losses()
        return known[backend, ranks]

    return losses


@pytest.mark.parametrize(("backend", "ranks"), STARTS)
def test_losses_after_a_kill_are_those_of_the_uninterrupted_run_to_the_last_bit(
    tmp_path: Path, uninterrupted: Callable[[str, int], dict[int, float]], backend: str, ranks: int
) -> None:
    """Another moment each time; pytest shows it where the test fails."""
    at_step, delay_s = random.randint(7, 11), random.uniform(0, 0.2)
    print(f"killed {delay_s:.3f} s after step {at_step}")
    run = tiny_run(tmp_path, **_job(backend))
    run.start_and_kill(ranks, at_step, delay_s)
    done = run.start(ranks)
    assert "checkpoints/step-" in done.stdout  # the write of step 3 is over when that of step 6 begins
    assert run.losses() == uninterrupted(backend, ranks)


@full
@pytest.mark.parametrize("backend", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
@pytest.mark.parametrize("what", ["compiled blocks", "photographs from shards"])
def test_losses_after_a_kill_are_the_same_with(tmp_path: Path, what: str, backend: str) -> None:
    sections: dict[str, Any] = {"data": _shards(tmp_path / "shards", max_bad_share=0.1)}
    if what == "compiled blocks":
        sections = {"model": {"compile": True}, "optim": {"steps": 30, "max_batch_size_per_gpu": 4}}
    whole, killed = TinyRun(tmp_path, "whole"), TinyRun(tmp_path, "killed")
    for run in (whole, killed):
        run.write(**_job(backend, **sections))
    whole.start(2)
    killed.start_and_kill(2, at_step=7)
    done = killed.start(2)
    assert ("compile      4 blocks" in done.stdout) == (what == "compiled blocks")
    assert killed.losses() == whole.losses()
    assert whole.losses()[12] < whole.losses()[1]


def test_a_kill_while_a_checkpoint_is_written_loses_only_the_steps_since_the_one_before(
    tmp_path: Path, uninterrupted: Callable[[str, int], dict[int, float]]
) -> None:
    run = tiny_run(tmp_path, **_job("torch"))
    checkpoints = run.run / "checkpoints"
    for _ in range(5):
        process = subprocess.Popen(run.command(2), stdout=subprocess.DEVNULL)
        while not (seen := _begun_after_a_whole_one(checkpoints)) and process.poll() is None:
            time.sleep(0.0005)
        kill_tree(process.pid)
        process.wait()
        if seen:
            break
        shutil.rmtree(
            run.run
        )  # the machine was busy, and the run over before a checkpoint was seen half done
    left = sorted(path.name for path in checkpoints.iterdir())
    done = run.start(2)
    assert f"checkpoints/{max(name for name in left if name.startswith('step-'))}" in done.stdout
    assert run.losses() == uninterrupted("torch", 2)
    assert not list(checkpoints.glob(".step-*"))


def _begun_after_a_whole_one(checkpoints: Path) -> bool:
    return any(checkpoints.glob("step-*")) and any(checkpoints.glob(".step-*.partial"))


def _tables(folder: Path) -> dict[str, Any]:
    """[data] with filters, weighted captions of two columns and row groups of two files."""
    pictures = [members for _, members in _photographs()]
    for part in range(2):
        rows = pictures[part * 45 : (part + 1) * 45]
        columns = {
            "image": [row["jpg"] for row in rows],
            "captions": [row["txt"].decode().split("\n") for row in rows],
            "alt": [None if number % 3 else f"alt {number}" for number in range(45)],
            "score": [number / 45 for number in range(45)],
        }
        parquet.write_table(pyarrow.table(columns), folder / f"{part}.parquet", row_group_size=10)
    return {
        "format": "auto",
        "train": [str(folder / "*.parquet")],
        "caption_column": ["captions[*]", "alt"],
        "caption_weights": [1.0, 2.0],
        "filters": ["score >= 0.1", "width >= 80"],
        "max_bad_share": 0.1,
        "workers": 1,
    }


@pytest.mark.parametrize(
    ("source", "backend"),
    [
        ("parquet", "torch"),
        *(pytest.param(source, "torch", marks=full) for source in ("synthetic", "shards")),
        *(
            pytest.param(source, "horovod", marks=[full, pytest.mark.horovod])
            for source in ("synthetic", "shards")
        ),
    ],
)
def test_a_killed_run_goes_on_exactly_on_other_numbers_of_ranks(
    tmp_path: Path, source: str, backend: str
) -> None:
    """In float64, so that only the order of additions differs."""
    data: dict[str, Any] = {}
    if source == "shards":
        data = _shards(tmp_path / "shards", max_bad_share=0.1)
    elif source == "parquet":
        data = _tables(tmp_path)
    sections = _job(backend, data=data, model={"precision": "fp64"}, optim={"steps": 20})
    whole, moved = TinyRun(tmp_path, "whole"), TinyRun(tmp_path, "moved")
    whole.write(**sections)
    moved.write(**sections)
    whole.start(1)
    moved.start_and_kill(2, at_step=7)
    moved.start(1 if source == "parquet" else 4)
    expected, found = whole.losses(), moved.losses()
    assert list(found) == list(expected) == list(range(1, 21))
    assert max(abs(found[step] - expected[step]) / expected[step] for step in expected) < 1e-9
    if source == "parquet":
        header = "the image's header, which data.filters need, cannot be read"
        assert whole.result()["left_out"] == {header: 1, "filter score >= 0.1": 10}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    run = tiny_run(tmp_path_factory.mktemp("finished"), checkpoint={"every_steps": 2, "keep": 2})
    run.start(1)
    return run


def test_the_last_ones_are_kept_and_the_rest_removed(finished: TinyRun) -> None:
    names = sorted(path.name for path in (finished.run / "checkpoints").iterdir())
    assert names == ["step-00000010", "step-00000012"]


def test_every_checkpoint_leaves_its_cost_in_the_metrics(finished: TinyRun) -> None:
    written = [event for event in finished.events() if "checkpoint" in event]
    assert [event["step"] for event in written] == [2, 4, 6, 8, 10, 12]
    assert all(event["write_s"] > 0 and event["checkpoint_bytes"] > 0 for event in written)
    assert all("checkpoint_s" in event for event in finished.events() if "loss" in event)


def test_a_finished_run_is_left_alone_until_told_otherwise(finished: TinyRun) -> None:
    before = finished.result()
    again = finished.start(1)
    assert "--fresh" in again.stdout
    assert "starting" not in again.stderr, "ranks need not be started to see it"
    job = str(finished.folder / "tiny.toml")
    assert clipship("train", job).stdout == again.stdout
    assert finished.result() == before
    finished.start(1, "--fresh")
    assert (finished.run.with_name("tiny.old-1") / "result.json").exists()


def test_a_longer_run_is_the_one_that_was_to_be_as_long_from_the_beginning(tmp_path: Path) -> None:
    """At a constant learning rate, which does not depend on the length."""
    run, whole = TinyRun(tmp_path / "longer"), TinyRun(tmp_path / "whole")
    for one, steps in ((run, 6), (whole, 10)):
        one.folder.mkdir()
        one.write(comm={"deterministic": True}, optim={"steps": steps, "lr": 1e-3, "min_lr": 1e-3})
    run.start(1)
    assert run.result()["steps"] == 6
    again = run.start(1, "--longer", "steps=10")
    assert "goes on to step 10 in place of 6" in again.stderr
    assert run.result()["steps"] == 10
    whole.start(1)
    assert run.losses() == whole.losses()


def test_a_checkpoint_on_request_while_the_run_goes_on(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, optim={"steps": 100_000}, checkpoint={"every_minutes": 600.0})
    process = subprocess.Popen(run.command(1), stdout=subprocess.DEVNULL)
    try:
        until(lambda: run.last_step() >= 2, process)
        clipship("checkpoint", run.run)
        checkpoints = run.run / "checkpoints"
        until(lambda: any(checkpoints.glob("step-*")), process)
        (folder,) = checkpoints.glob("step-*")
        step = int(folder.name.removeprefix("step-"))
        until(lambda: run.last_step() >= step + 3, process)
    finally:
        kill_tree(process.pid)
        process.wait()
