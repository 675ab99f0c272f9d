"""Runs on a real Slurm of two nodes: each way of starting ranks, and each way in which a job may end."""

import os
import re
import signal
import time

import pytest

from tests.cluster.slurm.cluster import NODES
from tests.cluster.slurm.going_on import RANK, processes
from tests.cluster.slurm.runs import HOSTILE, LIMIT_S, SHORT, Demo
from trainer.sysinfo.children import processes_with

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

HOROVOD = {"backend": "horovod", "deterministic": False}
ONE_RANK, TWO_RANKS = {"nodes": 1, "gpus_per_node": 1}, {"nodes": 2, "gpus_per_node": 1}
FEWER = {"epochs": 6, "warmup_steps": 10}
"""Enough to learn the digits; four ranks of Horovod on two cores wait for each other by spinning."""
LEARNED = 0.85
"""Top-1 of held-out digits after the demo's epochs; chance is 0.1."""


def test_torch_by_srun_learns_the_digits_and_a_time_limit_leaves_no_trace_in_its_losses(demo: Demo) -> None:
    cut = demo.submit("cut")
    demo.wait_for_step("cut", 10, cut)
    demo.cluster.run("scontrol", "update", f"JobId={cut}", "EndTime=now+50")
    demo.until(lambda: demo.cluster.job(cut)["Restarts"] != "0", "the job is not queued again", "cut", cut)
    demo.cluster.run(
        "scontrol", "update", f"JobId={cut}", "TimeLimit=50"
    )  # the limit of before would be the next start's too
    demo.completed("cut", cut, restarts=demo.cluster.job(cut)["Restarts"])
    said = demo.output("cut", cut)
    assert "the time limit is near: the ranks save and exit" in said
    assert "clipship: saved; queued again" in said
    assert f"start 2 of job {cut}" in said
    assert demo.result("cut")["zero_shot_top1"] > LEARNED
    assert demo.result("cut")["world_size"] == 4
    resumed = max(int(step) for step in re.findall(r"asked to stop: step (\d+) of 308 is saved", said))
    # without a device of its own in the job, ranks that find no GPU compute on the CPU
    over_ethernet = {"fabric": "ethernet", "device": None}
    whole = demo.submit("whole", resources=over_ethernet, slurm={"gpus": "none"})
    demo.wait_for_step("whole", resumed + 10, whole)
    here = processes_with(b"NCCL_NET=Socket\0", "environ")  # as are all nodes
    assert len(here) >= 4, "the ranks have no variables of their network"
    demo.cluster.run("scancel", whole)
    expected = demo.losses("whole")
    assert {step: loss for step, loss in demo.losses("cut").items() if step in expected} == expected


@pytest.mark.horovod
@pytest.mark.parametrize(
    ("name", "optim"), [("six-epochs", FEWER), pytest.param("whole-demo", {}, marks=pytest.mark.full)]
)
def test_horovod_by_srun_learns_the_digits(demo: Demo, name: str, optim: dict[str, int]) -> None:
    job = demo.submit(name, comm=HOROVOD, optim=optim)
    demo.completed(name, job)
    assert demo.result(name)["zero_shot_top1"] > LEARNED
    assert demo.result(name)["world_size"] == 4


@pytest.mark.horovod
def test_horovod_by_mpirun_in_a_run_with_a_hostile_name_and_hostile_variables(demo: Demo) -> None:
    name = "a #b \"c\" 'd' %j $HOME \\n;é"
    job = demo.submit(name, comm=HOROVOD, slurm={"launcher": "mpirun"}, env=HOSTILE, optim=SHORT)
    demo.completed(name, job)
    assert demo.result(name)["world_size"] == 4
    listed = demo.cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%j")
    assert listed.stdout == f"{name}\n"


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_variables_arrive_on_every_node_as_they_are_written(demo: Demo, launcher: str) -> None:
    name, before = f"variables-{launcher}", time.time()
    found = demo.variables(name, env=HOSTILE, slurm={"launcher": launcher, "python": demo.stand_in()})
    for variables in found:
        assert {key: variables[key] for key in HOSTILE} == HOSTILE
        assert variables["CLIPSHIP_WORLD_SIZE"] == "4"
    rendezvous = ("MASTER_ADDR", "MASTER_PORT", "CLIPSHIP_SUPERVISORS", "CLIPSHIP_TOKEN")
    for key in (*rendezvous, "OMP_NUM_THREADS", "CLIPSHIP_BEGAN"):
        assert len({variables[key] for variables in found}) == 1, key
    assert before - 1 <= float(found[0]["CLIPSHIP_BEGAN"]) <= time.time()
    assert len(found[0]["CLIPSHIP_TOKEN"]) == 32


def test_each_node_starts_its_ranks_from_what_sbcast_has_copied_to_it(demo: Demo) -> None:
    copied = "/tmp/python-of-a-test"  # of which each node has its own
    setup = [f"sbcast --force {demo.stand_in()} {copied}"]
    found = demo.variables("broadcast", slurm={"setup": setup, "python": copied})
    assert {variables["SLURMD_NODENAME"] for variables in found} == {"n1", "n2"}


def _leftovers(demo: Demo) -> list[int]:
    """Ranks that outlived their job; Slurm may need a moment after its last word."""
    for _ in range(20):
        found = [pid for node in NODES for pid in processes(demo, node, b"trainer.")]
        if not found:
            break
        time.sleep(0.5)
    return found


def test_scancel_saves_and_nothing_queues_the_job_again(demo: Demo) -> None:
    job = demo.submit("cancelled", resources=TWO_RANKS, data={"workers": 1})
    demo.wait_for_step("cancelled", 3, job)
    again = demo.clipship(
        "submit", str(demo.write("cancelled", resources=TWO_RANKS)), "--to", "slurm", code=2
    )
    assert f"is already Slurm job {job} (RUNNING)" in again.stderr
    answer = demo.clipship("cancel", str(demo.run("cancelled")), code=0)
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
    late = demo.clipship("cancel", str(demo.run("cancelled")), code=1)
    assert "has already ended" in late.stderr


def test_a_lost_node_queues_the_job_again_and_it_goes_on(demo: Demo) -> None:
    job = demo.submit("lost-node", resources=TWO_RANKS, checkpoint={"every_steps": 5}, optim={"epochs": 2})
    demo.wait_for_step("lost-node", 7, job)
    demo.cluster.kill_node("n2")
    demo.completed("lost-node", job, restarts="1")
    assert len(demo.losses("lost-node")) == 44
    assert f"start 2 of job {job} on n[1,3]" in demo.output("lost-node", job)


def test_a_failed_job_is_queued_again_without_the_node_that_failed_and_then_ends_with_a_name(
    demo: Demo,
) -> None:
    """The rank that was killed is the last word."""
    job = demo.submit(
        "retried",
        resources=TWO_RANKS,
        checkpoint={"every_steps": 5},
        slurm={"retries": 1, "output": str(demo.folder / "printed" / "%x-%j.out")},
    )
    demo.wait_for_step("retried", 7, job)
    for node in ("n2", "n3"):
        while not (ranks := processes(demo, node, RANK)):
            time.sleep(0.5)
        os.kill(ranks[0], signal.SIGKILL)
    ended = demo.wait("retried", job)
    said = (demo.folder / "printed" / f"retried-{job}.out").read_text()
    found = tuple(ended[key] for key in ("JobState", "ExitCode", "Restarts", "ExcNodeList"))
    assert found == ("FAILED", "1:0", "1", "n2"), said
    assert "clipship: failure 1 of 1 that slurm.retries allows; queued again" in said
    assert f"start 2 of job {job} on n[1,3]" in said
    last = "clipship: rank 1 on n3 ended the run with exit code 1: killed by SIGKILL in "
    assert said.splitlines()[-1].startswith(last)
    status = demo.clipship("status", str(demo.run("retried"))).stdout
    assert "state       FAILED\n" in status
    assert "rank 1 on n3: killed by SIGKILL" in status
    assert sorted(demo.losses("retried")) == list(range(1, len(demo.losses("retried")) + 1))
    assert _leftovers(demo) == []


@pytest.mark.full
def test_a_preempted_job_saves_and_goes_on_when_there_is_room(demo: Demo) -> None:
    job = demo.submit("preempted", resources=TWO_RANKS, slurm={"partition": "low"}, optim={"epochs": 4})
    demo.wait_for_step("preempted", 3, job)
    demo.preempt()
    demo.until(lambda: demo.cluster.job(job)["Restarts"] == "1", "the job is not preempted", "preempted", job)
    demo.completed("preempted", job, restarts="1")
    assert "is saved, and the run can go on" in demo.output("preempted", job)


def test_no_more_starts_than_the_job_allows(demo: Demo) -> None:
    job = demo.submit("bounded", resources=ONE_RANK, slurm={"max_restarts": 0})
    demo.wait_for_step("bounded", 2, job)
    demo.cluster.run("scancel", "--batch", "--signal=USR2", job)
    ended = demo.wait("bounded", job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "0")
    assert demo.output("bounded", job).endswith("saved, but not queued again: slurm.max_restarts = 0\n")


def test_a_run_folder_that_only_one_node_has_ends_the_job_and_says_what_to_change(demo: Demo) -> None:
    runs = {"runs": "/tmp/clipship-test-runs"}
    job, printed = demo.sbatch(demo.rendered("not-shared", resources=TWO_RANKS, logging=runs))
    ended = demo.wait("not-shared", job)
    last = printed.read_text().splitlines()[-1]
    assert ended["ExitCode"] == "2:0"
    assert last.startswith("clipship: rank 1 on n2 ended the run with exit code 2: node n2 does not see ")
    assert last.endswith("(logging.runs), must be on a file system that all nodes share")


def test_a_script_that_was_submitted_by_hand_is_known_to_clipship(demo: Demo) -> None:
    script = demo.rendered("by-hand", resources=ONE_RANK, optim={"epochs": 20})  # there is room for two of it
    job, _ = demo.sbatch(script)
    demo.wait_for_step("by-hand", 1, job)
    status = demo.clipship("status", str(demo.run("by-hand"))).stdout
    assert "state       RUNNING\n" in status
    assert f"job         {job} on Slurm since 20" in status
    again = demo.clipship("submit", str(demo.folder / "job-of-a-test.toml"), "--to", "slurm")
    assert (again.returncode, f"is already Slurm job {job} (RUNNING)" in again.stderr) == (2, True)
    second, printed = demo.sbatch(script)
    assert demo.wait("by-hand", second)["ExitCode"] == "2:0"
    assert f"Slurm job {job} already writes to {demo.run('by-hand')}" in printed.read_text()
    demo.clipship("cancel", str(demo.run("by-hand")), code=0)
    assert demo.wait("by-hand", job)["JobState"] == "CANCELLED"


def test_a_sweep_is_an_array_whose_tasks_go_on_and_are_cancelled_on_their_own(demo: Demo) -> None:
    path = demo.write("swept", resources=ONE_RANK, optim={"epochs": 3})
    words = ("sweep", str(path), "--grid", "seed=0,1,2", "--to", "slurm")
    answer = demo.clipship(*words, "--parallel", "1", code=0)
    first, second, third = answer.stdout.split()
    assert (first.partition("_")[2], third.partition("_")[2]) == ("0", "2")
    names = [f"swept-seed-{seed}" for seed in (0, 1, 2)]
    assert "is cancelled" in demo.clipship("cancel", str(demo.run(names[2]))).stderr
    demo.wait_for_step(names[0], 3, first)
    assert demo.cluster.job(second)["JobState"] == "PENDING"
    demo.cluster.run("scancel", "--batch", "--signal=USR2", first)
    demo.completed(names[0], first, restarts=None)  # Slurm may signal the task once more when it starts
    demo.completed(names[1], second)
    assert "clipship: saved; queued again" in demo.output(names[0], first)
    again = demo.clipship(*words, "--list").stdout.splitlines()
    assert [row.split()[2] for row in again[1:3]] == ["done", "done"]
    # A pending task that is cancelled leaves no record in Slurm's memory, only in its accounting.
    assert "CANCELLED" in again[3] or "Slurm no longer knows the job, and accounting is off" in again[3]
    demo.clipship("report", str(demo.folder / "runs" / "swept-sweep"), code=0)


def test_another_number_of_ranks_than_rendered_is_refused(demo: Demo) -> None:
    job, printed = demo.sbatch(demo.rendered("changed"), "--nodes=1")
    assert demo.wait("changed", job)["ExitCode"] == "2:0"
    assert "is for 4 ranks, but Slurm gives it 2" in printed.read_text()


def test_a_part_of_a_heterogeneous_job_does_not_train_alone(demo: Demo) -> None:
    parts = ("--nodes=1", ":", "--nodes=1", "--ntasks=1")
    job, printed = demo.sbatch(demo.rendered("mixed", resources={"nodes": 1}), *parts)
    assert demo.wait("mixed", job)["ExitCode"] == "2:0"
    assert "Slurm gives it 2 in one of 2 parts of a heterogeneous job" in printed.read_text()


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
    answer = demo.clipship("submit", str(demo.write("refused", **sections)), "--to", "slurm", code=2)
    assert answer.stdout == ""
    assert "Slurm refuses the job: sbatch: " in answer.stderr
    assert expected in answer.stderr.partition("\nchange ")[2]
    assert "RUNNING" not in demo.cluster.run("squeue", "--noheader", "--format=%T").stdout


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
