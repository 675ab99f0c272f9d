"""`check` says what a start reads: for the index as much as the indexer will, and the blocks of a batch."""

import io
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.jobs import tiny_job
from trainer.config.batch_plan import plan
from trainer.data import index_reading
from trainer.data.arena import Arena
from trainer.data.choose_order import choose_order
from trainer.data.columnar import ParquetSource, open_columnar, row_selection
from trainer.data.files import stamp
from trainer.data.index import index_shards, open_index, scan, stale, unindexed, write_catalogue
from trainer.data.index_reading import Speed
from trainer.data.indexed import in_memory
from trainer.data.lanes import Lanes
from trainer.data.reading import TALLY
from trainer.data.table_reading import TableReading
from trainer.data.tar import Selection
from trainer.plan.start_reading import start_rows

SELECTION = Selection(("jpg",), "txt")
SPEED = Speed(0.1, 1e8)


def tar_of(samples: int, image_bytes: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(samples):
            for ending, size in (("jpg", image_bytes), ("txt", 9)):
                info = tarfile.TarInfo(f"{number:06d}.{ending}")
                info.size = size
                tar.addfile(info, io.BytesIO(bytes(size)))
    return out.getvalue()


def far(name: str, content: bytes) -> str:
    fsspec.filesystem("memory").pipe(f"/start/{name}", content)
    return f"memory://start/{name}"


@pytest.mark.parametrize(
    ("samples", "image_bytes", "filters"),
    [(1500, 20_000, ()), (40, 2**21, ()), (40, 2**21, ("width > 1",)), (300, 100, ()), (60, 600_000, ())],
)
def test_what_is_foretold_is_what_the_indexer_asks_for(
    samples: int, image_bytes: int, filters: tuple[str, ...]
) -> None:
    """It is so where members are small, where they are passed over, and where filters look into them."""
    content = tar_of(samples, image_bytes)
    shards, selection = [far("a.tar", content)] * 4, SELECTION._replace(filters=filters)
    found = index_reading.index_reading(shards, selection, 2, SPEED)
    assert found.total_bytes == 4 * len(content)
    TALLY.pop()
    scan(shards[0], selection, len(content))
    read = TALLY.pop()
    assert found.requests == pytest.approx(4 * (read.requests + 1), rel=0.1, abs=4)
    assert found.read_bytes == pytest.approx(4 * read.size, rel=0.1)
    least_s = (found.requests * 0.1 + found.read_bytes / 1e8) / 2 / 2
    assert found.seconds is not None
    assert found.seconds >= 0.99 * least_s, "each of two ranks reads two shards at the same time"


def test_a_shard_that_is_no_tar_is_foretold_too() -> None:
    found = index_reading.index_reading([far("b.tar", b"text" * 999)], SELECTION, 8, SPEED)
    assert (round(found.requests), found.read_bytes) == (2, 3996)
    assert found.seconds is not None
    assert found.seconds < 9


def rows(job: Any, ranks: int = 1, begun: Any = None, samples: int | None = None) -> str:
    ((topic, text),) = start_rows(job, plan(job, ranks), begun, samples)
    assert topic == "start"
    return text


def job_of(train: tuple[str, ...], batch: int = 64, **data: Any) -> Any:
    return tiny_job(data={"format": "auto", "train": train, **data}, optim={"global_batch_size": batch})


def test_check_says_what_a_start_reads_of_far_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speed, "of", classmethod(lambda cls, shard: SPEED))
    shards = tuple(far(f"{number}.tar", tar_of(100, 100_000)) for number in range(4))
    job = job_of(shards, index=str(tmp_path))
    batch = "the first batch up to 134 MB in 64 requests of each rank, about 1 s"
    assert rows(job) == (
        "the headers of 4 shards for the index: 40 MB of 40.8 MB in 20 requests, about 1 s on 1 rank; "
        + batch
    )
    selection = Selection(job.data.image_key, "txt")
    new = stale(shards[1:], selection, tmp_path)
    write_catalogue(tmp_path, selection, index_shards(new, selection, tmp_path))
    assert unindexed(shards, selection, tmp_path) == [shards[0]]
    assert rows(job).startswith("the headers of 1 shard for the index: 10 MB of 10.2 MB in 5 requests, about")
    new = stale(shards, selection, tmp_path)
    write_catalogue(tmp_path, selection, index_shards(new, selection, tmp_path))
    assert len(open_index(shards, selection, tmp_path).entries) == 4
    assert rows(job) == "the index is there; " + batch
    begun = Lanes(10, 64).facts()
    assert rows(
        job, 2, begun, 400
    ) == "the index is there; the first batch up to 67.1 MB in 32 requests of " + ("each rank, about 1 s")
    assert (
        rows(job, 1, {"order": "window"}) == "the index is there; the first batch in 64 requests of each rank"
    )


def test_check_says_when_storage_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    text = rows(job_of(("http://127.0.0.1:9/{0..2}.tar",)))
    assert text.startswith(
        "the headers of 3 shards for the index, and their storage does not answer from here;"
    )


def test_check_says_what_a_start_reads_of_local_shards(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.tar" for number in range(2)]
    for path in paths:
        path.write_bytes(tar_of(30, 2000))
    job = job_of(tuple(map(str, paths)), batch=8)
    batch = "the first batch up to 0.225 MB in 8 requests of each rank"
    assert rows(job) == "the headers of 2 shards for the index, about 1 s on 1 rank; " + batch
    selection = Selection(job.data.image_key, "txt")
    folder = tmp_path / ".clipship-index"
    new = stale([str(path) for path in paths], selection, folder)
    write_catalogue(folder, selection, index_shards(new, selection, folder))
    assert rows(job) == "the index is there; " + batch


def test_data_without_shards_have_no_such_line() -> None:
    job = tiny_job()
    assert list(start_rows(job, plan(job, 1), None, None)) == []


def parquet_of(rows: int, per_group: int, image_bytes: int, columns: int = 1) -> bytes:
    """A table of images that do not shrink; with many columns the footer is long."""
    content = np.random.default_rng(0)
    table = {
        "image": [content.bytes(image_bytes) for _ in range(rows)],
        **{f"more{number}": [b"x" * 30] * rows for number in range(columns)},
        "caption": ["a text"] * rows,
        "score": [0.5] * rows,
    }
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(table), out, row_group_size=per_group)
    return out.getvalue()


@pytest.mark.parametrize("filters", [(), ("score > 0.1",), ("score > 0.1", "width > 1")])
@pytest.mark.parametrize(
    ("rows", "per_group", "image_bytes", "columns"), [(64, 8, 3000, 1), (60, 7, 40_000, 1), (400, 8, 50, 60)]
)
def test_what_is_foretold_of_parquet_is_what_a_start_asks_for(
    rows: int, per_group: int, image_bytes: int, columns: int, filters: tuple[str, ...]
) -> None:
    """For the index, and for the row groups of the first batch on two ranks."""
    files = [far(f"{number}.parquet", parquet_of(rows, per_group, image_bytes, columns)) for number in (1, 2)]
    job = job_of(tuple(files), batch=8, filters=filters)
    reading, batch_plan = TableReading(files, job.data), plan(job, 2)
    found = reading.index(files, 1, SPEED)
    TALLY.pop()
    contents = [scan(file, row_selection(job.data), stamp(file).size) for file in files]
    asked = TALLY.pop()
    assert (found.requests, found.read_bytes) == (asked.requests + len(files), asked.size)
    assert found.total_bytes == sum(stamp(file).size for file in files)
    if "width > 1" in filters:
        return  # these are no images
    source = open_columnar(in_memory(files, contents), job.data)
    assert isinstance(source, ParquetSource)
    order = choose_order(job.data, source, 8, 2, 0)
    assert isinstance(order, Lanes)
    pieces = order.of_epoch(source.shard_sizes(), None, seed=0, epoch=0, batch=8).pieces(0, 4)
    blocks = {source.block_of(*each) for each in zip(pieces.firsts, pieces.counts, strict=True)}
    TALLY.pop()
    for block in blocks:
        source.read_block(*block, Arena())
    read, batch = TALLY.pop(), reading.first_batch(batch_plan, None, None)
    assert len(blocks) <= 4
    assert batch.requests == pytest.approx(read.requests * 4 / len(blocks), abs=2)
    assert batch.size == pytest.approx(read.size * 4 / len(blocks), rel=0.3)


def test_check_says_what_a_start_reads_of_far_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speed, "of", classmethod(lambda cls, shard: SPEED))
    files = tuple(far(f"{number}.parquet", parquet_of(64, 8, 100_000)) for number in range(4))
    job = job_of(files, batch=64, index=str(tmp_path))
    batch = "the first batch up to 25.9 MB in 36 requests of each rank, about 1 s"
    assert rows(job) == (
        "the footers of 4 Parquet files for the index: 0.262 MB of 25.6 MB in 8 requests, about 1 s on 1 "
        f"rank; {batch}"
    )
    selection = row_selection(job.data)
    new = stale(files, selection, tmp_path)
    write_catalogue(tmp_path, selection, index_shards(new, selection, tmp_path))
    assert rows(job) == f"the index is there; {batch}"
    assert rows(job, 2, Lanes(8, 8).facts()).startswith("the index is there; the first batch up to 3.")
