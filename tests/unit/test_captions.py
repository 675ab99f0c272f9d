"""Captions in plain text, JSON and tables: what a path names, and what makes a sample bad."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.jobs import tiny_job
from tests.support.loading import open_job, unindexed, write_tar
from tests.support.pictures import picture
from tests.support.tables import write_parquet
from trainer.config import Data
from trainer.data.captions import CaptionReader, WeightedCaption
from trainer.data.pack import write_shard
from trainer.data.sample import BadSample, RawSample
from trainer.data.source import open_images, open_source
from trainer.errors import InputError
from trainer.plan.first_samples import FirstSamples

META = {"caption": "a  cat\n on a mat", "captions": ["one", "", None, "two"], "meta": {"texts": ["t0", "t1"]}}


def reader(key: str, **data: Any) -> CaptionReader:
    return CaptionReader.by(Data(train=("a.tar",), caption_key=(key,), **data))


def read(key: str, value: Any) -> tuple[str, ...]:
    return reader(key)(json.dumps(value).encode()).texts


def shard(folder: Path, *contents: bytes, ending: str = "json") -> str:
    samples = [(f"s{number}", {"jpg": b"image", ending: content}) for number, content in enumerate(contents)]
    write_shard(samples, folder / "0.tar")
    return str(folder / "0.tar")


def test_lines_are_one_caption_where_the_job_says_so(tmp_path: Path) -> None:
    data = Data(train=(shard(tmp_path, b" a cat \r\n\non  a mat\n", b" \n", ending="txt"),))
    one = data.model_copy(update={"caption_lines": "one"})
    assert open_source(data).read(0).captions == ("a cat", "on  a mat")
    assert open_source(one).read(0).captions == ("a cat on a mat",)
    assert open_images(one).read(0).captions == ("a cat on a mat",)
    with pytest.raises(BadSample, match="captions are empty"):
        open_source(one).read(1)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("json:captoin", META, r"at its top; did you mean caption\? \(its fields: caption, captions, "),
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
    "huge": b'{"caption": "a", "x": "' + b"x" * 2**24 + b'"}',
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


def test_shards_retrieval_streams_and_commands_read_the_same_captions(tmp_path: Path) -> None:
    path = shard(tmp_path, json.dumps(META).encode())
    data = Data(train=(path,), caption_key=("json:captions[*]",))
    stream = open_job(train=(f"pipe:cat '{path}'",), stream_samples=1, caption_key=("json:captions[*]",))
    for source in (open_source(data), open_images(data), stream):
        assert source.read(0).captions == ("one", "two")
    found = clipship("data", "stats", path, "--caption-key", "json:captions[*]", code=0)
    assert json.loads(found.out)["samples"] == 1
    clipship("index", path, "--caption-key", "JSON:caption", code=0)
    folder = tmp_path / ".clipship-index"
    assert unindexed([path], folder, caption_key=("json:caption",)) == [], "paths into one member share it"


def test_captions_of_another_encoding_are_read_by_its_name(tmp_path: Path) -> None:
    path = shard(tmp_path, "一只黑猫\n两只白猫".encode("gb18030"), ending="txt")
    with pytest.raises(BadSample, match=r'not UTF-8 .* data\.encoding = "gb18030" in a job, --encoding in a'):
        open_source(Data(train=(path,))).read(0)
    data = Data(train=(path,), encoding="gb18030")
    assert open_source(data).read(0).captions == ("一只黑猫", "两只白猫")
    with pytest.raises(ValueError, match=r"captions are not GB18030 .* at byte 1"):
        reader("txt", encoding="gb18030")(b"a\xff")


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


def test_weights_draw_keys_as_often_as_they_say_and_their_captions_alike() -> None:
    choice, draw = WeightedCaption((1.0, 3.0)), Random(0)
    raw = RawSample("k", "o", b"", ("a", "b", "c"), caption_counts=(1, 2))
    drawn = Counter(choice(raw, draw.getrandbits(63)) for _ in range(20_000))
    assert drawn["a"] / 20_000 == pytest.approx(1 / 4, abs=0.02)
    assert drawn["b"] / 20_000 == pytest.approx(3 / 8, abs=0.02)


def test_tables_have_several_caption_columns_and_templates(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(0))
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


WORDS = ["a red cat", "nan", "two dogs", "None", "null", "a house", "Nan bread", "a red cat"]


def shard_of_words(path: Path) -> str:
    members = [
        (f"{number:03d}.{ending}", content)
        for number, caption in enumerate(WORDS)
        for ending, content in (("png", picture(0)), ("txt", caption.encode()))
    ]
    return str(write_tar(path, members))


def table_of_words(path: Path) -> str:
    (path.parent / "a.png").write_bytes(picture(0))
    path.write_text("\n".join(["image,caption", *(f"a.png,{each}" for each in WORDS)]))
    return str(path)


def parquet_of_words(path: Path) -> str:
    return write_parquet(path, {"image": [picture(0)] * len(WORDS), "caption": WORDS})


@pytest.mark.parametrize(
    ("make", "ending"), [(shard_of_words, "tar"), (table_of_words, "csv"), (parquet_of_words, "parquet")]
)
def test_words_that_stand_for_no_caption_are_left_out_counted_and_named(
    tmp_path: Path, make: Any, ending: str
) -> None:
    file = make(tmp_path / f"a.{ending}")
    source = open_source(Data(train=(file,), max_bad_share=1))
    used = list[str]()
    causes = [sample.cause for sample in source.left_out.named]
    for number in range(len(source)):
        try:
            used += source.read(number).captions
        except BadSample as problem:
            causes.append(problem.cause)
    assert used == ["a red cat", "two dogs", "a house", "Nan bread", "a red cat"]
    assert sorted(causes) == ["caption 'None'", "caption 'nan'", "caption 'null'"]
    found = json.loads(clipship("data", "stats", file, code=0).out)
    assert {**found["bad"], **found["not_usable"]} == dict.fromkeys(causes, 1)
    assert found["equal_captions"] == 2
    assert json.loads(clipship("data", "stats", file, "--empty-captions", "-", code=0).out)["bad"] == {}


@pytest.mark.parametrize(
    ("make", "ending"), [(shard_of_words, "tar"), (table_of_words, "csv"), (parquet_of_words, "parquet")]
)
def test_check_names_the_words_and_the_share_of_equal_captions(
    tmp_path: Path, make: Any, ending: str
) -> None:
    data = {"train": (make(tmp_path / f"a.{ending}"),), "format": "auto"}
    job = tiny_job(data=data, optim={"global_batch_size": 4})
    said = "\n".join(FirstSamples(job).warnings())
    assert "3 of its first 8 captions stand for none ('nan', 'None', 'null')" in said
    assert "about 23% of a batch's samples have the caption of another one" in said
    assert 'optim.positives = "captions"' in said
    job = tiny_job(data=data, optim={"global_batch_size": 4, "positives": "captions"})
    assert "caption of another one" not in "\n".join(FirstSamples(job).warnings())


def test_one_of_several_captions_and_a_field_of_a_template_may_stand_for_none() -> None:
    reader = CaptionReader.by(Data(train=("a.tar",), caption_key=("json:a", "json:b")))
    assert reader(json.dumps({"a": "nan", "b": "a dog"}).encode()) == (("a dog",), (0, 1))
    reader = CaptionReader.by(Data(train=("a.tar",), caption_key=("json",), caption_template=("{a}. {b}",)))
    with pytest.raises(ValueError, match="empty"):
        reader(json.dumps({"a": "nan", "b": "a dog"}).encode())
