"""`clipship run`: starts the ranks of a job here or over ssh, itself or by mpirun.

Every launcher runs the same command in the same environment: `python -m trainer.rank JOB`, a supervisor with
the rank below it. This process imports no torch.
"""

import asyncio
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from trainer.comm.backends import (
    Launcher,
    check_lost_nodes,
    launcher_for,
    meeting_variables,
    over_mpi,
    starts_again,
)
from trainer.config import Job
from trainer.config.stages import standard_input
from trainer.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, InputError, MachineError
from trainer.launch.hosts import (
    KEEP_ALIVE,
    SSH_OPTIONS,
    Host,
    hosts_text,
    rendezvous_address,
)
from trainer.launch.live_line import LiveLine, line_for_signal
from trainer.launch.open_mpi import find_open_mpi, mpirun_command
from trainer.launch.processes import is_second, supervise
from trainer.launch.rank_env import rank_environment
from trainer.launch.start_again import asked_after, run_generations, wait_for_hosts
from trainer.launch.submission import make_artefacts_folder
from trainer.run.exit_files import ExitFiles, exit_record_of
from trainer.run.exit_record import EXIT_DIR, ExitRecord, first_cause, is_shown
from trainer.run.find import remember
from trainer.run.folder import not_written, run_folder
from trainer.run.generations import newest_claim
from trainer.run.goodput_log import BEGAN
from trainer.run.goodput_log import began as began_at
from trainer.run.layout import EXIT_FILE, RESULT_FILE, Run
from trainer.run.notify import Notifier
from trainer.run.retry import shown as shown_late
from trainer.run.start_job import (
    StartRecord,
    appears,
    new_start_job,
    remove_start_jobs,
    write_start,
    write_start_job,
)
from trainer.supervise.network.link import send_stop_request
from trainer.sysinfo.addresses import check_loopback, free_port, loopback_interface
from trainer.sysinfo.extras import require
from trainer.sysinfo.shortage import raise_open_files_limit
from trainer.sysinfo.signals import signal_name
from trainer.text.paste import word
from trainer.text.terminal import LIVE, say, tell
from trainer.text.wording import many
from trainer.world import rank_process, state_folder
from trainer.world.heartbeat import published_state
from trainer.world.rendezvous import Rendezvous
from trainer.world.variables import GENERATION, KEEPS_GOING, OF_A_START, RESPAWNS, SPARE_NODES, STARTS_AGAIN


@dataclass(frozen=True)
class LaunchRequest:
    """Request to a launcher: a rank's command, its additional variables, and the hosts of the ranks."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    hosts: tuple[Host, ...]
    here: bool
    """True if this machine is the only host."""
    folder: Path
    keeps_going: bool = False
    """True if the others go on without a supervisor that was killed, and a new one takes its place."""

    @property
    def ranks(self) -> int:
        """Number of supervisors, those of spare hosts included."""
        return sum(host.slots for host in self.hosts)


def run(
    job: Job,
    *,
    nproc: int | None,
    hosts: Sequence[Host] | None,
    began: float | None = None,
) -> int:
    """Train the job on `nproc` ranks here or on `hosts`.

    Returns the exit code of the rank that failed first, else 0. Raises InputError if the launcher is missing
    or cannot do what the job asks. The rank's command names the start's own job in the run folder: over ssh
    every host sees that folder, and has this environment at the same path. `began` is the time of the
    command, in seconds since the epoch, from which the run's time counts; None means now.
    """
    folder = run_folder(job)
    path = new_start_job(folder)
    # -P: a folder `trainer` in the working folder is not this package
    command = (sys.executable, "-P", "-m", "trainer.rank", str(path))
    remember(folder.parent)
    ranks = ranks_of(job, nproc, None) if hosts is None else 0
    asked = StartRecord(path.name, ranks, hosts_text(hosts or ()))
    try:
        return start_ranks(
            command,
            job,
            nproc=nproc,
            hosts=hosts,
            folder=folder,
            began=began,
            before=lambda: _keep(folder, path, job, asked),
        )
    finally:
        with suppress(OSError):
            remove_start_jobs(folder, path)


def _keep(folder: Path, path: Path, job: Job, asked: StartRecord) -> None:
    """Writes what the start and `clipship resume` read. Raises InputError if the folder cannot be written."""
    make_artefacts_folder(folder, "set logging.runs to a folder that all hosts see")
    try:
        write_start_job(path, job)
        write_start(folder, asked)
    except OSError as problem:
        raise InputError(not_written(folder, problem)) from None


def start_ranks(
    command: Sequence[str],
    job: Job,
    *,
    nproc: int | None,
    hosts: Sequence[Host] | None,
    folder: Path | None = None,
    began: float | None = None,
    before: Callable[[], object] = lambda: None,
) -> int:
    """Start `command` once for each rank, wait for all, and explain on stderr why the first one failed.

    See `run` for result and errors. `folder` is the run's, in which supervisors leave their records: if no
    rank runs on this machine, it is the only place that both sides see. The run's time counts from `began`,
    in seconds since the epoch; None means now. `before` is called once nothing speaks against the start.
    """
    require("torch")  # said once here, not by each rank
    raise_open_files_limit()
    if hosts is None:
        check_loopback()
    ranks = None if hosts is None else sum(host.slots for host in hosts)
    launcher = launcher_for(job, several_hosts=hosts is not None, ranks=ranks)
    if hosts is not None:
        check_lost_nodes(job, launcher, keeps_going=launcher == "clipship")
    stdin = _stdin(job, launcher, here=hosts is None)
    all_hosts = tuple(hosts) if hosts is not None else (Host("localhost", _local_ranks(job, nproc)),)
    keeps_going = folder is not None and job.recovery.max_restarts > 0 and launcher == "clipship"
    with _exit_folder() as exits:
        rendezvous = Rendezvous(*_free_address(all_hosts, hosts is None), secrets.token_hex(16))
        variables = (
            _variables(job, launcher, all_hosts, hosts is None)
            | rendezvous.variables()
            | {BEGAN: f"{began_at(os.environ, began or time.time()):.3f}"}
        )
        if keeps_going:
            spares = 0 if hosts is None else job.recovery.spare_nodes
            variables |= {KEEPS_GOING: "1", RESPAWNS: "1", SPARE_NODES: str(spares)}
        again = starts_again(job, launcher) if folder is not None else ""
        if again:
            variables |= {STARTS_AGAIN: again, GENERATION: "1"}
        start = LaunchRequest(tuple(command), variables, all_hosts, hosts is None, Path(exits), keeps_going)
        arguments = _COMMANDS[launcher](start)
        environment = {
            **_MPI_DEFAULTS,
            **(_MPI_HERE if hosts is None else {}),
            **{name: value for name, value in os.environ.items() if name not in OF_A_START},
            **start.variables,
            EXIT_DIR: exits,
        }
        fallback_signal = _FALLBACK_SIGNAL.get(launcher, signal.SIGTERM)
        since = time.time()
        before()

        def recorded_end() -> ExitRecord | None:
            return exit_record_of(folder, rendezvous.start) if folder else None

        requests: list[int] = []

        def request_stop(number: int) -> bool:
            requests.append(number)
            again = is_second(requests, 0.0)
            if send_stop_request(rendezvous, number, again=again):
                return True
            moved = newest_claim(folder, rendezvous.start) if folder and keeps_going else None
            if moved is None or not moved.port:
                return False
            successor = replace(rendezvous, host=moved.host, port=moved.port)
            return send_stop_request(successor, number, again=again)

        interrupts: list[int] = []

        def signal_line(number: int, times: int) -> str:
            interrupts.append(number)
            state, begun = published_state(start.folder)
            return line_for_signal(
                number, times, state, begun=begun, here=hosts is None, saves=folder is not None
            )

        def next_after(generation: int) -> int:
            return asked_after(Path(folder), rendezvous.start, generation) if again and folder else 0

        def is_over(generation: int) -> bool:
            # the others may go on without the one that has left a record here
            left = not keeps_going and any(start.folder.glob("rank-*.json"))
            return left or recorded_end() is not None or next_after(generation) > 0

        def start_once(generation: int) -> int:
            for record in start.folder.glob("rank-*.json"):
                record.unlink()  # of the generation before
            return supervise(
                arguments,
                environment | ({GENERATION: str(generation)} if again else {}),
                start.folder,
                request_stop,
                fallback_signal,
                lambda: is_over(generation),
                stdin,
                signal_line,
            )

        with _live_line(start, job, launcher, environment):
            code = run_generations(
                start_once,
                next_after,
                lambda: wait_for_hosts([host.name for host in hosts or ()], job.timeouts.init_s),
                say,
                lambda: bool(requests),
            )
        # One supervisor may have left alone, cut off from others that went on.
        ends = [first_cause(start.folder), recorded_end()]
        end = next(filter(None, reversed(ends) if keeps_going else ends), None)
        if end is None and hosts is not None:
            request_stop(signal.SIGTERM)  # ranks of other hosts outlive a launcher that was killed
        if hosts is None:
            sweep_memory()
        if end is None and folder is not None and not interrupts:
            end = _record_killed(
                folder, rendezvous.start, code, Notifier(job.name, job.logging.notify, os.environ)
            )
        # mpirun's own messages may have come since
        shown_before = end is not None and launcher != "mpirun" and is_shown(start.folder, end)
        if end is None and code == EXIT_DONE and folder is not None and not start.here:
            end = shown_late(recorded_end, folder, _LATE_S)
        says_done = code == EXIT_DONE and (end is None or end.exit_code == EXIT_DONE)
        if folder is not None and says_done and not _is_done(folder, end, since):
            say(f"the ranks left without an error, but {folder} has no result of this start: it failed")
            return EXIT_FAILED
        reported = _report_end(code, end, folder, shown_before=shown_before)
        # The end that the first Ctrl-C began may have come before the second one could change it.
        at_once = reported == EXIT_PREEMPTED and is_second(interrupts or [0], 0.0)
        return EXIT_INTERRUPTED if at_once else reported


def _stdin(job: Job, launcher: Launcher, *, here: bool) -> int | None:
    """Returns what the ranks read as standard input, None for this process's own. Raises InputError."""
    if not (reads := standard_input(job)):
        return subprocess.DEVNULL
    if launcher != "clipship" or not here:
        raise InputError(
            f"{reads}: {launcher} passes standard input to no rank"
            f"{' of other hosts' if launcher == 'clipship' else ''}; "
            "use comm.launcher = clipship on one host, which passes it to one rank"
        )
    return None


def _exit_folder() -> "tempfile.TemporaryDirectory[str]":
    """Makes the folder in which the ranks leave why they end. Raises MachineError if there can be none."""
    try:
        return tempfile.TemporaryDirectory(prefix="clipship-")
    except OSError as problem:
        raise MachineError(
            f"no temporary folder can be made ({problem.strerror}): make room in /tmp, or let TMPDIR name a "
            "folder that can be written"
        ) from None


@contextmanager
def _live_line(
    start: LaunchRequest, job: Job, launcher: Launcher, environment: dict[str, str]
) -> Iterator[None]:
    """Shows what rank 0 does if it runs here; tells the ranks by their environment that the line is there."""
    if not start.here:
        yield
        return
    live = LiveLine(
        partial(published_state, start.folder),
        start.ranks,
        every_steps=job.logging.every_steps,
        short=launcher == "mpirun",  # it reads what the ranks print, which therefore see no terminal
    )
    if live.moves:
        environment[LIVE] = "1"
    with live:
        yield


def ranks_of(job: Job, nproc: int | None, hosts: Sequence[Host] | None) -> int:
    """Returns the number of ranks of a run on `nproc` ranks here or on `hosts`, else what [resources] says.

    Raises InputError as `ranks_without_spares` does.
    """
    if hosts is not None:
        return ranks_without_spares(job, hosts)
    return job.resources.world_size if nproc is None else nproc


def ranks_without_spares(job: Job, hosts: Sequence[Host]) -> int:
    """Returns the number of ranks on the hosts; the last `recovery.spare_nodes` of them are spares.

    Raises InputError if no host is left, or if spares could not take another host's place.
    """
    spares = job.recovery.spare_nodes
    if spares >= len(hosts):
        raise InputError(
            f"--hosts names {many(len(hosts), 'host')}, and recovery.spare_nodes = {spares} of them would be "
            f"spares: name at least {spares + 1}"
        )
    if spares and len({host.slots for host in hosts}) > 1:
        raise InputError(
            f"recovery.spare_nodes = {spares} needs the same number of ranks on every host of --hosts, so "
            "that a spare can take any host's place"
        )
    return sum(host.slots for host in hosts[: len(hosts) - spares])


def _local_ranks(job: Job, nproc: int | None) -> int:
    if nproc is None and job.resources.nodes > 1:
        raise InputError(
            f"resources.nodes = {job.resources.nodes} describes a cluster: give --nproc N for this "
            "machine, or --hosts a:4,b:4"
        )
    ranks = job.resources.world_size if nproc is None else nproc
    if ranks < 1:
        raise InputError(f"--nproc {ranks} starts no rank: use 1 or more")
    return ranks


def _variables(job: Job, launcher: Launcher, all_hosts: Sequence[Host], here: bool) -> dict[str, str]:
    ranks = sum(host.slots for host in all_hosts)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = rank_environment(job, ranks, max(1, cores // ranks) if here else None)
    if here:
        variables |= _loopback(job)
    if here and ranks > cores:
        # A rank that spins while it waits takes the core from the rank that it waits for.
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if not over_mpi(job, launcher):
        address, port = _free_address(all_hosts, here)
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    variables |= meeting_variables(job, launcher)
    return variables


def _loopback(job: Job) -> dict[str, str]:
    """Returns the variables that keep communication between ranks of one machine off the network.

    Variables in the job's own [env] have precedence.
    """
    interface = loopback_interface()
    if interface is None:
        return {}
    names = {
        "GLOO_SOCKET_IFNAME": interface,
        "HOROVOD_GLOO_IFACE": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }
    return names | {name: value for name, value in job.env.items() if name in names}


def _free_address(all_hosts: Sequence[Host], here: bool) -> tuple[str, int]:
    """Returns address and free port on the host of rank 0."""
    return ("127.0.0.1", free_port("127.0.0.1")) if here else rendezvous_address(all_hosts)


_FALLBACK_SIGNAL = {"mpirun": signal.SIGUSR2}
"""Signal for a launcher if the supervisors cannot be asked directly. mpirun passes SIGUSR2 on; on SIGTERM
it would kill ranks before they can save."""


# Open MPI 4 reads OMPI_MCA_plm_rsh_*, Open MPI 5 PRTE_MCA_plm_ssh_*.
# Variables that the user exports have precedence.
_MPI_DEFAULTS = {
    # UCX and libfabric, if installed, may find no network on a laptop or in a container, and fail
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^openib",  # Open MPI 4 warns of it on every host with InfiniBand
    "OMPI_MCA_plm_rsh_args": " ".join(SSH_OPTIONS),
    "PRTE_MCA_plm_ssh_args": " ".join(SSH_OPTIONS),
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",  # only this host needs to reach the others by ssh
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
}
_MPI_HERE = {"OMPI_MCA_btl": "^openib,tcp"}
"""Settings of Open MPI on one machine, where ranks communicate through memory: its tcp would listen on
every interface."""


def _clipship(start: LaunchRequest) -> list[str]:
    where = [f"--ranks={start.ranks}"]
    if not start.here:
        ssh = shlex.join(["ssh", *SSH_OPTIONS, *KEEP_ALIVE])
        where = [*(f"--host={host.name}:{host.slots}" for host in start.hosts), f"--ssh={ssh}"]
    where += ["--keep-going"] if start.keeps_going else []
    return [sys.executable, "-P", "-m", "trainer.launch.ranks.localrun", *where, "--", *start.command]


def _mpirun(start: LaunchRequest) -> list[str]:
    hostfile = start.folder / "hosts"
    hostfile.write_text(
        "".join(f"{host.name} slots={host.slots}\n" for host in start.hosts), encoding="utf-8"
    )
    exported = sorted({*start.variables, EXIT_DIR})
    return mpirun_command(find_open_mpi(), start.command, start.ranks, hostfile, exported)


_COMMANDS: dict[Launcher, Callable[[LaunchRequest], list[str]]] = {
    "clipship": _clipship,
    "mpirun": _mpirun,
}


_BY_A_SIGNAL = 128
_LATE_S = 60.0
"""Longest that a network file system may remember that a file was not there (acdirmax of NFS)."""


def _is_done(folder: Path, end: ExitRecord | None, began: float) -> bool:
    """Returns whether a rank has recorded that the run is done, whatever the exit codes of processes say.

    A result that was written since the start began, in seconds since the epoch, says so, too, where a file
    system that hung at the end has kept the record of it.
    """
    if end is None and not _written_since(folder / RESULT_FILE, began):
        return False
    if end is not None and (end.exit_code != EXIT_DONE or not appears(folder / RESULT_FILE)):
        return False
    try:
        return Run(folder).finished()
    except InputError:  # it cannot be read
        return False


def _written_since(path: Path, began: float) -> bool:
    try:
        return path.stat().st_mtime > began
    except OSError:
        return False


def _record_killed(folder: Path, start: str, code: int, notifier: Notifier) -> ExitRecord | None:
    """Writes exit.json for a run of which nobody is left to say how it ended; returns the record.

    `code` is the launcher's. Returns None if it says nothing of a signal.
    """
    if not 0 < code - _BY_A_SIGNAL < signal.NSIG:
        return None
    reason = f"its supervisors were killed by {signal_name(code - _BY_A_SIGNAL)}, and none is left to say why"
    record = ExitRecord(0, os.uname().nodename, code, reason, time.time())
    asyncio.run(ExitFiles(str(folder), start, notifier=notifier).write(EXIT_FILE, asdict(record)))
    return record


def sweep_memory(memory: Path = state_folder.MEMORY) -> None:
    """Removes what killed supervisors have left in this machine's memory; what is in use stays."""
    with suppress(OSError):
        for parent in {memory, Path(tempfile.gettempdir())}:
            rank_process.sweep(parent, memory)
        state_folder.sweep(memory)


def _report_end(code: int, cause: ExitRecord | None, folder: Path | None, *, shown_before: bool) -> int:
    """Print why the run ended; returns the exit code of the first failed rank, or else the launcher's.

    `shown_before` says that the headline stands there already.
    """
    if cause is None:
        return code
    if text := cause.details if shown_before else cause.text() if cause.exit_code else "":
        tell(text)
    if cause.exit_code == EXIT_PREEMPTED and folder is not None:
        say(f"to go on: clipship resume {word(folder)}")
    return cause.exit_code
