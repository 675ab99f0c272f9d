"""The lanes of a new run follow from what a sample takes in its file, the batch and the memory."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from tests.support.tables import write_parquet
from trainer.config import Data
from trainer.config.batch_plan import plan
from trainer.data.lanes import Lanes, choose_lanes
from trainer.data.reading_plan import reading_rows
from trainer.data.sample import Source
from trainer.data.source import open_source

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path) -> Any:
    """Four row groups of 1,000 samples of 40 kB."""
    columns = {"image": ["a.png"] * 4000, "caption": ["c"] * 4000}
    source = open_source(Data(train=(write_parquet(tmp_path / "t.parquet", columns, 1000),)))
    (entry,) = source.index.entries  # type: ignore[attr-defined]
    object.__setattr__(entry, "size", 40_000 * 4000)
    return source


def chosen(source: Source, batch: int, ranks: int, room: int = GIB, **data: Any) -> Any:
    return choose_lanes(Data(train=("0.tar",), **data), source, batch, ranks, room)


def test_row_groups_are_blocks_and_as_many_are_open_as_fit(groups: Any) -> None:
    assert chosen(groups, 64, 1, row_group_cache_mb=512) == Lanes(1000, 8)
    assert chosen(groups, 64, 4, row_group_cache_mb=512) == Lanes(1000, 32)
    assert chosen(groups, 64, 1, row_group_cache_mb=1) == Lanes(1000, 1)


def test_check_says_what_a_rank_reads_at_once(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(10_000_000))

    def said(train: str, batch: int, ranks: int, **data: Any) -> list[tuple[str, str]]:
        job = tiny_job(data={"format": "auto", "train": (train,), **data}, optim={"global_batch_size": batch})
        return list(reading_rows(job, plan(job, ranks)))

    text = (
        "blocks of 4 MiB, each once: in a new run a rank reads up to {} MB before its first step, has at "
        "most {} MB of them open, and reads {} MB ahead"
    )
    assert said("http://store.example/{0..9}.tar", 64, 1) == [("reading", text.format(134, 268, 67))]
    assert said("http://store.example/0.tar", 64, 4, read_ahead_mb=500) == [
        ("reading", text.format(34, 67, 524))
    ]
    assert said("http://store.example/0.tar", 8192, 2) == [("reading", text.format(537, "1,074", 67))]
    assert said(str(tmp_path / "0.tar"), 64, 1) == [("reading", text.format(10, 10, 10))]
    named = text.replace("4 MiB", "20,000 samples")
    several = "http://store.example/0.tar"
    assert said(several, 2, 1, block_samples=20_000) == [("reading", named.format(537, "1,074", 67))]
    row_groups = "row groups, each once: a rank has at most 537 MB of them open, and reads 67 MB ahead"
    assert said("http://store.example/{0..9}.parquet", 64, 1) == [("reading", row_groups)]
    assert said("0.arrow", 64, 1) == []
    job = tiny_job()
    assert list(reading_rows(job, plan(job, 1))) == [], "synthetic data are not read"
