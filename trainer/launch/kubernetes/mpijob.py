"""The MPIJob of the MPI Operator: a launcher pod starts the ranks in worker pods with mpirun. Pure."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from trainer.launch.kubernetes.gangs import Yaml, values
from trainer.launch.kubernetes.kind import JOB_FILE, OWN_UID, Kind, Object, memory, plain_variables, program
from trainer.launch.kubernetes.pod.names import SSH_KEY

JOB_NAME_LABEL = "training.kubeflow.org/job-name"
ROLE_LABEL = "training.kubeflow.org/job-role"
HOSTFILE = "/etc/mpi/hostfile"
_FAN_OUT = 128
# root's ssh sets its groups before it runs the command that knows the job's hosts (docker/ssh-client.conf)
_SSH = ("SETGID",)
_ATTRIBUTED_TO_MPI = ("OMPI_", "OPAL_", "PRTE_", "PMIX_", "UCX_")


_PHASES = (
    ("Running", "running"),
    ("Restarting", "restarting"),
    ("Failed", "failing"),
    ("Created", "waiting"),
)


class MpiJob(Kind):
    """MPIJobs."""

    name_in_job = "mpijob"
    kind = "MPIJob"
    api_version = "kubeflow.org/v2beta1"
    plural = "mpijobs"
    controller = "the MPI Operator"
    advice = "the MPI Operator, v0.3 or newer, must be installed (kubeflow.org/v2beta1)"
    template = "k8s/mpijob.yaml.j2"
    succeeded = "Succeeded"
    launcher = "mpirun"
    starter = "mpirun"
    starts_ranks_by = "the MPI Operator starts ranks by mpirun"
    keeps_going = False
    pod_label = JOB_NAME_LABEL
    output: ClassVar[Mapping[str, str]] = {ROLE_LABEL: "launcher"}
    output_pod = "launcher"
    first_pod_suffix = "worker-0"
    makes = ("-launcher",)
    # root's sshd needs them to confine its children
    capabilities = ("AUDIT_WRITE", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")

    @classmethod
    def pods(cls, objects: Sequence[Object]) -> dict[str, Object]:
        """Returns the parts of the MPIJob, the last of the objects, that hold a pod's template, by role."""
        specs = objects[-1]["spec"]["mpiReplicaSpecs"]
        return {"launcher": specs["Launcher"], "worker": specs["Worker"]}

    @classmethod
    def workers(cls, found: Object) -> int:
        """Returns the number of workers that an MPIJob asks for."""
        return int(found["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"])

    @classmethod
    def ended_at(cls, found: Object) -> str | None:
        """Returns when an MPIJob has ended; None if it has not.

        After an eviction the operator reports Failed for a job that goes on.
        """
        at = found.get("status", {}).get("completionTime")
        return None if at is None else str(at)

    @classmethod
    def phase(cls, found: Object) -> tuple[str, str] | None:
        """Returns a word for what an MPIJob does, and since when; None if the operator has not seen it."""
        true = cls.conditions(found)
        for kind, word in _PHASES:
            if kind in true:
                return word, str(true[kind]["lastTransitionTime"])
        return None

    @property
    def worker_pods(self) -> Yaml:
        return {"matchLabels": {JOB_NAME_LABEL: self.name, ROLE_LABEL: "worker"}}

    @property
    def own_variables(self) -> dict[str, str]:
        return {SSH_KEY: f"{self.k8s.ssh_folder}/id_rsa"}

    @property
    def scheduling(self) -> Yaml:
        """Scheduling of the gang.

        A launcher that starts after the workers is not counted: a gang that waited for it would never start.
        """
        members = self.job.resources.nodes + (self.k8s.launcher_start == "at-once")
        return {"minAvailable": members} | (values(self.k8s, self.gang.of_mpijob) if self.gang else {})

    @property
    def ssh_port(self) -> int:
        return self._port(22 if self.k8s.is_root else 2222, 0)

    @property
    def launcher_command(self) -> Sequence[str]:
        return program("launcher", JOB_FILE, "--ssh-port", str(self.ssh_port))

    @property
    def worker_command(self) -> Sequence[str]:
        config = [] if self.k8s.is_root else ["-f", "/opt/clipship/etc/sshd_config"]
        return program("worker", "/usr/sbin/sshd", "-De", *config, "-p", str(self.ssh_port))

    @property
    def launcher_env(self) -> list[Yaml]:
        own = {name: value for name, value in self.job.env.items() if name.startswith(_ATTRIBUTED_TO_MPI)}
        no_gpu = self.job.resources.row.hidden_by
        return [
            *plain_variables(
                self.meeting | self.own_variables | {"PYTHONUNBUFFERED": "1"} | no_gpu | self._open_mpi | own
            ),
            OWN_UID,
        ]

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

    @property
    def launcher_resources(self) -> Yaml:
        mem = memory(1 + self.job.resources.nodes / 128)  # 8 MiB for each worker's ssh client
        return {"requests": {"cpu": "1", **mem}, "limits": mem}

    @property
    def launcher_security(self) -> Yaml:
        return self._security(*_SSH)
