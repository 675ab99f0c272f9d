"""Captions in plain text and JSON: which texts a path names, what makes a sample bad, other encodings."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from trainer.cli.main import cli
from trainer.config import Data
from trainer.config.caption_key import EVERY, parse_caption_key, path_text
from trainer.data.captions import MOST_JSON_BYTES, CaptionReader
from trainer.data.index import index_folder, stale
from trainer.data.sample import BadSample
from trainer.data.shard_files import write_shard
from trainer.data.source import open_images, open_source
from trainer.data.streams import open_streams
from trainer.data.tar import Selection

META = {"caption": "a  cat\n on a mat", "captions": ["one", "", None, "two"], "meta": {"texts": ["t0", "t1"]}}


def reader(key: str, encoding: str = "utf-8") -> CaptionReader:
    return CaptionReader(parse_caption_key(key).path, encoding)


def read(key: str, value: Any) -> tuple[str, ...]:
    return reader(key)(json.dumps(value).encode())


def shard(folder: Path, *contents: bytes, ending: str = "json") -> str:
    samples = [(f"s{number}", {"jpg": b"image", ending: content}) for number, content in enumerate(contents)]
    write_shard(samples, folder / "0.tar")
    return str(folder / "0.tar")


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        ("json:caption", ("a cat on a mat",)),
        ("json:captions[*]", ("one", "two")),
        ("json:captions[3]", ("two",)),
        ("json:meta.texts[0]", ("t0",)),
        ("json:meta.texts[*]", ("t0", "t1")),
    ],
)
def test_a_path_names_one_text_or_every_text_of_a_list(key: str, texts: tuple[str, ...]) -> None:
    assert read(key, META) == texts


def test_lists_at_the_top_and_lists_of_objects_have_paths() -> None:
    assert read("json:[*]", ["a", "b"]) == ("a", "b")
    assert read("json:[1].text", [{}, {"text": "b"}]) == ("b",)
    assert read("json:texts[*].en", {"texts": [{"en": "a"}, {"en": "b"}]}) == ("a", "b")


STEPS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_characters=".[]", codec="utf-8"), min_size=1),
        st.integers(0, 999_999_999),
        st.just(EVERY),
    ),
    min_size=1,
    max_size=32,
)


@given(STEPS)
def test_every_path_is_read_as_it_is_written(steps: list[str | int | None]) -> None:
    assert parse_caption_key(f"meta.json:{path_text(tuple(steps))}") == ("meta.json", tuple(steps))


def test_a_colon_in_another_ending_is_part_of_it() -> None:
    assert parse_caption_key("a:b") == ("a:b", None)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (
            "json:captoin",
            META,
            r"no field captoin at its top; did you mean caption\? \(its fields: caption, ",
        ),
        ("json:meta.text", META, r"no field text at meta; did you mean texts\?"),
        ("json:captions", META, r"has a list at captions, not a text: captions\[\*\] takes every text of it"),
        ("json:meta", META, "an object at meta, not a text"),
        ("json:meta.texts[2]", META, r"a list of 2 at meta.texts, so there is no \[2\]"),
        ("json:caption[*]", META, "a text at caption, not a list"),
        ("json:caption.en", META, "a text at caption, not an object with the field en"),
        ("json:c", {"c": 0.5}, "a number at c, not a text"),
        ("json:c", {"c": float("nan")}, "a number at c, not a text"),
        ("json:c", {"c": True}, "true or false at c, not a text"),
        ("json:c[*]", {"c": ["a", 1]}, r"a number at c\[\*\], not a text"),
        ("json:c", {"c": None}, "captions are empty"),
        ("json:c", {"c": " \n"}, "captions are empty"),
        ("json:c[*]", {"c": []}, "captions are empty"),
        ("json:c", {"c": "\ud800"}, "half a character"),
        ("json:c", 7, "a number at its top, not an object with the field c"),
    ],
)
def test_a_field_that_is_no_text_is_named(key: str, value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read(key, value)


HOSTILE = {
    "cut": b'{"caption": "a',
    "deep": b"[" * 200_000,
    "deep object": b'{"caption":' * 100_000,
    "long number": b'{"n": ' + b"9" * 5000 + b', "caption": "a"}',
    "not UTF-8": b'{"caption": "\xff"}',
    "UTF-16": '{"caption": "a"}'.encode("utf-16"),
    "twice": b'{"caption": "a", "caption": "b"}',
    "huge": b'{"caption": "a", "x": "' + b"x" * MOST_JSON_BYTES + b'"}',
    "empty": b" ",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_json_is_one_bad_sample(tmp_path: Path, content: bytes) -> None:
    path = shard(tmp_path, content, b'{"caption": "good", "similarity": NaN}')
    source = open_source(Data(train=(path,), caption_key="json:caption"))
    with pytest.raises(BadSample, match=r"0\.tar: sample s0: ") as caught:
        source.read(0)
    assert caught.value.cause == "bad captions"
    assert source.read(1).captions == ("good",), "NaN elsewhere is what img2dataset writes"


def test_the_limit_of_a_members_bytes_holds_for_json(tmp_path: Path) -> None:
    path = shard(tmp_path, b'{"caption": "a", "x": "' + b"x" * 1000 + b'"}')
    source = open_source(Data(train=(path,), caption_key="json:caption", max_member_bytes=500))
    with pytest.raises(BadSample, match=r"its \.json has 1,025 bytes; data\.max_member_bytes allows 500"):
        source.read(0)


def test_shards_retrieval_streams_and_commands_read_the_same_captions(tmp_path: Path) -> None:
    path = shard(tmp_path, json.dumps(META).encode())
    data = Data(train=(path,), caption_key="json:captions[*]")
    stream = open_streams(
        [f"pipe:cat '{path}'"], 1, Selection(("jpg",), "json"), 1, 0, 0, 1, captions=CaptionReader.by(data)
    )
    for source in (open_source(data), open_images(data), stream):
        assert source.read(0).captions == ("one", "two")
    found = CliRunner().invoke(cli, ["data", "stats", path, "--caption-key", "json:captions[*]"])
    assert json.loads(found.stdout)["samples"] == 1


def test_paths_into_one_member_share_an_index(tmp_path: Path) -> None:
    path = shard(tmp_path, json.dumps(META).encode())
    run = CliRunner().invoke(cli, ["index", path, "--caption-key", "JSON:caption"])
    assert run.exit_code == 0, run.output
    folder = index_folder([path])
    assert folder is not None
    assert stale([path], Selection(Data(train=(path,)).image_key, "json"), folder) == []


CHINESE = "一只黑猫\n两只白猫"


def test_captions_of_another_encoding_are_read_by_its_name(tmp_path: Path) -> None:
    path = shard(tmp_path, CHINESE.encode("gb18030"), ending="txt")
    with pytest.raises(BadSample, match=r'not UTF-8 .* data\.encoding = "gb18030" in a job, --encoding in a'):
        open_source(Data(train=(path,))).read(0)
    data = Data(train=(path,), encoding="gb18030")
    assert open_source(data).read(0).captions == tuple(CHINESE.split("\n"))
    with pytest.raises(ValueError, match=r"captions are not GB18030 .* at byte 1"):
        reader("txt", "gb18030")(b"a\xff")
    assert reader("json:a", "gb18030")(b'{"a": "\xc3\xa8"}') == ("猫",)


def test_tables_of_another_encoding_are_read_and_packed_by_its_name(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_bytes("image,caption\na.png,一只黑猫\n".encode("gb18030"))
    found = CliRunner().invoke(cli, ["pack", str(tmp_path / "t.csv"), str(tmp_path / "no")])
    assert found.exit_code
    assert "row 2 is not UTF-8 text" in str(found.exception)
    assert 'data.encoding = "gb18030"' in str(found.exception)
    source = open_source(Data(train=(str(tmp_path / "t.csv"),), encoding="gb18030"))
    assert source.read(0).captions == ("一只黑猫",)
    run = CliRunner().invoke(
        cli, ["pack", str(tmp_path / "t.csv"), str(tmp_path / "out"), "--encoding", "GB18030"]
    )
    assert run.exit_code == 0, run.output
    assert open_source(Data(train=(run.stdout.strip(),))).read(0).captions == ("一只黑猫",)
