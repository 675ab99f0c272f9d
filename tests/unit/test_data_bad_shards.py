"""Damage that reading headers finds in shards; the job decides whether it is counted or ends the run."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import clipship
from tests.support.loading import Member, keys_of, pair, write_tar
from trainer.config import Data
from trainer.data.source import open_source

LOST = "lost in damaged shards, estimated"
HEADER = tarfile.BLOCKSIZE
SAMPLE = 4 * HEADER
"""Bytes of one: two headers, two members."""


def shards_of(folder: Path, *samples: int) -> list[str]:
    def members(shard: int) -> list[Member]:
        return [member for number in range(samples[shard]) for member in pair(f"{shard}-{number}")]

    return [
        str(write_tar(folder / f"{shard}.tar", members(shard), tarfile.USTAR_FORMAT))
        for shard in range(len(samples))
    ]


def cut(path: str, size: int) -> None:
    with Path(path).open("r+b") as file:
        file.truncate(size)


def data(paths: list[str], **settings: Any) -> Data:
    return Data(train=tuple(paths), **settings)


@given(st.integers(0, 5 * SAMPLE))
def test_wherever_a_shard_is_cut_every_whole_sample_before_is_there_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    paths = shards_of(folder, 5, 1)
    cut(paths[0], size)
    source = open_source(data(paths, max_bad_share=1))
    text = len("a caption")  # a sample is whole with the last byte of its caption, whatever pads the block
    assert source.shard_sizes()[0] == (size + HEADER - text) // SAMPLE
    assert keys_of(source)[:-1] == [f"0-{number}" for number in range(source.shard_sizes()[0])]


def test_a_hole_in_a_shard_is_not_taken_for_its_end(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 30, 30)
    with Path(paths[0]).open("r+b") as file:
        file.seek(10 * SAMPLE)
        file.write(bytes(SAMPLE))
    source = open_source(data(paths, max_bad_share=0.1))
    assert source.shard_sizes() == [10, 30]
    assert f"damaged or cut off at byte {10 * SAMPLE}" in str(source.left_out.named[0])


def test_the_commands_say_what_is_damaged(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 4, 4)
    cut(paths[1], SAMPLE + 1)
    said = clipship("index", *paths, code=2).err
    assert "2 of 2 shards read; 5 samples" in said
    assert f"3 samples not used: {LOST}" in said
    assert "1.tar: damaged or cut off at byte 2048" in said
    assert json.loads(clipship("data", "stats", *paths, code=0).out)["not_usable"] == {LOST: 3}
