"""Real Indexed Jobs, which need no operator: a pod is lost, asked to go, or fails, and what the run does."""

from typing import Any

import pytest

from tests.cluster.kubernetes.runs import KILL_RANK, Demo
from tests.cluster.kubernetes.test_runs import (
    BACKENDS,
    BEGAN_TO,
    EVERY_5,
    NO_CHECKPOINT,
    RECOVERY,
    SHORT,
    THREE_EPOCHS,
)
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]
full = pytest.mark.full


def job(demo: Demo, name: str, **sections: Any) -> str:
    """Submits an Indexed Job and returns its name."""
    keys = sections.pop("kubernetes", {})
    return demo.submit(name, kubernetes={"kind": "job", **keys}, **sections)


def ended(demo: Demo, name: str, index: int) -> list[int]:
    """Returns the exit codes of the pods of an index, in their order."""
    states = [pod["status"]["containerStatuses"][0]["state"] for pod in demo.pods_of_index(name, index)]
    return [state["terminated"]["exitCode"] for state in states if "terminated" in state]


def test_the_demo_learns_the_digits_without_an_operator_over_ethernet(demo: Demo) -> None:
    name = job(demo, "indexed", optim=SHORT, resources={"fabric": "ethernet"})
    assert demo.wait("indexed") == "succeeded", demo.said("indexed")
    [pod] = demo.pods_of_index(name, 1)
    assert {"name": "NCCL_NET", "value": "Socket"} in pod["spec"]["containers"][0]["env"]
    assert demo.result("indexed")["zero_shot_top1"] > BEGAN_TO
    assert demo.result("indexed")["world_size"] == 2
    last = demo.steps("indexed")[-1]
    assert f"step {last}/{last}" in demo.clipship("logs", str(demo.elsewhere("indexed"))).stdout
    assert f"step {last}/{last}" in demo.clipship("status", str(demo.folder / "elsewhere/indexed")).stdout


@pytest.mark.parametrize(
    ("backend", "lost"),
    [
        ("torch", 1),
        ("horovod", 0),
        *(pytest.param(*way, marks=full) for way in (("torch", 0), ("horovod", 1))),
    ],
)
def test_a_lost_pod_is_replaced_and_the_run_goes_on_in_its_next_generation(
    demo: Demo, backend: str, lost: int
) -> None:
    name = f"replaced-{backend}-{lost}"
    comm = BACKENDS[backend]
    job(demo, name, comm=comm, optim=THREE_EPOCHS, checkpoint=NO_CHECKPOINT, recovery=RECOVERY)
    demo.wait_for_step(name, 12)
    [pod] = demo.pods_of_index(name, lost)
    demo.kill_pod(pod["metadata"]["name"])
    demo.lost_no_step(name)
    [restart] = demo.result(name)["restarts"]
    assert (restart["generation"], restart["kind"], restart["rank"]) == (2, "lost", lost)
    assert restart["from_step"] >= 11  # no checkpoint has it
    assert len(demo.pods_of_index(name, lost)) == 2
    assert len(demo.pods_of_index(name, 1 - lost)) == 1, "the other pod was replaced, too"


@full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_spare_pod_takes_a_lost_ones_place_and_the_job_is_done(demo: Demo, backend: str) -> None:
    run, spare = f"spared-{backend}", {**RECOVERY, "spare_nodes": 1}
    comm = BACKENDS[backend]
    name = job(demo, run, comm=comm, optim=THREE_EPOCHS, checkpoint=NO_CHECKPOINT, recovery=spare)
    demo.wait_for_step(run, 12)
    [pod] = demo.pods_of_index(name, 1)
    demo.kill_pod(pod["metadata"]["name"])
    demo.lost_no_step(run)
    assert demo.result(run)["world_size"] == 2
    [restart] = demo.result(run)["restarts"]
    assert (restart["kind"], restart["ranks"]) == ("lost", 2)


@full
def test_an_evicted_pod_saves_first_and_the_next_pods_lose_no_step(demo: Demo) -> None:
    name = job(demo, "drained-job", optim=SHORT, checkpoint=NO_CHECKPOINT)
    demo.wait_for_step("drained-job", 12)
    demo.evict_pod(demo.pods_of_index(name, 1)[0]["metadata"]["name"])
    demo.lost_no_step("drained-job")
    assert ended(demo, name, 0) == [EXIT_PREEMPTED, EXIT_DONE]


def test_a_run_that_fails_again_ends_the_job_with_its_cause(demo: Demo) -> None:
    name = job(demo, "failing", optim={**SHORT, "lr": 1e-3}, kubernetes={"retries": 0})
    demo.wait_for_step("failing", 3)
    demo.inside(demo.pods_of_index(name, 0)[0]["metadata"]["name"], KILL_RANK)
    assert demo.wait("failing") == "failed", demo.said("failing")
    assert ended(demo, name, 0) == [EXIT_FAILED]
    assert "rank 0 on failing-0 ended the run with exit code 1: killed by SIGKILL" in demo.said("failing")


@full
def test_without_recovery_a_killed_rank_is_a_new_start_from_its_checkpoint(demo: Demo) -> None:
    name = job(demo, "retried", optim=SHORT, checkpoint=EVERY_5)
    demo.wait_for_step("retried", 12)
    demo.inside(demo.pods_of_index(name, 1)[0]["metadata"]["name"], KILL_RANK)
    assert demo.wait("retried") == "succeeded", demo.said("retried")
    assert demo.steps("retried") == sorted(set(demo.steps("retried")))


def test_bad_input_ends_the_job_at_once(demo: Demo) -> None:
    name = job(demo, "wrong-job", data={"train": str(demo.folder / "nothing" / "*.tar")})
    assert demo.wait("wrong-job") == "failed", demo.said("wrong-job")
    # The first pod that fails ends the Job, and the other one may be deleted before it has.
    assert EXIT_BAD_INPUT in ended(demo, name, 0) + ended(demo, name, 1)
    assert "no file matches" in demo.said("wrong-job")


def test_a_cancelled_job_saves_and_leaves_nothing_but_its_run(demo: Demo) -> None:
    name = job(demo, "cancelled-job", optim=SHORT, checkpoint=NO_CHECKPOINT)
    demo.wait_for_step("cancelled-job", 5)
    again = demo.clipship("submit", str(demo.folder / "job-of-a-test.toml"), "--to", "kubernetes")
    assert (again.returncode, "already exists and has not ended" in again.stderr) == (2, True)
    demo.clipship("cancel", str(demo.run("cancelled-job")), code=0)
    demo.until(lambda: not demo.pods_of_index(name, 0), lambda: f"{name} is still there")
    assert list((demo.run("cancelled-job") / "checkpoints").glob("step-*/manifest.json")), "it did not save"
    core, namespace = demo.cluster.core, demo.cluster.namespace
    demo.until(
        lambda: name not in [item.metadata.name for item in core.list_namespaced_service(namespace).items],
        lambda: f"the Service {name} is left",
    )


@full
def test_a_run_that_leaves_its_mpijob_goes_on_as_a_job_without_losing_a_step(demo: Demo) -> None:
    demo.submit("leaving", optim=SHORT, checkpoint=NO_CHECKPOINT)
    demo.wait_for_step("leaving", 5)
    demo.clipship("cancel", str(demo.run("leaving")), code=0)
    pods, namespace = demo.cluster.core.list_namespaced_pod, demo.cluster.namespace
    demo.until(lambda: not pods(namespace).items, lambda: "the MPIJob's pods are still there")
    job(demo, "leaving", optim=SHORT, checkpoint=NO_CHECKPOINT)
    demo.lost_no_step("leaving")
