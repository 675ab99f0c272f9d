"""`clipship sweep` on this machine, with real runs of one rank."""

from pathlib import Path

import pytest

from tests.support.ends import write_job
from tests.support.runs import clipship


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("sweep"), "torch", "clipship", "", steps=4)


def test_each_run_is_trained_once_and_one_that_fails_ends_no_other(job: Path) -> None:
    grid = ["--grid", "optim.lr=1e30,1e-4", "--grid", "seed=0,1", "--nproc", "1"]
    done = clipship("sweep", job, *grid, code=1)
    assert "2 runs of 4 failed: ends-lr-1e30-seed-0, ends-lr-1e30-seed-1" in done.stderr
    title, *rows = done.stdout.splitlines()[-5:]
    assert title.split()[:6] == ["run", "optim.lr", "seed", "state", "step", "loss"]
    assert "top-1" in title
    assert ["  done  " in row for row in rows] == [False, False, True, True]
    assert ["ended with 1" in row for row in rows] == [True, True, False, False]

    grid[1] = "optim.lr=1e-4"
    again = clipship("sweep", job, *grid)
    assert "2 runs of 2 are done already" in again.stderr
    assert "run 1 of" not in again.stderr
    assert [row.split() for row in again.stdout.splitlines()[1:]] == [row.split() for row in rows[2:]]
    assert "on one page: clipship report" in again.stderr


def test_a_bad_value_is_found_before_any_run_starts(job: Path) -> None:
    done = clipship("sweep", job, "--grid", "optim.global_batch_size=16,15", "--nproc", "2", code=2)
    assert "no run was started" in done.stderr
    assert "optim.global_batch_size=15: " in done.stderr
    assert not list((job.parent / "runs").glob("ends-global_batch_size*"))
