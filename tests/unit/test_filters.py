"""`data.filters`: what they keep, what they count, how order and the limit of bad samples hold."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.loading import keys_of
from trainer.config import Data
from trainer.config.filters import parse_filter
from trainer.data.check import check_data
from trainer.data.pack import write_shard
from trainer.data.source import open_source
from trainer.errors import InputError


def picture(width: int, height: int, form: str = "jpeg", **options: Any) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, form, **options)
    return file.getvalue()


def shard(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> str:
    write_shard(samples, path)
    return str(path)


def kept(path: str, *filters: str) -> list[str]:
    return keys_of(open_source(Data(train=(path,), filters=filters)))


def test_filtered_samples_do_not_count_as_bad_and_those_that_cannot_be_judged_do(tmp_path: Path) -> None:
    good = {"jpg": picture(8, 8), "txt": b"c", "json": b'{"score": 0}'}
    wrong = [
        {**good, "json": b"{"},
        {**good, "json": b'{"scores": 0}'},
        {**good, "json": b'{"score": "high"}'},
        {name: content for name, content in good.items() if name != "json"},
    ]
    samples = [(f"k{number}", members) for number, members in enumerate([*wrong, *[good] * 96])]
    path = shard(tmp_path / "0.tar", samples)
    source = open_source(Data(train=(path,), filters=("score <= 0",), max_bad_share=0.004))
    assert len(source) == 96
    assert source.left_out.by_cause == {
        ".json, which data.filters need, cannot be read": 1,
        "no field score, which data.filters need": 1,
        "score is a text, which score <= 0 compares with a number": 1,
        "no .json, which data.filters need": 1,
    }
    assert sorted(bad.key for bad in source.left_out.named) == ["k0", "k1", "k2", "k3"]
    with pytest.raises(InputError, match="bad samples: 4 of 100"):
        open_source(Data(train=(path,), filters=("score <= 0",), max_bad_share=0.003))
    with pytest.raises(InputError, match="bad samples: 4 of 100"):
        open_source(Data(train=(path,), filters=("score <= 0",), on_bad_sample="fail"))
    assert len(open_source(Data(train=(path,), filters=("score <= 0",), max_bad_share=0.004))) == 96


@pytest.mark.parametrize("form", ["jpeg", "png", "webp"])
def test_a_size_behind_long_metadata_is_found(tmp_path: Path, form: str) -> None:
    content = picture(300, 20, form, icc_profile=b"x" * 200_000)
    path = shard(tmp_path / "0.tar", [("a", {"jpg": content, "txt": b"c"})])
    assert kept(path, "width == 300") == ["a"]


@pytest.mark.parametrize(
    ("text", "found", "holds"),
    [
        ("uid == 9007199254740993", 9007199254740993, True),
        ("uid == 9007199254740993", 9007199254740992, False),
        ("uid == 3", 3.0, True),
        ("uid >= 2.5", 3, True),
        ("score != 0", float("nan"), False),
        ("score < 1", float("nan"), False),
    ],
)
def test_a_number_is_compared_to_its_last_digit_and_nan_fails(text: str, found: float, holds: bool) -> None:
    assert parse_filter(text).holds(found) is holds
    assert parse_filter(text).holds_for_text(str(found)) is holds


def test_texts_and_truth_are_compared_with_their_like(tmp_path: Path) -> None:
    metas = [{"lang": "en", "safe": True}, {"lang": "zh", "safe": True}, {"lang": "en", "safe": False}]
    samples = [
        (f"k{number}", {"jpg": picture(8, 8), "txt": b"c", "json": json.dumps(meta).encode()})
        for number, meta in enumerate(metas)
    ]
    path = shard(tmp_path / "0.tar", samples)
    assert kept(path, 'lang == "en"', "safe == true") == ["k0"]
    assert kept(path, "lang != 'en'") == ["k1"]


def test_tables_are_filtered_by_their_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(picture(8, 8))
    table = tmp_path / "t.csv"
    table.write_text(
        "image,caption,clip score,lang\na.jpg,a,0.3,en\na.jpg,b,0.1,en\na.jpg,c,,en\na.jpg,d,1e0,zh\n"
    )
    data = Data(train=(str(table),), filters=("clip score >= 0.28", "lang == 'en'"))
    source = open_source(data)
    assert [source.read(row).captions for row in range(len(source))] == [("a",)]
    assert source.left_out.filtered == {"clip score >= 0.28": 2, "lang == 'en'": 1}
    assert check_data(data) == 1
    table.write_text("image,caption,score\na.jpg,a,0.3\na.jpg,b,high\n")
    with pytest.raises(InputError, match="row 3: score is a text, which score > 0 compares with a number"):
        open_source(Data(train=(str(table),), filters=("score > 0",)))
    with pytest.raises(InputError, match="there is no filter column 'scor'; did you mean 'score'"):
        open_source(Data(train=(str(table),), filters=("scor > 0",)))
    with pytest.raises(InputError, match=r"t.csv: data.filters keep no sample \(caption == 'z' left out 2\)"):
        open_source(Data(train=(str(table),), filters=("caption == 'z'",)))


def test_an_image_whose_size_cannot_be_read_is_bad(tmp_path: Path) -> None:
    samples = [(key, {"jpg": image, "txt": b"c"}) for key, image in (("a", b"text"), ("b", picture(8, 8)))]
    source = open_source(Data(train=(shard(tmp_path / "0.tar", samples),), filters=("width > 0",)))
    assert keys_of(source) == ["b"]
    assert source.left_out.by_cause == {"the image's header, which data.filters need, cannot be read": 1}


def test_filters_that_keep_nothing_are_refused_with_their_counts(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", [(key, {"jpg": picture(8, 8), "txt": b"c"}) for key in "abc"])
    with pytest.raises(InputError, match=r"data.filters keep no sample \(min_side >= 999 left out 3\)"):
        kept(path, "min_side >= 999")
