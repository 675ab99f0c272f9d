"""Says whether a job's workers use their nodes' network, and whether a NetworkPolicy isolates them. Pure."""

from collections.abc import Mapping

from trainer.config import Job
from trainer.config.fabric_fit import fabric_of

NETWORKS = ("k8s.v1.cni.cncf.io/", "v1.multus-cni.io/", "networking.gke.io/")
"""Prefixes of annotations that give pods additional networks: multus, and GKE's multi-networking."""


def on_host_network(job: Job) -> bool:
    """Returns whether the workers are on the nodes' network.

    The patch decides; without it the job's fabric, whose adapters may have addresses only there.
    """
    patch = job.kubernetes.patch
    specs = (patch.both.get("spec"), patch.worker.get("spec"))
    patched = [spec["hostNetwork"] for spec in specs if isinstance(spec, Mapping) and "hostNetwork" in spec]
    if patched:
        return patched[-1] is True
    row = fabric_of(job)
    return row is not None and row.needs_interface and not _further_networks(job)


def isolated(job: Job) -> bool:
    """Returns whether the job has a NetworkPolicy, which cannot recognize pods on a node's network."""
    return job.kubernetes.network_policy and not on_host_network(job)


def lacks_interface(job: Job) -> bool:
    """Returns whether the job's adapters have no address that the workers' pods could use."""
    row = fabric_of(job)
    return row is not None and row.needs_interface and not on_host_network(job) and not _further_networks(job)


def _further_networks(job: Job) -> bool:
    names = job.kubernetes.annotations | job.kubernetes.worker_annotations
    return any(name.startswith(NETWORKS) for name in names)
