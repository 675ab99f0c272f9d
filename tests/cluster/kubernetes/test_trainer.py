"""Real TrainJobs, which Kubeflow Trainer and JobSet make into pods: two nodes, lost pods, errors, gangs."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.kubernetes.controllers import JOBSET, TRAINER
from tests.cluster.kubernetes.crds import crds, defined
from tests.cluster.kubernetes.programs import controlled
from tests.cluster.kubernetes.runs import KILL_RANK, Demo
from tests.cluster.kubernetes.test_runs import (
    BACKENDS,
    BEGAN_TO,
    NO_CHECKPOINT,
    RECOVERY,
    SHORT,
    THREE_EPOCHS,
)
from trainer.errors import EXIT_FAILED
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.gangs import GANGS
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.state import pods_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800), pytest.mark.usefixtures("controllers")]
full = pytest.mark.full

ROW, GANG = KINDS["trainjob"], GANGS["scheduler-plugins"]
JOBSETS = (JOBSET.group, "v1alpha2", "jobsets")
RUNTIMES = (*ROW.api_version.split("/"), "trainingruntimes")


@pytest.fixture(scope="module")
def controllers(cluster: Cluster) -> Iterator[None]:
    """Kubeflow Trainer and JobSet, of the cluster's own or running for these tests; and the kind PodGroup."""
    groups = [crd for crd in crds() if crd["spec"]["group"] == GANG.group]
    with defined(cluster, groups), controlled(cluster, JOBSET, TRAINER):
        yield


def trainjob(demo: Demo, name: str, **sections: Any) -> str:
    """Submits a TrainJob and returns its name."""
    keys = sections.pop("kubernetes", {})
    return demo.submit(name, kubernetes={"kind": "trainjob", **keys}, **sections)


def names(demo: Demo, group: str, version: str, plural: str) -> list[str]:
    """Returns the names of all objects of a kind in the tests' namespace."""
    found = demo.cluster.ask("get", f"{group}/{version}", plural)
    return [item["metadata"]["name"] for item in found["items"]]


def test_the_demo_learns_the_digits_as_a_trainjob_of_two_nodes(demo: Demo) -> None:
    name = trainjob(demo, "trained", optim=SHORT)
    demo.wait_for_step("trained", 1)
    assert demo.state("trained") == "running", demo.said("trained")
    assert names(demo, *JOBSETS) == [name]
    assert demo.wait("trained") == "succeeded", demo.said("trained")
    found = demo.cluster.read(ROW, name)
    assert found is not None
    assert ("Complete", "True") in {(each["type"], each["status"]) for each in found["status"]["conditions"]}
    assert demo.result("trained")["zero_shot_top1"] > BEGAN_TO
    assert demo.result("trained")["world_size"] == 2
    ranks = json.loads((demo.run("trained") / "environment.json").read_text())
    assert {rank["node"] for rank in ranks} == {f"{name}-node-0-0", f"{name}-node-0-1"}
    last = demo.steps("trained")[-1]
    assert f"step {last}/{last}" in demo.clipship("logs", str(demo.elsewhere("trained"))).stdout


@full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_trainjobs_lost_pod_is_replaced_and_the_run_goes_on(demo: Demo, backend: str) -> None:
    """Horovod's ranks too are started by the pods, and meet without MPI."""
    run = f"lost-of-trainjob-{backend}"
    comm, sections = BACKENDS[backend], {"checkpoint": NO_CHECKPOINT, "recovery": RECOVERY}
    name = trainjob(demo, run, comm=comm, optim=THREE_EPOCHS, **sections)
    demo.wait_for_step(run, 12)
    [pod] = demo.pods_of_index(name, 1, "trainjob")
    demo.kill_pod(pod["metadata"]["name"])
    demo.lost_no_step(run)
    [restart] = demo.result(run)["restarts"]
    assert (restart["generation"], restart["kind"], restart["rank"]) == (2, "lost", 1)
    assert len(demo.pods_of_index(name, 1, "trainjob")) == 2
    assert len(demo.pods_of_index(name, 0, "trainjob")) == 1, "the other pod was replaced, too"


@full
def test_a_trainjob_whose_run_fails_has_failed_with_its_cause(demo: Demo) -> None:
    name = trainjob(demo, "failing-trainjob", optim=SHORT, kubernetes={"retries": 0})
    demo.wait_for_step("failing-trainjob", 3)
    demo.inside(demo.pods_of_index(name, 0, "trainjob")[0]["metadata"]["name"], KILL_RANK)
    assert demo.wait("failing-trainjob") == "failed", demo.said("failing-trainjob")
    cause = f"rank 0 on {name}-node-0-0 ended the run with exit code {EXIT_FAILED}: killed by SIGKILL"
    assert cause in demo.said("failing-trainjob")


@full
def test_a_cancelled_trainjob_saves_and_is_submitted_again_under_its_name(demo: Demo) -> None:
    name = trainjob(demo, "again", optim=SHORT, checkpoint=NO_CHECKPOINT)
    demo.wait_for_step("again", 5)
    demo.clipship("cancel", str(demo.run("again")), code=0)
    assert trainjob(demo, "again", optim=SHORT, checkpoint=NO_CHECKPOINT) == name
    demo.lost_no_step("again")
    assert trainjob(demo, "again", optim=SHORT, checkpoint=NO_CHECKPOINT) == name, "an ended one had the name"
    demo.clipship("cancel", str(demo.run("again")), code=0)
    demo.until(
        lambda: not names(demo, *JOBSETS) + names(demo, *RUNTIMES),
        lambda: "a JobSet or TrainingRuntime is left",
    )


@full
def test_kubeflow_trainer_makes_the_pod_group_of_a_trainjobs_gang(demo: Demo) -> None:
    keys = {"gang": "scheduler-plugins", "gang_timeout_s": 90}
    name = trainjob(demo, "gang-of-trainjob", optim=SHORT, kubernetes=keys)
    demo.until(lambda: len(pods_of(demo.cluster, ROW, name)) == 2, lambda: demo.said("gang-of-trainjob"))
    group = demo.cluster.ask("get", GANG.api_version, GANG.plural, name)
    assert (group["spec"]["minMember"], group["spec"]["scheduleTimeoutSeconds"]) == (2, 90)
    [owner] = group["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("TrainJob", name)
    for pod in pods_of(demo.cluster, ROW, name):
        assert pod["spec"]["schedulerName"] == GANG.scheduler
        assert pod["metadata"]["labels"][GANG.mark] == name
