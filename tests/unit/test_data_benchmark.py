"""`make bench-data`: where the processor time of a sample goes, on a few samples."""

import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("sklearn")

from benchmarks.data import photographs, table
from benchmarks.data_parts import BETWEEN, ORDER, PLACES, REST, SUM, measured
from benchmarks.data_remote import store
from benchmarks.data_remote_ours import counts
from trainer.data.shard_files import write_shards

SAMPLES = 4


def test_parts_of_a_sample_add_up_to_what_a_loader_process_and_its_rank_spend(tmp_path: Path) -> None:
    write_shards(photographs(256, 192, SAMPLES * 2), tmp_path, SAMPLES)
    found = measured(f"{tmp_path}/*.tar", batches=1, samples=SAMPLES)
    of_sample = {part: value for part, value in found.items() if part not in (SUM, "decoder")}
    assert set(of_sample) == {ORDER, *(part for _, _, part in PLACES), REST, BETWEEN}
    assert sum(of_sample.values()) == pytest.approx(found[SUM])
    assert all(found[part] > 0 for _, _, part in PLACES)
    assert found["decoder"] > 0
    assert f"{found['decode']:9.0f}" in table({512: found})


def test_the_slow_store_waits_gives_ranges_and_counts(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(range(200)))
    with store(tmp_path, 20) as address:
        start = time.monotonic()
        request = Request(f"{address}/0.tar", headers={"Range": "bytes=10-19"})
        assert urlopen(request).read() == bytes(range(10, 20))
        assert time.monotonic() - start >= 0.02
        assert len(urlopen(f"{address}/0.tar").read()) == 200
        pattern = f"{address}/{{0..3}}.tar"
        assert counts(pattern) == {"requests": 2, "bytes": 210}
        assert counts(pattern) == {"requests": 0, "bytes": 0}
        urlopen(f"{address}/stall/0.1").close()
        start = time.monotonic()
        urlopen(f"{address}/0.tar").close()
        assert time.monotonic() - start >= 0.1
    assert counts("/data/{0..3}.tar") == {"requests": 0, "bytes": 0}
