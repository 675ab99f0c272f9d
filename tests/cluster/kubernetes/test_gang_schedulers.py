"""Real gangs of Indexed Jobs on the schedulers of Volcano and of the scheduler-plugins: all pods or none."""

from collections.abc import Iterator

import pytest
from kubernetes.utils.quantity import parse_quantity

from tests.cluster.kubernetes.controllers import PLUGINS, VOLCANO
from tests.cluster.kubernetes.programs import controlled
from tests.cluster.kubernetes.runs import DONE, Demo
from tests.cluster.kubernetes.test_runs import NO_CHECKPOINT, RECOVERY, SHORT, THREE_EPOCHS
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.gangs import GANGS
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.state import pods_of

# The schedulers take minutes to build, so that all of it is left to `make test-kubernetes-full`.
pytestmark = [pytest.mark.kubernetes, pytest.mark.full, pytest.mark.timeout(1800)]

PROGRAMS = {"volcano": VOLCANO, "scheduler-plugins": PLUGINS}
ROW = KINDS["job"]


def share_of_node(demo: Demo) -> float:
    """Returns cores for a pod, so that the node has room for three such pods and not for four."""
    [node] = demo.cluster.core.list_node().items
    return round(float(parse_quantity(node.status.allocatable["cpu"])) * 0.27, 3)


@pytest.fixture(scope="module", params=GANGS)
def scheduler(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    with controlled(cluster, PROGRAMS[request.param]):
        yield request.param


def submit(demo: Demo, name: str, scheduler: str, **keys: float) -> str:
    pods = {"kind": "job", "gang": scheduler, **keys}
    return demo.submit(name, optim=SHORT, checkpoint=NO_CHECKPOINT, kubernetes=pods)


def test_a_second_gang_gets_no_node_until_the_first_has_ended(demo: Demo, scheduler: str) -> None:
    first, second, share = f"one-{scheduler}", f"two-{scheduler}", share_of_node(demo)
    submit(demo, first, scheduler, cpu_request=share)
    demo.wait_for_step(first, 1)
    name = submit(demo, second, scheduler, cpu_request=share)
    demo.until(lambda: len(pods_of(demo.cluster, ROW, name)) == 2, lambda: demo.said(second))

    def first_has_ended() -> bool:
        placed = [pod for pod in pods_of(demo.cluster, ROW, name) if "nodeName" in pod["spec"]]
        ended = demo.state(first) in DONE
        assert ended or not placed, f"{len(placed)} of 2 pods of the second gang had a node"
        return ended

    demo.until(first_has_ended, lambda: demo.said(first), 0.2)
    assert demo.state(first) == "succeeded", demo.said(first)
    assert demo.wait(second) == "succeeded", demo.said(second)


def test_a_lost_pod_of_a_gang_alone_gets_a_node_again(demo: Demo, scheduler: str) -> None:
    run = f"lost-of-{scheduler}"
    pods = {"kind": "job", "gang": scheduler, "cpu_request": share_of_node(demo)}
    name = demo.submit(run, optim=THREE_EPOCHS, checkpoint=NO_CHECKPOINT, recovery=RECOVERY, kubernetes=pods)
    demo.wait_for_step(run, 12)
    demo.kill_pod(demo.pods_of_index(name, 1)[0]["metadata"]["name"])
    assert demo.wait(run) == "succeeded", demo.said(run)
    assert len(demo.pods_of_index(name, 0)) == 1, "the other pod was replaced, too"
