"""The index of WebDataset shards: what is a sample, what is left out, what is refused."""

import gzip
import io
import pickle
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_iterator

from tests.support.loading import keys_of, pair, refusal, write_tar
from trainer.config import Data, Eval
from trainer.data.check import check_data
from trainer.data.sample import Source
from trainer.data.source import open_labelled, open_source
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
