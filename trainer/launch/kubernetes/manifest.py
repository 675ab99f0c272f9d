"""Renders a job as the text of an MPIJob, its ConfigMap and its NetworkPolicy.

Pure: uses no clock, no network and no cluster. Imports neither torch nor the client.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tomli_w

from trainer.comm.backends import row_of
from trainer.config import Image, Job, Kubernetes
from trainer.config.kubernetes import JOB_FOLDER, object_name
from trainer.config.loader import own_keys
from trainer.errors import InputError
from trainer.launch.kubernetes.patch import patched
from trainer.launch.kubernetes.pod.names import JOB_UID, SSH_KEY
from trainer.launch.kubernetes.pod_values import (
    Yaml,
    cores,
    gib,
    memory,
    mounted,
    plain_variables,
    toleration,
    volume,
)
from trainer.launch.kubernetes.validate import validate
from trainer.launch.rank_env import rank_environment
from trainer.launch.templates import render

JOB_NAME_LABEL = "training.kubeflow.org/job-name"
ROLE_LABEL = "training.kubeflow.org/job-role"
HOSTFILE = "/etc/mpi/hostfile"
_PYTHON = "/opt/clipship/bin/python"
_JOB_FILE = f"{JOB_FOLDER}/job.toml"
_MEETING_PORT, _MASTER_PORT = 29400, 29401
_FAN_OUT = 128
# the image says "all", which NVIDIA's runtime grants even without a request
_NO_GPU = {"NVIDIA_VISIBLE_DEVICES": "void"}
# root needs them on volumes whose files belong to another user
_FILES_OF_OTHERS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID")
# root's sshd needs them to confine its children
_SSHD = ("AUDIT_WRITE", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")
# root's ssh sets its groups before it runs the command that knows the job's hosts (docker/ssh-client.conf)
_SSH = ("SETGID",)
_ATTRIBUTED_TO_MPI = ("OMPI_", "OPAL_", "PRTE_", "PMIX_", "UCX_")
_KEY_REF = {"secret": "secretKeyRef", "configmap": "configMapKeyRef"}
_SOURCE_REF = {"secret": "secretRef", "configmap": "configMapRef"}

_BUILD = Image.model_fields.keys() - {"tag"}


def manifest(job: Job) -> str:
    """Returns the YAML that `kubectl apply` takes.

    Raises InputError that lists everything that cannot work on Kubernetes.
    """
    validate(job)
    view = Manifest(job)
    return patched(render("k8s/mpijob.yaml.j2", job=job, k8s=job.kubernetes, m=view), job.kubernetes.patch)


def mpijob_name(job: Job) -> str:
    """Returns the MPIJob's name. Raises InputError if the given name is too long."""
    try:
        return object_name(job.name, job.kubernetes, job.resources.nodes)
    except ValueError as problem:
        raise InputError(f"kubernetes.name: {problem}") from None


def beside_name(mpijob: str) -> str:
    """Returns the name of the ConfigMap and of the NetworkPolicy that belong to the MPIJob."""
    return f"{mpijob}-job"


@dataclass(frozen=True)
class Manifest:
    """Values that the template prints; each property is a value of the MPIJob."""

    job: Job

    @cached_property
    def k8s(self) -> Kubernetes:
        return self.job.kubernetes

    @cached_property
    def name(self) -> str:
        return mpijob_name(self.job)

    @property
    def beside_name(self) -> str:
        return beside_name(self.name)

    @property
    def namespace(self) -> str | None:
        return self.k8s.namespace

    @property
    def title(self) -> str:
        ranks = f"{self.job.resources.world_size} ranks on {self.job.resources.nodes} workers"
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

    @property
    def image(self) -> str:
        return self.job.image.tag or ""

    @property
    def pod_labels(self) -> Yaml:
        return {"app.kubernetes.io/name": "clipship", **self.k8s.labels}

    @property
    def labels(self) -> Yaml:
        return self.pod_labels | ({"kueue.x-k8s.io/queue-name": self.k8s.queue} if self.k8s.queue else {})

    @property
    def annotations(self) -> Yaml:
        return dict(self.k8s.annotations)

    @property
    def launcher_annotations(self) -> Yaml:
        return self.annotations | self.k8s.launcher_annotations

    @property
    def worker_annotations(self) -> Yaml:
        return self.annotations | self.k8s.worker_annotations

    @property
    def creation_policy(self) -> str:
        return "WaitForWorkersReady" if self.k8s.launcher_start == "workers-ready" else "AtStartup"

    @property
    def scheduling(self) -> Yaml:
        """Scheduling of the gang.

        A launcher that starts after the workers is not counted: a gang that waited for it would never start.
        """
        members = self.job.resources.nodes + (self.k8s.launcher_start == "at-once")
        queue = {"queue": self.k8s.gang_queue} if self.k8s.gang_queue else {}
        priority = (
            {"priorityClass": self.k8s.priority_class}
            if self.k8s.priority_class and self.k8s.gang == "volcano"
            else {}
        )
        limit = {"scheduleTimeoutSeconds": self.k8s.gang_timeout_s} if self.k8s.gang_timeout_s else {}
        return {"minAvailable": members, **queue, **priority, **limit}

    @property
    def grace_s(self) -> int:
        limits = self.job.timeouts
        return self.k8s.grace_s or math.ceil(limits.checkpoint_s + limits.shutdown_s) + 30

    # Ports: the usual ones in a pod's own network; on the node's network jobs need different ones.

    @property
    def ssh_port(self) -> int:
        return self._port(22 if self.k8s.is_root else 2222, 0)

    def _port(self, usual: int, offset: int) -> int:
        if not self.k8s.host_network:
            return usual
        mark = int.from_bytes(hashlib.sha256(f"{self.namespace}/{self.name}".encode()).digest()[:4], "big")
        return 20_000 + 3 * (mark % 3_000) + offset

    # Commands and variables

    @property
    def launcher_command(self) -> Sequence[str]:
        return [
            _PYTHON,
            "-P",
            "-m",
            "trainer.launch.kubernetes.pod.launcher",
            _JOB_FILE,
            "--ssh-port",
            str(self.ssh_port),
        ]

    @property
    def worker_command(self) -> Sequence[str]:
        config = [] if self.k8s.is_root else ["-f", "/opt/clipship/etc/sshd_config"]
        return [
            _PYTHON,
            "-P",
            "-m",
            "trainer.launch.kubernetes.pod.worker",
            "/usr/sbin/sshd",
            "-De",
            *config,
            "-p",
            str(self.ssh_port),
        ]

    @property
    def launcher_env(self) -> list[Yaml]:
        uid = {
            "name": JOB_UID,
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}},
        }
        own = {name: value for name, value in self.job.env.items() if name.startswith(_ATTRIBUTED_TO_MPI)}
        return [
            *plain_variables(self._meeting | {"PYTHONUNBUFFERED": "1"} | _NO_GPU | self._open_mpi | own),
            uid,
        ]

    @property
    def worker_env(self) -> list[Yaml]:
        """Variables of the workers' pods, from which ranks take them.

        ssh passes none on, and device plugins add others.
        """
        first = f"{self.name}-worker-0.{self.name}"
        store = {"MASTER_ADDR": first, "MASTER_PORT": str(self._port(_MASTER_PORT, 2))}
        backend = store if row_of(self.job).uses_master_address else {}
        devices = _NO_GPU if self.k8s.gpu_resource == "none" else {}
        variables = (
            self._meeting | backend | devices | rank_environment(self.job, self.job.resources.world_size)
        )
        references = [
            {
                "name": name,
                "valueFrom": {_KEY_REF[reference.kind]: {"name": reference.name, "key": reference.key}},
            }
            for name, reference in self.k8s.variables.items()
        ]
        return [*plain_variables(variables), *references]

    @property
    def env_from(self) -> list[Yaml]:
        return [
            {_SOURCE_REF[reference.kind]: {"name": reference.name}} for reference in self.k8s.variable_sources
        ]

    @property
    def _meeting(self) -> dict[str, str]:
        place = f"{self.name}-worker-0.{self.name}:{self._port(_MEETING_PORT, 1)}"
        return {"CLIPSHIP_SUPERVISORS": place, SSH_KEY: f"{self.k8s.ssh_folder}/id_rsa"}

    @property
    def _open_mpi(self) -> dict[str, str]:
        """Settings of Open MPI.

        The operator sets the names of Open MPI 4; Open MPI 5 reads PRTE_MCA_* and, without them, runs every
        rank in the launcher.
        """
        fan_out = str(min(_FAN_OUT, self.job.resources.nodes))
        return {
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "^openib",
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
            "OMPI_MCA_plm_rsh_num_concurrent": fan_out,
            "PRTE_MCA_prte_default_hostfile": HOSTFILE,
            "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
            "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
            "PRTE_MCA_plm_ssh_num_concurrent": fan_out,
        }

    # Resources and placement

    @property
    def launcher_resources(self) -> Yaml:
        mem = memory(self.k8s.launcher_mem_gb or 1 + self.job.resources.nodes / 128)
        most = self.k8s.launcher_cpu_limit
        return {
            "requests": {"cpu": cores(self.k8s.launcher_cpu), **mem},
            "limits": ({"cpu": cores(most)} if most else {}) | mem,
        }

    @property
    def worker_resources(self) -> Yaml:
        asked, k8s = self.job.resources, self.k8s
        cpus = float(asked.cpus_per_gpu * asked.ranks_per_node)
        mem_gb = None if asked.mem_gb_per_gpu is None else asked.mem_gb_per_gpu * asked.ranks_per_node
        gpus = (
            {}
            if k8s.gpu_resource == "none" or asked.on_cpu
            else {k8s.gpu_resource: str(asked.ranks_per_node)}
        )
        devices = gpus | {name: str(count) for name, count in k8s.rdma.items()}
        requests = {"cpu": cores(k8s.cpu_request or cpus)} | memory(k8s.mem_request_gb or mem_gb)
        limits = ({"cpu": cores(cpus)} if k8s.cpu_limit else {}) | memory(mem_gb)
        return {"requests": requests | devices} | ({"limits": limits | devices} if limits | devices else {})

    @property
    def shm_gb(self) -> float:
        return self.k8s.shm_gb or 2.0 * self.job.resources.ranks_per_node

    @property
    def tolerations(self) -> list[Yaml]:
        return [toleration(borne) for borne in self.k8s.borne]

    @property
    def pull_secrets(self) -> list[Yaml]:
        return [{"name": name} for name in self.k8s.image_pull_secrets]

    @property
    def own_pods(self) -> Yaml:
        """Selector of the launcher's and the workers' pods, by the label that the operator gives them."""
        return {"matchLabels": {JOB_NAME_LABEL: self.name}}

    @property
    def _workers(self) -> Yaml:
        return {"matchLabels": {JOB_NAME_LABEL: self.name, ROLE_LABEL: "worker"}}

    @property
    def affinity(self) -> Yaml:
        term = {"labelSelector": self._workers, "topologyKey": self.k8s.pack_by}
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
            "labelSelector": self._workers,
        }

    # Users, capabilities and files of the processes

    @property
    def pod_security(self) -> Yaml:
        user = self.k8s.run_as_user
        group = self.k8s.fs_group if self.k8s.fs_group is not None else user or None
        owner = {} if group is None else {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
        return {"runAsUser": user, "runAsGroup": user, **owner, "seccompProfile": {"type": self.k8s.seccomp}}

    @property
    def launcher_security(self) -> Yaml:
        return self._security((*_FILES_OF_OTHERS, *_SSH) if self.k8s.is_root else ())

    @property
    def worker_security(self) -> Yaml:
        """Security context of a worker.

        IPC_LOCK pins memory for RDMA; only root's sshd needs other capabilities.
        """
        root = (*_FILES_OF_OTHERS, *_SSHD) if self.k8s.is_root else ()
        return self._security((*root, "IPC_LOCK") if self.k8s.rdma else root)

    def _security(self, capabilities: Sequence[str]) -> Yaml:
        """Returns a container's security context with these capabilities and no others."""
        added = {"add": list(capabilities)} if capabilities else {}
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
        shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": gib(self.shm_gb)}}
        scratch = [{"name": name, "emptyDir": {}} for name in self._scratch]
        return [{"name": "job", "configMap": {"name": self.beside_name}}, shm, *scratch, *shared]

    @property
    def _scratch(self) -> dict[str, str]:
        """Folders for temporary files and caches, by the names of their empty volumes.

        mpirun and Python write the temporary files. A folder at which the job mounts its own volume is left
        out.
        """
        places = {"tmp": "/tmp", "home": self.k8s.home} if self.k8s.read_only_root else {}
        return {name: path for name, path in places.items() if path not in self.k8s.mounts}

    @property
    def launcher_mounts(self) -> list[Yaml]:
        users = [
            {"name": "job", "mountPath": f"/etc/{file}", "subPath": file, "readOnly": True}
            for file in ("passwd", "group")
        ]
        shared = [mounted(number, mount) for number, mount in enumerate(self.k8s.volumes)]
        scratch = [{"name": name, "mountPath": path} for name, path in self._scratch.items()]
        job = {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}
        return [job, *(users if self.passwd else []), *scratch, *shared]

    @property
    def worker_mounts(self) -> list[Yaml]:
        return [*self.launcher_mounts, {"name": "shm", "mountPath": "/dev/shm"}]
