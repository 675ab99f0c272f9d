"""The network between a job's pods: whether it is their nodes', what it lacks, what is rarely meant. Pure."""

from collections.abc import Iterator, Mapping

from trainer.config import Job
from trainer.config.fabric_fit import fabric_of, nccl_unknown
from trainer.launch.fabric import conflicts, pins_memory, plugin_advice

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


def missing_annotations(job: Job) -> Iterator[str]:
    """Yields a sentence for each annotation of the network that only the job can give."""
    row, given = fabric_of(job), job.kubernetes.annotations | job.kubernetes.worker_annotations
    for line in row.asked_annotations if row else ():
        if line.name not in given:
            yield (
                f'resources.fabric = "{job.resources.fabric}" needs '
                f"kubernetes.worker_annotations.\"{line.name}\" = '{line.value}': {line.why}"
            )


def network_warnings(job: Job) -> Iterator[str]:
    """Yields a sentence for each setting of the network that is allowed but rarely meant."""
    yield from _locked_memory(job)
    yield from _adapters(job)
    yield from nccl_unknown(job)
    yield from plugin_advice(job)
    yield from conflicts(job)
    yield from _isolation(job)
    networks = [name for name in job.kubernetes.annotations if name.startswith(NETWORKS)]
    if networks:
        yield (
            f"kubernetes.annotations: {', '.join(networks)} also applies to the launcher; networks belong "
            "in worker_annotations"
        )


def _locked_memory(job: Job) -> Iterator[str]:
    k8s = job.kubernetes
    if (k8s.rdma or pins_memory(job)) and not k8s.is_root:
        yield (
            f"kubernetes.run_as_user = {k8s.run_as_user}: RDMA needs locked memory, and only root gets the "
            "capability IPC_LOCK. The nodes' container runtime must not limit it (LimitMEMLOCK=infinity), or "
            "set run_as_user = 0"
        )


def _adapters(job: Job) -> Iterator[str]:
    row = fabric_of(job)
    if lacks_interface(job):
        yield (
            f'resources.fabric = "{job.resources.fabric}": with hostNetwork = false in kubernetes.patch the '
            "pods need an interface of their own, such as "
            'worker_annotations."k8s.v1.cni.cncf.io/networks" = "rail-0"'
        )
    if row and row.device and not any(_same_name(name, row.device.value) for name in job.kubernetes.rdma):
        yield (
            f'resources.fabric = "{row.name}": no container gets an adapter without {row.device.name}, such '
            f'as "{row.device.value}" = 1; {row.device.why}'
        )


def _isolation(job: Job) -> Iterator[str]:
    if job.kubernetes.network_policy and on_host_network(job):
        yield (
            "workers on the nodes' network have no NetworkPolicy: anything that reaches the nodes may "
            "connect to the ports of this job; kubernetes.network_policy = false accepts this"
        )


def _same_name(name: str, wanted: str) -> bool:
    """Returns whether a resource has the wanted name, of which NAME stands for any."""
    return wanted.endswith("/NAME") or name == wanted
