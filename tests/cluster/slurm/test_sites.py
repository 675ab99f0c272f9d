"""The batch script with what Slurm's operators for Kubernetes write into slurm.conf, on their Slurm 26.05.

Their pods are not here: no jail, no cgroups of their own, and the nodes' names are in a file of hosts. Pyxis,
which both have, has tests of its own.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.slurm.cluster import Cluster, missing_programs
from tests.cluster.slurm.going_on import SHORTENED, STEPS, TWO_NODES, Cell, check_goes_on
from tests.cluster.slurm.runs import SHORT, Demo

pytestmark = [pytest.mark.site, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Site:
    """Settings of an operator, without those that need its pods: addresses, keys, cgroups, paths."""

    settings: Mapping[str, str]
    files: Mapping[str, str]


# slurm-operator 1.3 leaves the rest to Slurm's own defaults. It brings nodes back itself: here Slurm does.
SLINKY = Site(
    {
        "MaxNodeCount": "1024",
        "SelectType": "",
        "SelectTypeParameters": "",
        "SlurmdUser": "root",
        "SlurmctldParameters": "reconfig_on_restart",
        "MpiDefault": "",
        "KillWait": "",
        "PreemptType": "",
        "PreemptMode": "",
    },
    {},
)
# Soperator 5.0, internal/render/common/configmap.go and the values of its chart slurm-cluster.
SOPERATOR = Site(
    {
        "DefMemPerNode": "0",
        "DefCpuPerGPU": "4",
        "CompleteWait": "5",
        "MessageTimeout": "60",
        "MinJobAge": "1800",
        "TaskProlog": "{folder}/task_prolog.sh",
        "TopologyPlugin": "topology/tree",
        "TopologyParam": "SwitchAsNodeRank",
        "MpiDefault": "pmix",
        "MailProg": "/usr/bin/true",
        "CliFilterPlugins": "cli_filter/user_defaults",
        "LaunchParameters": "use_interactive_step",
        "PropagateResourceLimits": "NONE",
        "KillOnBadExit": "1",
        "WaitTime": "0",
        "SlurmctldParameters": "enable_stepmgr,conmgr_threads=32",
        "PrologFlags": "contain",
        "SchedulerParameters": "nohold_on_prolog_fail,extra_constraints,pack_serial_at_end,sbatch_wait_nodes,"
        "defer_batch,bf_continue,bf_running_job_reserve,sched_interval=2,bf_interval=2",
        "SelectTypeParameters": "CR_Core_Memory,CR_CORE_DEFAULT_DIST_BLOCK",
        "MaxNodeCount": "1024",
        "MaxArraySize": "1024",
        "JobRequeue": "1",
    },
    {
        ".slurm/defaults": "cpu-bind=verbose\n",
        # The order of the switches makes that of a job's nodes: n3 comes before n1.
        "topology.conf": "SwitchName=a Nodes=n3\nSwitchName=b Nodes=n[1-2]\nSwitchName=root Switches=a,b\n",
        "task_prolog.sh": "#!/bin/bash\necho export DOCKER_HOST=unix:///var/run/soperator-docker.sock\n",
    },
)
SITES = {"slinky": SLINKY, "soperator": SOPERATOR}


@pytest.fixture(scope="module", params=SITES)
def demo(request: pytest.FixtureRequest) -> Iterator[Demo]:
    assert not missing_programs(), missing_programs()
    site = SITES[request.param]
    cluster = Cluster(
        Path(tempfile.mkdtemp(prefix="clipship-slurm-", dir="/var/tmp")),
        settings=site.settings,
        files=site.files,
    )
    try:
        cluster.start()
        yield Demo.make(cluster)
    finally:
        cluster.stop()
        shutil.rmtree(cluster.folder, ignore_errors=True)


def test_ranks_of_all_nodes_meet(demo: Demo) -> None:
    """On Soperator the order of a job's nodes is not that of their names."""
    job = demo.submit(
        "meet", resources={"nodes": 3, "gpus_per_node": 1}, optim=SHORT | {"global_batch_size": 63}
    )
    demo.completed("meet", job)
    assert demo.result("meet")["world_size"] == 3
    assert "state       COMPLETED\n" in demo.clipship("status", str(demo.run("meet"))).stdout


def test_a_cancelled_job_saves(demo: Demo) -> None:
    job = demo.submit("cancelled", resources=TWO_NODES | {"nodes": 2})
    demo.wait_for_step("cancelled", 3, job)
    demo.clipship("cancel", str(demo.run("cancelled")), code=0)
    assert demo.wait("cancelled", job)["JobState"] == "CANCELLED"
    assert "ended the run with exit code 75: asked to stop: step " in demo.output("cancelled", job)


def test_a_job_goes_on_in_its_allocation_without_a_lost_node(demo: Demo) -> None:
    check_goes_on(demo, Cell("torch", "node"))


def test_a_job_whose_pod_is_deleted_is_queued_again(demo: Demo) -> None:
    """When a pod ends, Slinky's hook sets its node down, and Slurm queues the job again by itself.

    The node is killed first: a slurmd that still answers would bring it back, as this test's Slurm lets it.
    """
    name = "deleted"
    job = demo.submit(name, resources=TWO_NODES, checkpoint={"every_steps": 5}, optim=SHORTENED)
    demo.wait_for_step(name, 7, job)
    demo.cluster.kill_node("n2")
    demo.cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=pod-is-terminating")
    demo.completed(name, job, restarts="1")
    assert len(demo.losses(name)) == STEPS
