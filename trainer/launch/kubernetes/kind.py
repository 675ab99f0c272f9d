"""Base class of the kinds of object that can run a job, with what their pods have in common. Pure."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import tomli_w

from trainer.comm.backends import Launcher, meeting_variables, over_mpi
from trainer.config import Image, Job, Kubernetes
from trainer.config.fabric_fit import fabric_of
from trainer.config.kubernetes import JOB_FOLDER, Mount, Toleration, object_name, shm_gb_of
from trainer.config.loader import own_keys
from trainer.config.stack_table import ARCHITECTURES, ARM64
from trainer.errors import InputError
from trainer.launch.fabric import cluster_environment, pins_memory
from trainer.launch.kubernetes.gangs import GANGS, Gang, Yaml
from trainer.launch.kubernetes.network import isolated, on_host_network
from trainer.launch.kubernetes.places import Carried, carried
from trainer.launch.kubernetes.pod.names import JOB_UID
from trainer.text.wording import many

Object = dict[str, Any]
"""An object of the API, as the server has it."""
JOB_FILE = f"{JOB_FOLDER}/job.toml"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_MEETING_PORT, _MASTER_PORT = 29400, 29401
# root needs them on volumes whose files belong to another user
_FILES_OF_OTHERS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID")
OWN_UID: Yaml = {
    "name": JOB_UID,
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
}
_KEY_REF = {"secret": "secretKeyRef", "configmap": "configMapKeyRef"}

_BUILD = Image.model_fields.keys() - {"tag"}


def run_name(job: Job) -> str:
    """Returns the name of the job's object. Raises InputError if the given name is too long."""
    try:
        return object_name(job.name, job.kubernetes, job.resources.nodes)
    except ValueError as problem:
        raise InputError(f"kubernetes.name: {problem}") from None


def beside_name(name: str) -> str:
    """Returns the name of the ConfigMap and of the NetworkPolicy that belong to the object."""
    return f"{name}-job"


def program(name: str, *arguments: str) -> list[str]:
    """Returns the command of a pod's first process, a module of `trainer.launch.kubernetes.pod`."""
    python = "/opt/clipship/bin/python"
    return [python, "-P", "-m", f"trainer.launch.kubernetes.pod.{name}", *arguments]


def _of_job(path: str, name: str) -> Yaml:
    """Returns the mount of one file of the job's ConfigMap."""
    return {"name": "job", "mountPath": path, "subPath": name, "readOnly": True}


@dataclass(frozen=True)
class Kind(ABC):
    """One kind of object. The template of a job prints the properties of `Kind(job)`.

    The class itself serves for objects in the cluster, whose job need not be known.
    """

    job: Job
    name_in_job: ClassVar[str]
    """Value of `kubernetes.kind`."""
    kind: ClassVar[str]
    """Its name in Kubernetes, and in messages."""
    api_version: ClassVar[str]
    plural: ClassVar[str]
    controller: ClassVar[str]
    """Program that makes its pods, in messages."""
    advice: ClassVar[str]
    """Advice for a cluster that does not know the kind."""
    template: ClassVar[str]
    succeeded: ClassVar[str]
    """Condition of an object that has ended well."""
    launcher: ClassVar[Launcher]
    """Launcher of the ranks, as the backends know it."""
    starter: ClassVar[str]
    """Program that starts the ranks."""
    starts_ranks_by: ClassVar[str]
    """The same in a clause."""
    keeps_going: ClassVar[bool]
    """True if the other pods go on when one is gone. MPI ends all, and has a launcher's pod without ranks."""
    pod_label: ClassVar[str]
    """Label of the pods that has the object's name."""
    output: ClassVar[Mapping[str, str]]
    """Labels of the pods whose logs are the run's output; there is one at a time."""
    output_pod: ClassVar[str]
    """Such a pod, in messages."""
    first_pod_suffix: ClassVar[str]
    """End of the name of the pod with rank 0, behind the object's name."""
    makes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the names of further objects that the controller makes."""
    without: ClassVar[tuple[str, ...]] = ()
    """Keys of [kubernetes] that mean nothing for this kind."""
    unseen: ClassVar[tuple[str, ...]] = ()
    """Parts of the words with which controllers refuse an object before they have seen those beside it."""
    own_references: ClassVar[Sequence[Yaml]] = ()
    """Variables of the pods with ranks whose values Kubernetes fills in."""
    capabilities: ClassVar[tuple[str, ...]] = ()
    """Capabilities that root needs in a pod with ranks, beside those for files."""

    @classmethod
    @abstractmethod
    def pods(cls, objects: Sequence[Object]) -> dict[str, Object]:
        """Returns the parts of the rendered objects that hold a pod's `template`, by its role."""

    @classmethod
    @abstractmethod
    def workers(cls, found: Object) -> int:
        """Returns the number of the pods that have ranks."""

    @classmethod
    @abstractmethod
    def ended_at(cls, found: Object) -> str | None:
        """Returns the time at which the object has ended; None if it has not."""

    @classmethod
    @abstractmethod
    def phase(cls, found: Object) -> tuple[str, str] | None:
        """Returns a word for what the object does, and since when; None if its status does not say."""

    @staticmethod
    def conditions(found: Object) -> dict[str, Object]:
        """Returns what the object's status says to be true, by the name of the condition."""
        given = found.get("status", {}).get("conditions", [])
        return {each["type"]: each for each in given if each["status"] == "True"}

    @property
    def first_pod(self) -> str:
        """Name of the pod with rank 0, as other pods resolve it."""
        return f"{self.name}-{self.first_pod_suffix}.{self.name}"

    @property
    def own_pods(self) -> Yaml:
        """Selector of all pods of the job."""
        return {"matchLabels": {self.pod_label: self.name}}

    @property
    def worker_pods(self) -> Yaml:
        """Selector of the pods that have ranks."""
        return self.own_pods

    @property
    def own_variables(self) -> dict[str, str]:
        """Variables of the pods with ranks that only this kind has."""
        return {}

    @property
    def members(self) -> int:
        """Number of supervisors that are started, which may be more than there are ranks."""
        return self.job.resources.world_size

    @cached_property
    def k8s(self) -> Kubernetes:
        return self.job.kubernetes

    @cached_property
    def name(self) -> str:
        return run_name(self.job)

    @property
    def beside_name(self) -> str:
        return beside_name(self.name)

    @property
    def title(self) -> str:
        ranks = f"{many(self.job.resources.world_size, 'rank')} on {many(self.job.resources.nodes, 'worker')}"
        return f"{self.job.name}: {ranks}, comm.backend {self.job.comm.backend}"

    @property
    def job_text(self) -> str:
        """Text of the job file without defaults and without the parts that have no meaning in a pod.

        These are Slurm's section, and how the image was built.
        """
        table = own_keys(self.job)
        table.pop("slurm", None)
        if image := table.pop("image", {}):
            table["image"] = {key: value for key, value in image.items() if key not in _BUILD}
        return tomli_w.dumps(table)

    @cached_property
    def carried(self) -> Sequence[Carried]:
        """Files that travel with the job file."""
        return list(carried(self.job))

    @property
    def labels(self) -> Yaml:
        return {"app.kubernetes.io/name": "clipship", **self.k8s.labels}

    @property
    def pod_labels(self) -> Yaml:
        return self.labels

    @property
    def queued_labels(self) -> Yaml:
        """Labels of the object that Kueue admits, which the objects beside it must not have."""
        return self.labels | ({QUEUE_LABEL: self.k8s.queue} if self.k8s.queue else {})

    @property
    def gang(self) -> Gang | None:
        """Scheduler that starts all pods or none."""
        return GANGS.get(self.k8s.gang)

    @property
    def worker_annotations(self) -> Yaml:
        row = fabric_of(self.job)
        of_fabric = {line.name: line.value for line in row.annotations} if row else {}
        level = {f"kueue.x-k8s.io/podset-{self.k8s.placement}-topology": self.k8s.topology}
        of_kueue = level if self.k8s.topology else {}
        return of_fabric | of_kueue | self.k8s.annotations | self.k8s.worker_annotations

    @property
    def grace_s(self) -> int:
        limits = self.job.timeouts
        return self.k8s.grace_s or math.ceil(limits.checkpoint_s + limits.shutdown_s) + 30

    @cached_property
    def on_host_network(self) -> bool:
        return on_host_network(self.job)

    @property
    def isolated(self) -> bool:
        return isolated(self.job)

    def _port(self, usual: int, offset: int) -> int:
        if not self.on_host_network:
            return usual
        known_as = f"{self.k8s.namespace or 'default'}/{self.name}"
        mark = int.from_bytes(hashlib.sha256(known_as.encode()).digest()[:4], "big")
        return 20_000 + 3 * (mark % 3_000) + offset

    # Variables

    @property
    def worker_env(self) -> list[Yaml]:
        """Variables of the pods that have ranks. Device plugins add others."""
        store = {"MASTER_ADDR": self.first_pod, "MASTER_PORT": str(self._port(_MASTER_PORT, 2))}
        meeting = {} if over_mpi(self.job, self.launcher) else store
        backend = {**meeting, **meeting_variables(self.job, self.launcher)}
        devices = self.job.resources.row.hidden_by if self._without_gpus else {}
        ranks = {
            name: value
            for name, value in cluster_environment(self.job, self.members).items()
            if name not in self.k8s.env
        }
        references = [
            {
                "name": name,
                "valueFrom": {_KEY_REF[reference.kind]: {"name": reference.name, "key": reference.key}},
            }
            for name, reference in self.k8s.variables.items()
        ]
        variables = self.meeting | self.own_variables | backend | devices | ranks
        return [*plain_variables(variables), *self.own_references, *references]

    @property
    def meeting(self) -> dict[str, str]:
        """Variable with the address at which the supervisors meet."""
        return {"CLIPSHIP_SUPERVISORS": f"{self.first_pod}:{self._port(_MEETING_PORT, 1)}"}

    # Resources and placement

    @property
    def _without_gpus(self) -> bool:
        """True if the workers ask for no GPU."""
        return self.k8s.without_gpus or self.job.resources.on_cpu

    @property
    def worker_resources(self) -> Yaml:
        asked, k8s = self.job.resources, self.k8s
        cpus = float(asked.cpus_per_gpu * asked.ranks_per_node)
        mem_gb = None if asked.mem_gb_per_gpu is None else asked.mem_gb_per_gpu * asked.ranks_per_node
        resource = k8s.gpu_resource or asked.row.kubernetes_resource
        gpus = {} if self._without_gpus else {resource: str(asked.ranks_per_node)}
        devices = gpus | {name: str(count) for name, count in k8s.rdma.items()}
        requests = {"cpu": cores(k8s.cpu_request or cpus)} | memory(k8s.mem_request_gb or mem_gb)
        limits = ({"cpu": cores(cpus)} if k8s.cpu_limit else {}) | memory(mem_gb)
        return {"requests": requests | devices} | ({"limits": limits | devices} if limits | devices else {})

    @property
    def node_selector(self) -> dict[str, str]:
        """Labels of the workers' nodes."""
        return self.processor | self.k8s.node_selector

    @property
    def processor(self) -> dict[str, str]:
        """Label of the nodes whose processor the image is for; empty for the usual one."""
        arm = self.job.image.platform == ARM64
        return {"kubernetes.io/arch": ARCHITECTURES[ARM64]} if arm else {}

    @property
    def tolerations(self) -> list[Yaml]:
        return [toleration(borne) for borne in self.k8s.borne]

    @property
    def affinity(self) -> Yaml:
        term = {"labelSelector": self.worker_pods, "topologyKey": self.k8s.pack_by}
        if self.k8s.placement == "required":
            return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
        return {
            "podAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
            }
        }

    @property
    def spread(self) -> Yaml:
        otherwise = "DoNotSchedule" if self.k8s.placement == "required" else "ScheduleAnyway"
        return {
            "maxSkew": 1,
            "topologyKey": self.k8s.spread_by,
            "whenUnsatisfiable": otherwise,
            "labelSelector": self.worker_pods,
        }

    # Users, capabilities and files of the processes

    @property
    def pod_security(self) -> Yaml:
        user = self.k8s.run_as_user
        owner = {} if self.k8s.is_root else {"fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"}
        return {"runAsUser": user, "runAsGroup": user, **owner, "seccompProfile": {"type": "RuntimeDefault"}}

    @property
    def may_change_owners(self) -> bool:
        """True if kubelet may give the files of a volume to fsGroup."""
        return not self.k8s.is_root and any(mount.kind in ("pvc", "csi") for mount in self.k8s.volumes)

    @property
    def worker_security(self) -> Yaml:
        """Security context of a pod with ranks.

        IPC_LOCK pins memory for RDMA. Kubernetes gives added capabilities to root alone.
        """
        locks = ("IPC_LOCK",) if self.k8s.rdma or pins_memory(self.job) else ()
        return self._security(*self.capabilities, *locks)

    def _security(self, *capabilities: str) -> Yaml:
        """Returns a container's security context; root has these capabilities, and those for files."""
        added = {"add": [*_FILES_OF_OTHERS, *capabilities]} if self.k8s.is_root else {}
        read_only = {"readOnlyRootFilesystem": True} if self.k8s.read_only_root else {}
        return {
            "runAsNonRoot": not self.k8s.is_root,
            "allowPrivilegeEscalation": False,
            **read_only,
            "capabilities": {"drop": ["ALL"], **added},
        }

    @property
    def passwd(self) -> str:
        """Text of /etc/passwd for another user than root and 1000, which the image knows; "" for those."""
        user = self.k8s.run_as_user
        if user in (0, 1000):
            return ""
        others = "root:x:0:0:root:/root:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
        return f"{others}clipship:x:{user}:{user}::/home/clipship:/bin/bash\n"

    @property
    def group(self) -> str:
        return f"root:x:0:\nnogroup:x:65534:\nclipship:x:{self.k8s.run_as_user}:\n"

    @property
    def volumes(self) -> list[Yaml]:
        shared = [volume(number, mount) for number, mount in enumerate(self.k8s.volumes)]
        shm = {
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": gib(shm_gb_of(self.k8s, self.job.resources))},
        }
        scratch = [{"name": name, "emptyDir": {}} for name in self._scratch]
        return [{"name": "job", "configMap": {"name": self.beside_name}}, shm, *scratch, *shared]

    @property
    def _fabric_folders(self) -> dict[str, str]:
        """Names of the volumes of the network's folders, by folder of the node."""
        row = fabric_of(self.job)
        folders = [line.name for line in row.folders] if row else []
        beside = row.sidecar.folders if row and row.sidecar else {}
        return {
            folder: f"fabric-{number}" for number, folder in enumerate(dict.fromkeys([*folders, *beside]))
        }

    @property
    def fabric_volumes(self) -> list[Yaml]:
        """Volumes of the pods with ranks that their network needs."""
        return [{"name": name, "hostPath": {"path": folder}} for folder, name in self._fabric_folders.items()]

    @property
    def sidecars(self) -> list[Yaml]:
        """Containers that run beside the ranks, which Kubernetes ends after them."""
        row = fabric_of(self.job)
        if row is None or row.sidecar is None:
            return []
        own = row.sidecar
        return [
            {
                "name": own.name,
                "image": own.image,
                "restartPolicy": "Always",
                "command": list(own.command),
                "env": plain_variables(own.variables),
                "startupProbe": {
                    "exec": {"command": ["cat", own.ready_file]},
                    "periodSeconds": 5,
                    "failureThreshold": 24,
                },
                "securityContext": {
                    "runAsUser": 0,
                    "runAsNonRoot": False,
                    "capabilities": {"add": list(own.capabilities)},
                },
                "volumeMounts": [
                    {"name": self._fabric_folders[folder], "mountPath": path}
                    for folder, path in own.folders.items()
                ],
            }
        ]

    @property
    def _scratch(self) -> dict[str, str]:
        """Folders for temporary files and caches, by the names of their empty volumes.

        mpirun and Python write the temporary files. A folder at which the job mounts its own volume is left
        out.
        """
        places = {"tmp": "/tmp", "home": self.k8s.home} if self.k8s.read_only_root else {}
        return {name: path for name, path in places.items() if path not in self.k8s.mounts}

    @property
    def mounts(self) -> list[Yaml]:
        """Mounts of every pod."""
        users = [_of_job(f"/etc/{file}", file) for file in ("passwd", "group")]
        configs = [_of_job(file.path, file.name) for file in self.carried]
        shared = [mounted(number, mount) for number, mount in enumerate(self.k8s.volumes)]
        scratch = [{"name": name, "mountPath": path} for name, path in self._scratch.items()]
        job = {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}
        return [job, *(users if self.passwd else []), *scratch, *shared, *configs]

    @property
    def worker_mounts(self) -> list[Yaml]:
        row = fabric_of(self.job)
        of_fabric = [
            {"name": self._fabric_folders[line.name], "mountPath": line.value}
            for line in (row.folders if row else ())
        ]
        return [*self.mounts, {"name": "shm", "mountPath": "/dev/shm"}, *of_fabric]


# Parts of a pod as its YAML has them


def plain_variables(variables: Mapping[str, str]) -> list[Yaml]:
    """Returns variables with plain values. Kubernetes expands $(NAME), and $$ stands for $."""
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()]


def toleration(borne: Toleration) -> Yaml:
    """Returns the toleration of a node's taint."""
    key = {"key": borne.key} if borne.key else {}
    meaning = {"operator": "Exists"} if borne.value is None else {"operator": "Equal", "value": borne.value}
    return key | meaning | ({"effect": borne.effect} if borne.effect else {})


def volume(number: int, mount: Mount) -> Yaml:
    """Returns the volume of the pod."""
    return {"name": f"mount-{number}", **_SOURCES[mount.kind](mount)}


def _csi(mount: Mount) -> Yaml:
    read_only = {"readOnly": True} if mount.read_only else {}
    attributes = {"volumeAttributes": dict(mount.attributes)} if mount.attributes else {}
    return {"csi": {"driver": mount.source, **read_only, **attributes}}


def _empty(mount: Mount) -> Yaml:
    medium = {"medium": mount.medium} if mount.medium else {}
    return {"emptyDir": medium | ({"sizeLimit": mount.size} if mount.size else {})}


_SOURCES: dict[str, Callable[[Mount], Yaml]] = {
    "pvc": lambda mount: {"persistentVolumeClaim": {"claimName": mount.source}},
    # with this type a mistyped path fails, instead of making an empty folder on every node
    "host": lambda mount: {"hostPath": {"path": mount.source, "type": "Directory"}},
    "nfs": lambda mount: {"nfs": {"server": mount.server, "path": mount.source}},
    "secret": lambda mount: {"secret": {"secretName": mount.source}},
    "configmap": lambda mount: {"configMap": {"name": mount.source}},
    "csi": _csi,
    "empty": _empty,
}
"""Functions from a mount to the source of its volume, by the mount's kind."""


def mounted(number: int, mount: Mount) -> Yaml:
    """Returns the mount of the volume in a container."""
    sub_path = {"subPath": mount.sub_path} if mount.sub_path else {}
    return {"name": f"mount-{number}", "mountPath": mount.path, **sub_path} | (
        {"readOnly": True} if mount.read_only else {}
    )


def memory(size_gib: float | None) -> Yaml:
    """Returns the memory of a container's resources, given in GiB; an empty table for None."""
    return {} if size_gib is None else {"memory": gib(size_gib)}


def gib(size: float) -> str:
    """Converts GiB to a quantity of Kubernetes: 1.5 to 1536Mi, 64 to 64Gi."""
    return f"{int(size)}Gi" if size == int(size) else f"{math.ceil(size * 1024)}Mi"


def cores(count: float) -> str:
    """Converts cores to a quantity of Kubernetes: 2.0 to 2, 0.5 to 500m."""
    return f"{int(count)}" if count == int(count) else f"{math.ceil(count * 1000)}m"
