"""Files that were forged, or are of another form, end in one sentence: features, lists, indexes, shards."""

import gzip
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.jobs import VIT, tiny_job
from tests.support.pictures import picture
from trainer.cli.main import main
from trainer.config import Data
from trainer.data import index, scores
from trainer.data.feature_files import read_about, read_by
from trainer.data.index import index_shards, read_catalogue, stale, write_catalogue
from trainer.data.shard_files import write_shard
from trainer.data.shards import shard_selection
from trainer.data.source import open_source
from trainer.data.targets import Targets, one_each, stored_teachers
from trainer.errors import InputError
from trainer.plan.describe import score_rows
from trainer.search.features import pictures_in


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """A process knows its scores once; tests change them."""
    yield
    scores._identities.clear()
    scores.forget_tables()


ABOUT = {
    "made_by": "x",
    "model": "m",
    "size": 1,
    "changed": "c",
    "samples": 2,
    "rows": 2,
    "bad": {},
    "width": 2,
    "logit_scale": 100.0,
    "logit_bias": None,
    "read_by": {},
    "views": 0,
}


def features(path: Path, about: object, drop: str = "", statistics: bool = True, **columns: Any) -> str:
    """A file of the features of samples k0 and k1."""
    vectors = pyarrow.FixedSizeListArray.from_arrays(np.ones(4, dtype=np.float16), 2)
    table = {
        "shard": ["0.tar"] * 2,
        "key": ["k0", "k1"],
        "row": np.arange(2),
        "caption": np.zeros(2, dtype=np.int64),
        "image": vectors,
        "text": vectors,
        "cosine": [1.0, 1.0],
        "problem": pyarrow.array([None, None], type=pyarrow.string()),
    }
    table = {name: value for name, value in {**table, **columns}.items() if name != drop}
    text = about if isinstance(about, str) else json.dumps(about)
    held = pyarrow.table(table).replace_schema_metadata({"clipship": text})
    parquet.write_table(held, path, write_statistics=statistics)
    return str(path)


@pytest.mark.parametrize(
    "about",
    [
        *("[" * 100_000, "5", "[1]"),
        *({**ABOUT, "logit_scale": value} for value in (math.nan, math.inf, 1e30, "x", None)),
        *({**ABOUT, "logit_bias": value} for value in (math.nan, "x")),
        *({**ABOUT, "width": value} for value in (0, "2", 2.5, None)),
        *({**ABOUT, "views": -1}, {**ABOUT, "bad": 5}, {**ABOUT, "size": "1"}, {**ABOUT, "model": 7}),
    ],
)
def test_what_features_say_of_themselves_is_believed_within_reason(tmp_path: Path, about: object) -> None:
    assert read_about(features(tmp_path / "0.parquet", ABOUT)).width == 2
    with pytest.raises(InputError, match=r"1.parquet is no file of features"):
        read_about(features(tmp_path / "1.parquet", about))


def lists(values: list[float], size: int) -> Any:
    return pyarrow.FixedSizeListArray.from_arrays(np.array(values, dtype=np.float16), size)


@pytest.mark.parametrize(
    ("forged", "why"),
    [
        ({"drop": "problem"}, "problem"),
        ({"drop": "key"}, "key"),
        ({"statistics": False}, "the least and the largest row"),
        ({"key": [7, 8]}, "the least and the largest key"),
        ({"image": lists([1.0] * 6, 3)}, "one feature for each row"),
        ({"image": lists([1.0] * 8, 4)}, "one feature for each row"),
        ({"image": lists([1.0, math.nan, 1.0, 1.0], 2)}, "no finite numbers"),
        ({"text": ["a", "b"]}, "no finite numbers|reshape"),
    ],
)
def test_features_of_another_form_are_no_targets(tmp_path: Path, forged: dict[str, Any], why: str) -> None:
    write_shard([(f"k{n}", {"png": picture(n), "txt": b"c"}) for n in range(2)], tmp_path / "0.tar")
    job = tiny_job(
        data={"format": "auto", "train": (f"{tmp_path}/0.tar",)}, model={"targets": (f"{tmp_path}/f",)}
    )
    (tmp_path / "f").mkdir()
    status = os.stat(tmp_path / "0.tar")
    versions = index.versions_of([f"{tmp_path}/0.tar"])
    about = {**ABOUT, "size": status.st_size, "changed": str(status.st_mtime_ns)}
    about["read_by"] = read_by(job.data, job.seed, 0)

    def found(**columns: Any) -> object:
        features(tmp_path / "f" / "0.parquet", about, **columns)
        teachers = one_each(stored_teachers(job, versions))
        opened = open_source(job.data)
        return Targets(job, opened.index, teachers).find(f"{tmp_path}/0.tar", ["k0", "k1"], 0)  # type: ignore[attr-defined]

    with pytest.raises(InputError, match=rf"0.parquet: cannot be read as a table: .*({why})"):
        found(**forged)


@pytest.mark.parametrize(
    "forged",
    [{"drop": "image"}, {"image": lists([math.nan] * 4, 2)}, {"image": [1.0, 2.0]}, {"drop": "caption"}],
)
def test_features_of_another_form_are_not_searched(tmp_path: Path, forged: dict[str, Any]) -> None:
    assert pictures_in(features(tmp_path / "0.parquet", ABOUT)).num_rows == 2
    with pytest.raises(InputError, match=r"1.parquet: cannot be read as a table"):
        pictures_in(features(tmp_path / "1.parquet", ABOUT, **forged))


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.zeros(2))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        npy(np.array([{}], dtype=object), allow_pickle=True),
        npz(),
        b"PK\3\4",
        b"\x93NUMPY\1\0\x10\0{'descr': '<u8'  ",
        npy(np.zeros((2, 2), dtype=np.uint64))[:-9],
        npy(np.zeros((2, 2), dtype=np.uint64)).replace(b"(2, 2), }", b"(2, 2**60), }"[:9]),
        npy(np.zeros((2, 2), dtype="U4")),
        npy(np.zeros((), dtype="U4")),
        npy(np.zeros(3, dtype=[("a", "<u8", (2,)), ("b", "<u8")])),
        npy(np.zeros((2, 3), dtype=np.uint64)),
    ],
)
def test_a_list_of_another_form_is_named_without_numpys_advice(tmp_path: Path, content: bytes) -> None:
    write_shard([("k0", {"png": picture(0), "txt": b"c"})], tmp_path / "0.tar")
    (tmp_path / "keys.npy").write_bytes(content)
    data = Data(
        train=(f"{tmp_path}/0.tar",),
        scores=(f"{tmp_path}/keys.npy",),
        scores_by="key",
        filters=("scores:listed == true",),
    )
    with pytest.raises(InputError, match=r"keys.npy (cannot be read as a list of keys|holds)") as told:
        open_source(data)
    assert "allow_pickle" not in str(told.value)


def test_check_names_a_filter_that_orders_true_and_false(tmp_path: Path) -> None:
    write_shard([("k0", {"png": picture(0), "txt": b"c"})], tmp_path / "0.tar")
    parquet.write_table(pyarrow.table({"key": ["k0"], "x": [True]}), tmp_path / "s.parquet")
    data = {"train": (f"{tmp_path}/0.tar",), "format": "auto", "scores": (f"{tmp_path}/s.parquet",)}
    with pytest.raises(InputError, match=r"data.filters: .*x is true or false"):
        list(score_rows(tiny_job(data={**data, "filters": ("scores:x > 0",)})))


@pytest.mark.parametrize(
    "change",
    [
        {"samples": -1},
        {"samples": 2**60},
        {"left_out": {"x": "y"}},
        {"endings": {"png": -1}},
        {"groups": "abc"},
        {"flaws": [1]},
        {"flaws": [["a", "b", "c"]]},
    ],
)
def test_a_forged_catalogue_counts_as_none(tmp_path: Path, change: dict[str, Any]) -> None:
    path, selection = str(tmp_path / "0.tar"), shard_selection(Data(train=("0.tar",)))
    write_shard([("k0", {"png": picture(0), "txt": b"c"})], Path(path))
    made = index_shards(stale([path], selection, tmp_path), selection, tmp_path)
    write_catalogue(tmp_path, selection, made)
    (name,) = read_catalogue(tmp_path, selection)
    file = index.catalogue_file(tmp_path, selection)
    held = json.loads(file.read_bytes().partition(b"\n")[2])
    held["shards"][name].update(change)
    file.write_bytes(index._sealed(json.dumps(held).encode()))
    assert read_catalogue(tmp_path, selection) == {}


JOB = """name = "x"
[data]
train = "{train}"
[model]
name = "{model}"
[optim]
global_batch_size = 2
steps = 1
"""
FORGED: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(b"garbage" * 3000),
    "empty": lambda path: path.touch(),
    "gzip": lambda path: path.write_bytes(gzip.compress(bytes(10240))),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", FORGED)
def test_check_refuses_shards_that_the_run_refuses(
    tmp_path: Path, kind: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(count):
        FORGED[kind](tmp_path / f"{number}.tar")
    (tmp_path / "job.toml").write_text(JOB.format(train=tmp_path / "*.tar", model=VIT))
    assert main(["check", str(tmp_path / "job.toml")]) == 2
    assert "0.tar: not a readable tar file" in capsys.readouterr().err
