"""The index of WebDataset shards: what is a sample, what is left out, what is refused."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_iterator

from tests.support.command_line import clipship
from tests.support.loading import Member, keys_of, open_job, pair, refusal, write_tar
from tests.support.pictures import picture
from trainer.config import Data, Eval
from trainer.data import hops
from trainer.data.check import check_data
from trainer.data.hops import Hopping
from trainer.data.pictures import decode
from trainer.data.sample import BadSample, RawSample, Source
from trainer.data.source import open_labelled, open_source
from trainer.data.tar import Selection, read_headers
from trainer.errors import InputError


def open_captioned(*paths: Path) -> Source:
    return open_source(Data(train=tuple(map(str, paths)), max_bad_share=1))


def refused(*paths: Path) -> str:
    return refusal(open_source, Data(train=tuple(map(str, paths)), on_bad_sample="fail"))


def test_samples_are_numbered_through_the_shards(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "one.tar", [*pair("a"), *pair("b")])
    two = write_tar(tmp_path / "two.tar", pair("c"))
    empty = write_tar(tmp_path / "none.tar", [])
    source = open_captioned(one, empty, two)
    assert (len(source), source.shard_sizes()) == (3, [2, 0, 1])
    assert [(s.key, s.image, s.origin) for s in map(source.read, range(3))] == [
        ("a", b"image of a", str(one)),
        ("b", b"image of b", str(one)),
        ("c", b"image of c", str(two)),
    ]
    copy = pickle.loads(pickle.dumps(source))
    del source
    assert copy.read(0).image == b"image of a", "without its open files"
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            copy.read(outside)


NAMES = st.text("ab.", min_size=1, max_size=4).filter(lambda name: name.strip(".") == name)
PATHS = st.builds(
    lambda folder, name, ending: f"{folder}{name}.{ending}",
    st.sampled_from(["", "f/", "f.g/"]),
    NAMES,
    st.sampled_from(["jpg", "TXT", "x.txt"]),
)


@given(st.lists(PATHS, unique=True, max_size=12))
def test_samples_are_grouped_as_webdataset_groups_them(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str]
) -> None:
    shard = write_tar(
        tmp_path_factory.mktemp("shard") / "0.tar", [*((path, path.encode()) for path in paths), *pair("zz")]
    )
    ours = open_captioned(shard)
    try:
        with shard.open("rb") as file:
            theirs = list(group_by_keys({**member, "__url__": ""} for member in tar_file_iterator(file)))
    except ValueError:  # two members with the same name
        assert ours.left_out.by_cause["two members with the same name"]
        return
    assert keys_of(ours) == [s["__key__"] for s in theirs if "jpg" in s and "txt" in s]


def test_members_that_are_no_plain_files_are_named_as_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in [
            ("folder", tarfile.DIRTYPE), ("linked.jpg", tarfile.SYMTYPE), ("linked.txt", tarfile.LNKTYPE),
            ("half.jpg", tarfile.SYMTYPE), ("half.txt", b""), ("pipe.jpg", tarfile.FIFOTYPE),
            ("pipe.txt", b""),
            ("extra.json", tarfile.SYMTYPE), ("extra.jpg", b""), ("among.jpg", tarfile.SYMTYPE),
            ("extra.txt", b""), (".dot.jpg", b""), (".dot.txt", b""), ("._mac.jpg", b""), ("README", b""),
        ]:  # fmt: skip
            info = tarfile.TarInfo(name)
            if kind:
                info.type, info.linkname = kind, "elsewhere"
                tar.addfile(info)
            else:
                info.size = 1
                tar.addfile(info, io.BytesIO(b"x"))
    source = open_captioned(path)
    assert keys_of(source) == ["extra"]
    assert source.left_out.by_cause == {
        ".jpg is a link": 3,
        ".jpg is no file": 1,
        ".jpg has a name that begins with a dot": 1,
    }
    assert sorted(bad.key for bad in source.left_out.named) == [".dot", "among", "half", "linked", "pipe"]


def test_images_and_texts_in_different_places_of_a_tar_are_told_to_be_sorted(tmp_path: Path) -> None:
    def apart(name: str, samples: range) -> Path:
        members = [member for number in samples for member in pair(f"{number:04d}")]
        return write_tar(tmp_path / name, sorted(members, key=lambda member: member[0].partition(".")[2]))

    message = refused(apart("0.tar", range(64)))
    assert "Found .jpg (64), .txt (64)" in message
    assert "64 with image and .txt do not follow each other: unpack it, and in that folder: find" in message
    assert "Set data.image_key" not in message
    halves = [
        write_tar(tmp_path / f"{n}.tar", [pair(f"{number}")[n] for number in range(64)]) for n in range(2)
    ]
    assert "no sample has both in one tar; image and .txt do not follow each other" in refused(*halves)
    data = Data(train=(str(apart("2.tar", range(1100))),))
    with pytest.raises(InputError, match=r"\.jpg \(1000\).* first 1000; if the others come later: .*find"):
        check_data(data)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (gzip.compress(b"x" * 2000, mtime=0), "gzip data"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 20, "Git LFS pointer"),
        (b"<html>404</html>" * 100, "failed download"),
    ],
)
def test_files_that_are_no_tars_are_refused_with_their_actual_kind_and_all_at_once(
    tmp_path: Path, content: bytes, found: str
) -> None:
    paths = [tmp_path / f"{n}.tar" for n in range(8)]
    for path in paths:
        path.write_bytes(content)
    message = refused(*paths)
    assert all(f"{path}: " in message for path in paths[:5])
    assert found in message
    assert "and 3 more shards" in message


def test_a_shard_that_is_gone_or_remote_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "gone.tar")
    with pytest.raises(InputError, match=r"gs://bucket/0\.tar: .*'clipship\[gcs\]'"):
        open_source(Data(train=("gs://bucket/0.tar",)))


def test_a_shard_cut_after_it_was_indexed_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", pair("a"))
    source = open_captioned(path)
    with path.open("r+b") as file:
        file.truncate(1024)
    with pytest.raises(InputError, match=rf"{path}: .*changed after it was indexed.*sample a"):
        source.read(0)


def test_many_shards_are_read_with_few_open_files_and_indexing_reports_each(tmp_path: Path) -> None:
    paths = [str(write_tar(tmp_path / f"{n}.tar", pair(f"k{n}"))) for n in range(150)]
    seen: list[tuple[int, int]] = []
    source = open_source(Data(train=tuple(paths)), lambda done, total: seen.append((done, total)))
    assert seen == [(n, 150) for n in range(1, 151)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert [source.read(n).key for n in (*range(150), 0)] == [*(f"k{n}" for n in range(150)), "k0"]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64


@pytest.mark.parametrize("text", [b"-1", b"seven", b"1.5", "²".encode(), b"1" + 30 * b"0"])
def test_a_label_that_is_no_class_number_is_refused(tmp_path: Path, text: bytes) -> None:
    shard = write_tar(tmp_path / "0.tar", [("a.jpg", b"i"), ("a.cls", text)])
    source = open_labelled(Eval(zero_shot=(str(shard),), class_names=("x",)))
    assert "0.tar: sample a: label must be a class number" in refusal(source.read, 0)


# Damage that reading headers finds in shards; the job decides whether it is counted or ends the run.

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


# What is larger than anybody means is a bad sample; its bytes are never read.

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


# Headers that are read by hops are those that reading everything finds, and large members are not read.

SELECTION = Selection(("jpg", "png"), "txt")
SMALL = {"FIRST_BYTES": 1024, "LEAST_BYTES": 512, "MOST_BYTES": 4096, "HOP": 2048}

keys = st.text("ab.ö猫/", min_size=1, max_size=6) | st.just("long" * 60)
members = st.tuples(
    keys, st.sampled_from(["jpg", "png", "txt", "json", ""]), st.integers(0, 9000) | st.integers(0, 700)
)


def tar_of(wanted: Sequence[tuple[str, str, int]], kind: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for key, ending, size in wanted:
            info = tarfile.TarInfo(f"{key}.{ending}" if ending else key)
            info.size = size
            tar.addfile(info, io.BytesIO(b"\0" * size))
    return out.getvalue()


def hopping(content: bytes, fetched: list[int]) -> BinaryIO:
    def fetch(begin: int, size: int) -> bytes:
        assert size > 0
        assert begin + size <= len(content)
        fetched.append(size)
        return content[begin : begin + size]

    return cast(BinaryIO, Hopping(len(content), fetch))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(members, max_size=9), st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])),
        min_size=1,
        max_size=2,
    ),
    st.none() | st.tuples(st.floats(0, 1), st.sampled_from(["cut", "flip"])),
)
def test_hops_find_what_reading_everything_finds(
    archives: list[tuple[list[tuple[str, str, int]], int]], harm: tuple[float, str] | None
) -> None:
    """In tars of both kinds with long and odd names, that follow each other, whole and damaged."""
    content = bytearray(b"".join(tar_of(wanted, kind) for wanted, kind in archives))
    if harm is not None:
        place = int(harm[0] * (len(content) - 1))
        if harm[1] == "cut":
            del content[place:]
        else:
            content[place] ^= 0xFF
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(hops, name, value)
        found = read_headers(hopping(bytes(content), []), SELECTION)
    assert found == (read_headers(io.BytesIO(bytes(content)), SELECTION))
