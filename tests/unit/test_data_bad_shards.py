"""Damage that reading headers finds in shards; the job decides whether it is counted or ends the run."""

import json
import tarfile
from pathlib import Path
from typing import Any

from tests.support.command_line import clipship
from tests.support.loading import Member, pair, write_tar
from trainer.config import Data

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


def test_the_commands_say_what_is_damaged(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 4, 4)
    cut(paths[1], SAMPLE + 1)
    said = clipship("index", *paths, code=2).err
    assert "2 of 2 shards read; 5 samples" in said
    assert f"3 samples not used: {LOST}" in said
    assert "1.tar: damaged or cut off at byte 2048" in said
    assert json.loads(clipship("data", "stats", *paths, code=0).out)["not_usable"] == {LOST: 3}
