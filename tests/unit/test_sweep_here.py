"""`clipship sweep` without a scheduler: which ends of a run end the sweep."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import TOY_JOB
from trainer.cli.main import main


@pytest.mark.parametrize(
    ("ends", "code", "runs"),
    [
        (75, 75, 1),
        (129, 129, 1),  # SIGHUP
        (130, 130, 1),
        (140, 140, 1),  # SIGUSR2
        (143, 143, 1),  # SIGTERM, before the supervisors heard of it
        (137, 1, 2),  # a rank that the kernel killed
        (1, 1, 2),
        (0, 0, 2),
    ],
)
def test_a_run_that_was_asked_to_stop_ends_the_sweep(
    ends: int, code: int, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def run(job: object, **_: Any) -> int:
        started.append(job)
        return ends

    monkeypatch.setattr("trainer.launch.local.run", run)
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(TOY_JOB)
    assert main(["sweep", "job.toml", "--grid", "seed=0,1", "--nproc", "1"]) == code
    assert len(started) == runs
