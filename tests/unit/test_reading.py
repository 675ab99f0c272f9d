"""Costs of reading are counted in every process, and come out in metrics, status and report."""

import json
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from benchmarks.data_remote import store
from benchmarks.data_remote_ours import counts
from tests.integration.test_bad_input import sample
from tests.support.command_line import clipship
from tests.support.range_server import serving
from tests.support.training import run, setup_of
from tests.unit.test_data_read_ahead import SHARDS, Order, batches, opened
from tests.unit.test_data_read_ahead import shards as shards
from trainer.comm.protocol import Comm
from trainer.data.pack import write_shards
from trainer.data.reading import TALLY

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec's clients live on


def cost(source: Any, order: Order, workers: int = 0) -> Any:
    """Cost of an epoch: of loader processes as their batches say it, and of this one."""
    TALLY.pop()
    sent = [batch.reading for batch in batches(source, order, workers=workers, epochs=1)]
    return sum(sent, TALLY.pop())


def test_requests_that_fail_count_and_so_do_headers_and_images_behind_addresses(
    shards: str, tmp_path: Path
) -> None:
    with serving(Path(shards).parent) as (address, server):
        TALLY.pop()
        source = opened(f"{address}/00.tar")
        assert TALLY.pop().requests == len(server.asked) > 0
        server.failures = 2
        source.read(0)
        assert TALLY.pop().requests == 3
        (table := tmp_path / "t.csv").write_text(f"image,caption\n{address}/01.tar,c\n")
        content = opened(table).read(0).image
        assert TALLY.pop()[:2] == (1, len(content))


def test_what_the_cache_had_is_counted_apart(shards: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    first = cost(opened(shards, cache=folder), (100, 16))
    assert first.requests == SHARDS
    second = cost(opened(shards, cache=folder), (100, 16))
    assert (second.requests, second.size) == (0, 0)
    assert second.cache_hits == first.requests + first.cache_hits


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_says_what_its_data_have_cost(tmp_path: Path, alone: Comm) -> None:
    (tmp_path / "data").mkdir()
    write_shards((sample(number) for number in range(64)), tmp_path / "data", 16)
    folder, train = tmp_path / "run", (str(tmp_path / "data" / "shard-{000000..000003}.tar"),)
    TALLY.pop()
    data = {"train": train, "format": "webdataset"}
    run(setup_of(folder, alone, dict, data=data, logging={"every_steps": 2}))
    (folder / "job.toml").write_text('name = "x"\n')
    records = [record for record in records_of(folder) if "read_requests" in record]
    assert sum(record["read_requests"] for record in records) > 0
    said = json.loads(clipship("status", folder, "--json", code=0).out)["reading"]
    assert said["requests"] == sum(record["read_requests"] for record in records)
    assert said["bytes"] == sum(record["read_bytes"] for record in records) > 0
    assert f"in {said['requests']} requests, whose waits add up to " in clipship("status", folder, code=0).out


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
