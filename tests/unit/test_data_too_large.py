"""Members and files that are larger than anybody means are bad samples.

Their bytes are never read, from shards, streams and tables alike.
"""

import bz2
import gzip
import lzma
import os
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.loading import open_job
from trainer.config import Data, Eval
from trainer.data.sample import BadSample, Source
from trainer.data.source import open_labelled, open_source

GB = 10**9
MOST_MEMORY = 40_000_000
"""Bytes that Python may allocate while a member of gigabytes is refused."""


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEMORY, f"{peak / 1e6:.0f} MB"


def sparse_shard(path: Path, *members: tuple[str, int | bytes]) -> Path:
    """A tar whose members are holes where only a size is given: gigabytes that need no disk."""
    with path.open("wb") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = content if isinstance(content, int) else len(content)
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            if isinstance(content, bytes):
                file.write(content)
            else:
                file.seek(info.size, os.SEEK_CUR)
            file.seek(-file.tell() % tarfile.BLOCKSIZE, os.SEEK_CUR)
        file.write(bytes(2 * tarfile.BLOCKSIZE))
    return path


def beside(
    key: str, *, image: int | bytes = b"image", text: int | bytes = b"text"
) -> list[tuple[str, int | bytes]]:
    return [(f"{key}.jpg", image), (f"{key}.txt", text)]


def bad(source: Source, number: int = 0) -> BadSample:
    with pytest.raises(BadSample) as caught:
        source.read(number)
    return caught.value


def test_a_caption_of_gigabytes_and_a_labelled_image_are_bad_samples_too(tmp_path: Path) -> None:
    shard = sparse_shard(tmp_path / "0.tar", *beside("a", text=3 * GB))
    labelled = sparse_shard(tmp_path / "1.tar", ("a.jpg", 3 * GB), ("a.cls", b"0"))
    (tmp_path / "classes" / "one").mkdir(parents=True)
    with (tmp_path / "classes" / "one" / "big.png").open("wb") as file:
        file.truncate(3 * GB)
    with little_memory():
        assert "its .txt has 3,000,000,000 bytes" in str(bad(open_source(Data(train=(str(shard),)))))
        evaluated = Eval(zero_shot=(str(labelled),), class_names=("x",))
        for evaluation in (evaluated, Eval(zero_shot=(str(tmp_path / "classes"),))):
            assert bad(open_labelled(evaluation)).cause == "too large"


def test_a_header_that_claims_gigabytes_is_damage_and_is_never_read(tmp_path: Path) -> None:
    path = sparse_shard(tmp_path / "0.tar", *beside("a"))
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 3 * GB
    with path.open("r+b") as file:
        file.seek(-2 * tarfile.BLOCKSIZE, os.SEEK_END)
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.seek(info.size, os.SEEK_CUR)
        file.write(bytes(tarfile.BLOCKSIZE))
    with little_memory():
        source = open_source(Data(train=(str(path),), max_bad_share=1))
    assert (len(source), source.left_out.count > 0) == (1, True)


def pax(name: str, **headers: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.pax_headers = headers
    return info.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize(
    "headers",
    [
        {"size": "-2048"},
        {"size": "-100000000000000000000000"},
        {"size": "99999999999999999999999999"},
        {"GNU.sparse.map": "x,y"},
        {"GNU.sparse.size": "x"},
        {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "c.jpg",
            "GNU.sparse.realsize": "5",
        },
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "x"},
    ],
)
def test_hostile_sizes_end_a_shard_and_not_the_run(tmp_path: Path, headers: dict[str, str]) -> None:
    path = sparse_shard(tmp_path / "0.tar", *beside("a"), *beside("b"))
    whole = path.read_bytes()[: -2 * tarfile.BLOCKSIZE]
    path.write_bytes(whole + pax("c.jpg", **headers) + b"1" * 2048 + bytes(1024))
    assert open_source(Data(train=(str(path),), max_bad_share=1)).read(0).key == "a"
    stream = streaming(f"pipe:cat '{path}'")
    assert stream.read(0).key == "a"


def streaming(stream: str, most_bytes: int = 256_000_000) -> Source:
    source: Source = open_job(
        train=(stream,), format="webdataset", stream_samples=10, shuffle_window=1, max_member_bytes=most_bytes
    )
    return source


@pytest.mark.parametrize("compressed", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_stream_is_read_and_a_bomb_in_it_is_passed_over(
    tmp_path: Path, compressed: Callable[[bytes], bytes]
) -> None:
    shard = sparse_shard(tmp_path / "0.tar", *beside("a"), *beside("bomb", image=60_000_000), *beside("c"))
    (tmp_path / "small").write_bytes(compressed(shard.read_bytes()))
    assert (tmp_path / "small").stat().st_size < 1_000_000
    with little_memory():
        source = streaming(f"pipe:cat '{tmp_path / 'small'}'", most_bytes=1_000_000)
        assert source.read(0).key == "a"
        bad(source)
        assert source.read(0).key == "c"
