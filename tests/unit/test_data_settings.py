"""Settings of data that cannot be, or do not go together, are refused when a job is read."""

from typing import Any

import pytest

from tests.support.jobs import COCA, tiny_job
from tests.support.naflex import NAFLEX

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
