"""Real jobs of Volcano (vcjob): two nodes, lost and evicted pods, errors, cancel, and a full cluster."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.kubernetes.controllers import VOLCANO
from tests.cluster.kubernetes.programs import controlled
from tests.cluster.kubernetes.runs import DONE, KILL_RANK, Demo
from tests.cluster.kubernetes.test_gang_schedulers import share_of_node
from tests.cluster.kubernetes.test_job import NO_CHECKPOINT, RECOVERY, THREE_EPOCHS
from tests.cluster.kubernetes.test_runs import BACKENDS, BEGAN_TO, EVERY_5, SHORT, settings
from trainer.errors import EXIT_FAILED
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.state import pods_of

# Volcano is built from a checkout, in minutes, so that all of it is left to `make test-kubernetes-full`.
pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("volcano"),
]

ROW = KINDS["vcjob"]


@pytest.fixture(scope="module")
def volcano(cluster: Cluster) -> Iterator[None]:
    with controlled(cluster, VOLCANO):
        yield


def vcjob(demo: Demo, name: str, **sections: Any) -> str:
    """Submits a vcjob and returns its name."""
    keys = sections.pop("kubernetes", {})
    return demo.submit(name, kubernetes=settings(demo, kind="vcjob", **keys), **sections)


def uids(demo: Demo, name: str) -> dict[str, str]:
    """Returns the uids of the pods that are there, by their names."""
    pods = pods_of(demo.cluster, ROW, name)
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def status_of(demo: Demo, name: str) -> dict[str, Any]:
    found = demo.cluster.read(ROW, name)
    assert found is not None
    status: dict[str, Any] = found["status"]
    return status


def steps_without_a_gap(demo: Demo, run: str) -> bool:
    return demo.steps(run) == list(range(1, demo.steps(run)[-1] + 1))


def test_the_demo_learns_the_digits_as_a_vcjob_of_two_nodes(demo: Demo) -> None:
    name = vcjob(demo, "of-volcano", optim=SHORT)
    demo.wait_for_step("of-volcano", 1)
    assert demo.state("of-volcano") == "running", demo.said("of-volcano")
    assert demo.wait("of-volcano") == "succeeded", demo.said("of-volcano")
    assert status_of(demo, name)["state"]["phase"] == "Completed"
    assert demo.result("of-volcano")["zero_shot_top1"] > BEGAN_TO
    assert demo.result("of-volcano")["world_size"] == 2
    ranks = json.loads((demo.run("of-volcano") / "environment.json").read_text())
    assert {rank["node"] for rank in ranks} == {f"{name}-worker-0", f"{name}-worker-1"}
    last = demo.steps("of-volcano")[-1]
    assert f"step {last}/{last}" in demo.clipship("logs", str(demo.elsewhere("of-volcano"))).stdout


@pytest.mark.parametrize(("backend", "lost"), [("torch", 1), ("torch", 0), ("horovod", 1)])
def test_a_lost_pod_of_a_vcjob_starts_again_and_the_run_goes_on(demo: Demo, backend: str, lost: int) -> None:
    run = f"lost-of-vcjob-{backend}-{lost}"
    comm, sections = BACKENDS[backend], {"checkpoint": NO_CHECKPOINT, "recovery": RECOVERY}
    name = vcjob(demo, run, comm=comm, optim=THREE_EPOCHS, **sections)
    demo.wait_for_step(run, 12)
    before = uids(demo, name)
    demo.kill_pod(f"{name}-worker-{lost}")
    assert demo.wait(run) == "succeeded", demo.said(run)
    assert steps_without_a_gap(demo, run), "a step was lost or done twice"
    [restart] = demo.result(run)["restarts"]
    assert (restart["generation"], restart["kind"], restart["rank"]) == (2, "lost", lost)
    after = uids(demo, name)
    assert {pod for pod in before if before[pod] != after[pod]} == {f"{name}-worker-{lost}"}


def test_without_recovery_a_killed_rank_of_a_vcjob_is_a_new_start(demo: Demo) -> None:
    name = vcjob(demo, "retried-vcjob", optim=SHORT, checkpoint=EVERY_5)
    demo.wait_for_step("retried-vcjob", 12)
    demo.inside(f"{name}-worker-1", KILL_RANK)
    assert demo.wait("retried-vcjob") == "succeeded", demo.said("retried-vcjob")
    assert demo.steps("retried-vcjob") == sorted(set(demo.steps("retried-vcjob")))


def test_a_spare_pod_of_a_vcjob_takes_a_lost_ones_place_and_the_job_is_done(demo: Demo) -> None:
    sections = {"checkpoint": NO_CHECKPOINT, "recovery": {**RECOVERY, "spare_nodes": 1}}
    name = vcjob(demo, "spared-vcjob", optim=THREE_EPOCHS, **sections)
    demo.wait_for_step("spared-vcjob", 12)
    demo.kill_pod(f"{name}-worker-1")
    assert demo.wait("spared-vcjob") == "succeeded", demo.said("spared-vcjob")
    assert steps_without_a_gap(demo, "spared-vcjob")
    assert demo.result("spared-vcjob")["world_size"] == 2


def test_an_evicted_pod_of_a_vcjob_saves_first_and_no_step_is_lost(demo: Demo) -> None:
    name = vcjob(demo, "drained-vcjob", optim=SHORT, checkpoint=NO_CHECKPOINT)
    demo.wait_for_step("drained-vcjob", 12)
    demo.evict_pod(f"{name}-worker-1")
    assert demo.wait("drained-vcjob") == "succeeded", demo.said("drained-vcjob")
    assert steps_without_a_gap(demo, "drained-vcjob")


def test_a_vcjob_whose_run_fails_has_failed_with_its_cause(demo: Demo) -> None:
    name = vcjob(demo, "failing-vcjob", optim=SHORT, kubernetes={"retries": 0})
    demo.wait_for_step("failing-vcjob", 3)
    demo.inside(f"{name}-worker-0", KILL_RANK)
    assert demo.wait("failing-vcjob") == "failed", demo.said("failing-vcjob")
    cause = f"rank 0 on {name}-worker-0 ended the run with exit code {EXIT_FAILED}: killed by SIGKILL"
    assert cause in demo.said("failing-vcjob")
    assert not any(pod["status"]["phase"] == "Running" for pod in pods_of(demo.cluster, ROW, name))


def test_a_cancelled_vcjob_saves_leaves_nothing_and_is_submitted_again(demo: Demo) -> None:
    name = vcjob(demo, "again-vcjob", optim=SHORT, checkpoint=NO_CHECKPOINT)
    demo.wait_for_step("again-vcjob", 5)
    assert demo.clipship("cancel", str(demo.run("again-vcjob"))).returncode == 0
    assert vcjob(demo, "again-vcjob", optim=SHORT, checkpoint=NO_CHECKPOINT) == name
    assert demo.wait("again-vcjob") == "succeeded", demo.said("again-vcjob")
    assert steps_without_a_gap(demo, "again-vcjob"), "it did not save"
    assert vcjob(demo, "again-vcjob", optim=SHORT, checkpoint=NO_CHECKPOINT) == name, "an ended one had it"
    assert demo.clipship("cancel", str(demo.run("again-vcjob"))).returncode == 0
    core, namespace = demo.cluster.core, demo.cluster.namespace
    demo.until(
        lambda: name not in [item.metadata.name for item in core.list_namespaced_service(namespace).items],
        lambda: f"the Service {name} is left",
    )


def test_a_second_vcjob_waits_without_a_node_and_says_so(demo: Demo) -> None:
    keys = {"cpu_request": share_of_node(demo)}
    vcjob(demo, "first-vcjob", optim=SHORT, kubernetes=keys)
    demo.wait_for_step("first-vcjob", 1)
    second = vcjob(demo, "second-vcjob", optim=SHORT, kubernetes=keys)
    demo.until(lambda: demo.state("second-vcjob") == "waiting", lambda: demo.said("second-vcjob"))

    def first_has_ended() -> bool:
        placed = [pod for pod in pods_of(demo.cluster, ROW, second) if "nodeName" in pod["spec"]]
        ended = demo.state("first-vcjob") in DONE
        assert ended or not placed, "pods of both jobs had nodes"
        return ended

    demo.until(first_has_ended, lambda: demo.said("first-vcjob"), 0.2)
    assert demo.state("first-vcjob") == "succeeded", demo.said("first-vcjob")
    assert demo.wait("second-vcjob") == "succeeded", demo.said("second-vcjob")
