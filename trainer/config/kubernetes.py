"""`[kubernetes]`: requests of a job's pods beyond `[resources]`. Asks no cluster."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import Field, field_validator, model_validator

from trainer.config.image_folders import hidden_by
from trainer.config.resources import Resources
from trainer.config.types import (
    AboveZero,
    Gibibytes,
    Positive,
    SchedulerSection,
    Seconds,
    Section,
    Text,
    VariableName,
    each,
    fits,
    names_fit,
    optional_section,
    refuse,
    refuse_names,
)
from trainer.text.wording import many

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
DNS_LABEL = re.compile(_LABEL)
"""A DNS label as RFC 1123 defines it."""
DNS_1035_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
QUALIFIED_NAME = re.compile(
    rf"((?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_DATA_KEY = re.compile(r"[A-Za-z0-9_.-]{1,253}")

_MOUNT = re.compile(
    r"(?P<kind>pvc|host|nfs|secret|configmap|csi|empty)(:(?P<rest>[^\x00-\x1f]+?))??(?P<ro>:ro)?"
)
_EMPTY = re.compile(r"(?P<medium>memory)?(:?(?P<size>[0-9]+(\.[0-9]+)?[KMGT]i?))?")
_TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_REFERENCE = re.compile(r"(?P<kind>secret|configmap):(?P<name>[^:]+):(?P<key>[^:]+)")

MOUNT_FORMS = (
    "pvc:CLAIM, pvc:CLAIM/FOLDER, host:/FOLDER, nfs:SERVER:/FOLDER or csi:DRIVER?NAME=VALUE&NAME=VALUE, with "
    ":ro at the end for read-only; secret:NAME, secret:NAME/KEY, configmap:NAME or configmap:NAME/KEY; or "
    "empty, empty:SIZE, empty:memory or empty:memory:SIZE, with a SIZE such as 20Gi"
)
TOLERATION_FORMS = (
    "KEY, KEY:EFFECT, KEY=VALUE or KEY=VALUE:EFFECT; the effect is NoSchedule, PreferNoSchedule or NoExecute"
)


@dataclass(frozen=True)
class Mount:
    """A volume that every pod of the job has at `path`."""

    path: str
    kind: str
    """One of the words before the colon in `MOUNT_FORMS`."""
    source: str = ""
    """Claim, folder of the node or of the server, Secret, ConfigMap, or driver."""
    server: str = ""
    """Server of kind nfs; "" for the others."""
    sub_path: str = ""
    """Folder within the claim, or key of the Secret or ConfigMap; "" for the whole."""
    read_only: bool = False
    attributes: tuple[tuple[str, str], ...] = ()
    """Attributes that the driver of kind csi gets."""
    medium: str = ""
    """"Memory" for kind empty in memory, which counts as the pod's."""
    size: str = ""
    """Limit of kind empty, as Kubernetes writes it; "" for none."""

    @property
    def is_shared(self) -> bool:
        """True if all pods may see the same files there, and others after them."""
        return self.kind in ("pvc", "host", "nfs", "csi")


@dataclass(frozen=True)
class Toleration:
    """A taint that pods tolerate; `value` None means any value, `effect` None any effect."""

    key: str
    value: str | None
    effect: str | None


@dataclass(frozen=True)
class Reference:
    """One key of a Secret or ConfigMap."""

    kind: Literal["secret", "configmap"]
    name: str
    key: str


def parse_mount(path: str, text: str) -> Mount:
    """Read a mount such as `pvc:clip-data/cc3m:ro`. Raises ValueError that says what is allowed."""
    match = _MOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f'"{text}" is not a volume for {path}: write {MOUNT_FORMS}')
    if not path.startswith("/") or path != _plain_path(path) or ":" in path or path == "/":
        raise ValueError(
            f'"{path}" is not a mount path: give an absolute path without "..", "//" and ":", and without '
            "a slash at its end"
        )
    mount = _PARSERS[match["kind"]](path, match["rest"] or "")
    if mount is None:
        raise ValueError(f'"{text}" is not a volume for {path}: write {MOUNT_FORMS}')
    return replace(mount, read_only=True) if match["ro"] else mount


def _claim(path: str, rest: str) -> Mount | None:
    claim, _, folder = rest.partition("/")
    if not DNS_SUBDOMAIN.fullmatch(claim) or (folder and folder != _plain_path(folder)):
        return None
    return Mount(path, "pvc", claim, sub_path=folder)


def _host(path: str, rest: str) -> Mount | None:
    return Mount(path, "host", rest) if _is_folder(rest) else None


def _nfs(path: str, rest: str) -> Mount | None:
    server, _, folder = rest.rpartition(":")
    return Mount(path, "nfs", folder, server=server) if server and _is_folder(folder) else None


def _keys(kind: str) -> "_Parser":
    def parse(path: str, rest: str) -> Mount | None:
        name, slash, key = rest.partition("/")
        if not DNS_SUBDOMAIN.fullmatch(name) or (slash and not _DATA_KEY.fullmatch(key)):
            return None
        return Mount(path, kind, name, sub_path=key, read_only=True)

    return parse


def _csi(path: str, rest: str) -> Mount | None:
    driver, mark, query = rest.partition("?")
    if not DNS_SUBDOMAIN.fullmatch(driver):
        return None
    try:
        attributes = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if mark else []
    except ValueError:
        return None
    return Mount(path, "csi", driver, attributes=tuple(attributes))


def _empty(path: str, rest: str) -> Mount | None:
    match = _EMPTY.fullmatch(rest)
    if match is None:
        return None
    return Mount(path, "empty", medium="Memory" if match["medium"] else "", size=match["size"] or "")


_Parser = Callable[[str, str], Mount | None]
_PARSERS: dict[str, _Parser] = {
    "pvc": _claim,
    "host": _host,
    "nfs": _nfs,
    "secret": _keys("secret"),
    "configmap": _keys("configmap"),
    "csi": _csi,
    "empty": _empty,
}
"""Functions from the mount path and the text after the kind to the mount; None for a text of another form."""


def _is_folder(path: str) -> bool:
    return path.startswith("/") and ".." not in path.split("/")


def parse_toleration(text: str) -> Toleration:
    """Read a toleration such as `dedicated=clip:NoSchedule`; "*" tolerates every taint.

    Raises ValueError that says what is allowed.
    """
    match = _TOLERATION.fullmatch(text)
    if match is None or (match["key"] != "*" and not QUALIFIED_NAME.fullmatch(match["key"])):
        raise ValueError(f'"{text}" is not a toleration: write {TOLERATION_FORMS}')
    if match["value"] is not None and (match["key"] == "*" or not LABEL_VALUE.fullmatch(match["value"])):
        raise ValueError(
            f'"{text}" is not a toleration: a value has at most 63 characters of letters, digits, "-", "_" '
            'and ".", and "*" takes no value'
        )
    return Toleration("" if match["key"] == "*" else match["key"], match["value"], match["effect"])


def parse_reference(text: str) -> Reference:
    """Read a reference such as `secret:wandb:api-key`. Raises ValueError that says what is allowed."""
    match = _REFERENCE.fullmatch(text)
    if match is None or not DNS_SUBDOMAIN.fullmatch(match["name"]):
        raise ValueError(f'"{text}" is not a reference: write secret:NAME:KEY or configmap:NAME:KEY')
    if not _DATA_KEY.fullmatch(match["key"]):
        raise ValueError(
            f'"{match["key"]}" is not a key of a Secret or ConfigMap: a key has at most 253 characters of '
            'letters, digits, "-", "_" and "."'
        )
    return Reference("secret" if match["kind"] == "secret" else "configmap", match["name"], match["key"])


def _plain_path(path: str) -> str:
    """Returns the path without `..`, `.` and double slashes, which Kubernetes refuses or readers overlook."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return ("/" if path.startswith("/") else "") + "/".join(parts)


JOB_FOLDER = "/etc/clipship"
"""Folder in which pods find the job file."""
_TAKEN = (
    JOB_FOLDER,
    "/etc/mpi",
    "/dev/shm",
    "/root/.ssh",
    "/home/clipship/.ssh",
)
_OPERATORS = ("training.kubeflow.org/", "clipship/", "kueue.x-k8s.io/queue-name")
_OWN_LABEL = "app.kubernetes.io/name"
"""Label by which Clipship knows its own objects."""
_SHM_GB_OF_GPU = 2.0
_OF_TEMPLATES = {"metadata", "spec", "$patch"}
"""Keys of a pod's template, and the directive of a strategic merge."""
_LARGEST = 2**31 - 1
"""Largest number in fields of Kubernetes that have 32 bits."""
_NAMES = (
    'a name has at most 253 characters of a-z, 0-9, "-" and ".", with a letter or digit at both ends '
    "(RFC 1123)"
)
_QUALIFIED = (
    'write NAME or DOMAIN/NAME; the name has at most 63 characters of letters, digits, "-", "_" and "."'
)


class Patch(Section):
    """Settings that no other key makes.

    They are merged into the pod templates as `kubectl patch` does (strategic merge): lists of containers,
    volumes and variables by name.
    """

    launcher: dict[str, Any] = Field(default_factory=dict)
    """Merged into the launcher's template: keys `metadata` and `spec`."""
    worker: dict[str, Any] = Field(default_factory=dict)
    """Merged into the workers' template: keys `metadata` and `spec`."""
    both: dict[str, Any] = Field(default_factory=dict)
    """Merged into every template, before the two above."""
    job: dict[str, Any] = Field(default_factory=dict)
    """Merged into the object that runs the job: keys `metadata` and `spec`."""

    @field_validator("launcher", "worker", "both")
    @classmethod
    def _of_a_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse((name for name in value if name not in _OF_TEMPLATES), "a pod has `metadata` and `spec` alone")
        return value


class Kubernetes(SchedulerSection):
    """Requests of a job's pods beyond [resources]: a worker pod per node, and an MPIJob's launcher pod."""

    kind: Literal["mpijob", "job", "trainjob"] | None = None
    """Kind of object that runs the job. job: an Indexed Job with a headless Service, which needs no operator.
    trainjob: the same pods in a TrainJob of Kubeflow Trainer (v2). mpijob: an MPIJob of the MPI Operator,
    which starts the ranks with mpirun. None: what comm.launcher means, mpijob for mpirun and job for
    clipship."""
    namespace: Text | None = None
    """Namespace of all objects. None: the one of kubectl's context."""
    name: Text | None = None
    """Name of the job's object. None: made from the job's name, so that `NAME-worker-N` is a DNS label."""

    run_as_user: Annotated[int, Field(ge=0, lt=2**31)] = 1000
    """User id of every process; the image's own user is 1000. 0: root, with sshd on port 22 instead of 2222.
    """
    read_only_root: bool = True
    """Mount the containers' root file systems read-only, except the mounts, /dev/shm, /tmp and the user's
    home, which are empty at first. false: files that a process writes elsewhere last as long as its
    container."""

    gpu_resource: Text | None = None
    """Name of the resource under which nodes offer GPUs; each worker asks for resources.gpus_per_node of it.
    "none": ranks run on CPUs. None: nvidia.com/gpu, amd.com/gpu or huawei.com/Ascend910, by
    resources.accelerator."""
    rdma: dict[Text, Positive] = Field(default_factory=dict)
    """RDMA devices of each worker, such as `"rdma/hca_shared_devices" = 1`. Workers that run as root then get
    the capability IPC_LOCK; for other users, the nodes must not limit locked memory."""
    network_policy: bool = True
    """Create a NetworkPolicy that lets only pods of this job connect to its pods, if the cluster's network
    plugin enforces policies. There is none for workers on the nodes' network: a policy cannot recognize pods
    there, and the launcher's would keep mpirun's daemons out."""
    cpu_request: AboveZero | None = None
    """Cores that a worker requests. None: its limit, resources.cpus_per_gpu for each GPU."""
    cpu_limit: bool = True
    """Limit a worker's cores; false lets it use idle cores."""
    mem_request_gb: Gibibytes | None = None
    """Host memory that a worker requests, in GiB. None: its limit, resources.mem_gb_per_gpu for each GPU."""
    shm_gb: Gibibytes | None = None
    """Size of a worker's /dev/shm in GiB, which counts as its memory; containers have only 64 MiB by default.
    None: 2 for each GPU, and at most the worker's memory."""

    node_selector: dict[Text, str] = Field(default_factory=dict)
    """Labels that a worker's node must have."""
    tolerations: tuple[Text, ...] = ()
    """Taints that pods tolerate, as kubectl writes them: `nvidia.com/gpu:NoSchedule`, `dedicated=clip`; "*"
    means all."""
    pack_by: Text | None = None
    """Label of nodes, such as topology.kubernetes.io/zone: workers are placed near other workers of the job.
    """
    spread_by: Text | None = None
    """Label of nodes, such as kubernetes.io/hostname: workers are spread evenly over its values."""
    placement: Literal["preferred", "required"] = "preferred"
    """Reaction if pack_by, spread_by or topology cannot be satisfied for a worker. preferred: start it
    elsewhere; required: wait."""
    priority_class: Text | None = None
    """PriorityClass of the pods. None: the cluster's default."""
    labels: dict[Text, str] = Field(default_factory=dict)
    """Labels of the job's objects and pods."""
    annotations: dict[Text, str] = Field(default_factory=dict)
    """Annotations of the job's objects and pods."""
    worker_annotations: dict[Text, str] = Field(default_factory=dict)
    """Annotations of the workers' pods only, such as multus' `"k8s.v1.cni.cncf.io/networks" = "rail-0"`."""

    mounts: dict[Text, Text] = Field(default_factory=dict)
    """Volumes of every pod by mount path: `"/data" = "pvc:clip-data"`, `"host:/mnt/data:ro"`,
    `"nfs:filer:/export"`, `"csi:gcsfuse.csi.storage.gke.io?bucketName=clip"`, `"secret:gcp/key.json"`,
    `"configmap:site"`, `"empty:memory:20Gi"`."""
    env: dict[VariableName, Text] = Field(default_factory=dict)
    """Variables of ranks whose values the cluster keeps: `WANDB_API_KEY = "secret:wandb:api-key"`,
    `"configmap:site:proxy"`."""

    queue: Text | None = None
    """LocalQueue of Kueue: the job is created suspended, and Kueue starts it."""
    topology: Text | None = None
    """Label of nodes that is a level of the queue's topology, such as cloud.provider.com/topology-rack: Kueue
    gives all workers nodes with one value of it. With placement = "preferred" they may be further apart."""
    gang: Literal["none", "volcano", "scheduler-plugins"] = "none"
    """Gang scheduler, which starts all pods or none: volcano, or scheduler-plugins' coscheduling as its
    second scheduler (scheduler-plugins-scheduler). A Job gets a PodGroup of its own. For an MPIJob the MPI
    Operator makes it, and must run with --gang-scheduling=volcano or the second scheduler's name."""
    gang_queue: Text | None = None
    """Queue of Volcano, whose quota the pods count in. None: Volcano's default queue."""
    gang_timeout_s: Annotated[int, Field(ge=1, le=_LARGEST)] | None = None
    """scheduler-plugins: seconds that pods which have a node wait for the rest of the gang. None: what the
    scheduler is set to, 60 by default."""

    launcher_start: Literal["workers-ready", "at-once"] = "workers-ready"
    """Start of the launcher pod. workers-ready: once every worker's sshd answers. at-once: immediately; it
    waits for the workers itself, for workers_ready_s at most."""
    workers_ready_s: Seconds = 1800.0
    """Longest time in seconds to wait for all workers; then the job ends and names the missing ones. An
    MPIJob's launcher waits as long for one that was replaced."""
    retries: Annotated[int, Field(ge=0, le=10_000)] = 3
    """Consecutive failures, without a new checkpoint in between, after which the ranks are still started
    again. Restarts that recovery.max_restarts allows do not count here."""
    backoff_limit: Annotated[int, Field(ge=0, le=10_000)] = 3
    """Number of launcher pods that may be lost. Without a launcher: number of times that each worker may be
    lost, beside those that recovery.max_restarts allows."""
    grace_s: Annotated[int, Field(ge=1)] | None = None
    """Seconds between the request to stop and the end of a pod. None: timeouts.checkpoint_s +
    timeouts.shutdown_s + 30."""
    deadline_s: Annotated[int, Field(ge=1)] | None = None
    """Longest time in seconds that the launcher, or without one the job, may run. None: no limit."""
    patch: Patch = optional_section(Patch)
    hatch = "If it is a field of a pod, or of the object that runs the pods, set it in kubernetes.patch"

    @property
    def without_gpus(self) -> bool:
        """True if pods ask for no GPU."""
        return self.gpu_resource == "none"

    @property
    def is_root(self) -> bool:
        return self.run_as_user == 0

    @property
    def home(self) -> str:
        return "/root" if self.is_root else "/home/clipship"

    @property
    def ssh_folder(self) -> str:
        """Folder of the ssh key.

        The operator gives the key mode 0600 only in /root/.ssh; anywhere else ssh refuses it to root, but to
        no other user.
        """
        return f"{self.home}/.ssh"

    @property
    def volumes(self) -> tuple[Mount, ...]:
        return tuple(parse_mount(path, text) for path, text in self.mounts.items())

    @property
    def borne(self) -> tuple[Toleration, ...]:
        return tuple(parse_toleration(text) for text in self.tolerations)

    @property
    def variables(self) -> dict[str, Reference]:
        return {name: parse_reference(text) for name, text in self.env.items()}

    _a_dns_label = field_validator("namespace")(
        fits(
            DNS_LABEL,
            '"{}" is not a namespace; expected at most 63 characters of a-z, 0-9 and "-", with no "-" at the '
            "ends (RFC 1123)",
        )
    )

    _a_dns_1035_label = field_validator("name")(
        fits(
            DNS_1035_LABEL,
            '"{}" cannot be the name of a Kubernetes object; expected a letter, then a-z, 0-9 and "-", with '
            'no "-" at the end (RFC 1035)',
        )
    )

    _names = field_validator("priority_class", "gang_queue")(names_fit(DNS_SUBDOMAIN, _NAMES))

    _a_label_value = field_validator("queue")(
        names_fit(
            DNS_LABEL,
            'the name of a LocalQueue has at most 63 characters of a-z, 0-9 and "-" (RFC 1123)',
        )
    )

    _topology_keys = field_validator("pack_by", "spread_by", "topology")(
        names_fit(QUALIFIED_NAME, _QUALIFIED)
    )

    @field_validator("gpu_resource")
    @classmethod
    def _a_resource(cls, value: str | None) -> str | None:
        if value not in (None, "none"):
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
        refuse_names(
            value.values(),
            LABEL_VALUE,
            'a label\'s value has at most 63 characters of letters, digits, "-", "_" and "."',
        )
        return value

    @field_validator("labels", "annotations", "worker_annotations")
    @classmethod
    def _free_labels(cls, value: dict[str, str]) -> dict[str, str]:
        refuse_names(value, QUALIFIED_NAME, _QUALIFIED)
        refuse(
            (name for name in value if name.startswith(_OPERATORS)),
            "set by the operator or by clipship; use another name, or kubernetes.queue for Kueue",
        )
        return value

    @field_validator("labels")
    @classmethod
    def _own_label(cls, value: dict[str, str]) -> dict[str, str]:
        refuse(value.keys() & {_OWN_LABEL}, "set by clipship, which knows its own objects by it")
        return value

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: dict[str, str]) -> dict[str, str]:
        for path, text in value.items():
            parse_mount(path, text)
            if path in _TAKEN:
                raise ValueError(f"{path} is in use in every pod: mount the volume elsewhere")
            if own := hidden_by(path):
                raise ValueError(f"{path} would hide the image's {own}: mount the volume elsewhere")
        return value

    _tolerations = field_validator("tolerations")(each(parse_toleration))

    _references = field_validator("env")(each(parse_reference))

    @model_validator(mode="after")
    def _consistent(self) -> "Kubernetes":
        if self.gang_queue is not None and self.gang != "volcano":
            raise ValueError('gang_queue is for gang = "volcano": set that, or leave gang_queue out')
        if self.gang_timeout_s is not None and self.gang != "scheduler-plugins":
            raise ValueError(
                'gang_timeout_s is for gang = "scheduler-plugins": set that, or leave gang_timeout_s out'
            )
        if self.topology is not None and self.queue is None:
            raise ValueError("topology is for Kueue: set queue, or use pack_by instead, which needs no Kueue")
        if self.topology is not None and (self.pack_by is not None or self.spread_by is not None):
            raise ValueError(
                "topology leaves the choice of nodes to Kueue, which knows neither pack_by nor spread_by: "
                "leave these out, or topology"
            )
        return self


def shm_gb_of(kubernetes: Kubernetes, resources: Resources) -> float:
    """Returns the GiB of a worker's /dev/shm, which Kubernetes counts as its memory."""
    for_each = min(_SHM_GB_OF_GPU, resources.mem_gb_per_gpu or _SHM_GB_OF_GPU)
    return kubernetes.shm_gb or for_each * resources.ranks_per_node


def object_name(job_name: str, kubernetes: Kubernetes, workers: int) -> str:
    """Returns the name of the job's object: the given one, or one made from the job's name.

    The job's name is taken in lower case; if other characters or its length have to change, a hash of it is
    added. `NAME-worker-N`, `NAME-launcher` and a TrainJob's `NAME-node-0-N-abcde` are DNS labels of 63
    characters at most. Raises ValueError if the given name is too long.
    """
    longest = "-node-0-99999-abcde" if kubernetes.kind == "trainjob" else f"-worker-{workers - 1}"
    room = 63 - max(len(longest), len("-launcher"))
    if kubernetes.name is not None:
        if len(kubernetes.name) > room:
            raise ValueError(
                f'"{kubernetes.name}" has {many(len(kubernetes.name), "character")}, and its pods, '
                f"{kubernetes.name}{longest}, may have 63 in all: use at most {room}"
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
    refuse(
        (name for name in names if "/" not in name),
        "devices have names with a domain, such as nvidia.com/gpu or rdma/hca_shared_devices",
    )
