"""Damage that reading headers finds in shards; the job decides whether it is counted or ends the run."""

import json
import logging
import os
import tarfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import clipship
from tests.support.loading import Member, keys_of, open_indexed, pair, unindexed, write_tar
from trainer.config import Data
from trainer.data.bad_samples import name_left_out
from trainer.data.source import open_images, open_source
from trainer.errors import InputError

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


def flip(path: str, place: int) -> None:
    content = bytearray(Path(path).read_bytes())
    content[place] ^= 0xFF
    Path(path).write_bytes(content)


def data(paths: list[str], **settings: Any) -> Data:
    return Data(train=tuple(paths), **settings)


def test_the_samples_before_the_damage_are_used_where_bad_ones_are_skipped(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 5, 5, 5)
    cut(paths[0], 2 * SAMPLE + HEADER + 7)  # in the third sample's image
    whole = Path(paths[1]).read_bytes()[: 5 * SAMPLE]  # without the zeros at its end
    Path(paths[1]).write_bytes(whole)
    flip(paths[1], 3 * SAMPLE + 2 * HEADER + 100)  # the header of the fourth sample's caption
    source = open_source(data(paths))
    assert source.shard_sizes() == [2, 3, 5]
    assert source.left_out.by_cause == {LOST: 3 + 1}, "of the second, by the bytes behind the damage"
    assert [(bad.origin, bad.key) for bad in source.left_out.named] == [(paths[0], ""), (paths[1], "")]
    with pytest.raises(
        InputError,
        match=r"0\.tar: damaged or cut off at byte 4615: .*\n.*1\.tar: damaged or cut off at byte 7168",
    ):
        open_source(data(paths, on_bad_sample="fail"))


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


def test_a_file_that_is_no_tar_is_a_lost_shard_unless_all_are(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 8, 8, 8)
    for path in paths[1:]:
        Path(path).write_bytes(b"")
    with pytest.raises(
        InputError,
        match=r"bad samples: 16 of 24 \(16 lost .* allows 10\. Repair(.|\n)*1\.tar: not a readable tar",
    ):
        open_source(data(paths))
    assert len(open_source(data(paths, max_bad_share=0.02))) == 8
    Path(paths[0]).write_bytes(b"")
    with pytest.raises(InputError, match=r"0\.tar: not a readable tar file: the file is empty(.|\n)*2\.tar"):
        open_source(data(paths, max_bad_share=1))


def test_a_hole_in_a_shard_is_not_taken_for_its_end(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 30, 30)
    with Path(paths[0]).open("r+b") as file:
        file.seek(10 * SAMPLE)
        file.write(bytes(SAMPLE))
    source = open_source(data(paths, max_bad_share=0.1))
    assert source.shard_sizes() == [10, 30]
    assert f"damaged or cut off at byte {10 * SAMPLE}" in str(source.left_out.named[0])


def test_a_hole_as_short_as_the_end_of_a_tar_hides_no_whole_sample(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 30)
    with Path(paths[0]).open("r+b") as file:
        file.seek(10 * SAMPLE)
        file.write(bytes(2 * HEADER))
    source = open_source(data(paths))
    assert (source.shard_sizes(), source.left_out.by_cause) == ([29], {"no image": 1})


def test_a_cut_shard_is_judged_by_the_others_of_its_folder(tmp_path: Path) -> None:
    for name in ("large", "small"):
        (tmp_path / name).mkdir()
    paths = [*shards_of(tmp_path / "large", 40, 40), *shards_of(tmp_path / "small", 4, 4)]
    cut(paths[3], 3 * SAMPLE + 1)
    assert open_source(data(paths)).left_out.by_cause == {LOST: 1}
    cut(paths[2], SAMPLE)
    cut(paths[2], SAMPLE - 1 - HEADER)
    assert open_source(data(paths)).left_out.by_cause == {LOST: 1 + 3}, "none is whole: by the largest"


def test_incomplete_samples_count_against_the_limit(tmp_path: Path) -> None:
    path = str(
        write_tar(tmp_path / "0.tar", [*pair("a"), *((f"mute{number:02}.jpg", b"i") for number in range(11))])
    )
    with pytest.raises(
        InputError, match=r"bad samples: 11 of 12 \(11 no \.txt\); data\.max_bad_share = 0\.01 allows 10"
    ) as caught:
        open_source(data([path]))
    assert str(caught.value).count("sample mute") == 3
    assert len(open_source(data([path], max_bad_share=0.5))) == 1
    with pytest.raises(InputError, match=r"data\.max_bad_share = 0\.001 allows 1\."):
        open_source(data([path], max_bad_share=0.001))
    with pytest.raises(
        InputError, match=r'on_bad_sample = "fail" allows none.*\n.*0\.tar: sample mute00: no \.txt'
    ):
        open_source(data([path], on_bad_sample="fail"))


def test_an_evaluation_skips_and_wants_whole_shards_as_training_does(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 4, 4)
    cut(paths[1], SAMPLE + 1)
    assert len(open_images(data(paths))) == len(open_source(data(paths))) == 5
    for source in (open_images, open_source):
        with pytest.raises(InputError, match=r"1\.tar: damaged or cut off at byte 2048"):
            source(data(paths, on_bad_sample="fail"))


def test_an_index_on_disk_remembers_what_is_wrong(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 3, 3)
    cut(paths[0], SAMPLE)  # between two samples: a tar may end like that
    twice = [("twice.jpg", b"i"), ("twice.jpg", b"j"), ("twice.txt", b"t")]
    write_tar(Path(paths[1]), [*pair("a"), *twice, *pair("b")], tarfile.USTAR_FORMAT)
    cut(paths[1], 2 * SAMPLE + HEADER)
    for _ in range(2):
        source = open_indexed(paths, tmp_path / "index")
        in_memory = open_source(data(paths))
        assert keys_of(source) == keys_of(in_memory) == ["0-0", "a"]
        assert source.left_out.by_cause == in_memory.left_out.by_cause == {LOST: 1}
        assert (
            str(source.left_out.named[0])
            == f"{paths[1]}: damaged or cut off at byte 4608: the samples behind it are lost"
        )


def test_a_catalogue_of_an_older_version_is_still_read(tmp_path: Path) -> None:
    paths, folder = shards_of(tmp_path, 2), tmp_path / "index"
    open_indexed(paths, folder)
    (catalogue,) = folder.glob("catalogue-*.json")
    table = json.loads(catalogue.read_bytes().partition(b"\n")[2])
    for name in ("flaws", "damage", "lost"):
        del table["shards"]["../0.tar"][name]
    older = json.dumps(table)
    catalogue.write_text(f"{blake2b(older.encode(), digest_size=16).hexdigest()}\n{older}")
    for rows in folder.glob("*.rows"):
        os.utime(rows)
    assert unindexed(paths, folder) == []
    assert len(open_indexed(paths, folder)) == 2


def test_keys_go_to_the_log_and_damage_to_the_console(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [str(write_tar(tmp_path / "0.tar", [*pair("a"), ("mute.jpg", b"i"), *pair("b"), *pair("c")]))]
    cut(paths[0], 2 * SAMPLE + 2 * HEADER + 1)
    with caplog.at_level(logging.INFO, "clipship.data"):
        name_left_out(open_source(data(paths)).left_out)
    assert [(record.levelname, record.getMessage().partition(" (")[0]) for record in caplog.records] == [
        ("WARNING", "left out"),
        ("INFO", "left out"),
    ]
    assert "0.tar: sample mute: no .txt" in caplog.text


def test_the_commands_say_what_is_damaged(tmp_path: Path) -> None:
    paths = shards_of(tmp_path, 4, 4)
    cut(paths[1], SAMPLE + 1)
    said = clipship("index", *paths, code=2).err
    assert "2 of 2 shards read; 5 samples" in said
    assert f"3 samples not used: {LOST}" in said
    assert "1.tar: damaged or cut off at byte 2048" in said
    assert json.loads(clipship("data", "stats", *paths, code=0).out)["not_usable"] == {LOST: 3}
