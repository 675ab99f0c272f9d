"""Real jobs in a queue of Kueue with room for one: who waits, who goes first, and where the pods go."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from tests.cluster.kubernetes.controllers import JOBSET_0_11, KUEUE, TRAINER_2_2
from tests.cluster.kubernetes.programs import controlled, kubectl
from tests.cluster.kubernetes.runs import DONE, Demo
from tests.cluster.kubernetes.test_runs import NO_CHECKPOINT, SHORT
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.state import pods_of

# Kueue takes minutes to build, so that all of it is left to `make test-kubernetes-full`.
pytestmark = [pytest.mark.kubernetes, pytest.mark.full, pytest.mark.timeout(1800)]

QUEUE, RACKS = "for-one", "with-racks"
LOW, HIGH = "clipship-test-low", "clipship-test-high"
RACK = "cloud.provider.com/topology-rack"
SIZES = {"job": 0.075, "trainjob": 0.075, "mpijob": 0.05}
"""Cores with which a job of two workers takes the whole quota of QUEUE."""
BEGUN = ("waiting", "running")
"""Words for the state of a job that its queue has let go."""
QUOTAS = {QUEUE: "150m", RACKS: "1"}


def objects(namespace: str) -> Iterator[dict[str, Any]]:
    """Yields two queues, the second of nodes with racks, and two priorities."""
    api = {"apiVersion": f"{KUEUE.group}/v1beta2"}
    yield api | {"kind": "Topology", "metadata": {"name": RACKS}, "spec": {"levels": [{"nodeLabel": RACK}]}}
    for name, quota in QUOTAS.items():
        placed = {"nodeLabels": {RACK: "r1"}, "topologyName": RACKS} if name == RACKS else {}
        yield api | {"kind": "ResourceFlavor", "metadata": {"name": name}, "spec": placed}
        cpu, memory = {"name": "cpu", "nominalQuota": quota}, {"name": "memory", "nominalQuota": "100Gi"}
        group = {
            "coveredResources": ["cpu", "memory"],
            "flavors": [{"name": name, "resources": [cpu, memory]}],
        }
        spec = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [group],
        }
        yield api | {"kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}
        place = {"name": name, "namespace": namespace}
        yield api | {"kind": "LocalQueue", "metadata": place, "spec": {"clusterQueue": name}}
    for value, name in enumerate((LOW, HIGH), 1):
        class_ = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        yield class_ | {"value": value}


@pytest.fixture(scope="module")
def queues(cluster: Cluster) -> Iterator[None]:
    """Queues of Kueue: of the cluster's own, or of one that runs for these tests."""
    with controlled(cluster, JOBSET_0_11, TRAINER_2_2, KUEUE) as folder, ExitStack() as stack:
        made = folder / "queues.yaml"
        made.write_text(yaml.safe_dump_all(objects(cluster.namespace)))
        [node] = cluster.core.list_node().items
        kubectl("label", "node", node.metadata.name, f"{RACK}=r1", "--overwrite")
        stack.callback(kubectl, "label", "node", node.metadata.name, f"{RACK}-")
        stack.callback(kubectl, "delete", "--timeout=60s", "-f", made)
        kubectl("apply", "-f", made)
        yield


def submit(demo: Demo, name: str, kind: str, epochs: int = 2, **keys: Any) -> str:
    """Submits a short job to the queue for one, and returns the name of its object."""
    pods = {"kind": kind, "queue": QUEUE, "cpu_request": SIZES[kind], **keys}
    optim = {**SHORT, "epochs": epochs}
    return demo.submit(name, optim=optim, checkpoint=NO_CHECKPOINT, kubernetes=pods)


def status(demo: Demo, name: str) -> str:
    answer = demo.clipship("status", str(demo.run(name)), code=0)
    return answer.stdout


def until_status(demo: Demo, name: str, text: str) -> None:
    demo.until(
        lambda: text in status(demo, name), lambda: f"{name} does not say {text}: {status(demo, name)}"
    )


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("kind", SIZES)
def test_a_second_job_waits_whole_and_starts_when_the_first_has_ended(demo: Demo, kind: str) -> None:
    submit(demo, f"first-{kind}", kind)
    demo.until(lambda: demo.state(f"first-{kind}") in BEGUN, lambda: status(demo, f"first-{kind}"))
    second = submit(demo, f"second-{kind}", kind)
    until_status(demo, f"second-{kind}", f"{QUEUE}: couldn't assign flavors to pod set")
    assert demo.state(f"second-{kind}").startswith("suspended")

    def first_has_ended() -> bool:
        waits = not pods_of(demo.cluster, KINDS[kind], second)
        ended = demo.state(f"first-{kind}") in DONE
        assert waits or ended, "pods of both jobs were there"
        return ended

    demo.until(first_has_ended, lambda: demo.said(f"first-{kind}"), 0.2)
    assert demo.state(f"first-{kind}") == "succeeded", demo.said(f"first-{kind}")
    assert demo.wait(f"second-{kind}") == "succeeded", demo.said(f"second-{kind}")


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("kind", SIZES)
def test_a_job_that_is_preempted_saves_and_goes_on_when_its_turn_has_come(demo: Demo, kind: str) -> None:
    low, high = f"low-{kind}", f"high-{kind}"
    submit(demo, low, kind, epochs=14, priority_class=LOW)
    demo.wait_for_step(low, 5)
    submit(demo, high, kind, priority_class=HIGH)
    demo.wait_for_step(high, 1)
    assert demo.state(low).startswith("suspended"), status(demo, low)
    at = demo.steps(low)[-1]
    assert demo.wait(high) == "succeeded", demo.said(high)
    demo.lost_no_step(low)
    assert demo.steps(low)[-1] > at


@pytest.mark.usefixtures("queues")
@pytest.mark.parametrize("kind", SIZES)
def test_workers_get_nodes_of_one_rack_and_an_unknown_level_is_named(demo: Demo, kind: str) -> None:
    keys: dict[str, Any] = {"queue": RACKS, "topology": RACK, "placement": "required"}
    name = submit(demo, f"racked-{kind}", kind, **keys)
    demo.wait_for_step(f"racked-{kind}", 1)
    pods = [
        pod for pod in pods_of(demo.cluster, KINDS[kind], name) if "launcher" not in pod["metadata"]["name"]
    ]
    assert [pod["spec"]["nodeSelector"][RACK] for pod in pods] == ["r1", "r1"]
    submit(demo, f"lost-{kind}", kind, **{**keys, "topology": "rack"})
    until_status(demo, f"lost-{kind}", "rack")
    assert demo.wait(f"racked-{kind}") == "succeeded", demo.said(f"racked-{kind}")
