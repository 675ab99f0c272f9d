"""The index of WebDataset shards: what is a sample, what is left out, what is refused."""

import gzip
import io
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_iterator

from trainer.config import Data, Eval
from trainer.data.check import check_data
from trainer.data.index import scan
from trainer.data.sample import Numbering
from trainer.data.shards import ShardSource, open_shards
from trainer.data.source import IMAGE_ENDINGS, open_labelled, open_source
from trainer.data.tar import DOTS, Rows, Selection
from trainer.errors import InputError

Member = tuple[str, bytes]


def write_tar(path: Path, members: Sequence[Member], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def open_captioned(*paths: Path) -> ShardSource:
    return open_shards([str(path) for path in paths], IMAGE_ENDINGS, "txt", "captions")


def sample(key: str, caption: str = "a caption") -> list[Member]:
    return [(f"{key}.jpg", f"image of {key}".encode()), (f"{key}.txt", caption.encode())]


def refusal(*paths: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_captioned(*paths)
    return str(caught.value)


def test_samples_are_numbered_through_the_shards(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "one.tar", [*sample("a"), *sample("b")])
    two = write_tar(tmp_path / "two.tar", sample("c"))
    source = open_captioned(one, two)
    assert (len(source), source.shard_sizes()) == (3, [2, 1])
    assert [(s.key, s.image, s.origin) for s in map(source.read, range(3))] == [
        ("a", b"image of a", str(one)),
        ("b", b"image of b", str(one)),
        ("c", b"image of c", str(two)),
    ]
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            source.read(outside)


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
    shard = write_tar(tmp_path_factory.mktemp("shard") / "0.tar", [(path, path.encode()) for path in paths])
    try:
        with shard.open("rb") as file:
            theirs = list(group_by_keys({**member, "__url__": ""} for member in tar_file_iterator(file)))
    except ValueError:  # two members with the same name
        assert scan(str(shard), Selection(("jpg",), "txt")).entry.left_out["two members with the same name"]
        return
    ours = scan(str(shard), Selection(("jpg",), "txt"))
    rows = Rows.of(b"".join(ours.payload), len(ours.entry))
    assert [rows.key(row) for row in range(len(rows))] == [
        s["__key__"] for s in theirs if "jpg" in s and "txt" in s
    ]


def test_folders_and_long_names_are_part_of_the_key(tmp_path: Path) -> None:
    keys = ["v1.2/cat", "v1.2/" + "long" * 60, "größe/猫"]
    shard = write_tar(tmp_path / "0.tar", [m for key in keys for m in sample(key)], tarfile.PAX_FORMAT)
    source = open_captioned(shard)
    assert [(s.key, s.image) for s in map(source.read, range(3))] == [
        (key, f"image of {key}".encode()) for key in keys
    ]


def test_the_first_image_ending_of_the_job_wins(tmp_path: Path) -> None:
    shard = write_tar(
        tmp_path / "0.tar", [("a.png", b"png"), ("a.seg.png", b"mask"), ("a.JPG", b"jpg"), ("a.txt", b"t")]
    )
    assert open_shards([str(shard)], ["webp", "jpg", "png"], "txt", "captions").read(0).image == b"jpg"
    assert open_shards([str(shard)], ["seg.png"], "txt", "captions").read(0).image == b"mask"


def test_captions_are_the_lines_that_hold_something(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "0.tar", sample("a", "\ufeff one \r\n\r\n\u2028two\x0bhalves\n"))
    assert open_captioned(shard).read(0).captions == ("one", "two\x0bhalves")


@pytest.mark.parametrize(
    ("text", "cause"), [(b"caf\xe9", "not UTF-8 .* at byte 3"), (b" \n ", "captions are empty")]
)
def test_bad_captions_name_shard_and_key(tmp_path: Path, text: bytes, cause: str) -> None:
    shard = write_tar(tmp_path / "0.tar", [("x/a.jpg", b"i"), ("x/a.txt", text)])
    with pytest.raises(InputError, match=rf"0\.tar: sample x/a: .*{cause}"):
        open_captioned(shard).read(0)


def test_incomplete_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    members = [
        *sample("a"),
        ("b.txt", b"t"),
        ("c.jpg", b"i"),
        ("d.jpg", b""),
        ("d.txt", b"t"),
        ("README", b"r"),
        ("._e.jpg", b"x"),
        *sample("f"),
    ]
    source = open_captioned(
        write_tar(tmp_path / "0.tar", members), write_tar(tmp_path / "1.tar", [("g.jpg", b"i")])
    )
    assert source.left_out.by_cause == {"no image": 1, ".jpg is empty": 1, "no .txt": 2}
    assert source.shard_sizes() == [2, 0]
    assert [source.read(n).key for n in range(2)] == ["a", "f"]


def left_out(*members: Member) -> dict[str, int]:
    """Returns what is counted beside one plain sample in a shard of these members."""
    with TemporaryDirectory() as folder:
        source = open_captioned(write_tar(Path(folder) / "0.tar", [*members, *sample("plain")]))
        assert source.read(len(source) - 1).key == "plain"
        return dict(source.left_out.by_cause)


def test_pairs_that_share_a_key_up_to_the_first_dot_are_counted_and_named_one_by_one(tmp_path: Path) -> None:
    pairs = [member for number in range(30) for member in sample(f"scan.v2.{number:06d}")]
    shard = write_tar(tmp_path / "0.tar", [*pairs, *sample("plain")])
    source = open_captioned(shard)
    assert (len(source), source.left_out.by_cause) == (1, {DOTS: 30})
    assert str(source.left_out.named[1]) == f"{shard}: sample scan.v2.000001: {DOTS}"
    message = refusal(write_tar(tmp_path / "1.tar", pairs))
    assert (
        "Found .*.jpg (30), .*.txt (30); a sample needs one of .jpg, .jpeg, .png, .webp and a .txt. "
        f"30 with {DOTS}" in message
    )


def test_a_usable_sample_hides_no_further_pair_and_its_other_members_are_no_samples() -> None:
    assert left_out(*sample("a"), *sample("a.1"), *sample("a.2")) == {DOTS: 2}
    assert left_out(*sample("a"), ("a.seg.png", b"mask"), ("a.json", b"{}"), ("a.long.txt", b"t")) == {}
    assert left_out(*sample("a.1"), ("a.2.jpg", b"no caption")) == {DOTS: 1}
    assert left_out(*((f"a.{number}.jpg", b"i") for number in range(9))) == {DOTS: 9}
    assert left_out(*sample("same"), *sample("same"), *sample("same")) == {
        "two members with the same name": 3
    }


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
    assert [source.read(number).key for number in range(len(source))] == ["extra"]
    assert source.left_out.by_cause == {
        ".jpg is a link": 3,
        ".jpg is no file": 1,
        ".jpg has a name that begins with a dot": 1,
    }
    assert sorted(bad.key for bad in source.left_out.named) == [".dot", "among", "half", "linked", "pipe"]


def test_images_and_texts_in_different_places_of_a_tar_are_told_to_be_sorted(tmp_path: Path) -> None:
    members = [member for number in range(64) for member in sample(f"{number:02d}")]
    members.sort(key=lambda member: member[0].partition(".")[2])
    path = write_tar(tmp_path / "0.tar", members)
    message = refusal(path)
    assert "Found .jpg (64), .txt (64)" in message
    assert "64 with image and .txt do not follow each other: unpack it, and in that folder: find" in message
    assert "Set data.image_key" not in message
    half = len(members) // 2
    parts = [
        write_tar(tmp_path / f"{n}.tar", part) for n, part in enumerate((members[:half], members[half:]))
    ]
    message = refusal(*parts)
    assert "no sample has both in one tar; image and .txt do not follow each other" in message
    more = [member for number in range(1100) for member in sample(f"{number:04d}")]
    more.sort(key=lambda member: member[0].partition(".")[2])
    path = write_tar(tmp_path / "1.tar", more)
    with pytest.raises(InputError, match=r"\.jpg \(1000\).* first 1000; if the others come later: .*find"):
        check_data(Data(train=(str(path),)))


def test_shards_that_were_concatenated_are_read_to_the_end(tmp_path: Path) -> None:
    tars = [write_tar(tmp_path / f"{n}.tar", sample(f"k{n}")).read_bytes() for n in range(3)]
    tars[1] = tars[1][: 2048 + 1024]  # as other programs end one: two blocks of zeros, and no more
    both = tmp_path / "all.tar"
    both.write_bytes(b"".join(tars))
    source = open_captioned(both)
    assert [source.read(n).key for n in range(len(source))] == ["k0", "k1", "k2"]
    both.write_bytes(b"".join(tars) + b"?")
    assert "damaged or cut off at byte" in refusal(both)


def test_a_set_without_any_sample_lists_what_it_holds_and_what_is_expected(tmp_path: Path) -> None:
    message = refusal(
        write_tar(tmp_path / "0.tar", [("a.jpeg", b"i"), ("a.caption", b"t"), ("b.caption", b"t")])
    )
    assert ".caption (2), .jpeg (1)" in message
    assert "one of .jpg, .jpeg, .png, .webp and a .txt" in message
    assert "data.caption_key" in message


def test_an_empty_tar_is_no_damage_but_holds_nothing(tmp_path: Path) -> None:
    assert "Found no files" in refusal(write_tar(tmp_path / "0.tar", []))


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
def test_a_file_that_is_no_tar_is_refused_with_its_actual_kind(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(content)
    message = refusal(path)
    assert str(path) in message
    assert found in message


def test_every_cut_of_a_shard_is_refused_or_loses_nothing_but_the_end_mark(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "0.tar", [*sample("a"), *sample("b")]).read_bytes()
    cut_shard = tmp_path / "cut.tar"
    for size in range(1, 4 * 1024, 128):
        cut_shard.write_bytes(whole[:size])
        # The end between two members cannot be told from a shard without end mark, which tar allows.
        if size % 1024:
            assert str(cut_shard) in refusal(cut_shard)


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", [*sample("a"), *sample("b")])
    content = bytearray(path.read_bytes())
    content[2048 + 100] ^= 0xFF
    path.write_bytes(content)
    assert "damaged or cut off at byte 2048" in refusal(path)


def test_all_bad_shards_are_named_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.tar" for n in range(9)]
    write_tar(paths[0], sample("a"))
    for path in paths[1:]:
        path.write_bytes(b"")
    message = refusal(*paths)
    assert all(str(path) in message for path in paths[1:6])
    assert "and 3 more shards" in message


def test_a_shard_that_is_gone_or_remote_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "gone.tar")
    with pytest.raises(InputError, match=r"gs://bucket/0\.tar: .*'clipship\[gcs\]'"):
        open_shards(["gs://bucket/0.tar"], IMAGE_ENDINGS, "txt", "captions")


def test_a_shard_cut_after_it_was_indexed_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", sample("a"))
    source = open_captioned(path)
    with path.open("r+b") as file:
        file.truncate(1024)
    with pytest.raises(InputError, match=rf"{path}: .*changed after it was indexed.*sample a"):
        source.read(0)


def test_indexing_reports_each_shard(tmp_path: Path) -> None:
    paths = [str(write_tar(tmp_path / f"{n}.tar", sample("a"))) for n in range(5)]
    seen: list[tuple[int, int]] = []
    open_shards(paths, IMAGE_ENDINGS, "txt", "captions", lambda done, total: seen.append((done, total)))
    assert seen == [(n, 5) for n in range(1, 6)]


def test_many_shards_are_read_with_few_open_files(tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{n}.tar", sample(f"k{n}")) for n in range(150)]
    source = open_captioned(*paths)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert [source.read(n).key for n in (*range(150), 0)] == [*(f"k{n}" for n in range(150)), "k0"]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64


def test_a_source_is_pickled_without_its_open_files(tmp_path: Path) -> None:
    source = open_captioned(write_tar(tmp_path / "0.tar", sample("a")))
    source.read(0)
    copy = pickle.loads(pickle.dumps(source))
    del source
    assert copy.read(0).image == b"image of a"


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


def test_a_job_opens_its_shards_by_pattern_and_key(tmp_path: Path) -> None:
    for n in range(3):
        write_tar(tmp_path / f"{n}.tar", [(f"{n}.bmp", b"i"), (f"{n}.caption", b"c")])
    source = open_source(
        Data(train=(f"{tmp_path}/{{0..2}}.tar",), image_key=("bmp",), caption_key=("caption",))
    )
    assert [source.read(n).key for n in range(3)] == ["0", "1", "2"]


@given(st.lists(st.integers(0, 5)))
def test_numbering_finds_each_sample_of_each_shard(sizes: list[int]) -> None:
    numbering = Numbering(sizes)
    expected = [(shard, row) for shard, size in enumerate(sizes) for row in range(size)]
    assert [numbering.locate(index) for index in range(numbering.samples)] == expected
