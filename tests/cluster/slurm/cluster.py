"""A real Slurm on this machine: a controller and three nodes, each with its own host name, /tmp and /dev/shm.

Needs root.

Everything lies in one folder, keys and sockets too; no file of /etc is touched, and `stop` leaves nothing
behind. Programs come from PATH.
"""

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer.sysinfo.addresses import free_port

NODES = ("n1", "n2", "n3")
"""The last one is a spare: a job of two nodes starts on the first two that are up."""
# Of both: srun listens on its node's address, and is called back at the one that its request came from.
_ADDRESS = "127.0.0.1"
_GPU_FILES = ("null", "zero")
GPUS, CPUS, MEMORY_MB = len(_GPU_FILES), 8, 9000
"""Size of a node as Slurm sees it: there is no such hardware, and nobody looks for it."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
REPOSITORY = Path(__file__).parents[3]

_CONFIG = """\
ClusterName=clipship
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
TmpFS=/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=20
OverTimeLimit=0
SlurmdTimeout=10
InactiveLimit=0
MinJobAge=3600
FirstJobId={first_job}
MpiDefault=none
SrunPortRange=40000-40999
GresTypes=gpu
{nodes}
PlugStackConfig={folder}/plugstack.conf
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=n[1-3] Default=YES MaxTime=60 State=UP PriorityTier=2
PartitionName=low Nodes=n[1-3] MaxTime=60 State=UP PriorityTier=1 GraceTime=60
"""

# In namespaces of its own, so that the mounts are gone with the process. What is shared and lies in /tmp is
# moved over the new /tmp.
_NODE = """\
set -e
node=$1 folder=$2; shift 2
hostname "$node"
mount --make-rprivate /
mount --bind "$folder/hosts" /etc/hosts
for shared in "$@"; do \
mkdir -p "$folder/kept-$node$shared"; mount --rbind "$shared" "$folder/kept-$node$shared"; done
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp; chmod 1777 /tmp /dev/shm
for shared in "$@"; do mkdir -p "$shared"; mount --rbind "$KEPT/kept-$node$shared" "$shared"; done
exec slurmd -D -N "$node" -f "$folder/slurm.conf"
"""


@dataclass
class Cluster:
    """`folder` is on every node, and so are `shared`; their /tmp is not."""

    folder: Path
    shared: Sequence[Path] = (REPOSITORY,)
    pyxis: Path | None = None
    """Folder that pyxis.sh has built: srun then starts containers."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Lines of slurm.conf by their keys, in place of this cluster's own; "" leaves a key out."""
    files: Mapping[str, str] = field(default_factory=dict)
    """More files of its folder, which is the users' home, too."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """For sbatch and its friends: this cluster, and no variable of another launcher."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SBATCH_", "CLIPSHIP_", "OMPI_", "PYTEST"))
        }
        # Both nodes are the loopback interface, which Open MPI 4 passes over unless told; Open MPI 5 takes no
        # loopback at all.
        open_mpi = {
            "OMPI_MCA_btl_tcp_if_include": "lo",
            "OMPI_MCA_oob_tcp_if_include": "lo",
            "PMIX_MCA_ptl_tcp_if_include": "lo",
        }
        few_cores = {"OMPI_MCA_mpi_yield_when_idle": "1"}
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(REPOSITORY)}
        if self.files:
            ours["HOME"] = str(self.folder)
        if self.pyxis:
            ours["PATH"] = f"{self.folder}/bin:{self.pyxis}/bin:{kept['PATH']}"
        return {**kept, **open_mpi, **few_cores, **ours}

    def start(self) -> None:
        """Until all nodes are idle."""
        self._configure()
        self._spawn("munged", self._munged())
        _until(lambda: (self.folder / "munge.socket").exists(), 20, "munged has no socket")
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", str(self.folder / "slurm.conf")])
        for node in NODES:
            self.start_node(node)
        _until(self.is_idle, 60, "the nodes do not become idle", self.folder)

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        in_tmp = [str(path) for path in (self.folder, *self.shared) if path.is_relative_to("/tmp")]
        (self.folder / f"kept-{node}").mkdir(exist_ok=True)
        words = ["unshare", "--mount", "--uts", "bash", "-c", _NODE, "node", node, str(self.folder), *in_tmp]
        self._spawn(node, words)

    def kill_node(self, node: str) -> None:
        """As a node that loses power: slurmd and all that it started, at once.

        First come those that would cancel a step if the srun above them died before them.
        """
        for pid in sorted(self.members(node), key=_watches_srun, reverse=True):
            _kill(pid)
        self.processes.pop(node).wait()

    def members(self, node: str) -> list[int]:
        """All processes of the node: those of a job are no descendants of slurmd, but they share its host
        name.
        """
        mark = _host_name_space(self.processes[node].pid)
        return [
            pid for entry in Path("/proc").glob("[0-9]*") if _host_name_space(pid := int(entry.name)) == mark
        ]

    def clear(self) -> None:
        """No job, all nodes up and idle."""
        for node in NODES:
            if node not in self.processes:
                self.start_node(node)
        self.run("scancel", "--state=PENDING", "--user=root", check=False)
        self.run("scancel", "--user=root", check=False)
        _until(self.is_idle, 120, "the nodes do not become idle again")

    def stop(self) -> None:
        """Jobs, daemons, mounts (they live in the daemons' namespaces); the folder stays."""
        for node in NODES:
            if node in self.processes:
                self.kill_node(node)
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()

    def run(
        self, *words: str, check: bool = True, timeout_s: float = 120, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, or of ours, on the submitting host."""
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            words,
            env=self.environment,
            capture_output=True,
            text=True,
            check=check,
            timeout=timeout_s,
            **options,
        )

    def job(self, job_id: str) -> Mapping[str, str]:
        """Returns the values of `scontrol show job` by key; no value here holds a space."""
        text = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def is_idle(self) -> bool:
        states = self.run(
            "sinfo", "--Node", "--noheader", "--format=%N %T", "--partition=all", check=False
        ).stdout.split()
        return states == [word for node in NODES for word in (node, "idle")]

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        own, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={_ADDRESS} NodeHostname={name} Port={port} CPUs={CPUS} Boards=1 "
            f"SocketsPerBoard=1 "
            f"CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB} Gres=gpu:{GPUS} State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        )
        config = _CONFIG.format(
            address=_ADDRESS,
            host=socket.gethostname(),
            port=own,
            folder=self.folder,
            nodes=nodes,
            # A job's ports follow from its number: two clusters on this machine should differ in them.
            first_job=1 + secrets.randbelow(6000),
        )
        (self.folder / "slurm.conf").write_text(self._of_the_site(config))
        for name, text in self.files.items():
            path = self.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{name}\n" for name in _GPU_FILES))
        (self.folder / "hosts").write_text(
            " ".join([_ADDRESS, "localhost", socket.gethostname(), *NODES]) + "\n"
        )
        spank = (
            f"required {self.pyxis}/lib/slurm/spank_pyxis.so runtime_path=/tmp/pyxis\n" if self.pyxis else ""
        )
        (self.folder / "plugstack.conf").write_text(spank)
        (self.folder / "state").mkdir(exist_ok=True)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o400)

    def _of_the_site(self, config: str) -> str:
        """Returns the lines with those of `settings` in place of their keys' own."""
        kept = [line for line in config.splitlines() if line.partition("=")[0] not in self.settings]
        own = [f"{key}={value.format(folder=self.folder)}" for key, value in self.settings.items() if value]
        return "\n".join([*kept, *own, ""])

    def _munged(self) -> list[str]:
        names = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        return ["munged", "--foreground", "--force", *options]

    def _spawn(self, name: str, words: Sequence[str]) -> None:
        """The daemons end with this process, however it ends."""
        with open(self.folder / f"{name}.out", "ab") as out:
            environment = {**self.environment, "KEPT": str(self.folder)}
            self.processes[name] = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=_end_with_parent,
            )


def _host_name_space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return ""


def missing_programs() -> list[str]:
    """Debian's slurm-wlm, munge and util-linux have them."""
    return [
        name
        for name in ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare")
        if shutil.which(name) is None
    ]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _watches_srun(pid: int) -> bool:
    """Returns whether it is the second process of an srun, a child of the first."""
    with suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].partition(") ")
        parent = int(rest.split()[1])
        return name == "srun" and Path(f"/proc/{parent}/comm").read_text().strip() == "srun"
    return False


def _until(happened: Callable[[], bool], limit_s: float, otherwise: str, logs: Path | None = None) -> None:
    limit = time.monotonic() + limit_s
    while not happened():
        if time.monotonic() > limit:
            said = (
                [(path.name, path.read_text(errors="replace")[-1500:]) for path in sorted(logs.glob("*.out"))]
                if logs
                else []
            )
            raise TimeoutError("\n".join([otherwise, *(f"== {name}\n{text}" for name, text in said)]))
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    """All different."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port(_ADDRESS))
    return list(found)
