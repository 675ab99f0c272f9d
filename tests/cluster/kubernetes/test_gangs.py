"""A Job's PodGroup on a real API server, without the scheduler that would place its pods."""

import pytest

from tests.cluster.kubernetes.runs import Demo
from tests.cluster.kubernetes.test_runs import SHORT
from trainer.launch.kubernetes.gangs import GANGS
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.state import pods_of

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("other_kinds")
@pytest.mark.parametrize("scheduler", GANGS)
def test_a_gangs_pod_group_comes_before_its_pods_and_goes_with_the_job(demo: Demo, scheduler: str) -> None:
    run, gang = f"gang-{scheduler}", GANGS[scheduler]
    name = demo.submit(run, optim=SHORT, kubernetes={"kind": "job", "gang": scheduler})
    group = demo.cluster.ask("get", gang.api_version, gang.plural, name)
    assert group["spec"]["minMember"] == 2
    [owner] = group["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Job", name)
    demo.until(lambda: len(pods_of(demo.cluster, KINDS["job"], name)) == 2, lambda: demo.said(run))
    for pod in pods_of(demo.cluster, KINDS["job"], name):
        assert pod["spec"]["schedulerName"] == gang.scheduler
        assert pod["metadata"][gang.marked_in][gang.mark] == name
    demo.clipship("cancel", str(demo.run(run)), code=0)
    asked = ("get", gang.api_version, gang.plural)
    demo.until(lambda: not demo.cluster.ask(*asked)["items"], lambda: f"the PodGroup {name} is left")
