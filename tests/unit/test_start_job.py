"""The job of a start in its run folder, and the record from which a run goes on."""

import os
import time
from pathlib import Path

from tests.support.jobs import tiny_job
from trainer.run.start_job import new_start_job, remove_start_jobs, write_start_job


def test_a_start_that_is_over_removes_its_own_job_and_no_other_young_one(tmp_path: Path) -> None:
    """Another start may be between two generations, or before its ranks meet: nobody holds its folder."""
    own, other, left_behind = (new_start_job(tmp_path) for _ in range(3))
    own.parent.mkdir()
    for path in (other, own, left_behind):
        write_start_job(path, tiny_job())
    os.utime(left_behind, (time.time() - 40 * 86400,) * 2)
    remove_start_jobs(tmp_path, own)
    assert own.exists(), "no rank has written the run's own job file"
    (tmp_path / "job.toml").touch()
    remove_start_jobs(tmp_path, own)
    assert [path.exists() for path in (own, other, left_behind)] == [False, True, False]
