"""What is larger than anybody means is a bad sample; its bytes are never read."""

import bz2
import gzip
import lzma
import os
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.loading import open_job
from tests.support.pictures import picture
from trainer.config import Data, Eval
from trainer.data.pictures import decode
from trainer.data.sample import BadSample, RawSample, Source
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


def test_images_and_captions_of_gigabytes_are_bad_samples_and_are_never_read(tmp_path: Path) -> None:
    members = (
        *beside("a", text=3 * GB),
        *beside("b"),
        *beside("c", image=256_000_001),
        *beside("d", image=2**40),
    )
    shard = sparse_shard(tmp_path / "0.tar", *members)
    labelled = sparse_shard(tmp_path / "1.tar", ("a.jpg", 3 * GB), ("a.cls", b"0"))
    (tmp_path / "classes" / "one").mkdir(parents=True)
    with (tmp_path / "classes" / "one" / "big.png").open("wb") as file:
        file.truncate(3 * GB)
    with little_memory():
        source = open_source(Data(train=(str(shard),)))
        assert "its .txt has 3,000,000,000 bytes" in str(bad(source))
        assert source.read(1).key == "b"
        assert "256,000,001 bytes; data.max_member_bytes allows 256,000,000" in str(bad(source, 2))
        assert (bad(source, 3).key, bad(source, 3).cause) == ("d", "too large")
        evaluated = Eval(zero_shot=(str(labelled),), class_names=("x",))
        for evaluation in (evaluated, Eval(zero_shot=(str(tmp_path / "classes"),))):
            assert bad(open_labelled(evaluation)).cause == "too large"


def chained(kind: bytes, count: int) -> bytes:
    """Headers that each only announce the next one."""
    info = tarfile.TarInfo("name")
    info.type, info.size = kind, 5
    return (info.tobuf(tarfile.GNU_FORMAT) + b"name\0".ljust(512, b"\0")) * count


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


SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}


HOSTILE = {
    "negative": pax("c.jpg", size="-2048"),
    "far below zero": pax("c.jpg", size="-100000000000000000000000"),
    "far too large": pax("c.jpg", size="99999999999999999999999999"),
    "map of texts": pax("c.jpg", **{"GNU.sparse.map": "x,y"}),
    "size of text": pax("c.jpg", **{"GNU.sparse.size": "x"}),
    "sparse": pax("c.jpg", **SPARSE, **{"GNU.sparse.name": "c.jpg", "GNU.sparse.realsize": "5"}),
    "sparse text": pax("c.jpg", **SPARSE, **{"GNU.sparse.realsize": "x"}),
    "long names of long names": chained(tarfile.GNUTYPE_LONGNAME, 2000),
    "pax headers of pax headers": chained(tarfile.XHDTYPE, 2000),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_end_a_shard_and_not_the_run(tmp_path: Path, hostile: bytes) -> None:
    path = sparse_shard(tmp_path / "0.tar", *beside("a"), *beside("b"))
    whole = path.read_bytes()[: -2 * tarfile.BLOCKSIZE]
    path.write_bytes(whole + hostile + b"1" * 2048 + bytes(1024))
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


@pytest.mark.parametrize(
    ("name", "begin"),
    [(b"zTXt", b"Comment\0\0"), (b"iTXt", b"Comment\0\1\0\0\0"), (b"iCCP", b"profile\0\0"), (b"IDAT", b"")],
)
def test_a_png_that_unpacks_to_more_than_its_pixels_takes_no_memory(name: bytes, begin: bytes) -> None:
    whole, content = picture(200), begin + zlib.compress(bytes(100_000_000), 9)
    chunk = struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    raw = RawSample("k", "0.tar", whole[:33] + chunk + whole[33:], ())
    with little_memory(), suppress(BadSample):
        assert decode(raw).size == (8, 8)


def test_a_table_passes_over_image_files_that_are_too_large_or_no_files(tmp_path: Path) -> None:
    with (tmp_path / "big.png").open("wb") as file:
        file.truncate(3 * GB)
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "good.png").write_bytes(b"good")
    (tmp_path / "t.csv").write_text("image,caption\nbig.png,x\nfifo.png,x\n/dev/zero,x\ngood.png,x\n")
    source = open_source(Data(train=(f"{tmp_path}/t.csv",)))
    with little_memory():
        said = "its image file has 3,000,000,000 bytes; data.max_member_bytes allows 256,000,000"
        for number, cause in enumerate((said, "is a FIFO, not a file", "is a device, not a file")):
            assert f"row {number + 2}" in str(found := bad(source, number))
            assert cause in str(found)
        assert source.read(3).image == b"good"
