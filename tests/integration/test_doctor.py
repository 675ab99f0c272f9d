"""`clipship doctor` with real ranks, and the same look at the start of a run."""

import json
from pathlib import Path

import pytest

from tests.support.runs import TinyRun, clipship, tiny_run

SMALL = {"global_batch_size": 4, "steps": 1}


@pytest.mark.parametrize("backend", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
def test_doctor_measures_and_leaves_no_run_folder(backend: str, tmp_path: Path) -> None:
    run = TinyRun(tmp_path)
    done = clipship("doctor", run.write(comm={"backend": backend}), "--nproc", "2", "--json")
    found = json.loads(done.stdout)
    assert (found["ranks"], found["errors"], found["left_out"]) == (2, 0, [])
    for rank, reading in enumerate(found["measurements"]):
        assert reading["timings"].keys() == {"latency", "all_gather", "all_reduce"}
        assert reading["pairs"].keys() == {f"rank {1 - rank}"}
        assert all(timing["seconds"] > 0 for timing in reading["timings"].values())
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_that_cannot_be_made_is_found_before_a_run_wants_it(tmp_path: Path) -> None:
    job = TinyRun(tmp_path).write(logging={"runs": "/proc/clipship"})
    done = clipship("doctor", job, "--nproc", "2", code=2)
    assert "the run folder /proc cannot be written" in done.stderr
    assert "--set logging.runs=FOLDER" in done.stderr


def test_run_begins_with_the_same_look_unless_told_not_to(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, optim=SMALL)
    done = run.start(2)
    assert "\npreflight    0 errors, " in done.stdout
    assert len(json.loads((run.run / "preflight.json").read_text())["measurements"]) == 2
    quiet = tiny_run(tmp_path, "quiet", optim=SMALL, health={"preflight": False})
    assert "preflight" not in quiet.start(1).stdout
