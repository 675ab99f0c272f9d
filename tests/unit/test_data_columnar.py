"""Parquet and Arrow tables: cells, captions, order, weights, filters, memory, and what is refused."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch import Tensor

from tests.support.command_line import clipship
from tests.support.loading import open_job, rank_batches, refusal
from tests.support.pictures import picture
from tests.support.tables import damage, write_arrow, write_parquet, write_stream
from trainer.config import Data
from trainer.data.check import check_data
from trainer.data.sample import BadSample, RawSample, Source
from trainer.data.source import open_images, open_source
from trainer.errors import InputError


def rows(count: int, first: int = 0) -> dict[str, list[Any]]:
    numbers = range(first, first + count)
    return {
        "image": [picture(number) for number in numbers],
        "caption": [f"caption {number}" for number in numbers],
        "score": [number / 100 for number in numbers],
    }


def rows_of_noise(count: int, size: int) -> dict[str, list[Any]]:
    return {"image": [np.random.default_rng(n).bytes(size) for n in range(count)], "caption": ["c"] * count}


WRITERS: dict[str, tuple[str, Callable[..., str]]] = {
    "parquet": ("t.parquet", write_parquet),
    "arrow": ("t.arrow", write_arrow),
    "arrow stream": ("t.arrow", write_stream),
}


def captions(source: Source) -> list[tuple[str, ...]]:
    return [source.read(number).captions for number in range(len(source))]


@pytest.mark.parametrize("form", WRITERS)
def test_each_format_gives_its_rows_in_groups(tmp_path: Path, form: str) -> None:
    name, write = WRITERS[form]
    path = write(tmp_path / name, rows(10))
    data = Data(train=(path,))
    source = open_source(data)
    assert data.kind == form.split()[0]
    assert source.shard_sizes() == [4, 4, 2]
    assert [source.read(number).image for number in range(10)] == rows(10)["image"]
    assert captions(source) == [(text,) for text in rows(10)["caption"]]
    assert (source.read(9).key, source.read(9).origin) == ("2:1", path)
    again = pickle.loads(pickle.dumps(source))
    assert captions(again) == captions(source)
    assert check_data(data) == 10


@pytest.mark.parametrize(
    ("cell", "cause", "what"),
    [
        (None, "no image", "its image is empty"),
        (b"", "no image", "its image is empty"),
        (7, "no image", "neither bytes nor a path but int"),
        ("file:///etc/passwd", "no image", "passwd is an address of none of http://, https://, s3://, gs://"),
        ("simplecache::http://127.0.0.1:9/a.png", "no image", "an address of none of"),
        ("http://127.0.0.1:9/a.png", "image not fetched", "cannot be fetched"),
        (b"x" * 2000, "too large", "2,000 bytes; data.max_member_bytes allows 1,000"),
    ],
)
def test_an_image_that_cannot_be_used_is_one_bad_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: object, cause: str, what: str
) -> None:
    monkeypatch.setattr("trainer.data.image_cells.WAITS_S", ())
    path = write_parquet(tmp_path / "t.parquet", {"image": [cell], "caption": ["c"]})
    with pytest.raises(BadSample, match=what) as caught:
        open_source(Data(train=(path,), max_member_bytes=1000)).read(0)
    assert (caught.value.cause, caught.value.key) == (cause, "0:0")


def test_captions_have_paths_templates_and_weights(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "image": [picture(0)],
        "caption": ["plain"],
        "many": [["one", "two", ""]],
        "meta": [{"title": "T", "year": 1999}],
    }
    path = write_parquet(tmp_path / "t.parquet", columns)
    several = open_source(Data(train=(path,), caption_column=("caption", "many[*]"))).read(0)
    assert (several.captions, several.caption_counts) == (("plain", "one", "two"), (1, 2))
    template = Data(train=(path,), caption_template=("{meta.title} ({meta.year}): {many[1]}",))
    assert open_source(template).read(0).captions == ("T (1999): two",)
    with pytest.raises(BadSample, match=r"a list at many, not a text: many\[\*\] takes every text"):
        open_source(Data(train=(path,), caption_column=("many",))).read(0)
    columns["raw"] = [b"bytes of a text"]
    path = write_parquet(tmp_path / "t.parquet", columns)
    with pytest.raises(BadSample, match=r"it has bytes at raw, not a text"):
        open_source(Data(train=(path,), caption_column=("raw",))).read(0)


def test_check_names_what_is_wrong_with_the_tables(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", rows(4))
    with pytest.raises(InputError, match="there is no column 'captoin'; did you mean 'caption'"):
        check_data(Data(train=(path,), caption_column=("captoin",)))
    with pytest.raises(InputError, match="there is no column 'scor'; did you mean 'score'"):
        check_data(Data(train=(path,), filters=("scor > 0",)))
    (tmp_path / "cut.parquet").write_bytes(Path(path).read_bytes()[:-9])
    with pytest.raises(InputError, match=r"cut.parquet: cannot be read as a table"):
        check_data(Data(train=(str(tmp_path / "cut.parquet"),)))
    (tmp_path / "0.tar").write_bytes(bytes(10240))
    with pytest.raises(InputError, match=r"is a Parquet file among shards: name only files of one format"):
        check_data(Data(train=(path, str(tmp_path / "0.tar"))))
    names = write_arrow(tmp_path / "t.arrow", {"image": ["gone.png", None], "caption": ["a", "b"]})
    with pytest.raises(
        InputError, match=r"1 of 2 image files are missing; the first is .*/gone.png in row 1"
    ):
        check_data(Data(train=(names,)))


def test_images_that_a_table_names_are_looked_for(tmp_path: Path) -> None:
    here = [{"bytes": picture(1), "path": "gone.png"}] * 2
    path = write_parquet(tmp_path / "t.parquet", {"image": here, "caption": ["a", "b"]})
    assert check_data(Data(train=(path,))) == 2, "the path is only a name of the bytes"
    named: list[Any] = [{"bytes": None, "path": name} for name in ("t.parquet", "gone.png", "t.parquet")]
    path = write_parquet(tmp_path / "n.parquet", {"image": named, "caption": ["a", "b", "c"]})
    texts = write_parquet(tmp_path / "s.parquet", {"image": ["gone.png"], "caption": ["a"]})
    with pytest.raises(InputError) as caught:
        check_data(Data(train=(path, texts)))
    assert "n.parquet: 1 of 3 image files are missing; the first is" in str(caught.value)
    assert "s.parquet: 1 of 1 image file are missing" in str(caught.value).replace("files", "file")
    source = open_images(Data(train=(path,)))
    assert len(source) == 2, "two rows name one image"


def test_filters_keep_rows_by_columns_and_by_the_images_header(tmp_path: Path) -> None:
    columns = {**rows(8), "image": [picture(number, 8 + number) for number in range(8)]}
    path = write_parquet(tmp_path / "t.parquet", columns)
    data = Data(train=(path,), filters=("min_side >= 10", "score != 0.05"))
    source = open_source(data)
    assert captions(source) == [(f"caption {number}",) for number in (2, 3, 4, 6, 7)]
    assert source.shard_sizes() == [2, 3]
    assert source.left_out.filtered == {"min_side >= 10": 2, "score != 0.05": 1}
    assert check_data(data) is None
    found = json.loads(clipship("data", "stats", path, "--filters", "score > 0.04", code=0).out)
    assert (found["samples"], found["samples_per_shard"]["most"]) == (3, 3)
    assert found["not_usable"] == {"filter score > 0.04": 5}
    wrong = write_parquet(tmp_path / "w.parquet", {**rows(3), "score": ["high", None, "low"]})
    with pytest.raises(InputError, match=r"bad samples: 2 of 9 \(2 score is a text"):
        open_source(Data(train=(wrong, path), filters=("score > 0",), max_bad_share=0.0))
    with pytest.raises(InputError, match=r"data.filters keep no sample \(score > 9 left out 8\)"):
        open_source(Data(train=(path,), filters=("score > 9",)))


def numbers(raw: RawSample, _seed: int) -> Tensor:
    assert isinstance(raw.image, bytes)
    with Image.open(io.BytesIO(raw.image)) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def order(source: Source, ranks: int, start: int = 0, weights: list[float] | None = None) -> list[str]:
    """Captions of two epochs in their order, from a global batch on."""
    how: dict[str, Any] = {"ranks": ranks, "pixels": numbers, "epochs": 2, "start_batch": start}
    streams = [rank_batches(source, (8, 2), 4, rank=rank, weights=weights, **how) for rank in range(ranks)]
    of_ranks = [[batch.captions for batch in stream] for stream in streams]
    return [text for batch in zip(*of_ranks, strict=True) for part in batch for text in part]


@pytest.mark.parametrize("filters", [(), ("score >= 0.03",)])
@pytest.mark.parametrize("weights", [None, (1.0, 0.5)])
def test_order_and_resume_are_the_same_on_any_ranks(
    tmp_path: Path, filters: tuple[str, ...], weights: tuple[float, ...] | None
) -> None:
    paths = (
        write_parquet(tmp_path / "0.parquet", rows(20)),
        write_parquet(tmp_path / "1.parquet", rows(12, 20), per_group=5),
    )
    data: dict[str, Any] = {"train": paths, "filters": filters, "weights": weights}
    alone = open_source(Data(**data))
    together = open_job(2, 1, **data, index=str(tmp_path / "index"))
    units = zip(weights or (), together.units, strict=bool(weights))
    of_units = [weight for weight, count in units for _ in range(count)] or None
    expected = order(alone, 1, weights=of_units)
    assert order(together, 2, weights=of_units) == expected
    assert order(together, 2, start=2, weights=of_units) == expected[8:]
    if weights is None:
        assert set(expected) == set(rows(32)["caption"][3 if filters else 0 :])
    else:
        assert len(expected) == 2 * 4 * ((20 - 3 * len(filters) + 6) // 4)


def test_memory_for_row_groups_is_bounded(tmp_path: Path) -> None:
    big = rows_of_noise(32, 2**18)
    source = open_source(Data(train=(write_parquet(tmp_path / "t.parquet", big),), row_group_cache_mb=3))
    before, most = pyarrow.total_allocated_bytes(), 0
    for row in (*range(3, 32, 4), *range(3, 32, 4)):
        assert source.read(row).image == big["image"][row]
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert 2**20 < most <= 4 * 2**20
    large = open_source(
        Data(train=(write_parquet(tmp_path / "u.parquet", rows_of_noise(8, 2**18), 8),), row_group_cache_mb=1)
    )
    with pytest.raises(InputError, match=r"row group 0 takes more memory than the 1 MiB .* `clipship pack`"):
        large.read(0)


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_early(tmp_path: Path) -> None:
    value = pyarrow.array([bytes(2**20)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 8192, pyarrow.int32()), value)
    table = pyarrow.table({"image": column, "caption": ["c"] * 8192})
    path = tmp_path / "t.parquet"
    parquet.write_table(table, path, store_schema=False)
    assert path.stat().st_size < 2**20
    before = pyarrow.default_memory_pool().max_memory()
    with pytest.raises(InputError, match="row group 0 takes more memory than the 100 MiB"):
        open_source(Data(train=(str(path),), row_group_cache_mb=100)).read(0)
    assert pyarrow.default_memory_pool().max_memory() - before < 400 * 2**20


def not_utf8() -> Any:
    """A column of texts, as other programs write it, of which one is no UTF-8."""
    texts = pyarrow.array([b"one", b"tw\xff", b"three"], pyarrow.binary())
    return pyarrow.StringArray.from_buffers(3, *texts.buffers()[1:])


def test_a_text_that_is_no_utf8_is_one_bad_sample(tmp_path: Path) -> None:
    columns = {"image": list(map(picture, range(3))), "caption": ["c"] * 3, "text": not_utf8()}
    train = write_parquet(tmp_path / "t.parquet", columns)
    source = open_source(Data(train=(train,), caption_column=("text",)))
    assert source.read(0).captions == ("one",)
    with pytest.raises(BadSample, match="sample 0:1: it has bytes at text, not a text"):
        source.read(1)
    filtered = open_source(Data(train=(train,), filters=("text == 'three'",))).left_out
    assert filtered.filtered == {"text == 'three'": 1}
    assert list(filtered.by_cause.values()) == [1]


def test_evaluation_has_each_named_image_once_with_the_captions_of_all_its_rows(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(picture(1))
    images: list[Any] = ["a.png", "c.png", "./a.png", "b.png"]
    columns: dict[str, list[Any]] = {"image": images, "caption": [None, "", "one", "two"]}
    data = Data(train=(write_parquet(tmp_path / "t.parquet", columns, 3),))
    source = open_images(data)
    assert captions(source) == [("one",), ("two",)]
    assert source.left_out.by_cause == {"bad captions": 2}
    assert [sample.key for sample in source.left_out.named] == ["0:0", "0:1"]
    assert "bad captions" in refusal(open_images, data.model_copy(update={"on_bad_sample": "fail"}))
    columns = {"image": ["a.png", "b.png", "./a.png"], "caption": ["one", "two", "three"]}
    named = open_images(Data(train=(write_parquet(tmp_path / "n.parquet", columns, 2),)))
    assert captions(named) == [("one", "three"), ("two",)]
    columns = {"image": [None, "a.png", "a.png"], "caption": ["zero", "one", "two"]}
    lacking = open_images(Data(train=(write_parquet(tmp_path / "l.parquet", columns),)))
    assert (len(lacking), lacking.read(1).captions) == (2, ("one", "two"))
    held = open_images(Data(train=(write_parquet(tmp_path / "u.parquet", rows(3)),)))
    assert captions(held) == [("caption 0",), ("caption 1",), ("caption 2",)]


@pytest.mark.parametrize("write", [write_arrow, write_stream])
def test_an_arrow_file_that_is_cut_under_a_run_is_an_error_and_no_signal(
    tmp_path: Path, write: Callable[..., str]
) -> None:
    rows = 2000
    columns = {"image": [os.urandom(100)] * rows, "caption": [f"caption {row}" for row in range(rows)]}
    path = write(tmp_path / "t.arrow", columns, per_group=500)
    source = open_source(Data(train=(path,), format="arrow"))
    assert source.read(0).captions == ("caption 0",)
    os.truncate(path, 10_000)
    with pytest.raises(InputError, match=r"the file was cut short under the run: it had .* and has 10,000"):
        source.read(rows - 1)


def test_a_file_that_is_cut_or_damaged_is_no_traceback(tmp_path: Path) -> None:
    path = Path(write_parquet(tmp_path / "t.parquet", {"image": ["a.png"] * 9, "caption": ["c"] * 9}))
    damage(path, 0, 0, b"\xff" * 12)
    assert "t.parquet: cannot be read as a table" in refusal(check_data, Data(train=(str(path),)))
    stream = Path(write_stream(tmp_path / "t.arrow", rows(12)))
    stream.write_bytes(stream.read_bytes()[:-600])
    assert "t.arrow: cannot be read as a table" in refusal(open_source, Data(train=(str(stream),)))
    none = write_parquet(tmp_path / "n.parquet", {"image": [], "caption": []})
    assert "the tables have no rows" in refusal(open_source, Data(train=(none,)))


def test_rows_without_an_image_are_bad_when_filters_need_its_size(tmp_path: Path) -> None:
    columns = {**rows(40), "image": [None, b"text", *rows(38)["image"]]}
    train = write_parquet(tmp_path / "t.parquet", columns)
    source = open_source(Data(train=(train,), filters=("width > 1",)))
    cause = "the image's header, which data.filters need, cannot be read"
    assert (len(source), source.left_out.by_cause) == (38, {"no image": 1, cause: 1})
