"""Runs on a real Slurm of two nodes: each way of starting ranks, and each way in which a job may end."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.slurm.runs import HOSTILE, LIMIT_S, SHORT, Demo, processes_with
from trainer.launch.slurm.script import RENDEZVOUS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

HOROVOD = {"backend": "horovod", "deterministic": False}
TWO_RANKS = {"nodes": 2, "gpus_per_node": 1}
FEWER = {"epochs": 6, "warmup_steps": 10}
"""Enough to learn the digits; four ranks of Horovod on two cores wait for each other by spinning."""
LEARNED = 0.85
"""Top-1 of held-out digits after the demo's epochs; chance is 0.1."""


def _states(demo: Demo) -> set[str]:
    return set(demo.cluster.run("squeue", "--noheader", "--format=%T").stdout.split())


def test_torch_by_srun_learns_the_digits_and_a_time_limit_leaves_no_trace_in_its_losses(demo: Demo) -> None:
    cut = demo.submit("cut")
    demo.wait_for_step("cut", 10, cut)
    demo.cluster.run("scontrol", "update", f"JobId={cut}", "EndTime=now+60")
    demo.until(lambda: demo.cluster.job(cut)["Restarts"] != "0", "the job is not queued again", "cut", cut)
    demo.cluster.run(
        "scontrol", "update", f"JobId={cut}", "TimeLimit=50"
    )  # the limit of before would be the next start's too
    assert demo.wait("cut", cut)["JobState"] == "COMPLETED", demo.output("cut", cut)
    said = demo.output("cut", cut)
    assert "the time limit is near: the ranks save and exit" in said
    assert "clipship: saved; queued again" in said
    assert f"start 2 of job {cut}" in said
    assert int(demo.cluster.job(cut)["Restarts"]) >= 1
    assert demo.result("cut")["zero_shot_top1"] > LEARNED
    assert demo.result("cut")["world_size"] == 4
    resumed = max(int(step) for step in re.findall(r"asked to stop: step (\d+) of 308 is saved", said))
    # without a device of its own in the job, ranks that find no GPU compute on the CPU
    over_ethernet = {"fabric": "ethernet", "device": None}
    whole = demo.submit("whole", resources=over_ethernet, slurm={"gpus": "none"})
    demo.wait_for_step("whole", resumed + 10, whole)
    assert processes_with("NCCL_NET=Socket") >= 4, "the ranks have no variables of their network"
    demo.cluster.run("scancel", whole)
    expected = demo.losses("whole")
    assert {step: loss for step, loss in demo.losses("cut").items() if step in expected} == expected


@pytest.mark.horovod
@pytest.mark.parametrize(
    ("name", "optim"), [("six-epochs", FEWER), pytest.param("whole-demo", {}, marks=pytest.mark.full)]
)
def test_horovod_by_srun_learns_the_digits(demo: Demo, name: str, optim: dict[str, int]) -> None:
    job = demo.submit(name, comm=HOROVOD, optim=optim)
    assert demo.wait(name, job)["JobState"] == "COMPLETED", demo.output(name, job)
    assert demo.result(name)["zero_shot_top1"] > LEARNED
    assert demo.result(name)["world_size"] == 4


@pytest.mark.horovod
def test_horovod_by_mpirun_in_a_run_with_a_hostile_name_and_hostile_variables(demo: Demo) -> None:
    name = "a #b \"c\" 'd' %j $HOME \\n;é"
    job = demo.submit(name, comm=HOROVOD, slurm={"launcher": "mpirun"}, env=HOSTILE, optim=SHORT)
    assert demo.wait(name, job)["JobState"] == "COMPLETED", demo.output(name, job)
    assert demo.result(name)["world_size"] == 4
    assert (
        demo.cluster.run(
            "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%j"
        ).stdout.rstrip("\n")
        == name
    )


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_variables_arrive_on_every_node_as_they_are_written(demo: Demo, launcher: str) -> None:
    name, before = f"variables-{launcher}", time.time()
    found = demo.variables(name, env=HOSTILE, slurm={"launcher": launcher, "python": demo.stand_in()})
    for variables in found:
        assert {key: variables[key] for key in HOSTILE} == HOSTILE
        assert variables["CLIPSHIP_WORLD_SIZE"] == "4"
    for key in (*RENDEZVOUS, "OMP_NUM_THREADS", "CLIPSHIP_BEGAN"):
        assert len({variables[key] for variables in found}) == 1, key
    assert before - 1 <= float(found[0]["CLIPSHIP_BEGAN"]) <= time.time()
    assert len(found[0]["CLIPSHIP_TOKEN"]) == 32


def test_each_node_starts_its_ranks_from_what_sbcast_has_copied_to_it(demo: Demo) -> None:
    copied = "/tmp/python-of-a-test"  # of which each node has its own
    setup = [f"sbcast --force {demo.stand_in()} {copied}"]
    found = demo.variables("broadcast", slurm={"setup": setup, "python": copied})
    assert {variables["SLURMD_NODENAME"] for variables in found} == {"n1", "n2"}


def test_a_killed_rank_ends_the_job_with_its_name_as_the_last_word(demo: Demo) -> None:
    job = demo.submit("killed-rank", resources=TWO_RANKS)
    demo.wait_for_step("killed-rank", 3, job)
    os.kill(_rank_on(demo, "n2"), signal.SIGKILL)
    ended = demo.wait("killed-rank", job)
    last = demo.output("killed-rank", job).splitlines()[-1]
    assert ended["JobState"] == "FAILED"
    assert ended["ExitCode"] == "1:0"
    assert last.startswith("clipship: rank 1 on n2 ended the run with exit code 1: killed by SIGKILL in ")
    assert ended["Restarts"] == "0"
    status = demo.clipship("status", str(demo.run("killed-rank"))).stdout
    assert "state       FAILED\n" in status
    assert "rank 1 on n2: killed by SIGKILL" in status
    assert _leftovers(demo) == []


def _rank_on(demo: Demo, node: str) -> int:
    return next(
        pid for pid in demo.cluster.members(node) if b"trainer.supervise.rank.rank_start" in _command(pid)
    )


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _leftovers(demo: Demo) -> list[bytes]:
    """Ranks that outlived their job; Slurm may need a moment after its last word."""
    for _ in range(20):
        found = [
            _command(pid)
            for node in ("n1", "n2")
            for pid in demo.cluster.members(node)
            if b"trainer." in _command(pid)
        ]
        if not found:
            break
        time.sleep(0.5)
    return found


def test_scancel_saves_and_nothing_queues_the_job_again(demo: Demo) -> None:
    job = demo.submit("cancelled", resources=TWO_RANKS, data={"workers": 1})
    demo.wait_for_step("cancelled", 3, job)
    again = demo.clipship("submit", str(demo.write("cancelled", resources=TWO_RANKS)), "--to", "slurm")
    assert again.returncode == 2
    assert f"is already Slurm job {job} (RUNNING)" in again.stderr
    answer = demo.clipship("cancel", str(demo.run("cancelled")))
    assert answer.returncode == 0, answer.stderr
    assert f"job {job} is cancelled" in answer.stderr
    ended = demo.wait("cancelled", job)
    assert ended["JobState"] == "CANCELLED"
    said = demo.output("cancelled", job)
    assert "Slurm ends the job: the ranks save and exit" in said
    assert "ended the run with exit code 75: asked to stop: step " in said
    assert "queued again" not in said
    assert list((demo.run("cancelled") / "checkpoints").glob("step-*"))
    assert _leftovers(demo) == []
    assert demo.cluster.job(job)["Restarts"] == "0"
    late = demo.clipship("cancel", str(demo.run("cancelled")))
    assert late.returncode == 1
    assert "has already ended" in late.stderr


def test_a_lost_node_queues_the_job_again_and_it_goes_on(demo: Demo) -> None:
    job = demo.submit("lost-node", resources=TWO_RANKS, checkpoint={"every_steps": 5}, optim={"epochs": 6})
    demo.wait_for_step("lost-node", 7, job)
    demo.cluster.kill_node("n2")
    assert demo.wait("lost-node", job)["JobState"] == "COMPLETED", demo.output("lost-node", job)
    assert sorted(demo.losses("lost-node")) == list(range(1, 133))
    assert f"start 2 of job {job} on n[1,3]" in demo.output("lost-node", job)


def test_a_failed_job_is_queued_again_without_the_node_that_failed(demo: Demo) -> None:
    job = demo.submit(
        "retried",
        resources=TWO_RANKS,
        checkpoint={"every_steps": 5},
        optim=SHORT,
        slurm={"retries": 1, "output": str(demo.folder / "printed" / "%x-%j.out")},
    )
    demo.wait_for_step("retried", 7, job)
    os.kill(_rank_on(demo, "n2"), signal.SIGKILL)
    ended = demo.wait("retried", job)
    said = (demo.folder / "printed" / f"retried-{job}.out").read_text()
    assert (ended["JobState"], ended["Restarts"], ended["ExcNodeList"]) == ("COMPLETED", "1", "n2"), said
    assert "clipship: failure 1 of 1 that slurm.retries allows; queued again" in said
    assert f"start 2 of job {job} on n[1,3]" in said
    assert sorted(demo.losses("retried")) == list(range(1, demo.result("retried")["steps"] + 1))


@pytest.mark.full
def test_a_preempted_job_saves_and_goes_on_when_there_is_room(demo: Demo) -> None:
    job = demo.submit("preempted", resources=TWO_RANKS, slurm={"partition": "low"}, optim={"epochs": 4})
    demo.wait_for_step("preempted", 3, job)
    urgent = demo.folder / "urgent.sbatch"
    urgent.write_text("#!/bin/sh\n#SBATCH --nodes=3 --exclusive --partition=all --time=5\nsleep 5\n")
    demo.cluster.run("sbatch", str(urgent), cwd=demo.folder)
    demo.until(lambda: demo.cluster.job(job)["Restarts"] == "1", "the job is not preempted", "preempted", job)
    assert demo.wait("preempted", job)["JobState"] == "COMPLETED", demo.output("preempted", job)
    said = demo.output("preempted", job)
    assert "is saved, and the run can go on" in said
    assert sorted(demo.losses("preempted")) == list(range(1, 89))


def test_no_more_starts_than_the_job_allows(demo: Demo) -> None:
    job = demo.submit("bounded", resources=TWO_RANKS, slurm={"max_restarts": 0})
    demo.wait_for_step("bounded", 2, job)
    demo.cluster.run("scancel", "--batch", "--signal=USR2", job)
    ended = demo.wait("bounded", job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "0")
    assert demo.output("bounded", job).endswith("saved, but not queued again: slurm.max_restarts = 0\n")


def test_a_run_folder_that_only_one_node_has_ends_the_job_and_says_what_to_change(demo: Demo) -> None:
    path = demo.write("not-shared", resources=TWO_RANKS, logging={"runs": "/tmp/clipship-test-runs"})
    script = demo.folder / "not-shared.sbatch"
    script.write_text(demo.clipship("render", "slurm", str(path)).stdout)
    job = demo.cluster.run("sbatch", "--parsable", str(script), cwd=demo.folder).stdout.strip()
    ended = demo.wait("not-shared", job)
    last = (demo.folder / f"slurm-{job}.out").read_text().splitlines()[-1]
    assert ended["ExitCode"] == "2:0"
    assert last.startswith("clipship: rank 1 on n2 ended the run with exit code 2: node n2 does not see ")
    assert last.endswith("(logging.runs), must be on a file system that all nodes share")


def test_a_script_that_was_submitted_by_hand_is_known_to_clipship(demo: Demo) -> None:
    path = demo.write("by-hand", resources={"nodes": 1}, optim={"epochs": 20})  # there is room for two of it
    script = demo.folder / "by-hand.sbatch"
    script.write_text(demo.clipship("render", "slurm", str(path)).stdout)
    job = demo.cluster.run("sbatch", "--parsable", str(script), cwd=demo.folder).stdout.strip()
    demo.wait_for_step("by-hand", 1, job)
    status = demo.clipship("status", str(demo.run("by-hand"))).stdout
    assert "state       RUNNING\n" in status
    assert f"job         {job} on Slurm since 20" in status
    again = demo.clipship("submit", str(path), "--to", "slurm")
    assert (again.returncode, f"is already Slurm job {job} (RUNNING)" in again.stderr) == (2, True)
    second = demo.cluster.run("sbatch", "--parsable", str(script), cwd=demo.folder).stdout.strip()
    assert demo.wait("by-hand", second)["ExitCode"] == "2:0"
    assert (
        f"Slurm job {job} already writes to {demo.run('by-hand')}"
        in (demo.folder / f"slurm-{second}.out").read_text()
    )
    answer = demo.clipship("cancel", str(demo.run("by-hand")))
    assert answer.returncode == 0, answer.stderr
    assert demo.wait("by-hand", job)["JobState"] == "CANCELLED"


def test_a_sweep_is_an_array_whose_tasks_go_on_and_are_cancelled_on_their_own(demo: Demo) -> None:
    path = demo.write("swept", resources={"nodes": 1, "gpus_per_node": 1}, optim={"epochs": 3})
    words = ("sweep", str(path), "--grid", "seed=0,1,2", "--to", "slurm")
    answer = demo.clipship(*words, "--parallel", "1")
    assert answer.returncode == 0, answer.stderr
    first, second, third = answer.stdout.split()
    assert (first.partition("_")[2], third.partition("_")[2]) == ("0", "2")
    names = [f"swept-seed-{seed}" for seed in (0, 1, 2)]
    assert "is cancelled" in demo.clipship("cancel", str(demo.run(names[2]))).stderr
    demo.wait_for_step(names[0], 3, first)
    assert demo.cluster.job(second)["JobState"] == "PENDING"
    demo.cluster.run("scancel", "--batch", "--signal=USR2", first)
    for name, job in ((names[0], first), (names[1], second)):
        assert demo.wait(name, job)["JobState"] == "COMPLETED", demo.output(name, job)
        assert sorted(demo.losses(name)) == list(range(1, demo.result(name)["steps"] + 1))
    assert "clipship: saved; queued again" in demo.output(names[0], first)
    again = demo.clipship(*words, "--list").stdout.splitlines()
    assert [row.split()[2] for row in again[1:3]] == ["done", "done"]
    # A pending task that is cancelled leaves no record in Slurm's memory, only in its accounting.
    assert "CANCELLED" in again[3] or "Slurm no longer knows the job, and accounting is off" in again[3]
    page = demo.clipship("report", str(demo.folder / "runs" / "swept-sweep"))
    assert page.returncode == 0, page.stderr


def test_another_number_of_ranks_than_rendered_is_refused(demo: Demo) -> None:
    script = demo.folder / "changed.sbatch"
    script.write_text(demo.clipship("render", "slurm", str(demo.write("changed"))).stdout)
    job = demo.cluster.run("sbatch", "--parsable", "--nodes=1", str(script), cwd=demo.folder).stdout.strip()
    assert demo.wait("changed", job)["ExitCode"] == "2:0"
    assert "is for 4 ranks, but Slurm gives it 2" in (demo.folder / f"slurm-{job}.out").read_text()


def test_a_part_of_a_heterogeneous_job_does_not_train_alone(demo: Demo) -> None:
    script = demo.folder / "mixed.sbatch"
    job = demo.write("mixed", resources={"nodes": 1})
    script.write_text(demo.clipship("render", "slurm", str(job)).stdout)
    sent = ("sbatch", "--parsable", "--nodes=1", ":", "--nodes=1", "--ntasks=1", str(script))
    number = demo.cluster.run(*sent, cwd=demo.folder).stdout.strip()
    assert demo.wait("mixed", number)["ExitCode"] == "2:0"
    said = (demo.folder / f"slurm-{number}.out").read_text()
    assert "Slurm gives it 2 in one of 2 parts of a heterogeneous job" in said


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"slurm": {"partition": "nope"}}, "slurm.partition (`sinfo` lists the partitions)"),
        ({"resources": {"gpus_per_node": 4}}, "resources.nodes, gpus_per_node, cpus_per_gpu"),
        ({"slurm": {"mem": "900T"}}, "mem"),
        ({"slurm": {"extra": {"constraint": "no-such-feature"}}}, "slurm.extra.constraint"),
        ({"slurm": {"extra": {"no-such-option": "x"}}}, "slurm.extra"),
        ({"slurm": {"extra": {"dependency": "never:1"}}}, "slurm.extra.dependency"),
    ],
)
def test_what_slurm_refuses_names_the_key_to_change(
    demo: Demo, sections: dict[str, dict[str, object]], expected: str
) -> None:
    answer = demo.clipship("submit", str(demo.write("refused", **sections)), "--to", "slurm")
    assert answer.returncode == 2, answer.stderr
    assert answer.stdout == ""
    assert "Slurm refuses the job: sbatch: " in answer.stderr
    assert expected in answer.stderr.partition("\nchange ")[2]
    assert "RUNNING" not in _states(demo)


def test_logs_follow_all_ranks_to_the_end_in_the_order_of_time(demo: Demo) -> None:
    job = demo.submit("followed", resources=TWO_RANKS, optim=SHORT)
    said = demo.clipship("logs", "-f", str(demo.run("followed")), timeout_s=LIMIT_S).stdout
    demo.wait("followed", job)
    assert "step 22/22" in said
    for rank in (0, 1):  # of several ranks only what one look found is in order
        stamps = re.findall(rf"^\[{rank}\] (\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}}) ", said, re.MULTILINE)
        assert stamps[:5] == sorted(stamps[:5]) != [], said
    status = demo.clipship("status", str(demo.run("followed"))).stdout
    assert "state       COMPLETED\n" in status
    assert "step        22 of 22" in status
    assert "result      done" in status
