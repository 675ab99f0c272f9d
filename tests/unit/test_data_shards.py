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

from tests.support.loading import Member, keys_of, pair, refusal, write_tar
from trainer.config import Data, Eval
from trainer.data.check import check_data
from trainer.data.sample import Source
from trainer.data.source import open_labelled, open_source
from trainer.errors import InputError

DOTS = "a dot in the name, where the key ends: rename a.b.jpg to a-b.jpg"


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


def test_folders_and_long_names_are_part_of_the_key(tmp_path: Path) -> None:
    keys = ["v1.2/cat", "v1.2/" + "long" * 60, "größe/猫"]
    source = open_captioned(write_tar(tmp_path / "0.tar", [m for key in keys for m in pair(key)]))
    assert [(s.key, s.image) for s in map(source.read, range(3))] == [
        (key, f"image of {key}".encode()) for key in keys
    ]


def test_the_first_image_ending_of_the_job_wins_and_its_caption_key_is_read(tmp_path: Path) -> None:
    members = [("a.png", b"png"), ("a.seg.png", b"mask"), ("a.JPG", b"jpg"), ("a.caption", b"c")]
    shard = str(write_tar(tmp_path / "0.tar", members))
    for image_key, image in ((("webp", "jpg", "png"), b"jpg"), (("seg.png",), b"mask")):
        data = Data(train=(f"{tmp_path}/{{0..0}}.tar",), image_key=image_key, caption_key=("caption",))
        (raw,) = map(open_source(data).read, range(1))
        assert (raw.image, raw.captions, raw.origin) == (image, ("c",), shard)


def test_captions_are_the_lines_that_hold_something(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "0.tar", pair("a", "\ufeff one \r\n\r\n\u2028two\x0bhalves\n"))
    assert open_captioned(shard).read(0).captions == ("one", "two\x0bhalves")


@pytest.mark.parametrize(
    ("text", "cause"), [(b"caf\xe9", "not UTF-8 .* at byte 3"), (b" \n ", "captions are empty")]
)
def test_bad_captions_name_shard_and_key(tmp_path: Path, text: bytes, cause: str) -> None:
    shard = write_tar(tmp_path / "0.tar", [("x/a.jpg", b"i"), ("x/a.txt", text)])
    with pytest.raises(InputError, match=rf"0\.tar: sample x/a: .*{cause}"):
        open_captioned(shard).read(0)


@pytest.mark.parametrize(
    ("members", "causes"),
    [
        (
            [("b.txt", b"t"), ("c.jpg", b"i"), ("d.jpg", b""), ("d.txt", b"t"), ("README", b"r")],
            {"no image": 1, ".jpg is empty": 1, "no .txt": 1},
        ),
        ([*pair("a"), *pair("a.1"), *pair("a.2")], {DOTS: 2}),
        ([*pair("a"), ("a.seg.png", b"mask"), ("a.json", b"{}"), ("a.long.txt", b"t")], {}),
        ([*pair("a.1"), ("a.2.jpg", b"no caption")], {DOTS: 1}),
        ([(f"a.{number}.jpg", b"i") for number in range(9)], {DOTS: 9}),
        ([*pair("same"), *pair("same"), *pair("same")], {"two members with the same name": 3}),
    ],
)
def test_what_is_no_sample_is_left_out_and_counted(
    tmp_path: Path, members: list[Member], causes: dict[str, int]
) -> None:
    source = open_captioned(write_tar(tmp_path / "0.tar", [*members, ("._e.jpg", b"x"), *pair("plain")]))
    assert source.left_out.by_cause == causes
    assert source.read(len(source) - 1).key == "plain"


def test_pairs_that_share_a_key_up_to_the_first_dot_are_counted_and_named_one_by_one(tmp_path: Path) -> None:
    pairs = [member for number in range(30) for member in pair(f"scan.v2.{number:06d}")]
    shard = write_tar(tmp_path / "0.tar", [*pairs, *pair("plain")])
    source = open_captioned(shard)
    assert (len(source), source.left_out.by_cause) == (1, {DOTS: 30})
    assert str(source.left_out.named[1]) == f"{shard}: sample scan.v2.000001: {DOTS}"
    assert (
        "Found .*.jpg (30), .*.txt (30); a sample needs one of .jpg, .jpeg, .png, .webp and a .txt. "
        f"30 with {DOTS}" in refused(write_tar(tmp_path / "1.tar", pairs))
    )


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


def test_shards_that_were_concatenated_are_read_to_the_end(tmp_path: Path) -> None:
    tars = [
        write_tar(tmp_path / f"{n}.tar", pair(f"k{n}"), tarfile.USTAR_FORMAT).read_bytes() for n in range(3)
    ]
    tars[1] = tars[1][: 2048 + 1024]  # as other programs end one: two blocks of zeros, and no more
    both = tmp_path / "all.tar"
    both.write_bytes(b"".join(tars))
    assert keys_of(open_captioned(both)) == ["k0", "k1", "k2"]
    both.write_bytes(b"".join(tars) + b"?")
    assert "damaged or cut off at byte" in refused(both)


def test_a_set_without_any_sample_lists_what_it_holds_and_what_is_expected(tmp_path: Path) -> None:
    members = [("a.jpeg", b"i"), ("a.caption", b"t"), ("b.caption", b"t")]
    message = refused(write_tar(tmp_path / "0.tar", members))
    assert ".caption (2), .jpeg (1)" in message
    assert "one of .jpg, .jpeg, .png, .webp and a .txt" in message
    assert "data.caption_key" in message
    assert "Found no files" in refused(write_tar(tmp_path / "0.tar", []))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "the file is empty"),
        (gzip.compress(b"x" * 2000, mtime=0), "gzip data"),
        (b"version https://git-lfs.github.com/spec/v1\n" * 20, "Git LFS pointer"),
        (b"<html>404</html>" * 100, "failed download"),
        (b"\x01" * 2000, "invalid header"),
    ],
)
def test_files_that_are_no_tars_are_refused_with_their_actual_kind_and_all_at_once(
    tmp_path: Path, content: bytes, found: str
) -> None:
    paths = [tmp_path / f"{n}.tar" for n in range(9)]
    write_tar(paths[0], pair("a"))
    for path in paths[1:]:
        path.write_bytes(content)
    message = refused(*paths)
    assert all(str(path) in message for path in paths[1:6])
    assert "and 3 more shards" in message
    assert found in message


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
    with pytest.raises(InputError, match=r"0\.tar: sample a: label must be a class number"):
        source.read(0)


def test_labelled_shards_need_no_captions(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "0.tar", [("a.jpg", b"i"), ("a.cls", b"12\n"), ("b.jpg", b"i")])
    source = open_labelled(Eval(zero_shot=(str(shard),), class_names=("x",)))
    assert (len(source), source.read(0).label, source.read(0).captions) == (1, 12, ())
    assert source.left_out.by_cause == {"no .cls": 1}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
def test_numbering_finds_each_sample_of_each_shard(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    expected = [f"{shard}-{row}" for shard, size in enumerate(sizes) for row in range(size)]
    for shard in range(len(sizes)):
        members = [m for key in expected if key.startswith(f"{shard}-") for m in pair(key)]
        write_tar(folder / f"{shard}.tar", members)
    assert keys_of(open_captioned(*(folder / f"{shard}.tar" for shard in range(len(sizes))))) == expected
