"""Streams are read again and again, shared by ranks and loader processes, and named where they are bad."""

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.loading import open_job, refusal
from trainer.config import Data
from trainer.data.pack import write_shard
from trainer.data.sample import BadSample, Source
from trainer.data.source import open_source
from trainer.data.streams import loader_processes
from trainer.errors import InputError, StorageError

Packed = tuple[str, dict[str, bytes]]


def packed(key: str, **members: bytes) -> Packed:
    return key, members or {"jpg": f"image of {key}".encode(), "txt": f"caption of {key}".encode()}


def pipe(folder: Path, name: str, *samples: Packed) -> str:
    write_shard(samples, folder / f"{name}.tar")
    return f"pipe:cat '{folder / name}.tar'"


def source(*streams: str, window: int = 1, seed: int = 0) -> Any:
    return open_job(seed=seed, train=streams, format="webdataset", stream_samples=10, shuffle_window=window)


def keys(found: Source, count: int) -> list[str]:
    return [found.read(0).key for _ in range(count)]


def test_streams_come_one_after_the_other_and_begin_again(tmp_path: Path) -> None:
    found = source(pipe(tmp_path, "a", packed("a1"), packed("a2")), pipe(tmp_path, "b", packed("b1")))
    raw = found.read(7)
    assert (raw.key, raw.image, raw.captions) == ("a1", b"image of a1", ("caption of a1",))
    assert raw.origin.startswith("pipe:cat ")
    assert keys(found, 6) == ["a2", "b1", "a1", "a2", "b1", "a1"]
    assert len(found) == 10
    assert found.shard_sizes() == [10]
    assert keys(pickle.loads(pickle.dumps(found)), 1) == ["a1"], "another process begins by itself"


def test_each_rank_has_streams_of_its_own_and_none_is_left_over(tmp_path: Path) -> None:
    streams = tuple(pipe(tmp_path, name, packed(name)) for name in "abc")
    settings: dict[str, Any] = {"train": streams, "format": "webdataset", "stream_samples": 10}
    shares = [open_job(2, rank, **settings) for rank in range(2)]
    assert [set(keys(share, 4)) for share in shares] == [{"a", "c"}, {"b"}]
    assert [loader_processes(share, 4) for share in shares] == [2, 1]
    assert loader_processes(open_job(format="synthetic"), 4) == 4
    assert "3 streams for 4 ranks, but ranks cannot share a stream" in refusal(open_job, 4, **settings)


def test_a_bad_sample_is_named_and_the_next_one_comes(tmp_path: Path) -> None:
    found = source(
        pipe(tmp_path, "a", packed("mute", jpg=b"x"), packed("empty", jpg=b"x", txt=b" \n"), packed("good"))
    )
    with pytest.raises(BadSample, match=r"sample mute: no \.txt") as missing:
        found.read(0)
    assert missing.value.cause == "no .txt"
    with pytest.raises(BadSample, match="sample empty: captions are empty"):
        found.read(0)
    assert found.read(0).key == "good"


def test_all_tars_of_a_command_are_read(tmp_path: Path) -> None:
    for number in range(4):
        write_shard([packed(f"{number}a"), packed(f"{number}b")], tmp_path / f"000{number}.tar")
    found = source(f"pipe:cat {tmp_path}/000*.tar")
    once = [f"{number}{letter}" for number in range(4) for letter in "ab"]
    assert keys(found, 16) == [*once, *once]
    packed_too = source(f"pipe:for tar in {tmp_path}/000*.tar; do gzip -c $tar; done")
    assert keys(packed_too, 9) == [*once, "0a"]


def test_one_stream_that_never_gives_a_sample_ends_the_run_beside_others(tmp_path: Path) -> None:
    found = source(pipe(tmp_path, "a", packed("a")), "pipe:false", pipe(tmp_path, "b", packed("b")))
    assert found.read(0).key == "a"
    with pytest.raises(StorageError, match=r"pipe:false: cannot be read after 3 attempts .*exit code 1"):
        found.read(0)


def test_a_command_that_fails_for_long_is_a_bad_sample_and_for_all_streams_the_end(tmp_path: Path) -> None:
    found = source(pipe(tmp_path, "a", packed("a")), pipe(tmp_path, "b", packed("b")) + " 2>/dev/null")
    assert keys(found, 2) == ["a", "b"]
    (tmp_path / "b.tar").unlink()
    assert found.read(0).key == "a"
    with pytest.raises(BadSample, match=r"b\.tar' 2>/dev/null: cannot be read after 3 .*exit code 1") as bad:
        found.read(0)
    assert str(bad.value).count("pipe:") == 1
    alone = source(pipe(tmp_path, "c", packed("c")) + " 2>/dev/null")
    assert alone.read(0).key == "c"
    (tmp_path / "c.tar").unlink()
    for kind in (BadSample, StorageError):
        with pytest.raises(kind):
            alone.read(0)


def test_a_stream_names_what_a_shard_names(tmp_path: Path) -> None:
    members = [
        packed("x.v2.0"),
        packed("x.v2.1"),
        packed("empty", jpg=b"", txt=b"t"),
        packed("a"),
        packed("a"),
    ]
    found = source(pipe(tmp_path, "0", *members, packed("last")))
    bad: list[str] = []
    while True:
        try:
            assert found.read(0).key == "last"
            break
        except BadSample as error:
            bad.append(error.cause)
    shards = open_source(Data(train=(f"{tmp_path}/0.tar",), image_key=("jpg",), max_bad_share=1))
    assert Counter(bad) == shards.left_out.by_cause
    assert shards.left_out.count == 5


@pytest.mark.parametrize("order", [("jpg", "txt"), ("txt", "jpg")])
@pytest.mark.parametrize(("most", "count"), [(100, 6), (1, 11)])
def test_halves_that_lie_apart_are_one_bad_sample_as_in_a_shard(
    order: tuple[str, ...], most: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.streams._KEYS", most)
    halves = [packed(key, **{ending: b"x"}) for ending in order for key in "abcde"]
    found = source(pipe(tmp_path, "0", *halves, packed("mute", jpg=b"x"), packed("last")))
    for _ in range(count):
        with pytest.raises(BadSample):
            found.read(0)
    assert found.read(0).key == "last"
    if most == 100:
        shards = open_source(Data(train=(f"{tmp_path}/0.tar",), image_key=("jpg",), max_bad_share=1))
        assert shards.left_out.count == count


def test_a_stream_that_is_no_tar_is_named_and_asked_once() -> None:
    found = source("pipe:echo hello")
    for kind in (BadSample, InputError):
        with pytest.raises(
            kind, match="pipe:echo hello: the stream cannot be read: not a readable tar"
        ) as no:
            found.read(0)
        assert "uncompressed" not in str(no.value)
    assert not isinstance(no.value, StorageError)


def test_a_cut_stream_loses_none_of_the_samples_that_wait_to_be_drawn(tmp_path: Path) -> None:
    whole = tmp_path / "whole.tar"
    write_shard(
        [*(packed(f"{number:03}") for number in range(100)), packed("last", jpg=bytes(100_000), txt=b"b")],
        whole,
    )
    found = source(f"pipe:head -c 230000 '{whole}'", window=1000)
    seen = keys(found, 100)
    with pytest.raises(BadSample, match="the stream cannot be read"):
        found.read(0)
    assert sorted(seen) == [f"{number:03}" for number in range(100)]


@pytest.mark.parametrize(
    ("cut", "kinds", "said"),
    [
        (False, [InputError], "standard input ended after 2 samples and cannot be read again"),
        (True, [BadSample, InputError], "-: the stream cannot be read"),
    ],
)
def test_standard_input_is_read_once_by_the_rank_itself_and_one_that_is_cut_is_not_called_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool, kinds: list[type[InputError]], said: str
) -> None:
    shard = tmp_path / "0.tar"
    write_shard([packed("a"), packed("b"), *([packed("c")] if cut else [])], shard)
    if cut:
        os.truncate(shard, 4612)
    found = source("-")
    assert loader_processes(found, 4) == 0
    with shard.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert keys(found, 2) == ["a", "b"]
        for kind in kinds:
            with pytest.raises(kind, match=said):
                found.read(0)
