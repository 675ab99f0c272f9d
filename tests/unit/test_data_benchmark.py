"""`make bench-data`: where the processor time of a sample goes, on a few samples."""

import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("sklearn")

from benchmarks.data_remote import store
from benchmarks.data_remote_ours import counts


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
