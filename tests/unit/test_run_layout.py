"""The run folder's names."""

from pathlib import Path

from trainer.run import layout


def test_logs_of_ranks_are_found_in_order(tmp_path: Path) -> None:
    (tmp_path / layout.LOGS).mkdir()
    for rank in (100_000, 2, 1):
        (tmp_path / layout.LOGS / layout.rank_log(rank)).touch()
    (tmp_path / layout.LOGS / "rank-1.log").touch()
    assert [rank for rank, _ in layout.rank_logs(tmp_path)] == [1, 2, 100_000]
