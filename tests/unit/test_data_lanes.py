"""The order of lanes: each sample once, the same in each release, and as many lanes as memory takes."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.jobs import tiny_job
from tests.support.tables import write_parquet
from trainer.config import Data
from trainer.config.batch_plan import plan
from trainer.data.lanes import LaneOrder, Lanes, choose_lanes
from trainer.data.order import position_seed
from trainer.data.reading_plan import reading_rows
from trainer.data.source import open_source


@st.composite
def orders(draw: st.DrawFn) -> tuple[LaneOrder, list[int]]:
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=8))
    lanes = draw(st.sampled_from([1, 2, 4, 8]))
    batch = lanes * draw(st.sampled_from([1, 3]))
    block = draw(st.integers(1, 80))
    seed, epoch = draw(st.integers(0, 2**31)), draw(st.integers(0, 99))
    return LaneOrder(sizes, Lanes(block, lanes), seed=seed, epoch=epoch, batch=batch), sizes


@settings(deadline=None)
@given(orders(), st.data())
def test_an_epoch_has_each_sample_once_but_for_less_than_a_batch_and_may_begin_anywhere(
    made: tuple[LaneOrder, list[int]], data: st.DataObject
) -> None:
    order, sizes = made
    samples = order.samples(0, len(order)).tolist()
    assert len(set(samples)) == len(samples) == len(order)
    assert set(samples) <= set(range(sum(sizes)))
    assert 0 <= sum(sizes) - len(order) < order.batch
    begin = data.draw(st.integers(0, len(order)))
    end = data.draw(st.integers(begin, len(order)))
    assert order.samples(begin, end).tolist() == samples[begin:end]


def test_order_and_seeds_are_frozen_across_versions() -> None:
    """A run resumed with another release must find the same samples: these numbers may never change."""
    long = LaneOrder([5, 2, 6], Lanes(3, 2), seed=7, epoch=2, batch=4)
    assert long.samples(0, 99).tolist() == [6, 5, 10, 11, 4, 3, 8, 9, 2, 7, 1, 0]
    short = LaneOrder([5, 2, 6], Lanes(50, 4), seed=7, epoch=2, batch=4)
    assert short.samples(0, 99).tolist() == [8, 9, 6, 1, 7, 11, 2, 4, 12, 10, 5, 3]
    weighted = LaneOrder([9, 2, 16], Lanes(4, 2), weights=[1, 0.5, 2], seed=7, epoch=2, batch=2)
    assert weighted.samples(0, 16).tolist() == [8, 14, 7, 24, 18, 23, 16, 5, 15, 4, 17, 3, 21, 9, 22, 23]
    assert position_seed(7, 2, 5, "caption") == 7805577719114010955


def test_a_long_epoch_costs_as_much_memory_as_it_has_blocks() -> None:
    order = LaneOrder([10_000] * 10_000, Lanes(1000, 4096), seed=1, epoch=3, batch=4096)
    assert len(np.unique(order.samples(90_112_000, 90_116_096))) == 4096
    assert order.nbytes <= 100_000 * 17 + 4096 * 8 + 4096 * 4000


def test_row_groups_are_blocks_and_as_many_are_open_as_fit(tmp_path: Path) -> None:
    columns = {"image": ["a.png"] * 4000, "caption": ["c"] * 4000}
    source: Any = open_source(Data(train=(write_parquet(tmp_path / "t.parquet", columns, 1000),)))
    (entry,) = source.index.entries
    object.__setattr__(entry, "size", 40_000 * 4000)

    def chosen(batch: int, ranks: int, room_mb: int) -> object:
        data = Data(train=("0.tar",), row_group_cache_mb=room_mb)
        return choose_lanes(data, source, batch, ranks, 2**30)

    assert chosen(64, 1, 512) == Lanes(1000, 8)
    assert chosen(64, 4, 512) == Lanes(1000, 32)
    assert chosen(64, 1, 1) == Lanes(1000, 1)
    assert chosen(28, 4, 100) == Lanes(1000, 4), "with 7 lanes, ranks would read row groups of others again"


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
