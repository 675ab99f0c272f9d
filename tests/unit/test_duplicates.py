"""Near-duplicates: found by all pairs and by lists, and left out by data.scores."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from trainer.cli.main import main
from trainer.config import Data
from trainer.data import scores
from trainer.data.feature_files import About, Dtype, FeatureRows, FeatureWriter
from trainer.data.shard_files import write_shard
from trainer.data.source import open_source
from trainer.errors import InputError
from trainer.search import duplicates
from trainer.search.duplicates import Nearest, Vectors, by_lists, exact, read_pictures, recall

WIDTH = 32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks that end within these few vectors; and no scores of another test."""
    monkeypatch.setattr(duplicates, "BLOCK", 64)
    monkeypatch.setattr(duplicates, "OTHERS", 150)
    yield
    scores._identities.clear()
    scores.forget_tables()


def unit(count: int, seed: int) -> Vectors:
    found = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)
    return of_length_1(found)


def of_length_1(vectors: Vectors) -> Vectors:
    scaled: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


def with_copies(count: int, copies: int) -> Vectors:
    """Vectors of which the last are near earlier ones."""
    draw, vectors = np.random.default_rng(5), unit(count, 0)
    vectors[-copies:] = vectors[draw.choice(count - copies, copies)] + 0.02 * unit(copies, 1)
    return of_length_1(vectors)


def plain(vectors: Vectors) -> Nearest:
    """The definition, a vector after the other."""
    found = Nearest(np.full(len(vectors), -1, np.float32), np.full(len(vectors), -1))
    for number in range(1, len(vectors)):
        cosines = vectors[:number] @ vectors[number]
        found.numbers[number], found.cosines[number] = cosines.argmax(), cosines.max()
    return found


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 400])
def test_all_pairs_are_those_of_the_definition(count: int) -> None:
    vectors, told = unit(count, 3), list[int]()
    found, expected = exact(vectors, told.append), plain(vectors)
    np.testing.assert_allclose(found.cosines, expected.cosines, atol=1e-6)
    assert found.numbers.tolist() == expected.numbers.tolist()
    assert told == sorted(told)
    assert told[-1] == count


def test_lists_find_the_near_ones_and_say_which_share(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = with_copies(3000, 400)
    expected, found = plain(vectors), by_lists(vectors, lambda count: None)
    near = expected.cosines >= 0.95
    assert near.sum() >= 400
    assert (found.cosines <= expected.cosines + 1e-5).all(), "never nearer than the nearest"
    share = float((found.cosines[near] >= 0.95).mean())
    assert recall(vectors, found, [0.95]) == [pytest.approx(share, abs=0.05)]
    assert share > 0.9
    numbers = found.numbers[near & (found.cosines >= 0.95)]
    assert (numbers < np.flatnonzero(near & (found.cosines >= 0.95))).all(), "earlier ones alone"


def test_recall_tells_what_was_missed() -> None:
    vectors = with_copies(600, 100)
    found = plain(vectors)
    near = np.flatnonzero(found.cosines >= 0.95)
    found.cosines[near[::2]] = 0.5
    assert recall(vectors, found, [0.95]) == [pytest.approx(0.5, abs=0.01)]
    assert np.isnan(recall(unit(50, 1), plain(unit(50, 1)), [0.999])).all()


def write_features(
    folder: Path, shard: str, keys: list[str], vectors: Vectors, made_by: str = "m", dtype: Dtype = "fp16"
) -> None:
    """Two captions for each picture, and one picture that is bad."""
    count = len(keys)
    rows = FeatureRows(
        np.repeat(np.arange(count + 1), 2)[:-1],
        np.array([*[0, 1] * count, 0]),
        np.array([*np.repeat(keys, 2), "bad"], dtype=object),
        np.array([*[None] * 2 * count, "bad picture"], dtype=object),
        np.concatenate([np.repeat(vectors, 2, axis=0), np.zeros((1, WIDTH), np.float32)]),
        np.zeros((2 * count + 1, WIDTH), np.float32),
        np.zeros(2 * count + 1, np.float32),
    )
    folder.mkdir(exist_ok=True)
    writer = FeatureWriter(f"/data/{shard}.tar", dtype)
    writer.add(rows)
    about = About(made_by, f"model {made_by}", 1, "", count, 2 * count + 1, width=WIDTH)
    writer.write(f"{folder}/{shard}.parquet", about)


@pytest.fixture
def features(tmp_path: Path) -> Path:
    """Two shards of four pictures; b1 is like a0, b2 like b1."""
    vectors = unit(8, 7)
    vectors[5] = vectors[0] + 0.1 * vectors[1]
    vectors[6] = vectors[5] + 0.1 * vectors[2]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    folder = tmp_path / "features"
    write_features(folder, "a", [f"a{n}" for n in range(4)], vectors[:4])
    write_features(folder, "b", [f"b{n}" for n in range(4)], vectors[4:], dtype="fp32")
    return folder


def test_the_table_says_what_each_picture_is_near_and_filters_leave_it_out(
    tmp_path: Path, features: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "near.parquet"
    assert main(["duplicates", str(features), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    counted = json.loads(told)
    assert (counted["pictures"], counted["method"], counted["near_duplicates"]["0.98"]) == (8, "exact", 2)
    assert counted["found_share"]["0.98"] == 1.0
    rows = {row["key"]: row for row in parquet.read_table(out).to_pylist()}
    assert list(rows) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    assert (rows["a0"]["nearest"], rows["a0"]["of_key"], rows["a0"]["of_shard"]) == (-1.0, None, None)
    assert (rows["b1"]["of_shard"], rows["b1"]["of_key"]) == ("/data/a.tar", "a0")
    assert (rows["b2"]["of_shard"], rows["b2"]["of_key"], rows["b2"]["row"]) == ("/data/b.tar", "b1", 2)
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "png")
    for shard in "ab":
        samples = ((f"{shard}{n}", {"png": image.getvalue(), "txt": b"c"}) for n in range(4))
        write_shard(samples, tmp_path / f"{shard}.tar")
    data = Data(train=(f"{tmp_path}/*.tar",), scores=(str(out),), filters=("scores:nearest < 0.98",))
    source = open_source(data)
    assert [source.read(number).key for number in range(len(source))] == ["a0", "a1", "a2", "a3", "b0", "b3"]


def test_features_of_two_models_are_not_compared(features: Path) -> None:
    write_features(features, "c", ["c0"], unit(1, 2), made_by="other")
    with pytest.raises(InputError, match=r"holds features of 2 models.*: model m; model other"):
        read_pictures(str(features))


def test_a_folder_without_features_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["duplicates", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no features of a picture are there: `clipship embed` writes them" in said


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("near.csv", "--out near.csv: a table for data.scores ends with .parquet"),
        ("taken/near.parquet", "its folder cannot be made: File exists"),
    ],
)
def test_a_place_that_takes_no_table_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    assert main(["duplicates", "nothing-is-there", "--out", out]) == 2
    assert said in capsys.readouterr().err
