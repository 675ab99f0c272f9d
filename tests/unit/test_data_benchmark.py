"""`make bench-data`: where the processor time of a sample goes, on a few samples."""

from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from benchmarks.data import photographs, table
from benchmarks.data_parts import BETWEEN, ORDER, PLACES, REST, SUM, measured
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
