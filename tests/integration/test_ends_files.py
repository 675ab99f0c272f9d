"""Runs whose input breaks while they train: shards behind a URL that fails, a damaged newest checkpoint."""

import io
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from tests.integration.test_bad_input import sample
from tests.support.ends import CLIPSHIP, Running, begin, ranks_left, starts
from tests.support.harm import cut_short, flip_a_bit
from tests.support.range_server import serving
from trainer.data.shard_files import write_shards

STORAGE = "shard corrupt, missing, unreadable for a while"


def reading_from(tmp_path: Path, address: str, backend: str, launcher: str) -> Running:
    # Of so little data nearly all would be in memory before the storage fails.
    ahead = {"block_samples": 1, "read_ahead_mb": 1, "workers": 1}
    data = {"format": "webdataset", "train": (f"{address}/shard-{{000000..000003}}.tar",), **ahead}
    fault, never = "wait:0:step:4", {"every_steps": 100}
    return begin(tmp_path, backend, launcher, fault, steps=12, data=data, checkpoint=never)


def noise(number: int) -> bytes:
    """A picture of 300 kB."""
    file = io.BytesIO()
    Image.frombytes("RGB", (320, 320), Random(number).randbytes(3 * 320 * 320)).save(file, "png")
    return file.getvalue()


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
            write_shards((sample(number, noise(number)) for number in range(64)), folder / "web", 16)
            address, server = servers.enter_context(serving(folder / "web"))
            running[failures] = reading_from(folder, address, backend, launcher)
            running[failures].reached(3)
            server.failures = failures
            running[failures].go()
        for_a_while, for_good = running[3].end(), running[10**9].end()
    assert for_a_while.code == 0, for_a_while.errors
    assert server.failures == 0
    assert for_good.code == 1, for_good.errors  # no bad input: a later start may find the storage there
    assert re.search(r"http://\S+/shard-\d+\.tar", for_good.errors)
    assert "cannot be read after 9 attempts" in for_good.errors
    assert "Traceback" not in for_good.errors
    assert not ranks_left(running[10**9])


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
    assert begin(tmp_path, backend, "clipship", "raise:1:step:6").end().code == 1
    *_, before, newest = sorted((tmp_path / "runs" / "ends" / "checkpoints").glob("step-*"))
    harm(newest)
    end = begin(tmp_path, backend, "clipship").end()
    assert end.code == 0, end.errors
    passed_over = next(line for line in end.output.splitlines() if "skipped a broken checkpoint" in line)
    assert newest.name in passed_over
    assert said in passed_over
    assert f"start        step {int(before.name.rpartition('-')[2])}, from" in end.output
