"""What the ranks' laps say together."""

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.jobs import tiny_job
from trainer.comm.connect import connect
from trainer.comm.protocol import Comm
from trainer.telemetry import Lap
from trainer.watch import RANKS_FILE, Watch, seen
from trainer.world import detect

QUIET = [0.0, 0.1, 0.0, 0.0, 1.0, 1e9, 0.0, 0.0]


def test_slowest_rank_is_that_of_the_most_work_not_of_the_longest_wait() -> None:
    waits, works = [0.0, 0.1, 0.4, *QUIET[3:]], [0.3, 0.2, 0.0, *QUIET[3:]]
    found = seen([QUIET, waits, works])
    assert (found.slowest_rank, found.slowest_in) == (2, "data")
    assert found.slowest_by == pytest.approx(5.0)
    assert found.values["comm_s_min"] == 0.0
    assert "gpu_bytes_max" not in found.values


def test_of_two_ranks_the_slower_is_compared_with_the_other() -> None:
    found = seen([QUIET, [0.0, 0.3, *QUIET[2:]]])
    assert (found.slowest_rank, found.slowest_in) == (1, "compute")
    assert found.slowest_by == pytest.approx(3.0)


def test_one_rank_is_not_slow() -> None:
    assert seen([QUIET]).slowest_by == 1.0


def test_laps_add_up() -> None:
    both = Lap(2, 1.0, 2.0, 0.5, 0.5) + Lap(2, 1.0, 0.0, 0.0, 0.0)
    assert both.per_step() == {"step_s": 1.25, "data_s": 0.5, "compute_s": 0.5, "comm_s": 0.125, "checkpoint_s": 0.125}


class _TwoRanks:
    """A world of one that shows a second rank, five times as slow."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.world, self.device = comm.world, comm.device

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        other = tensor.clone()
        other[0, 1] = 5 * (tensor[0, 0] + tensor[0, 1]) + 1e-3
        return torch.cat([tensor, other])

    def all_gather_object(self, value: object) -> list[object]:
        return [value, "n2"]

    def pop_seconds(self) -> float:
        return 0.0

    def pop_bytes(self) -> int:
        return 1000


def test_rank_that_stays_slow_is_named_once_and_in_the_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    comm = connect(tiny_job(), detect({}, "here"), {})
    watch = Watch(_TwoRanks(comm), tmp_path)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "clipship"):
        for step in (10, 20, 30):
            watch.clock.step_done()
            watch.look(step)
    comm.close()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("slow         rank 1 on n2 takes ")
    assert message.endswith("(compute); all wait for it. Seen at step 20")
    times, about = watch.pop()
    assert about["slowest_rank"] == 1
    assert about["comm_bytes"] == 1000
    assert times["step_s"] > 0
    assert watch.summary()["slow_ranks"].keys() == {"1"}
    watch.close()
    lines = [json.loads(line) for line in (tmp_path / RANKS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30]
    assert all(len(line["compute_s"]) == 2 for line in lines)
