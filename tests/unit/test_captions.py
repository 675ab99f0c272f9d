"""Captions in plain text and JSON: which texts a path names, what makes a sample bad, other encodings."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from trainer.cli.main import cli
from trainer.config import Data
from trainer.config.caption_key import EVERY, parse_caption_key, parse_caption_keys, path_text
from trainer.data.captions import MOST_JSON_BYTES, CaptionReader, WeightedCaption
from trainer.data.index import index_folder, stale
from trainer.data.order import position_seed
from trainer.data.sample import BadSample, RawSample
from trainer.data.shard_files import write_shard
from trainer.data.source import open_images, open_source
from trainer.data.streams import open_streams
from trainer.data.tar import Selection
from trainer.errors import InputError

META = {"caption": "a  cat\n on a mat", "captions": ["one", "", None, "two"], "meta": {"texts": ["t0", "t1"]}}


def reader(key: str, encoding: str = "utf-8") -> CaptionReader:
    return CaptionReader(parse_caption_keys([key]).paths, encoding=encoding)


def read(key: str, value: Any) -> tuple[str, ...]:
    return reader(key)(json.dumps(value).encode()).texts


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


def test_lines_are_one_caption_where_the_job_says_so(tmp_path: Path) -> None:
    data = Data(train=(shard(tmp_path, b" a cat \r\n\non  a mat\n", b" \n", ending="txt"),))
    one = data.model_copy(update={"caption_lines": "one"})
    assert open_source(data).read(0).captions == ("a cat", "on  a mat")
    assert open_source(one).read(0).captions == ("a cat on a mat",)
    assert open_images(one).read(0).captions == ("a cat on a mat",)
    with pytest.raises(BadSample, match="captions are empty"):
        open_source(one).read(1)


def test_lists_at_the_top_and_lists_of_objects_have_paths() -> None:
    assert read("json:[*]", ["a", "b"]) == ("a", "b")
    assert read("json:[1].text", [{}, {"text": "b"}]) == ("b",)
    assert read("json:texts[*].en", {"texts": [{"en": "a"}, {"en": "b"}]}) == ("a", "b")


STEPS = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8"), min_size=1) | st.text('."[]', min_size=1),
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
    source = open_source(Data(train=(path,), caption_key=("json:caption",)))
    with pytest.raises(BadSample, match=r"0\.tar: sample s0: ") as caught:
        source.read(0)
    assert caught.value.cause == "bad captions"
    assert source.read(1).captions == ("good",), "NaN elsewhere is what img2dataset writes"


def test_the_limit_of_a_members_bytes_holds_for_json(tmp_path: Path) -> None:
    path = shard(tmp_path, b'{"caption": "a", "x": "' + b"x" * 1000 + b'"}')
    source = open_source(Data(train=(path,), caption_key=("json:caption",), max_member_bytes=500))
    with pytest.raises(BadSample, match=r"its \.json has 1,025 bytes; data\.max_member_bytes allows 500"):
        source.read(0)


def test_shards_retrieval_streams_and_commands_read_the_same_captions(tmp_path: Path) -> None:
    path = shard(tmp_path, json.dumps(META).encode())
    data = Data(train=(path,), caption_key=("json:captions[*]",))
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
    assert list(stale([path], Selection(Data(train=(path,)).image_key, "json"), folder)) == []


CHINESE = "一只黑猫\n两只白猫"


def test_captions_of_another_encoding_are_read_by_its_name(tmp_path: Path) -> None:
    path = shard(tmp_path, CHINESE.encode("gb18030"), ending="txt")
    with pytest.raises(BadSample, match=r'not UTF-8 .* data\.encoding = "gb18030" in a job, --encoding in a'):
        open_source(Data(train=(path,))).read(0)
    data = Data(train=(path,), encoding="gb18030")
    assert open_source(data).read(0).captions == tuple(CHINESE.split("\n"))
    with pytest.raises(ValueError, match=r"captions are not GB18030 .* at byte 1"):
        reader("txt", "gb18030")(b"a\xff")
    assert reader("json:a", "gb18030")(b'{"a": "\xc3\xa8"}').texts == ("猫",)


def test_tables_of_another_encoding_are_read_and_packed_by_its_name(tmp_path: Path) -> None:
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


def test_several_paths_give_a_sample_the_captions_of_all_and_say_how_many_each() -> None:
    keys = parse_caption_keys(["json:caption", "json:none", "json:captions[*]"])
    assert keys.ending == "json"
    found = CaptionReader(keys.paths)(json.dumps({**META, "none": None}).encode())
    assert found == (("a cat on a mat", "one", "two"), (1, 0, 2))


@pytest.mark.parametrize("key", ["caption_key", "caption_column"])
def test_a_list_without_an_entry_is_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="must name one place of captions at least"):
        Data.model_validate({"train": ("a.tar",), key: ()})


@pytest.mark.parametrize("keys", [["txt", "json:a"], ["json:a", "meta.json:a"], ["txt", "alt"]])
def test_captions_of_two_members_are_refused(keys: list[str]) -> None:
    with pytest.raises(ValidationError, match=f"{keys[0]}, {keys[1]} are several members, and a sample's"):
        Data(train=("a.tar",), caption_key=tuple(keys))


def read_template(template: str, value: Any) -> tuple[str, ...]:
    data = Data(train=("a.tar",), caption_template=(template,))
    return CaptionReader.by(data)(json.dumps(value).encode()).texts


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{caption}", "a cat on a mat"),
        ("A photo: {captions[0]}. {meta.texts[1]}!", "A photo: one. t1!"),
        ("{{ {year} }}", "{ 1999 }"),
        ("{captions[0]}\n{caption}", "one a cat on a mat"),
        ("{caption.__class__}", None),
        ("{captions[2]}{caption}", None),
        ("{half} {caption}", None),
    ],
)
def test_a_template_joins_fields_in_one_line(template: str, text: str | None) -> None:
    value = {**META, "year": 1999, "half": 0.5}
    if text is None:
        with pytest.raises(ValueError, match=r"not an object|captions are empty|a number at half"):
            read_template(template, value)
    else:
        assert read_template(template, value) == (text,)


def test_a_template_without_one_of_its_fields_gives_no_caption_and_another_may() -> None:
    data = Data(train=("a.tar",), caption_template=("{title}. {caption}", "{caption}"))
    assert data.caption_keys.ending == "json"
    reader = CaptionReader.by(data)
    assert reader(b'{"title": "T", "caption": "c"}') == (("T. c", "c"), (1, 1))
    assert reader(b'{"title": null, "caption": "c"}') == (("c",), (0, 1))
    with pytest.raises(ValueError, match="captions are empty"):
        reader(b'{"title": "T", "caption": " "}')
    with pytest.raises(ValueError, match="it has no field title at its top"):
        reader(b'{"caption": "c"}')


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("a photo", "has no field, or one without a name: write each field in braces"),
        ("{}", "has no field, or one without a name"),
        ("{a:>9}", "a field has a name alone"),
        ("{a!r}", "a field has a name alone"),
        ("{a", "cannot be read"),
        ("{a[*]}", r"would be several texts in one caption: name one, such as \[0\]"),
        ("{a..b}", "the path of the field cannot be read"),
    ],
)
def test_a_malformed_template_is_refused(template: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Data(train=("a.tar",), caption_template=(template,))


def test_a_template_takes_the_member_that_caption_key_names() -> None:
    data = Data(train=("a.tar",), caption_key=("meta.json",), caption_template=("{a}",))
    assert data.caption_keys == ("meta.json", ())
    with pytest.raises(ValidationError, match="so caption_key is the ending of a JSON member alone"):
        Data(train=("a.tar",), caption_key=("json:a",), caption_template=("{a}",))


def sample(*texts: str, counts: tuple[int, ...] = ()) -> RawSample:
    return RawSample("k", "o", b"", texts, caption_counts=counts)


def test_weights_draw_keys_as_often_as_they_say_and_their_captions_alike() -> None:
    choice = WeightedCaption((1.0, 3.0))
    seeds = [position_seed(0, 0, position, "caption") for position in range(20_000)]
    drawn = Counter(choice(sample("a", "b", "c", counts=(1, 2)), seed) for seed in seeds)
    assert drawn["a"] / len(seeds) == pytest.approx(1 / 4, abs=0.02)
    assert drawn["b"] / len(seeds) == pytest.approx(3 / 8, abs=0.02)


def test_a_key_without_captions_is_never_drawn() -> None:
    choice = WeightedCaption((1.0, 1000.0, 1.0))
    ends = (0, 2**63 - 1)
    assert [choice(sample("a", "b", counts=(1, 0, 1)), seed) for seed in ends] == ["a", "b"]
    assert {choice(sample("a", counts=(0, 0, 1)), seed) for seed in ends} == {"a"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"caption_weights": (1.0,)}, r"1 number for 2 sources of captions \(json:a, json:b\)"),
        ({"caption_weights": (1.0, 0.0)}, "greater than 0"),
        ({"caption_weights": (1.0, 2.0), "caption_choice": "first"}, '"first" draws none'),
    ],
)
def test_weights_that_fit_no_captions_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Data(train=("a.tar",), caption_key=("json:a", "json:b"), **settings)


def picture(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "a.png")


def test_tables_have_several_caption_columns_and_templates(tmp_path: Path) -> None:
    picture(tmp_path)
    table = tmp_path / "t.csv"
    table.write_text("image,title,caption,alt\na.png,T,c,\na.png,,c,d\n")
    columns = open_source(Data(train=(str(table),), caption_column=("caption", "alt")))
    assert [columns.read(row).captions for row in (0, 1)] == [("c",), ("c", "d")]
    assert columns.read(0).caption_counts == (1, 0)
    data = Data(train=(str(table),), caption_template=("{title}: {caption}", "{caption}"))
    assert [open_source(data).read(row).captions for row in (0, 1)] == [("T: c", "c"), ("c",)]
    left_out = open_source(Data(train=(str(table),), caption_template=("{alt}", "{title} {alt}"))).left_out
    assert [str(sample) for sample in left_out.named] == [f"{table}: row 2: sample a.png: captions are empty"]
    with pytest.raises(InputError, match="there is no caption column 'titel'; did you mean 'title'"):
        open_source(Data(train=(str(table),), caption_template=("{titel}",)))


def test_commands_take_templates_and_several_columns(tmp_path: Path) -> None:
    picture(tmp_path)
    table = tmp_path / "t.csv"
    table.write_text("image,title,caption\na.png,T,c\n")
    packed = CliRunner().invoke(
        cli, ["pack", str(table), str(tmp_path / "out"), "--caption-template", "{title}: {caption}"]
    )
    assert packed.exit_code == 0, packed.output
    shard = packed.stdout.strip()
    assert open_source(Data(train=(shard,))).read(0).captions == ("T: c",)
    of_json = Data(train=(shard,), caption_key=("json:caption", "json:title"))
    assert open_source(of_json).read(0).captions == ("c", "T")
    found = CliRunner().invoke(
        cli, ["data", "stats", shard, "--caption-key", "json:caption", "--caption-key", "json:title"]
    )
    assert json.loads(found.stdout)["captions_per_image"]["most"] == 2
    wrong = CliRunner().invoke(cli, ["data", "stats", shard, "--caption-template", "{a"])
    assert str(wrong.exception).startswith("--caption-template: '{a' cannot be read")
