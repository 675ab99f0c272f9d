"""`clipship embed`: whose features it writes, what it keeps, what it counts and what it refuses."""

import io
import json
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import open_clip
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from tests.support.jobs import VIT, tiny_job
from tests.support.loading import refusal
from tests.support.pictures import noise
from tests.support.thread_ranks import run_ranks
from trainer.comm.protocol import Comm
from trainer.config import Data, Job
from trainer.data.bad_samples import Skipped
from trainer.data.feature_files import FeatureWriter
from trainer.data.pack import write_shard
from trainer.data.source import open_source
from trainer.errors import InputError, Preempted, StorageError
from trainer.evaluate.embed import embed
from trainer.evaluate.rounds import EvaluationFailed, Rounds
from trainer.model.build import untrained
from trainer.plan.trained import embed_job

COUNTS = (7, 3, 5)
"""Samples of each shard."""


def captions(number: int) -> list[str]:
    return [f"noise {number}", *([f"another {number}"] if number % 3 == 1 else [])]


def sample(number: int, *, broken: bool = False) -> tuple[str, dict[str, bytes]]:
    image = bytes(40) if broken else noise(number)
    return f"k{number:02d}", {"png": image, "txt": "\n".join(captions(number)).encode()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three shards of noise."""
    return write_shards(tmp_path / "shards")


def write_shards(folder: Path, broken: Collection[int] = ()) -> Path:
    folder.mkdir()
    first = 0
    for shard, count in enumerate(COUNTS):
        numbers = range(first, first + count)
        write_shard((sample(n, broken=n in broken) for n in numbers), folder / f"{shard}.tar")
        first += count
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "weights.pt"
    torch.save(untrained(tiny_job()).model.state_dict(), path)
    return str(path)


def job_of(weights: str, *patterns: str, overrides: Collection[str] = ()) -> Job:
    changes = ("eval.batch_size=4", "data.workers=0", *overrides)
    return embed_job(weights, VIT, patterns, 4, changes)


def embedded(job: Job, ranks: int = 1, dtype: Any = "fp32", out: str = "") -> dict[str, Any]:
    found = run_ranks(ranks, lambda comm: embed(job, comm, dtype, out))
    assert all(each == found[0] for each in found)
    return found[0]


def about_of(path: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(parquet.read_metadata(path).metadata[b"clipship"])
    return about


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def test_the_features_are_those_of_open_clip_itself(weights: str, shards: Path) -> None:
    found = embedded(job_of(weights, f"{shards}/*.tar"))
    counts = {"shards": 3, "kept": 0, "samples": 15, "rows": 20}
    assert found == {**counts, "bad_samples": {}, "examples": []}
    open_clip.add_model_config(VIT)
    clip, _, transform = open_clip.create_model_and_transforms(Path(VIT).stem, pretrained=weights)
    tokenizer = open_clip.get_tokenizer(Path(VIT).stem)
    clip.eval()
    rows = [row for shard in range(3) for row in rows_of(shards / "features" / f"{shard}.parquet")]
    expected = [(n, caption, text) for n in range(15) for caption, text in enumerate(captions(n))]
    assert [(row["key"], row["caption"]) for row in rows] == [(f"k{n:02d}", each) for n, each, _ in expected]
    assert [row["row"] for row in rows if row["caption"] == 0] == [*range(7), *range(3), *range(5)]
    pictures = [transform(Image.open(io.BytesIO(noise(n)))) for n, _, _ in expected]
    with torch.no_grad():
        images = clip.encode_image(torch.stack(pictures), normalize=True)
        texts = clip.encode_text(tokenizer([text for *_, text in expected]), normalize=True)
    for name, features in (("image", images), ("text", texts), ("cosine", (images * texts).sum(1))):
        stored = torch.tensor([row[name] for row in rows])
        torch.testing.assert_close(stored, features, rtol=0, atol=1e-6)


def test_what_is_there_is_kept_and_the_next_command_goes_on(
    weights: str, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, original = job_of(weights, f"{shards}/*.tar"), FeatureWriter.write

    def full(self: Any, file: str, about: Any) -> None:
        if file.endswith("1.parquet"):
            raise StorageError("the disk is full")
        original(self, file, about)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureWriter, "write", full)
        for ranks in (1, 2):
            with pytest.raises(EvaluationFailed, match="the disk is full"):
                embedded(job, ranks)
    first = shards / "features" / "0.parquet"
    assert [path.name for path in first.parent.iterdir()] == ["0.parquet"]
    before = first.stat().st_mtime_ns
    found = embedded(job, 2)
    assert (found["kept"], found["samples"], found["rows"]) == (1, 15, 20)
    assert first.stat().st_mtime_ns == before
    os.utime(shards / "2.tar", ns=(1, 1))
    assert embedded(job) == {**found, "kept": 2}
    assert about_of(shards / "features" / "2.parquet")["changed"] == "1"


@pytest.mark.parametrize("broken", [(0, 5), (0, 1, 2, 3, 4, 5, 6)])
def test_a_bad_sample_has_a_row_without_features_and_is_counted(
    weights: str, tmp_path: Path, broken: tuple[int, ...]
) -> None:
    folder = write_shards(tmp_path / "shards", broken)
    found = embedded(job_of(weights, f"{folder}/*.tar"), 2)
    assert (found["samples"], found["bad_samples"]) == (15 - len(broken), {"not an image": len(broken)})
    assert f"{folder}/0.tar: sample k00: the image" in found["examples"][0]
    rows = rows_of(folder / "features" / "0.parquet")
    assert [row["row"] for row in rows] == sorted(row["row"] for row in rows)
    for row in rows:
        lost = row["row"] in broken
        assert [row[name] is None for name in ("image", "text", "cosine")] == [lost] * 3
        assert ("image" in row["problem"]) if lost else (row["problem"] is None)
    assert {row["key"] for row in rows} == {f"k{n:02d}" for n in range(7)}
    with pytest.raises(EvaluationFailed, match="sample k00"):
        embedded(job_of(weights, f"{folder}/0.tar", overrides=["data.on_bad_sample=fail"]), out=str(tmp_path))


def test_a_shard_without_a_usable_sample_has_a_file_without_rows(weights: str, tmp_path: Path) -> None:
    write_shard([], tmp_path / "0.tar")
    write_shard([("alone", {"png": noise(1)})], tmp_path / "1.tar")
    write_shard([sample(0)], tmp_path / "2.tar")
    found = embedded(job_of(weights, f"{tmp_path}/*.tar"))
    assert (found["shards"], found["samples"], found["bad_samples"]) == (3, 1, {"no .txt": 1})
    files = [tmp_path / "features" / f"{number}.parquet" for number in range(3)]
    assert [len(rows_of(file)) for file in files] == [0, 0, 1]
    assert parquet.read_schema(files[0]).equals(parquet.read_schema(files[2]))
    assert embedded(job_of(weights, f"{tmp_path}/*.tar"))["kept"] == 3


def test_features_of_another_model_or_of_other_captions_are_refused(
    weights: str, shards: Path, tmp_path: Path
) -> None:
    shard, other = f"{shards}/0.tar", tmp_path / "other.pt"
    job = job_of(weights, shard)
    embedded(job)
    other.write_bytes(Path(weights).read_bytes())
    for changed, dtype in ((job_of(str(other), shard), "fp32"), (job, "fp16")):
        with pytest.raises(InputError, match=r"by tiny-vit.json with weights.pt in fp32, stored in fp32"):
            embedded(changed, 2, dtype)
    for change in ("data.caption_lines=one", "model.precision=bf16"):
        with pytest.raises(InputError, match=r"otherwise|by tiny-vit.json with weights.pt in fp32"):
            embedded(job_of(weights, shard, overrides=[change]))
    same = job_of(weights, shard, overrides=["model.compile=true", "model.cache_dir=x"])
    assert embedded(same)["kept"] == 1, "these keys change no feature"


def test_a_file_of_another_program_is_never_replaced(weights: str, shards: Path) -> None:
    (shards / "features").mkdir()
    parquet.write_table(pyarrow.table({"key": ["a"]}), shards / "features" / "0.parquet")
    before = (shards / "features" / "0.parquet").read_bytes()
    assert "is no file of features" in refusal(embedded, job_of(weights, f"{shards}/0.tar"), 2)
    assert (shards / "features" / "0.parquet").read_bytes() == before


def test_a_diverged_model_is_refused(weights: str, shards: Path, tmp_path: Path) -> None:
    state = torch.load(weights, weights_only=True)
    state["visual.proj"].fill_(float("nan"))
    torch.save(state, tmp_path / "diverged.pt")
    with pytest.raises(InputError, match=r"hold NaN or infinity in 1 tensor: visual\.proj; choose others"):
        embedded(job_of(str(tmp_path / "diverged.pt"), f"{shards}/0.tar"), 2)


@pytest.mark.parametrize(
    ("shards", "out", "problem"),
    [
        (("a/0.tar", "b/0.tar"), "/out", r"a/0.tar and .*b/0.tar would both have their features in /out/0"),
        (("a" * 251 + ".tar",), "/out", r"aaa\.tar: the name of its file of features is too long"),
        (("https://host/0.tar?sign=1",), None, "a web server takes no files: give a folder"),
    ],
)
def test_places_that_cannot_be_are_refused(
    weights: str, tmp_path: Path, shards: tuple[str, ...], out: str | None, problem: str
) -> None:
    for shard in shards:
        if "://" not in shard:
            (tmp_path / shard).parent.mkdir(exist_ok=True)
            write_shard([sample(0)], tmp_path / shard)
    places = [shard if "://" in shard else str(tmp_path / shard) for shard in shards]
    with pytest.raises(InputError, match=problem):
        embedded(job_of(weights, *places), out=out or "")


def test_the_next_shard_is_read_beside_the_one_that_is_written(
    weights: str, shards: Path, alone: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    read, write = open_source, FeatureWriter.write

    def opened(data: Data, **keys: Any) -> Any:
        done.append(f"open {Path(str(data.train[0])).stem}")
        return read(data, **keys)

    def written(self: FeatureWriter, file: str, about: Any) -> None:
        number = int(Path(file).stem.partition(".")[0])
        limit = time.monotonic() + 30
        while number < 2 and f"open {number + 1}" not in done and time.monotonic() < limit:
            time.sleep(0.01)
        done.append(f"write {number}")
        write(self, file, about)

    monkeypatch.setattr("trainer.evaluate.embed.open_source", opened)
    monkeypatch.setattr(FeatureWriter, "write", written)
    embed(job_of(weights, str(shards / "*.tar")), alone, "fp16")
    assert done.index("open 1") < done.index("write 0") < done.index("write 1") < done.index("write 2")
    assert done.index("open 2") < done.index("write 1")


def test_a_stop_does_not_wait_for_a_block_that_storage_does_not_give() -> None:
    answers = Event()

    def evaluation(comm: Comm) -> None:
        """Rank 1's second block never comes; both are asked to stop."""

        def blocks() -> Iterator[Any]:
            yield Block()
            if comm.world.rank == 1:
                answers.wait()
            yield Block()

        rounds = Rounds(comm, lambda: comm.world.rank == 1 and len(read) >= 2)
        read: list[Any] = []
        results = rounds.until_failed(rounds.counted(blocks(), Skipped(max_share=1)))
        for _ in rounds.of(4, 1):
            read += [next(results, None)] * 2

    class Block:
        valid, bad = 1, ()

    try:
        with pytest.raises(Preempted):
            run_ranks(2, evaluation)
    finally:
        answers.set()
