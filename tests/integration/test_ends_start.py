"""Ranks that cannot meet, or must not.

The run ends at the init limit or at once, and says who is missing or what differs.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ends import HOROVOD_MPIRUN, LATEST_S, MPIRUN, begin, full, starts
from tests.support.runs import TinyRun, kill_tree

NODE = os.uname().nodename
INIT = {"init_s": 15.0}
ROOT = Path(__file__).parents[2]


@pytest.mark.fault("master unreachable, port taken, one rank never starts")
@starts(MPIRUN)
@pytest.mark.parametrize("victim", [pytest.param(0, marks=full), 1])
def test_rank_that_never_starts_is_named_at_the_init_limit(
    tmp_path: Path, backend: str, launcher: str, victim: int
) -> None:
    end = begin(tmp_path, backend, launcher, f"absent:{victim}:start:0", timeouts=INIT).all_end(124)
    assert f"late: rank {victim}, which never joined: it was not started, or" in end.errors
    assert f"timeouts.init_s = {INIT['init_s']:g} s" in end.errors
    assert end.seconds < INIT["init_s"] + LATEST_S + 10  # the other rank's own start counts from later


@pytest.mark.fault("master unreachable, port taken, one rank never starts")
@full
@pytest.mark.mpi
def test_master_that_nobody_reaches_ends_the_run_at_the_init_limit(tmp_path: Path) -> None:
    end = begin(tmp_path, "torch", "mpirun", "unreachable:all:start:0", timeouts=INIT).all_end(124)
    assert f"init lasts longer than timeouts.init_s = {INIT['init_s']:g} s" in end.errors
    assert end.diagnosis["late"] == [0, 1]


@pytest.mark.fault("master unreachable, port taken, one rank never starts")
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("deed", "said"),
    [
        pytest.param(
            "port", "Address already in use (while attempting to bind on address ('127.0.0.1', ", marks=full
        ),
        ("meeting", "the supervisors cannot meet at 127.0.0.1, port"),
    ],
)
def test_port_that_another_process_has_ends_the_run_at_once_and_is_named(
    tmp_path: Path, deed: str, said: str
) -> None:
    end = begin(tmp_path, "torch", "mpirun", f"{deed}:0:start:0").all_end(1)
    assert f"clipship: rank 0 on {NODE} ended the run with exit code 1" in end.errors
    assert said in end.errors


@pytest.mark.fault("two starts of one run at once")
def test_a_second_start_of_a_run_is_refused_with_the_first_ones_name(tmp_path: Path) -> None:
    first = begin(
        tmp_path, "torch", "clipship", "slow:0:step:4", timeouts={"first_step_s": 280.0, "step_s": 280.0}
    )
    first.reached(3)
    second = begin(tmp_path, "torch", "clipship", variables={"LOCK_WAIT_S": "2"}).end(1)
    assert "is writing to the run folder" in second.errors
    assert f" on {NODE} since 20" in second.errors
    assert first.process.poll() is None
    assert not (first.folder / "exit.json").exists(), "it is the first one's, which has not ended"
    kill_tree(first.process.pid)
    first.process.communicate()


@pytest.mark.fault("worlds of unequal size, N worlds of one")
def test_ranks_that_each_see_a_world_of_their_own_leave_at_once(tmp_path: Path) -> None:
    """As under an mpirun that the library was not built for: nobody tells them of each other."""
    job = TinyRun(tmp_path).write()
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))
    } | {"CLIPSHIP_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "trainer.rank", str(job)]
    ranks = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for rank in ranks:
        said = rank.communicate(timeout=60)[1]
        assert rank.returncode == 2
        assert (
            "CLIPSHIP_WORLD_SIZE=2: a world of 2 ranks was expected, but this process sees one of 1" in said
        )
    assert not (tmp_path / "runs").exists()


@pytest.mark.fault("unequal versions or code on one rank")
@starts(HOROVOD_MPIRUN)
def test_other_code_and_another_version_on_one_rank_are_named_at_the_start(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    other = tmp_path / "other"
    for folder in ("trainer", "tests"):
        shutil.copytree(ROOT / folder, other / folder, ignore=shutil.ignore_patterns("__pycache__"))
    changed = other / "trainer" / "model" / "loss.py"
    changed.write_text(changed.read_text() + "\n# changed on one node\n")
    about = other / "webdataset-0.0.1.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: webdataset\nVersion: 0.0.1\n")
    variables = {"OTHER_PATH": str(other)}
    end = begin(tmp_path, backend, launcher, "path:1:start:0", variables=variables).all_end(2)
    assert "the ranks differ in their software or settings:" in end.errors
    assert f"0.0.1 on rank 1 ({NODE})" in end.errors
    assert "  code: " in end.errors
    assert end.errors.count("  python: ") == 0, "what is equal is not listed"
    assert "health.same_environment" in end.errors
    assert json.loads((end.folder / "exit.json").read_text())["exit_code"] == 2
