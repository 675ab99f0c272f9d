"""Costs of reading are counted in every process, and come out in metrics, status and report."""

import json
from pathlib import Path

import pytest

from tests.integration.test_bad_input import sample
from tests.support.range_server import serving
from tests.support.training import run, setup_of
from tests.unit.test_data_read_ahead import SHARDS, batches, opened
from tests.unit.test_data_read_ahead import shards as shards
from trainer.cli.main import main
from trainer.comm.protocol import Comm
from trainer.data.files import fetch
from trainer.data.lanes import Lanes
from trainer.data.reading import TALLY, Reading
from trainer.data.shard_files import write_shards
from trainer.data.shards import ShardSource
from trainer.report.folder import read_run
from trainer.report.headline import tiles

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # fsspec's clients live on


def cost(source: ShardSource, order: Lanes, workers: int = 0) -> Reading:
    """Cost of an epoch: of loader processes as their batches say it, and of this one."""
    TALLY.pop()
    sent = [batch.reading for batch in batches(source, order, workers=workers, epochs=1)]
    return sum(sent, TALLY.pop())


@pytest.mark.parametrize("workers", [0, 2])
def test_requests_and_bytes_are_those_that_the_store_has_seen(shards: str, workers: int) -> None:
    with serving(Path(shards).parent) as (address, server):
        source = opened(f"{address}/{Path(shards).name}")
        server.asked.clear()
        server.sent = 0
        found = cost(source, Lanes(7, 16), workers)
    assert (found.requests, found.size) == (len(server.asked), server.sent)
    assert found.wait_s > 0
    assert found.cache_hits == 0


def test_requests_that_fail_count_and_so_do_headers_and_images_behind_addresses(shards: str) -> None:
    with serving(Path(shards).parent) as (address, server):
        TALLY.pop()
        source = opened(f"{address}/00.tar")
        assert TALLY.pop().requests == len(server.asked) > 0
        server.failures = 2
        source.read(0)
        assert TALLY.pop().requests == 3
        content = fetch(f"{address}/01.tar", 10**6)
        assert TALLY.pop()[:2] == (1, len(content))


def test_what_the_cache_had_is_counted_apart(shards: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "cache")
    first = cost(opened(shards, cache=folder), Lanes(100, 16))
    assert first.requests == SHARDS
    second = cost(opened(shards, cache=folder), Lanes(100, 16))
    assert (second.requests, second.size) == (0, 0)
    assert second.cache_hits == first.requests + first.cache_hits


def test_a_run_says_what_its_data_have_cost(
    tmp_path: Path, alone: Comm, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    write_shards((sample(number) for number in range(64)), tmp_path / "data", 16)
    folder, train = tmp_path / "run", (str(tmp_path / "data" / "shard-{000000..000003}.tar"),)
    TALLY.pop()
    run(
        setup_of(
            folder, alone, dict, data={"train": train, "format": "webdataset"}, logging={"every_steps": 2}
        )
    )
    (folder / "job.toml").write_text('name = "x"\n')
    records = read_run(folder).metrics.records
    assert sum(record["read_requests"] for record in records) > 0
    assert main(["status", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["reading"]
    assert said["requests"] == sum(record["read_requests"] for record in records)
    assert said["bytes"] == sum(record["read_bytes"] for record in records) > 0
    assert main(["status", str(folder)]) == 0
    assert f"in {said['requests']} requests, whose waits add up to " in capsys.readouterr().out
    assert "read" in [tile.label for tile in tiles(read_run(folder))]


def test_made_up_pictures_are_not_read(
    tmp_path: Path, alone: Comm, capsys: pytest.CaptureFixture[str]
) -> None:
    TALLY.pop()
    run(setup_of(tmp_path, alone, dict))
    (tmp_path / "job.toml").write_text('name = "x"\n')
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reading"] is None
    assert not any("read_requests" in record for record in read_run(tmp_path).metrics.records)
