"""`make bench-data`: where the processor time of a sample goes, on a few samples."""

import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("sklearn")

from benchmarks import slow_disk
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


def test_a_slow_disk_is_a_limit_to_a_control_group_of_either_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_disk, "disk_of", lambda folder: "8:0")
    monkeypatch.setattr(slow_disk, "remove", lambda group: None)
    (tmp_path / "2").mkdir()
    (tmp_path / "1" / "blkio").mkdir(parents=True)
    with slow_disk.slow_disk(tmp_path, tmp_path / "2") as group:
        assert (group / "io.max").read_text() == "8:0 riops=120 rbps=150000000"
        assert slow_disk.reads_in(group) == 0
        (group / "io.stat").write_text("8:0 rbytes=4096 wbytes=0 rios=7 wios=0 dbytes=0 dios=0\n")
        assert slow_disk.reads_in(group) == 7
        assert (tmp_path / "2" / "cgroup.subtree_control").read_text() == "+io"
    with slow_disk.slow_disk(tmp_path, tmp_path / "1") as group:
        assert group.parent == tmp_path / "1" / "blkio"
        assert (group / "blkio.throttle.read_iops_device").read_text() == "8:0 120"
        assert (group / "blkio.throttle.read_bps_device").read_text() == "8:0 150000000"
        (group / "blkio.throttle.io_serviced").write_text(
            "8:0 Read 61\n8:0 Write 0\n8:0 Total 61\nTotal 61\n"
        )
        assert slow_disk.reads_in(group) == 61
    with (
        pytest.raises(slow_disk.CannotSlowDown, match="No such file"),
        slow_disk.slow_disk(tmp_path, tmp_path / "none"),
    ):
        pass


def test_a_folder_in_memory_lies_on_no_disk() -> None:
    with pytest.raises(slow_disk.CannotSlowDown, match="/dev/shm lies on no disk of this machine's own"):
        slow_disk.disk_of(Path("/dev/shm"))
