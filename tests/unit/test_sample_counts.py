"""Samples are counted before a start by what lies beside shards, here or behind URLs, or by an index."""

import json
import threading
from contextlib import nullcontext
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.range_server import serving
from tests.unit.test_data_index import SELECTION, write_shard
from trainer.config import Data
from trainer.data.check import check_data
from trainer.data.index import index_shards, stale, write_catalogue
from trainer.data.sample_counts import recorded_sizes, within


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec's client lives as long as the process
@pytest.mark.parametrize("far", [False, True])
def test_samples_are_counted_by_what_others_write_beside_shards(tmp_path: Path, far: bool) -> None:
    """Sizes, and img2dataset's statistics and tables; also where all of it is behind URLs."""
    (tmp_path / "sizes.json").write_text(json.dumps({"0.tar": 3}))
    (tmp_path / "1_stats.json").write_text(json.dumps({"count": 9, "successes": 5}))
    status = ["success", "failed_to_download", "success", "failed_to_resize"]
    parquet.write_table(pyarrow.table({"status": status}), tmp_path / "2.parquet")
    with serving(tmp_path) if far else nullcontext((str(tmp_path), None)) as (place, _):
        assert recorded_sizes([f"{place}/{number}.tar" for number in range(3)]) == [3, 5, 2]
        assert recorded_sizes([f"{place}/{number}.tar" for number in range(4)]) is None
        assert recorded_sizes([f"{place}/{number}.tar" for number in (3, 0)]) is None


def test_storage_that_does_not_answer_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded_sizes(["http://127.0.0.1:9/0.tar"]) is None
    answered = threading.Event()
    assert within(0.01, answered.wait) is None
    answered.set()
    assert within(9.0, answered.wait) is True


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_shards_behind_urls_are_counted_by_the_index_that_the_job_names(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.tar", ["a", "b", "c", "d"])
    folder = tmp_path / "index"
    with serving(tmp_path) as (address, handler):
        paths = [f"{address}/0.tar"]
        write_catalogue(folder, SELECTION, index_shards(stale(paths, SELECTION, folder), SELECTION, folder))
        before = len(handler.asked)
        assert check_data(Data(train=tuple(paths), index=str(folder))) == 4
        assert len(handler.asked) == before
