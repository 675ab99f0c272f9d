"""`data.scores`: which rows belong to which samples, what is counted, and what makes another run."""

import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tests.support.check import found
from tests.support.jobs import tiny_job
from tests.support.loading import keys_of, unindexed
from tests.support.pictures import picture
from tests.support.range_server import serving
from tests.support.thread_ranks import run_ranks
from trainer.config import Data, Job
from trainer.config.filters import parse_filter
from trainer.data import scores
from trainer.data.check import check_data
from trainer.data.distributed_index import data_rows, open_together
from trainer.data.files import Files
from trainer.data.pack import write_shard
from trainer.data.source import open_source
from trainer.errors import InputError

UIDS = [f"{number:016x}{number * 977:016x}" for number in range(12)]


def write(folder: Path, name: str, numbers: range) -> str:
    """A shard of the samples k00, k01, ..., each with its uid in its JSON."""
    folder.mkdir(exist_ok=True, parents=True)
    about = {n: json.dumps({"uid": UIDS[n], "score": n}).encode() for n in numbers}
    samples = ((f"k{n:02d}", {"png": picture(n), "txt": b"c", "json": about[n]}) for n in numbers)
    write_shard(samples, folder / name)
    return str(folder / name)


@pytest.fixture
def shards(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "data", "a.tar", range(6)), write(tmp_path / "data", "b.tar", range(6, 12))


def table(path: Path, columns: dict[str, Any], **options: Any) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    parquet.write_table(pyarrow.table(columns), path, **options)
    return str(path)


def cosine(number: int) -> float:
    return number * 7 % 12 / 12


def of(numbers: range, **more: Any) -> dict[str, Any]:
    return {"key": [f"k{n:02d}" for n in numbers], "cosine": [cosine(n) for n in numbers], **more}


HALF = [f"k{number:02d}" for number in range(12) if cosine(number) >= 0.5]
"""The samples of "clip_score >= 0.5"."""


def data_of(**values: Any) -> Data:
    return Data(**values)


def kept(data: Data) -> list[str]:
    return keys_of(open_source(data))


def test_rows_belong_to_the_sample_in_their_shard(tmp_path: Path) -> None:
    """Shards of two folders have equal names and equal keys."""
    one, two = (write(tmp_path / name, "0.tar", range(6)) for name in ("one", "two"))
    keys = [f"k{n:02d}" for n in range(6)] * 2
    columns = {"key": keys, "shard": ["/moved/one/0.tar"] * 6 + ["two/0.tar"] * 6, "x": range(12)}
    path = table(tmp_path / "s.parquet", columns)
    data = data_of(train=(one, two), scores=path, filters=("scores:x >= 4", "scores:x < 9"))
    assert kept(data) == ["k04", "k05", "k00", "k01", "k02"]


def test_the_best_caption_of_a_sample_counts(shards: tuple[str, str], tmp_path: Path) -> None:
    columns = {"key": ["k01", "k00", "k01", "k02"], "cosine": [0.1, 0.2, 0.9, None]}
    path = table(tmp_path / "s.parquet", columns)
    data = data_of(train=shards[:1], scores=path, filters=("clip_score >= 0.15",), max_bad_share=0.01)
    source = open_source(data)
    assert kept(data) == ["k00", "k01"]
    assert source.left_out.filtered == {"clip_score >= 0.15": 1}, "null is no score, and fulfils nothing"
    assert source.left_out.by_cause == {"no row in data.scores, which data.filters need": 3}


@pytest.mark.parametrize("form", ["npy", "texts.npy", "txt", "parquet"])
def test_a_list_of_uids_keeps_what_is_in_it(shards: tuple[str, str], tmp_path: Path, form: str) -> None:
    wanted = [UIDS[n] for n in (7, 2, 9)]
    path = tmp_path / f"uids.{form}"
    if form == "npy":  # as DataComp writes it
        halves = [(int(uid[:16], 16), int(uid[16:32], 16)) for uid in wanted]
        np.save(path, np.array(halves, np.dtype("u8,u8")))
    elif form == "texts.npy":
        np.save(path, np.array(wanted))
    elif form == "txt":
        path.write_text("\n".join(wanted) + "\n\n")
    else:
        table(path, {"uid": wanted})
    data = data_of(train=shards, scores=str(path), scores_by="json:uid", filters=("scores:listed == true",))
    assert kept(data) == ["k02", "k07", "k09"]
    source = open_source(data)
    assert (source.left_out.count, source.left_out.filtered) == (0, {"scores:listed == true": 9})
    others = data.model_copy(update={"filters": ("scores:listed == false",)})
    assert len(kept(others)) == 9


def test_an_id_that_is_null_belongs_to_no_row_and_a_whole_number_to_its_digits(tmp_path: Path) -> None:
    columns = {"image": [picture(n) for n in range(3)], "caption": ["c"] * 3, "id": [1.0, None, float("nan")]}
    train = table(tmp_path / "t.parquet", columns)
    scored = table(tmp_path / "s.parquet", {"key": ["1", "None", "nan"], "x": [1, 1, 1]})
    data = data_of(train=train, scores=scored, scores_by="id", filters=("scores:x == 1",))
    assert kept(data) == ["0:0"]
    causes = open_source(data).left_out.by_cause
    assert causes == {"no id in data.scores_by, which data.filters need": 2}


@pytest.mark.parametrize("keys", [["0", None, "2"], [0.0, None, 2.0], [Decimal(0), None, Decimal(2)]])
def test_a_row_of_scores_without_a_key_belongs_to_no_sample_and_is_counted(
    tmp_path: Path, keys: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"image": [picture(n) for n in range(3)], "caption": ["c"] * 3, "id": [0, 1, 2]}
    train = table(tmp_path / "t.parquet", columns)
    scored = table(tmp_path / "s.parquet", {"key": keys, "x": [1, 2, 3]})
    data = data_of(train=train, scores=scored, scores_by="id", filters=("scores:x > 1",))
    assert kept(data) == ["0:2"]
    assert f"1 row without a key in column key of {scored}" in caplog.text


def job_of(shards: tuple[str, ...], path: str, folder: Path, *filters: str) -> Job:
    data = {"format": "auto", "train": shards, "scores": (path,), "filters": filters, "index": str(folder)}
    return tiny_job(data=data)


def test_other_scores_make_another_index_and_another_run(shards: tuple[str, str], tmp_path: Path) -> None:
    """The other scores are the same numbers in another order: equal sizes, and as many samples are kept."""
    path = tmp_path / "s.parquet"
    job = job_of(shards, str(path), tmp_path / "index", "clip_score >= 0.5")
    columns, found = of(range(12)), []
    turned = {**columns, "cosine": [*columns["cosine"][1:], columns["cosine"][0]]}
    for each, unread in ((columns, list(shards)), (turned, list(shards)), (columns, [])):
        table(path, each)
        scores._identities.clear()
        scores.forget_tables()
        assert unindexed(shards, tmp_path / "index", scores=(str(path),), filters=job.data.filters) == unread
        (source,) = run_ranks(1, lambda comm: open_together(job, comm))
        found.append((keys_of(source), data_rows(job.data, source)))
    assert len(found[0][0]) == len(found[1][0])
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]
    assert found[0] == found[2]


def test_features_are_not_read_for_a_score(
    shards: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns that filters need are read, of a file behind an address, too."""
    noise = np.random.default_rng(0).random((12, 65536)).tolist()
    path = table(tmp_path / "s.parquet", of(range(12), image=noise), compression="none")
    reads: list[int] = []
    original = Files.read

    def counted(self: Files, file: str, offset: int, size: int) -> bytes:
        reads.append(size)
        return original(self, file, offset, size)

    monkeypatch.setattr(Files, "read", counted)
    with serving(tmp_path) as (url, _):
        data = data_of(train=shards, scores=f"{url}/s.parquet", filters=("clip_score >= 0.5",))
        assert kept(data) == HALF
    assert Path(path).stat().st_size > 5_000_000
    assert sum(reads) < 500_000


@pytest.mark.parametrize(
    ("name", "columns", "filters", "problem"),
    [
        ("s.parquet", {"id": ["a"]}, "clip_score > 0", "has no column key or uid; its columns are id"),
        ("s.parquet", {"key": ["a"]}, "scores:x > 0", "has no column x; its columns are key"),
        ("s.parquet", {"key": ["a"]}, "clip_score > 0", "has no column cosine"),
        ("s.parquet", {"key": ["a"], "x": ["b"]}, "scores:x > 0", "column x is string, and filters compare"),
        ("s.parquet", {"uid": [b"a"], "x": [1]}, "scores:x > 0", "column uid is neither a text nor .* bytes"),
        (
            "s.parquet",
            {"key": ["a", "b"], "x": [2**53 + 1, None]},
            "scores:x == 9007199254740993",
            "column x has whole numbers beyond 2",
        ),
        ("s.txt", None, "clip_score > 0", "is a list of keys and has no column clip_score"),
        ("s.npy", None, "scores:listed == true", "cannot be read as a list of keys"),
        ("s.csv", None, "clip_score > 0", r"scores are \.parquet, \.txt, \.npy, or one folder"),
        ("none.parquet", None, "clip_score > 0", "data.scores: .*no such file"),
    ],
)
def test_scores_that_cannot_be_read_are_refused(
    shards: tuple[str, str], tmp_path: Path, name: str, columns: Any, filters: str, problem: str
) -> None:
    if columns is not None:
        table(tmp_path / name, columns)
    elif not name.startswith("none"):
        (tmp_path / name).write_text("text\n")
    with pytest.raises(InputError, match=problem):
        open_source(data_of(train=shards, scores=str(tmp_path / name), filters=(filters,)))


def test_check_says_how_many_remain(shards: tuple[str, str], tmp_path: Path) -> None:
    path = table(tmp_path / "s.parquet", {**of(range(12), x=range(12))})
    job = job_of(shards, path, tmp_path / "i", "clip_score >= 0.5", "scores:x > 3", "min_side >= 4")
    expected = sum(cosine(n) >= 0.5 for n in range(4, 12))
    rows = found(job)["rows"]
    assert rows["scores"] == [f"{expected} of 12 samples with a row pass clip_score >= 0.5, scores:x > 3"]
    assert "scores" not in found(tiny_job())["rows"]


def test_tables_may_be_empty_and_columns_may_have_the_names_of_others(
    shards: tuple[str, str], tmp_path: Path
) -> None:
    empty = table(tmp_path / "e.parquet", {"key": pyarrow.array([], pyarrow.string())})
    (tmp_path / "e.txt").touch()
    for path in (empty, str(tmp_path / "e.txt")):
        assert len(kept(data_of(train=shards, scores=path, filters=("scores:listed == false",)))) == 12
    rows = found(job_of(shards, empty, tmp_path / "i", "scores:listed == true"))["rows"]
    assert rows["scores"] == ["0 of 0 samples with a row pass scores:listed == true"]
    numbers = table(tmp_path / "n.parquet", {"key": range(3), "uid": ["a", "b", "c"]})
    with pytest.raises(InputError, match="12 with no row in data"):
        open_source(data_of(train=shards, scores=numbers, filters=("scores:key > 1",), max_bad_share=0))


# `data.filters`: what they keep, what they count, how order and the limit of bad samples hold.


def noise_picture(width: int, height: int, form: str = "jpeg", **options: Any) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, form, **options)
    return file.getvalue()


def shard(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> str:
    write_shard(samples, path)
    return str(path)


def kept_by(path: str, *filters: str) -> list[str]:
    return keys_of(open_source(Data(train=(path,), filters=filters)))


def test_filtered_samples_do_not_count_as_bad_and_those_that_cannot_be_judged_do(tmp_path: Path) -> None:
    good = {"jpg": noise_picture(8, 8), "txt": b"c", "json": b'{"score": 0}'}
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
    content = noise_picture(300, 20, form, icc_profile=b"x" * 200_000)
    path = shard(tmp_path / "0.tar", [("a", {"jpg": content, "txt": b"c"})])
    assert kept_by(path, "width == 300") == ["a"]


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
        (f"k{number}", {"jpg": noise_picture(8, 8), "txt": b"c", "json": json.dumps(meta).encode()})
        for number, meta in enumerate(metas)
    ]
    path = shard(tmp_path / "0.tar", samples)
    assert kept_by(path, 'lang == "en"', "safe == true") == ["k0"]
    assert kept_by(path, "lang != 'en'") == ["k1"]


def test_tables_are_filtered_by_their_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(noise_picture(8, 8))
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
    samples = [
        (key, {"jpg": image, "txt": b"c"}) for key, image in (("a", b"text"), ("b", noise_picture(8, 8)))
    ]
    source = open_source(Data(train=(shard(tmp_path / "0.tar", samples),), filters=("width > 0",)))
    assert keys_of(source) == ["b"]
    assert source.left_out.by_cause == {"the image's header, which data.filters need, cannot be read": 1}


def test_filters_that_keep_nothing_are_refused_with_their_counts(tmp_path: Path) -> None:
    path = shard(tmp_path / "0.tar", [(key, {"jpg": noise_picture(8, 8), "txt": b"c"}) for key in "abc"])
    with pytest.raises(InputError, match=r"data.filters keep no sample \(min_side >= 999 left out 3\)"):
        kept_by(path, "min_side >= 999")
