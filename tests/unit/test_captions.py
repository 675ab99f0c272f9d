"""Captions in plain text, JSON and tables: what a path names, and what makes a sample bad."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.command_line import clipship
from tests.support.jobs import COCA, tiny_job
from tests.support.loading import open_job, unindexed, write_tar
from tests.support.naflex import NAFLEX
from tests.support.pictures import picture
from tests.support.tables import write_parquet
from trainer.config import Data
from trainer.data.captions import CaptionReader, choice_by
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


TWO_KEYS = Data(train=("a.tar",), caption_key=("json:a", "json:b"), caption_weights=(1.0, 3.0))


def test_weights_draw_keys_as_often_as_they_say_and_their_captions_alike() -> None:
    choice, draw = choice_by(TWO_KEYS), Random(0)
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


# Settings of data that cannot be, or do not go together, are refused when a job is read.

STREAM = {"train": ("pipe:cat a",), "stream_samples": 4}
TWO = {"caption_key": ("json:a", "json:b")}
SCORED = {"filters": ("clip_score > 1",), "scores": ("s.parquet",)}
MINIO = {"endpoint": "https://minio.example.org:9000"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"augment": {"crop_ratio": (2.0, 1.0)}}, "0 < smallest <= largest"),
        ({"augment": {"crop_ratio": (0.0, 1.0)}}, "0 < smallest <= largest"),
        ({"augment": {"color_jitter": (0.1, 0.1, 0.1, 0.6)}}, "the hue's shift, the last number, must be at"),
        ({"augment": {"color_jitter_prob": 0.5}}, "has no effect without color_jitter"),
        ({"augment": {"color_jitter": (-0.1, 0.0, 0.0, 0.0)}}, "greater than or equal to 0"),
        ({"augment": {"gray_scale_prob": 1.5}}, "less than or equal to 1"),
        ({"augment": {"rand_augment_magnitude": 31}}, "less than or equal to 30"),
        ({"caption_key": ("txt", "json:a")}, "txt, json:a are several members, and a sample's"),
        ({"caption_key": ("json:a", "meta.json:a")}, "json:a, meta.json:a are several members"),
        ({"caption_key": ()}, "must name one place of captions at least"),
        ({"caption_column": ()}, "must name one place of captions at least"),
        ({"caption_template": ("a photo",)}, "has no field, or one without a name: write each field in"),
        ({"caption_template": ("{}",)}, "has no field, or one without a name"),
        ({"caption_template": ("{a:>9}",)}, "a field has a name alone"),
        ({"caption_template": ("{a!r}",)}, "a field has a name alone"),
        ({"caption_template": ("{a",)}, "cannot be read"),
        ({"caption_template": ("{a[*]}",)}, r"several texts in one caption: name one, such as \[0\]"),
        ({"caption_template": ("{a..b}",)}, "the path of the field cannot be read"),
        ({"caption_template": ("{a}",), "caption_key": ("json:a",)}, "is the ending of a JSON member alone"),
        ({**TWO, "caption_weights": (1.0,)}, r"1 number for 2 sources of captions \(json:a, json:b\)"),
        ({**TWO, "caption_weights": (1.0, 0.0)}, "greater than 0"),
        ({**TWO, "caption_weights": (1.0, 2.0), "caption_choice": "first"}, '"first" draws none'),
        ({"train": ("t.parquet",), "image_column": "images[*]"}, r"images\[\*\] names several values"),
        ({"train": ("t.parquet",), "caption_column": ("a..b",)}, "the path of the field cannot be read"),
        ({"train": ("t.parquet",), "caption_column": ("[0]",)}, r"= \[0\] begins with no column"),
        ({"train": ("t.parquet",), "filters": ("a[*] > 1",)}, r"filters = a\[\*\] names several values"),
        ({"train": ("pipe:cat a", "b.tar"), "stream_samples": 4}, "mixes streams"),
        ({"train": ("pipe:cat a",)}, "stream_samples"),
        ({"train": ("-", "pipe:cat a"), "stream_samples": 4}, "standard input"),
        ({**STREAM, "weights": (1.0,)}, "weights"),
        ({**STREAM, "filters": ("width > 3",)}, "filter in the command of the stream"),
        ({"train": ("a.csv",), "filters": ("width > 3",)}, "width needs the headers of images, .* `clipship"),
        ({"filters": ("min_side",)}, "cannot be read: write a name, one of"),
        ({"filters": ("min_side >= ",)}, "cannot be read"),
        ({"filters": (">= 3",)}, "cannot be read"),
        ({"filters": ("min_side => 3",)}, "cannot be read"),
        ({"filters": ("min_side >= 3 and max_side < 9",)}, "cannot be read"),
        ({"filters": ("min_side >= nan",)}, "cannot be read"),
        ({"filters": ("min_side == 'a'",)}, "min_side is a number of the image"),
        ({"filters": ("lang > 'en'",)}, "have no order"),
        ({"filters": ("scores[*] > 1",)}, "names no single field of a JSON member"),
        ({"filters": ("txt:score > 1",)}, "names no single field of a JSON member"),
        ({"filters": ("a..b > 1",)}, "the path of the field cannot be read"),
        ({"filters": ("scores:x > 1",)}, "scores:x > 1 compares a column of scores: name the tables there"),
        ({"filters": ("scores:x == 'a'",), "scores": ("s.parquet",)}, "compared with a number, true or"),
        ({"filters": ("scores:listed > 1",), "scores": ("s.txt",)}, "listed is compared with true or false"),
        ({**SCORED, "train": ("t.csv",)}, "put the values into a column"),
        ({**SCORED, "scores_by": "txt:a"}, "names no single field"),
        ({"max_member_bytes": 0}, "greater than"),
        ({"max_member_bytes": 4 * 10**9 + 1}, "less than or equal to"),
        ({"train": ("s3://id:s3cr3tvalue@bucket/0.tar",)}, "a key has no place in a job file"),
        ({"train": ("s3://b/0.tar", "gs://b/1.tar"), "storage": MINIO}, r"2 kinds \(s3://b/0.tar, gs://b"),
        ({"train": ("obs://b/0.tar",)}, r"data.storage.endpoint: Huawei Cloud OBS \(obs://\) needs it"),
    ],
)
def test_settings_of_data_that_cannot_be_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        tiny_job(data={"format": "auto", "train": ("a.tar",), **keys})
    assert "s3cr3tvalue" not in str(refused.value).split("[type=")[0]


GROUPS = {"positives": "groups"}
TARGETS = {"targets": ("features",)}
NINE = {"max_image_tokens_per_gpu": 9}


def coca(**optim: Any) -> dict[str, Any]:
    return {"config": COCA, "optim": {"loss": "coca", **optim}}


def naflex(**model: Any) -> dict[str, Any]:
    return {"config": NAFLEX, "model": model}


@pytest.mark.parametrize(
    ("data", "sections", "said"),
    [
        ({}, {"eval": {"retrieval": ("pipe:cat a",)}}, "pipe:cat a is a stream, and ranks cannot share"),
        ({}, {"optim": GROUPS}, r"needs data\.group_by, which names the field"),
        ({**STREAM, "group_by": "json:g"}, {"optim": GROUPS}, "Neither streams nor synthetic data give any"),
        ({"format": "synthetic", "train": (), "group_by": "json:g"}, {"optim": GROUPS}, "Neither streams"),
        ({"group_by": "txt:g"}, {"optim": GROUPS}, "names no single field"),
        ({"group_by": "json:g[*]"}, {"optim": GROUPS}, "names no single field"),
        ({"train": ("a.parquet",), "group_by": "g[*]"}, {"optim": GROUPS}, "g.* names several values"),
        ({}, coca(positives="captions"), 'positives = "captions" is for the losses clip and siglip'),
        ({}, {"model": {**TARGETS, "teacher": "b", "teacher_pretrained": "a.pt"}}, "give one of the two"),
        ({}, {**coca(), "model": TARGETS}, r"model\.targets is for the losses clip and siglip, and not for"),
        ({"train": ("a.csv",)}, {"model": TARGETS}, r"not for \.csv and \.tsv tables"),
        (STREAM, {"model": TARGETS}, "streams and synthetic data"),
        ({}, naflex(image_tokens=(4, 8), image_tokens_weights=(1,)), "has 1 number for 2 values of"),
        ({}, naflex(image_patches_weights=(1,)), "image_patches_weights has 1 number for 0 values"),
        ({}, {**naflex(), "optim": NINE}, "needs model.image_tokens: give both or neither"),
        ({}, {**naflex(image_tokens=16), "optim": NINE}, "= 9 is less than one"),
    ],
)
def test_data_that_other_sections_cannot_have_are_refused(
    data: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        tiny_job(data={"format": "auto", "train": ("a.tar",), **data}, **sections)
