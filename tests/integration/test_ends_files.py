"""Runs whose files are broken or become so: samples, shards, shards behind a URL, checkpoints, a job."""

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.test_bad_input import refused, sample, shards_of, whatever_the_backend
from tests.support.ends import CLIPSHIP, Running, begin, full, starts
from tests.support.harm import cut_short, flip_a_bit
from tests.support.pictures import noise
from tests.support.range_server import serving
from tests.support.runs import TinyRun, tiny_run
from trainer.data.pack import write_shards

LOST = "lost in damaged shards, estimated"
STORAGE = "shard corrupt, missing, unreadable for a while"


def reading_from(tmp_path: Path, address: str, backend: str, launcher: str) -> Running:
    # Of so little data nearly all would be in memory before the storage fails.
    ahead = {"block_samples": 1, "read_ahead_mb": 1, "workers": 1}
    data = {"format": "webdataset", "train": (f"{address}/shard-{{000000..000003}}.tar",), **ahead}
    fault, never = "wait:0:step:4", {"every_steps": 100}
    return begin(tmp_path, backend, launcher, fault, steps=12, data=data, checkpoint=never)


@pytest.mark.fault(STORAGE)
@pytest.mark.fault(STORAGE, goes_on=True)
@starts(CLIPSHIP)
def test_storage_that_fails_is_asked_again_and_then_named(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    """For a while, and for good: two runs side by side, as the second waits most of the time."""
    running = {}
    with ExitStack() as servers:
        for failures in (10**9, 3):
            folder = tmp_path / str(failures)
            (folder / "web").mkdir(parents=True)
            samples = (sample(number, noise(number, side=320)) for number in range(64))  # of 300 kB each
            write_shards(samples, folder / "web", 16)
            address, server = servers.enter_context(serving(folder / "web"))
            running[failures] = reading_from(folder, address, backend, launcher)
            running[failures].reached(3)
            server.failures = failures
            running[failures].go()
        running[3].end()
        for_good = running[10**9].all_end(1)  # no bad input: a later start may find the storage there
    assert server.failures == 0
    assert re.search(r"http://\S+/shard-\d+\.tar", for_good.errors)
    assert "cannot be read after 9 attempts" in for_good.errors
    assert "Traceback" not in for_good.errors


@pytest.mark.fault(STORAGE)
@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=full), pytest.param("horovod", marks=pytest.mark.horovod)]
)
def test_broken_picture_in_one_ranks_share_ends_all_ranks_and_is_named(tmp_path: Path, backend: str) -> None:
    samples = [sample(number, b"not a picture" if number == 11 else None) for number in range(32)]
    run = tiny_run(
        tmp_path, data={**shards_of(tmp_path, samples), "on_bad_sample": "fail"}, comm={"backend": backend}
    )
    done = run.start(2, code=2)
    assert "shard-000001.tar: sample 011: the image has an unknown format" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run.run / "result.json").exists()


@pytest.mark.fault(STORAGE, goes_on=True)
def test_bad_samples_are_skipped_counted_and_named(tmp_path: Path) -> None:
    samples = [sample(number, b"not a picture" if number in (11, 20) else None) for number in range(32)]
    samples[5] = (samples[5][0], {**samples[5][1], "txt": b"\xff"})
    run = tiny_run(
        tmp_path, data=shards_of(tmp_path, samples), optim={"steps": 2}, logging={"every_steps": 1}
    )
    run.start(2)
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


@pytest.mark.fault(STORAGE)
@pytest.mark.fault(STORAGE, goes_on=True)
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
    lost = run.result()["left_out"][LOST]
    assert (run.result()["left_out"], 2 <= lost <= 6) == ({"no .txt": 1, LOST: lost}, True)
    assert f"{damaged}: damaged or cut off at byte" in done.stdout + done.stderr
    assert "shard-000000.tar: sample 007: no .txt" in (run.run / "logs" / "rank-00000.log").read_text()


@pytest.mark.fault("newest checkpoint cut short or flipped bits", goes_on=True)
@pytest.mark.parametrize(
    ("backend", "harm", "said"),
    [
        pytest.param("torch", cut_short, "bytes instead of", id="cut short"),
        pytest.param("horovod", flip_a_bit, "checksum", id="flipped bit", marks=pytest.mark.horovod),
    ],
)
def test_newest_checkpoint_that_is_broken_is_named_and_the_one_before_it_used(
    tmp_path: Path, backend: str, harm: Callable[[Path], None], said: str
) -> None:
    begin(tmp_path, backend, "clipship", "raise:1:step:6").end(1)
    *_, before, newest = sorted((tmp_path / "runs" / "ends" / "checkpoints").glob("step-*"))
    harm(newest)
    end = begin(tmp_path, backend, "clipship").end()
    passed_over = next(line for line in end.output.splitlines() if "skipped a broken checkpoint" in line)
    assert newest.name in passed_over
    assert said in passed_over
    assert f"start        step {int(before.name.rpartition('-')[2])}, from" in end.output


@pytest.mark.fault("job file edited, between two starts or while it trains")
def test_run_folder_of_another_job_is_left_as_it_is(tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    run.run.mkdir(parents=True)
    job = run.write(optim={"lr": 0.5})
    (run.run / "job.toml").write_text(job.read_text())
    message = refused(tmp_path, run.write())
    assert "optim.lr is 0.5 there and 0.001 here" in message
    assert "--fresh" in message
