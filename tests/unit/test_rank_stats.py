"""The figures of all ranks, and what they say together."""

import json
from errno import ENOSPC
from pathlib import Path

import pytest
import torch

from trainer.comm.protocol import Comm
from trainer.run.layout import RANK_STATS_FILE
from trainer.telemetry.rank_stats import RankStats, summarize
from trainer.telemetry.records import Lap

QUIET = [0.0, 0.1, 0.0, 0.0, 1.0, 1e9, 0.0, 0.0, 0.0]


def test_slowest_rank_is_that_of_the_most_work_not_of_the_longest_wait() -> None:
    waits, works = [0.0, 0.1, 0.4, *QUIET[3:]], [0.3, 0.2, 0.0, *QUIET[3:]]
    found = summarize([QUIET, waits, works])
    assert (found["slowest_rank"], found["slowest_by"]) == (2, 5.0)
    assert (found["data_s_max"], found["comm_s_min"]) == (0.3, 0.0)
    assert "gpu_bytes_max" not in found


def test_of_two_ranks_the_slower_is_compared_with_the_other() -> None:
    assert summarize([QUIET, [0.0, 0.3, *QUIET[2:]]])["slowest_by"] == pytest.approx(3.0)


def test_one_rank_is_not_slow() -> None:
    assert summarize([QUIET])["slowest_by"] == 1.0


def test_laps_add_up() -> None:
    both = Lap(2, 1.0, 2.0, 0.5, 0.5) + Lap(2, 1.0, 0.0, 0.0, 0.0)
    assert both.per_step() == {
        "step_s": 1.25,
        "data_s": 0.5,
        "compute_s": 0.5,
        "comm_s": 0.125,
        "checkpoint_s": 0.125,
    }


def test_each_record_is_a_row_and_a_resumed_run_has_each_step_once(alone: Comm, tmp_path: Path) -> None:
    first = RankStats(alone, tmp_path)
    alone.all_gather(torch.zeros(10))
    counts = {"bad_samples": 3.0, "read_requests": 7.0}
    about, totals, values = first.gather(10, Lap(10, 1.0, 3.0, 1.0, 0.0), counts, [torch.tensor(0.5)])()
    first.gather(20, Lap(10, 1.0, 3.0, 1.0, 0.0), {})()
    assert (totals, values) == (counts, [[0.5]])
    assert about["comm_bytes"] == 4
    assert about["comm_share"] == 0.2
    assert about["rss_bytes_max"] > 1e6
    whole = first.summary()
    assert whole.pop("rss_bytes_max") > 1e6
    shares = {"data_share": 0.2, "comm_share": 0.2, "checkpoint_share": 0.0}
    assert whole == {**shares, "step_s": 0.5, "comm_bytes": 2, "slowest_rank": 0, "slowest_share": 1.0}
    RankStats(alone, tmp_path, steps_done=10).gather(20, Lap(10, 1.0, 3.0, 1.0, 0.0), {})()
    lines = [json.loads(line) for line in (tmp_path / RANK_STATS_FILE).read_text().splitlines()]
    assert [(line["step"], line["generation"]) for line in lines] == [(10, 1), (20, 1)]
    assert lines[0]["compute_s"] == [0.3]


def test_a_row_that_a_full_disk_cut_takes_no_other_with_it(alone: Comm, tmp_path: Path) -> None:
    stats = RankStats(alone, tmp_path)
    (tmp_path / RANK_STATS_FILE).write_text('{"step": 10, "data')
    stats.gather(20, Lap(10, 1.0, 3.0, 1.0, 0.0), {})()
    _, row = (tmp_path / RANK_STATS_FILE).read_text().splitlines()
    assert json.loads(row)["step"] == 20


def test_rows_that_a_full_disk_takes_are_told_once(
    alone: Comm, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer.telemetry.rank_stats.append_line", full)
    stats = RankStats(alone, tmp_path)
    for step in (10, 20):
        stats.gather(step, Lap(10, 1.0, 3.0, 1.0, 0.0), {})()
    assert [record.message for record in caplog.records] == [
        (
            "metrics      NOT WRITTEN: [Errno 28] No space left on device. "
            "The run goes on, but ranks.jsonl will have gaps."
        )
    ]
