"""`[kubernetes]`: what the MPIJob asks for beside `[resources]`. No cluster is asked."""

import hashlib
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainer.job.fields import AboveZero, Positive, Seconds, Section, Text, VariableName, left_out
from trainer.job.kubernetes_values import (
    DNS_1035_LABEL,
    DNS_LABEL,
    DNS_SUBDOMAIN,
    LABEL_VALUE,
    QUALIFIED_NAME,
    Mount,
    Reference,
    Toleration,
    parse_mount,
    parse_reference,
    parse_toleration,
    refuse_names,
)

JOB_FOLDER = "/etc/clipship"
"""Where pods find the job file."""
_TAKEN = (JOB_FOLDER, "/etc/mpi", "/dev/shm", "/root/.ssh", "/home/clipship/.ssh", "/opt/clipship", "/proc", "/sys", "/dev")
_OPERATORS = ("training.kubeflow.org/", "clipship/", "kueue.x-k8s.io/queue-name")
_NAMES = 'a name is at most 253 of a-z, 0-9, "-" and ".", a letter or digit at both ends (RFC 1123)'
_QUALIFIED = 'write NAME or DOMAIN/NAME, the name at most 63 of letters, digits, "-", "_", "."'


class Patch(Section):
    """What no other key sets: merged into the pod templates as `kubectl patch` does (strategic merge), lists of containers, volumes and
    variables by name."""

    launcher: dict[str, Any] = Field(default_factory=dict)
    """Into the launcher's template: keys `metadata` and `spec`."""
    worker: dict[str, Any] = Field(default_factory=dict)
    """Into the workers' template: keys `metadata` and `spec`."""


class Kubernetes(Section):
    """What the MPIJob asks for beside [resources]: a worker pod for each node, and a launcher pod without a GPU."""

    namespace: Text | None = None
    """None: the namespace that kubectl's context names."""
    name: Text | None = None
    """Of the MPIJob. None: made from the job's name, so that `NAME-worker-N` is a DNS label."""

    run_as_user: Annotated[int, Field(ge=0, lt=2**31)] = 1000
    """User of every process; the image's own is 1000. 0: root, with sshd on port 22 instead of 2222."""
    fs_group: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Group that owns the files of mounted claims. None: the user's own number, none for root. hostPath and NFS know no such thing."""
    seccomp: Literal["RuntimeDefault", "Unconfined"] = "RuntimeDefault"
    """Which system calls the container runtime filters."""

    gpu_resource: Text = "nvidia.com/gpu"
    """The name under which nodes offer GPUs, resources.gpus_per_node of it for each worker. "none": ranks on CPUs."""
    rdma: dict[Text, Positive] = Field(default_factory=dict)
    """Devices of each worker for RDMA, `"rdma/hca_shared_devices" = 1`; workers then get the capability IPC_LOCK."""
    host_network: bool = False
    """Workers use the node's network; sshd and the ranks' meeting take ports that follow from the job's name."""
    cpu_request: AboveZero | None = None
    """Cores that a worker requests. None: its limit, resources.cpus_per_gpu for each GPU."""
    cpu_limit: bool = True
    """false: workers have no limit of cores and may use idle ones."""
    mem_request_gb: AboveZero | None = None
    """Host memory that a worker requests, GiB. None: its limit, resources.mem_gb_per_gpu for each GPU."""
    shm_gb: AboveZero | None = None
    """Size of a worker's /dev/shm, GiB, which counts as its memory; containers have 64 MiB otherwise. None: 2 for each GPU."""
    launcher_cpu: AboveZero = 1.0
    """Cores that the launcher requests."""
    launcher_cpu_limit: AboveZero | None = None
    """Cores that the launcher has at most, where a quota wants a limit of every container. None: no limit."""
    launcher_mem_gb: AboveZero | None = None
    """The launcher's memory, GiB: request and limit. None: 1, and 8 MiB for each worker (an ssh client)."""

    node_selector: dict[Text, str] = Field(default_factory=dict)
    """Labels of the nodes that workers may go to; the launcher goes anywhere (else: patch)."""
    tolerations: tuple[Text, ...] = ()
    """Taints that pods bear, as kubectl writes them: `nvidia.com/gpu:NoSchedule`, `dedicated=clip`; "*": all."""
    pack_by: Text | None = None
    """Label of nodes, such as topology.kubernetes.io/zone: workers go where others of the job are already."""
    spread_by: Text | None = None
    """Label of nodes, such as kubernetes.io/hostname: workers are shared equally by its values."""
    placement: Literal["preferred", "required"] = "preferred"
    """Whether a worker for which pack_by or spread_by cannot be kept starts elsewhere or waits."""
    priority_class: Text | None = None
    service_account: Text | None = None
    image_pull_secrets: tuple[Text, ...] = ()
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """None: Kubernetes' own choice, Always for the tag latest."""
    labels: dict[Text, str] = Field(default_factory=dict)
    """Of the MPIJob and its pods."""
    annotations: dict[Text, str] = Field(default_factory=dict)
    """Of the MPIJob and its pods."""

    mounts: dict[Text, Text] = Field(default_factory=dict)
    """Volumes of every pod by where they appear: `"/data" = "pvc:clip-data"`, `"host:/mnt/data:ro"`, `"nfs:filer:/export"`."""
    env: dict[VariableName, Text] = Field(default_factory=dict)
    """Variables of ranks from what the cluster keeps: `WANDB_API_KEY = "secret:wandb:api-key"`, `"configmap:site:proxy"`."""
    env_from: tuple[Text, ...] = ()
    """Whole Secrets and ConfigMaps as variables of ranks: `"secret:site"`, `"configmap:site"`."""

    queue: Text | None = None
    """Kueue's LocalQueue: the job starts suspended, and Kueue lets it go."""
    gang: Literal["none", "volcano", "scheduler-plugins"] = "none"
    """All workers start or none; the MPI Operator must run with --gang-scheduling of the same name."""
    gang_queue: Text | None = None
    """volcano's queue."""
    gang_timeout_s: Annotated[int, Field(ge=1)] | None = None
    """scheduler-plugins: seconds that the gang waits for room."""

    launcher_start: Literal["workers-ready", "at-once"] = "workers-ready"
    """workers-ready: once every worker's sshd answers. at-once: the launcher waits itself, workers_ready_s limits that too."""
    workers_ready_s: Seconds = 1800.0
    """The longest that the launcher waits for all workers, also for one that was replaced; then the job ends and says which are missing."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Failures in a row, with no new checkpoint in between, after which the launcher starts the ranks again."""
    backoff_limit: Annotated[int, Field(ge=0)] = 3
    """Launcher pods that may be lost."""
    grace_s: Annotated[int, Field(ge=1)] | None = None
    """Between the request to stop and the end of a pod. None: timeouts.checkpoint_s + timeouts.shutdown_s and half a minute."""
    deadline_s: Annotated[int, Field(ge=1)] | None = None
    """The longest that the launcher may run."""
    ttl_s: Annotated[int, Field(ge=0)] | None = None
    """The finished launcher is removed after so many seconds, and its log with it; None: it stays."""
    patch: Patch = left_out(Patch)

    @property
    def is_root(self) -> bool:
        return self.run_as_user == 0

    @property
    def ssh_folder(self) -> str:
        """The operator gives the key mode 0600 in /root/.ssh only; ssh refuses it to root anywhere else, and nobody else minds."""
        return "/root/.ssh" if self.is_root else "/home/clipship/.ssh"

    @property
    def volumes(self) -> tuple[Mount, ...]:
        return tuple(parse_mount(path, text) for path, text in self.mounts.items())

    @property
    def borne(self) -> tuple[Toleration, ...]:
        return tuple(parse_toleration(text) for text in self.tolerations)

    @property
    def variables(self) -> dict[str, Reference]:
        return {name: parse_reference(text, with_key=True) for name, text in self.env.items()}

    @property
    def variable_sources(self) -> tuple[Reference, ...]:
        return tuple(parse_reference(text, with_key=False) for text in self.env_from)

    @field_validator("namespace")
    @classmethod
    def _a_dns_label(cls, value: str | None) -> str | None:
        if value is not None and not DNS_LABEL.fullmatch(value):
            raise ValueError(f'"{value}" is no namespace; expected at most 63 of a-z, 0-9 and "-", with no "-" at the ends (RFC 1123)')
        return value

    @field_validator("name")
    @classmethod
    def _a_dns_1035_label(cls, value: str | None) -> str | None:
        if value is not None and not DNS_1035_LABEL.fullmatch(value):
            raise ValueError(f'"{value}" is no name of an MPIJob; expected a letter, then a-z, 0-9 and "-", no "-" at the end (RFC 1035)')
        return value

    @field_validator("priority_class", "service_account", "gang_queue")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        refuse_names([value] if value is not None else [], DNS_SUBDOMAIN, _NAMES)
        return value

    @field_validator("queue")
    @classmethod
    def _a_label_value(cls, value: str | None) -> str | None:
        refuse_names([value] if value is not None else [], DNS_LABEL, 'a LocalQueue is at most 63 of a-z, 0-9 and "-" (RFC 1123)')
        return value

    @field_validator("image_pull_secrets")
    @classmethod
    def _named_secrets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        refuse_names(value, DNS_SUBDOMAIN, _NAMES)
        return value

    @field_validator("pack_by", "spread_by")
    @classmethod
    def _a_topology_key(cls, value: str | None) -> str | None:
        refuse_names([value] if value is not None else [], QUALIFIED_NAME, _QUALIFIED)
        return value

    @field_validator("gpu_resource")
    @classmethod
    def _a_resource(cls, value: str) -> str:
        if value != "none":
            _refuse_resources([value])
        return value

    @field_validator("rdma")
    @classmethod
    def _resources(cls, value: dict[str, int]) -> dict[str, int]:
        _refuse_resources(value)
        return value

    @field_validator("labels", "node_selector")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        refuse_names(value, QUALIFIED_NAME, _QUALIFIED)
        refuse_names(value.values(), LABEL_VALUE, 'a label\'s value is at most 63 of letters, digits, "-", "_", "."')
        return value

    @field_validator("labels", "annotations")
    @classmethod
    def _free_labels(cls, value: dict[str, str]) -> dict[str, str]:
        refuse_names(value, QUALIFIED_NAME, _QUALIFIED)
        taken = [name for name in value if name.startswith(_OPERATORS)]
        if taken:
            raise ValueError(
                f"{', '.join(taken)} is set by the operator or by clipship: use another name, and [kubernetes] queue for Kueue"
            )
        return value

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: dict[str, str]) -> dict[str, str]:
        for path, text in value.items():
            parse_mount(path, text)
            if path in _TAKEN:
                raise ValueError(f"{path} is taken in every pod: mount the volume elsewhere")
        return value

    @field_validator("tolerations")
    @classmethod
    def _tolerations(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_toleration(text)
        return value

    @field_validator("env")
    @classmethod
    def _references(cls, value: dict[str, str]) -> dict[str, str]:
        for text in value.values():
            parse_reference(text, with_key=True)
        return value

    @field_validator("env_from")
    @classmethod
    def _sources(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_reference(text, with_key=False)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Kubernetes":
        if self.gang_queue is not None and self.gang != "volcano":
            raise ValueError('gang_queue is volcano\'s: set gang = "volcano", or leave it out')
        if self.gang_timeout_s is not None and self.gang != "scheduler-plugins":
            raise ValueError('gang_timeout_s is for gang = "scheduler-plugins"')
        return self


def object_name(job_name: str, kubernetes: Kubernetes, workers: int) -> str:
    """The MPIJob's name: as given, or the job's in lower case; a hash of it follows where other characters or the length had to change.

    `NAME-worker-N` and `NAME-launcher` are DNS labels of 63 characters at most. Raises ValueError where the given name is too long.
    """
    room = 63 - max(len(f"-worker-{workers - 1}"), len("-launcher"))
    if kubernetes.name is not None:
        if len(kubernetes.name) > room:
            raise ValueError(
                f'"{kubernetes.name}" has {len(kubernetes.name)} characters, and its pods, {kubernetes.name}-worker-{workers - 1}, '
                f"may have 63 in all: use at most {room}"
            )
        return kubernetes.name
    if DNS_1035_LABEL.fullmatch(job_name) and len(job_name) <= room:
        return job_name
    mark = hashlib.sha256(job_name.encode()).hexdigest()[:8]
    plain = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return f"{plain[: room - 9].rstrip('-')}-{mark}"


def _refuse_resources(names: Any) -> None:
    refuse_names(names, QUALIFIED_NAME, _QUALIFIED)
    plain = [name for name in names if "/" not in name]
    if plain:
        raise ValueError(f"{', '.join(plain)}: devices have names with a domain, such as nvidia.com/gpu or rdma/hca_shared_devices")
