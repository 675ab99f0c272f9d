"""Sick runs, some of which go on and some of which must end.

The reasons: slow ranks, loaders, full disks, NaN or infinite gradients, memory.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.ends import CLIPSHIP, DEATH_S, HOROVOD, SHORT, begin, full, starts
from tests.support.runs import events

NODE = os.uname().nodename
FULL_DISK = "disk full while a checkpoint is written"


@pytest.mark.fault("one rank slow, in data or in compute", goes_on=True)
@starts(CLIPSHIP)
@pytest.mark.parametrize("phase", ["step", pytest.param("data", marks=full)])
def test_slow_rank_is_flagged_within_20_steps_and_the_run_goes_on(
    tmp_path: Path, backend: str, launcher: str, phase: str
) -> None:
    end = begin(tmp_path, backend, launcher, f"lag:1:{phase}:3", steps=16).end()
    flagged = [event for event in events(end.folder) if "slow_rank" in event]
    assert flagged, end.output
    assert {event["slow_rank"] for event in flagged} == {1}
    assert int(str(flagged[0]["step"])) <= 3 + 20
    assert f"rank 1 on {NODE} works {flagged[0]['own_s']:.3f} s per step" in end.output
    assert float(str(flagged[0]["own_s"])) > 1.0, "the second that it sleeps"
    result = json.loads((end.folder / "result.json").read_text())
    assert result["slow_ranks"] == {"1": len(flagged)}
    assert result["slowest_rank"] == 1
    assert result["lost_s"]["stragglers"] > 10, "the seconds for which rank 0 waited"


@pytest.mark.fault("loader stalls; loader worker killed")
@starts(CLIPSHIP)
def test_loader_that_stalls_ends_the_run_at_the_data_limit(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    then = {"data": SHORT["data"]}  # rank 0's step must not reach its limit before
    running = begin(
        tmp_path, backend, launcher, "worker-stop:1:step:3", steps=50, data={"workers": 1}, then=then
    )
    end = running.all_end(124)
    assert f"timeouts.data_s = {SHORT['data']:g} s" in end.errors
    assert end.diagnosis["late"] == [1]


@pytest.mark.fault("loader stalls; loader worker killed")
@starts(HOROVOD)
def test_death_of_a_loader_process_is_told_with_what_to_look_for(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    end = begin(tmp_path, backend, launcher, "worker-kill:1:step:3", steps=50, data={"workers": 1}).all_end(1)
    assert f"rank 1 on {NODE} ended the run with exit code 1: a loader process died" in end.errors
    assert "out-of-memory killer" in end.errors
    assert end.seconds < DEATH_S + 10  # torch looks after its processes every 5 s


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root and unshare")
@pytest.mark.parametrize(
    ("policy", "code", "steps"),
    [
        pytest.param("continue", 1, 6, marks=pytest.mark.fault(FULL_DISK, goes_on=True)),
        pytest.param("stop", 1, 50, marks=pytest.mark.fault(FULL_DISK)),
    ],
)
def test_full_disk_leaves_the_checkpoint_before_and_follows_the_policy(
    tmp_path: Path, policy: str, code: int, steps: int
) -> None:
    disk = tmp_path / "runs"
    disk.mkdir()
    script = (
        'mount -t tmpfs -o size=64m none "$0" && "$@"; code=$?; rm -f "$0/filling"; cp -r "$0" "$0.after"; '
        "exit $code"
    )
    end = begin(
        tmp_path,
        "torch",
        "clipship",
        "fill:0:checkpoint:4",
        steps=steps,
        checkpoint={"every_steps": 2, "on_failure": policy},
        variables={"FULL_DISK": str(disk)},
        around=["unshare", "-m", "sh", "-c", script, str(disk)],
    ).end(code)
    assert "No space left on device: the checkpoint of step 4 takes " in end.errors + end.output
    assert "make room for " in end.errors
    assert "Traceback" not in end.errors + end.output
    assert ("The run goes on (checkpoint.on_failure = continue)" in end.output) == (policy == "continue")
    left = sorted(path.name for path in (tmp_path / "runs.after" / "ends" / "checkpoints").glob("step-*"))
    assert left == ["step-00000002"], "whole, and the only one that has a name"


@pytest.mark.fault("loss not finite")
@starts(HOROVOD)
def test_gradient_that_is_no_number_stops_the_run_with_its_samples_recorded(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    end = begin(tmp_path, backend, launcher, "nan:1:step:3").end(1)
    assert "the gradient of step 3 is NaN or infinite" in end.errors
    found = [
        json.loads(path.read_text())
        for path in sorted((end.folder / "non-finite").glob("step-00000003-*.json"))
    ]
    assert [record["loss_share"] is None for record in found] == [False, True], "rank 1's is the one"
    assert all(len(record["keys"]) == 8 for record in found)


@pytest.mark.fault("loss not finite", goes_on=True)
@starts(CLIPSHIP)
def test_gradient_that_is_no_number_is_left_out_where_the_job_says_so(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    end = begin(tmp_path, backend, launcher, "nan:1:step:3", health={"non_finite": "skip"}).end()
    losses = {event["step"]: event["loss"] for event in events(end.folder) if "loss" in event}
    assert losses[3] is None
    assert all(isinstance(losses[step], float) for step in (1, 2, 4, 5, 6))
    assert "step skipped, 1 in a row" in end.output


@pytest.mark.fault("loss not finite")
@full
def test_gradients_that_stay_no_numbers_end_the_run(tmp_path: Path) -> None:
    health = {"non_finite": "skip", "non_finite_in_a_row": 3}
    end = begin(tmp_path, "torch", "clipship", optim={"lr": 1e30}, steps=50, health=health).end(1)
    assert "like every gradient of the last 3 steps" in end.errors


@pytest.mark.fault("out of memory on one rank, by a limit")
@starts(CLIPSHIP)
def test_rank_that_runs_out_of_memory_is_named_with_the_numbers(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    end = begin(tmp_path, backend, launcher, "memory:1:step:3").all_end(1)
    headline = next(line for line in end.errors.splitlines() if "ended the run" in line)
    assert f"rank 1 on {NODE}" in headline
    assert "out of memory: " in headline
    assert "GiB (ulimit -v)" in headline
    assert "optim.max_batch_size_per_gpu" in headline
    assert end.seconds < DEATH_S


@pytest.mark.fault("evaluation longer than the collective timeout: uneven over 4 ranks", goes_on=True)
@starts(CLIPSHIP)
def test_evaluation_that_one_of_four_ranks_takes_long_for_ends_nothing(
    tmp_path: Path, backend: str, launcher: str
) -> None:
    """Each collective may last as long as the longest phase that can delay it.

    No library's own limit may end it earlier.
    """
    limits = {"eval_s": 100.0, "step_s": 18.0, "data_s": 16.0}
    end = begin(
        tmp_path, backend, launcher, "nap:3:evaluation:2", ranks=4, timeouts=limits, variables={"NAP_S": "21"}
    ).end()
    assert json.loads((end.folder / "result.json").read_text())["zero_shot_samples"] == 8
