"""Near-duplicates: found by all pairs and by lists."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.command_line import clipship
from tests.support.features import ABOUT, features, vectors_of

WIDTH = 32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within these few vectors."""
    monkeypatch.setattr("trainer.search.duplicates.BLOCK", 64)
    monkeypatch.setattr("trainer.search.duplicates.OTHERS", 150)


def of_length_1(vectors: Any) -> Any:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def unit(count: int, seed: int) -> Any:
    return of_length_1(np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32))


def write_features(folder: Path, shard: str, vectors: Any, model: str = "m", dtype: Any = np.float32) -> None:
    """Two captions for each picture, and one picture that is bad."""
    count = len(vectors)
    rows = np.repeat(np.arange(count + 1), 2)[:-1]
    images = [*np.repeat(vectors.astype(dtype), 2, axis=0), None]
    kind = pyarrow.list_(pyarrow.from_numpy_dtype(dtype), WIDTH)
    features(
        folder / f"{shard}.parquet",
        {**ABOUT, "made_by": model, "model": f"model {model}", "samples": count, "width": WIDTH},
        shard=[f"/data/{shard}.tar"] * len(rows),
        key=[f"{shard}{row}" for row in rows],
        row=rows,
        caption=[*[0, 1] * count, 0],
        image=pyarrow.array(images, kind),
        text=vectors_of(np.zeros((len(rows), WIDTH), dtype)),
        problem=pyarrow.array([*[None] * 2 * count, "bad picture"]),
    )


def nearest(vectors: Any) -> tuple[list[int], list[float]]:
    """The definition, a vector after the other: numbers of the nearest earlier ones, and cosines."""
    numbers, cosines = [-1], [-1.0]
    for number in range(1, len(vectors)):
        found = vectors[:number] @ vectors[number]
        numbers.append(int(found.argmax()))
        cosines.append(float(found.max()))
    return numbers, cosines


def found_by(folder: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the command says, and the rows of its table."""
    out = folder / "near.parquet"
    told = json.loads(clipship("duplicates", folder / "features", "--out", out, *words, code=0).out)
    rows: list[dict[str, Any]] = parquet.read_table(out).to_pylist()
    return told, rows


@pytest.mark.parametrize("count", [1, 64, 65, 400])
def test_all_pairs_are_those_of_the_definition(tmp_path: Path, count: int) -> None:
    vectors = unit(count, 3)
    write_features(tmp_path / "features", "a", vectors)
    _, rows = found_by(tmp_path, "--method", "exact")
    numbers, cosines = nearest(vectors)
    assert [row["of_key"] for row in rows] == [f"a{number}" if number >= 0 else None for number in numbers]
    np.testing.assert_allclose([row["nearest"] for row in rows], cosines, atol=1e-6)


def test_lists_find_the_near_ones_and_say_which_share(tmp_path: Path) -> None:
    draw, vectors = np.random.default_rng(5), unit(3000, 0)
    vectors[-400:] = vectors[draw.choice(2600, 400)] + 0.02 * unit(400, 1)
    vectors = of_length_1(vectors)
    write_features(tmp_path / "features", "a", vectors)
    told, rows = found_by(tmp_path, "--method", "lists")
    cosines, found = np.array(nearest(vectors)[1]), np.array([row["nearest"] for row in rows])
    near = cosines >= 0.95
    assert near.sum() >= 400
    assert (found <= cosines + 1e-5).all(), "never nearer than the nearest"
    share = float((found[near] >= 0.95).mean())
    assert told["found_share"]["0.95"] == pytest.approx(share, abs=0.05)
    assert share > 0.9
    earlier = [row["of_key"] is None or int(row["of_key"][1:]) < at for at, row in enumerate(rows)]
    assert all(earlier)


def test_features_of_two_models_are_not_compared(tmp_path: Path) -> None:
    for shard, model in (("a", "m"), ("c", "other")):
        write_features(tmp_path / "features", shard, unit(2, 2), model)
    said = clipship("duplicates", tmp_path / "features", "--out", tmp_path / "near.parquet", code=2).err
    assert "holds features of 2 models" in said
    assert "model m; model other" in said


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("near.csv", "--out near.csv: a table for data.scores ends with .parquet"),
        ("taken/near.parquet", "its folder cannot be made: File exists"),
        ("near.parquet", "no features of a picture are there: `clipship embed` writes them"),
    ],
)
def test_a_place_that_takes_no_table_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    (tmp_path / "none").mkdir()
    assert said in clipship("duplicates", "none", "--out", out, code=2).err
