"""Real MPIJobs: the demo on both backends and both Open MPIs, as root and not; and each way in which pods and
ranks are lost.
"""

import json
from itertools import product
from typing import Any

import pytest

from tests.cluster.kubernetes.runs import COMMAND_LINES, ENVIRONMENT, KILL_RANK, PATCH, Demo

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]

LEARNED, BEGAN_TO = 0.85, 0.5
"""Top-1 of held-out digits after the demo's epochs, and after six; chance is 0.1."""
HOROVOD: dict[str, Any] = {"backend": "horovod", "deterministic": False}
BACKENDS: dict[str, dict[str, Any]] = {"torch": {"backend": "torch"}, "horovod": HOROVOD}
USERS = {"user": 1000, "root": 0}
PAIRS = {
    ("torch", "openmpi5", "user"),
    ("horovod", "openmpi4", "user"),
    ("horovod", "openmpi5", "root"),
    ("torch", "openmpi4", "root"),
}
EVERY_5 = {"every_steps": 5}
SHORT, THREE_EPOCHS = ({"epochs": epochs, "warmup_steps": 4} for epochs in (6, 3))
NO_CHECKPOINT = {"every_steps": 10_000}
RECOVERY = {"max_restarts": 3, "backoff_s": 0.0, "keep_every_steps": 1}
"""Each step is in memory."""
PATIENT = {"OMPI_MCA_mpi_yield_when_idle": "1"}
"""The pods share this machine's cores: a rank that spins while it waits takes the core from the one it waits
for.
"""
HOSTILE = {
    "LIST": "a,b=c d",
    "QUOTES": "'\"`$(HOME)`\\",
    "DOLLARS": "$$ $",
    "LINES": "one\ntwo\n",
    "EMPTY": "",
    "UTF8": "é\t",
}


def cases() -> list[object]:
    """Six epochs of each pair, and the whole demo in every case."""
    pairs: list[object] = [
        pytest.param(*case, SHORT, BEGAN_TO, id=f"{'-'.join(case)}-six-epochs") for case in sorted(PAIRS)
    ]
    found = product(BACKENDS, ("openmpi4", "openmpi5"), USERS)
    return pairs + [
        pytest.param(*case, {}, LEARNED, marks=pytest.mark.full, id="-".join(case)) for case in found
    ]


@pytest.mark.parametrize(("backend", "image", "user", "optim", "learned"), cases())
def test_the_demo_learns_the_digits(
    backend: str, image: str, user: str, optim: dict[str, int], learned: float, demo: Demo
) -> None:
    name = f"{'short' if optim else 'whole'}-{backend}-{image}-{user}"
    comm = BACKENDS[backend]
    pods = {"run_as_user": USERS[user]}
    demo.submit(name, comm=comm, optim=optim, env=PATIENT, image={"tag": demo.images[image]}, kubernetes=pods)
    assert demo.wait(name) == "succeeded", demo.said(name)
    result = demo.result(name)
    assert result["zero_shot_top1"] > learned
    assert result["world_size"] == 2
    ranks = json.loads((demo.run(name) / "environment.json").read_text())
    assert {rank["node"] for rank in ranks} == {f"{name}-worker-0", f"{name}-worker-1"}
    assert all(rank["backend"].startswith(backend) for rank in ranks)
    assert f"step {demo.steps(name)[-1]}" in demo.clipship("logs", str(demo.run(name))).stdout


def test_a_killed_rank_is_started_again_from_its_checkpoint(demo: Demo) -> None:
    mpijob = demo.submit("killed", optim=SHORT, checkpoint=EVERY_5)
    demo.wait_for_step("killed", 12)
    demo.inside(f"{mpijob}-worker-1", KILL_RANK)
    assert demo.wait("killed") == "succeeded", demo.said("killed")
    said = demo.said("killed")
    assert "killed by SIGKILL in" in said
    assert "the ranks are started again (1 of at most 3)" in said
    assert demo.memory("killed")["starts"] == 2
    assert len(demo.pods(mpijob, "launcher")) == 1
    assert demo.steps("killed") == sorted(set(demo.steps("killed")))


def test_a_worker_that_vanishes_is_replaced_and_the_run_resumes(demo: Demo) -> None:
    mpijob = demo.submit("vanished", optim=SHORT, checkpoint=EVERY_5)
    demo.wait_for_step("vanished", 12)
    demo.delete_pod(f"{mpijob}-worker-1", grace_period_seconds=0)
    assert demo.wait("vanished") == "succeeded", demo.said("vanished")
    assert demo.memory("vanished")["starts"] == 2


def test_memory_that_runs_out_ends_the_job_with_rank_cause_and_step_in_the_pods_message(demo: Demo) -> None:
    small = {"nodes": 2, "gpus_per_node": 1, "cpus_per_gpu": 1, "mem_gb_per_gpu": 0.25}
    mpijob = demo.submit(
        "oom", resources=small, kubernetes={"retries": 1, "backoff_limit": 1, "shm_gb": 0.05}
    )
    assert demo.wait("oom") == "failed", demo.said("oom")
    launchers = demo.pods(mpijob, "launcher")
    ended = [pod["status"]["containerStatuses"][0]["state"]["terminated"] for pod in launchers]
    assert {end["exitCode"] for end in ended} == {1}
    for end in ended:
        assert "rank " in end["message"]
        assert f"on {mpijob}-worker-" in end["message"]
        assert "killed by SIGKILL in" in end["message"]
        assert "last logged step: none, newest checkpoint: none" in end["message"]
    assert demo.memory("oom")["starts"] == 2, "a launcher that came later started the ranks again"
    assert "when memory runs out" in demo.clipship("status", str(demo.run("oom"))).stdout


def test_bad_input_of_the_ranks_ends_the_job_at_once(demo: Demo) -> None:
    mpijob = demo.submit(
        "wrong", data={"train": str(demo.folder / "nothing" / "*.tar")}, kubernetes={"backoff_limit": 0}
    )
    assert demo.wait("wrong") == "failed", demo.said("wrong")
    end = demo.pods(mpijob, "launcher")[0]["status"]["containerStatuses"][0]["state"]["terminated"]
    assert end["exitCode"] == 2, demo.said("wrong")
    assert "no file matches" in demo.said("wrong")


def test_hostile_names_and_values_and_secrets_reach_the_ranks_as_data(demo: Demo) -> None:
    """And cancelled, the run saves before it goes."""
    name = "a #b \"c\" 'd' %j $HOME \\n;é"
    secret = {"metadata": {"name": "wandb"}, "stringData": {"key": "the-secret-value"}}
    demo.cluster.core.create_namespaced_secret(demo.cluster.namespace, secret)
    whole = [{"name": "worker", "envFrom": [{"secretRef": {"name": "wandb"}}]}]
    keys = {
        "env": {"API_KEY": "secret:wandb:key"},
        "patch": PATCH | {"worker": {"spec": {"containers": whole}}},
        "annotations": {"note": HOSTILE["QUOTES"]},
    }
    mpijob = demo.submit(name, env=HOSTILE, checkpoint=NO_CHECKPOINT, kubernetes=keys)
    demo.wait_for_step(name, 5)
    seen = dict(
        entry.split("=", 1)
        for entry in demo.inside(f"{mpijob}-worker-1", ENVIRONMENT).split("\0")
        if "=" in entry
    )
    assert {key: seen.get(key) for key in HOSTILE} == HOSTILE
    assert seen["API_KEY"] == seen["key"] == "the-secret-value"
    for pod in demo.pods(mpijob, "launcher") + demo.pods(mpijob, "worker"):
        lines = demo.inside(pod["metadata"]["name"], COMMAND_LINES)
        assert "trainer" in lines
        assert "the-secret-value" not in lines
        assert seen["CLIPSHIP_TOKEN"] not in lines
    far = demo.elsewhere(name)
    alone = demo.clipship("logs", "--rank", "0", str(far), code=0)
    assert "loss" in alone.stdout
    demo.clipship("logs", "--rank", "7", str(far), code=1)
    demo.clipship("cancel", str(demo.run(name)), code=0)
    demo.until(lambda: not demo.pods(mpijob, "worker"), lambda: f"{mpijob} is still there")
    assert list((demo.run(name) / "checkpoints").glob("step-*/manifest.json")), "it did not save"
    assert demo.state(name).startswith("gone")


def test_two_jobs_of_one_name_do_not_meet(demo: Demo) -> None:
    demo.submit("twice")
    again = demo.clipship("submit", str(demo.write("twice")), "--to", "kubernetes", code=2)
    assert "already exists and has not ended" in again.stderr


def test_a_run_without_its_folder_here_is_followed_through_the_launchers_log(demo: Demo) -> None:
    demo.submit("followed", optim={"epochs": 1, "warmup_steps": 4})
    elsewhere = demo.elsewhere("followed")
    followed = demo.clipship("logs", "-f", str(elsewhere), code=0)
    last = demo.steps("followed")[-1]
    assert f"step {last}/{last}" in followed.stdout
    status = demo.clipship("status", str(elsewhere)).stdout
    assert f"step {last}/{last}" in status
    assert "succeeded" in status
    nobody = {"both": {"spec": {"serviceAccountName": "nobody"}}}
    refused = demo.write("followed", kubernetes={"patch": nobody})
    demo.clipship("submit", str(refused), "--to", "kubernetes", code=1)
    assert (
        "succeeded" in demo.clipship("status", str(elsewhere)).stdout
    )  # what is refused has deleted nothing
    demo.submit("followed", optim={"epochs": 1, "warmup_steps": 4})
    assert "gone" in demo.clipship("status", str(elsewhere)).stdout


def test_a_user_that_the_image_does_not_know_trains_too(demo: Demo) -> None:
    demo.submit("stranger", optim={"epochs": 1, "warmup_steps": 4}, kubernetes={"run_as_user": 4242})
    assert demo.wait("stranger") == "succeeded", demo.said("stranger")
    assert (demo.run("stranger") / "result.json").stat().st_uid == 4242


def test_ranks_that_fail_again_and_again_end_the_job_with_their_cause(demo: Demo) -> None:
    """Within `retries`, and a launcher that comes later does not begin anew."""
    mpijob = demo.submit(
        "hopeless", optim={**SHORT, "lr": 1e-3}, kubernetes={"retries": 0, "backoff_limit": 1}
    )
    demo.wait_for_step("hopeless", 3)
    demo.inside(f"{mpijob}-worker-0", KILL_RANK)
    assert demo.wait("hopeless") == "failed", demo.said("hopeless")
    ended = [
        pod["status"]["containerStatuses"][0]["state"]["terminated"] for pod in demo.pods(mpijob, "launcher")
    ]
    assert len(ended) == 2
    assert len({end["message"] for end in ended}) == 1
    assert (
        f"rank 0 on {mpijob}-worker-0 ended the run with exit code 1: killed by SIGKILL in"
        in ended[0]["message"]
    )
    assert demo.memory("hopeless")["starts"] == 1
