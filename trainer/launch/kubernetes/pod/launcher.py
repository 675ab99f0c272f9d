"""First process of the launcher pod: starts the ranks with mpirun until the run has ended.

Run as `python -m trainer.launch.kubernetes.pod.launcher JOB --ssh-port N`. It waits for the workers, starts
every rank through ssh, passes a request to stop on to the ranks' supervisors, and starts failed ranks again
from their last checkpoint. It leaves with the first cause's exit code and a message that `kubectl describe`
shows. Imports no torch.
"""

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from trainer.comm.backends import starts_again
from trainer.config import Job
from trainer.config.loader import load_job
from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    InputError,
)
from trainer.launch.kubernetes.pod.hosts import listed, read_hostfile, wait_for_all
from trainer.launch.kubernetes.pod.last_word import leave
from trainer.launch.kubernetes.pod.names import JOB_UID, known_host, rendezvous
from trainer.launch.kubernetes.pod.watch import SHOWN_S, WATCH_S, Watch, listens
from trainer.launch.open_mpi import find_mpirun, mpirun_command
from trainer.launch.processes import supervise
from trainer.launch.start_again import asked_after, run_generations
from trainer.run.checkpoints import folder_name, newest_step
from trainer.run.exit_files import exit_record_of, remove_exit_files
from trainer.run.exit_record import EXIT_DIR
from trainer.run.folder import run_folder
from trainer.run.goodput_log import BEGAN
from trainer.run.layout import CHECKPOINTS, METRICS_FILE, Run
from trainer.run.retry import every, shown, until
from trainer.run.starts import StartsSoFar, add_starts, read_starts
from trainer.safe_io.plain import last_text, parse_json
from trainer.supervise.network.link import REPEAT_S, send_stop_request
from trainer.sysinfo.signals import reset_inherited_signals
from trainer.text.terminal import say
from trainer.world.rendezvous import Rendezvous
from trainer.world.restart_policy import after_end
from trainer.world.variables import GENERATION, STARTS_AGAIN

HOSTFILE = Path("/etc/mpi/hostfile")
_STARTS_APART_S = 2.0


def main(arguments: Sequence[str]) -> int:
    """Run the launcher; returns the run's exit code."""
    parser = argparse.ArgumentParser(prog="trainer.launch.kubernetes.pod.launcher")
    parser.add_argument("job", type=Path)
    parser.add_argument("--ssh-port", type=int, required=True)
    options = parser.parse_args(arguments)
    reset_inherited_signals()
    try:
        launcher = Launcher(options.job, load_job(options.job), options.ssh_port, os.environ)
        return launcher.run()
    except InputError as problem:
        return leave(EXIT_BAD_INPUT, str(problem))


class Launcher:
    """Launcher of one run; `run` is its whole life."""

    def __init__(self, job_path: Path, job: Job, ssh_port: int, env: Mapping[str, str]) -> None:
        self._job_path, self._job, self._ssh_port, self._env = job_path, job, ssh_port, env
        self._rendezvous = self._named_rendezvous = rendezvous(env)
        self._hosts = read_hostfile(HOSTFILE)
        self._folder = run_folder(job)
        self._record = read_starts(self._folder, env.get(JOB_UID, ""))
        self._asked = 0
        self._began: float | None = None
        """Time at which the first worker answered: from then on pods wait for the others."""
        self._starts_again = starts_again(job, "mpirun")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Start the ranks until they are done, have failed too often, or this pod is asked to stop."""
        if self._record.over:
            return leave(self._record.code, self._record.message)
        while True:
            code, reason = self._attempt()
            message = f"{reason}; {self._progress()}"
            retries = self._job.kubernetes.retries
            saved = newest_step(self._folder / CHECKPOINTS)
            asked = bool(self._asked)
            self._store(
                after_end(self._record, code, asked=asked, saved_step=saved, retries=retries, message=message)
            )
            if self._record.over or asked:
                return leave(code, message)
            again = (
                f"{self._record.failures} of at most {retries}"
                if code != EXIT_PREEMPTED
                else "a worker was asked to stop"
            )
            say(f"{message}; the ranks are started again ({again})")
            self._pause(_STARTS_APART_S)

    def _attempt(self) -> tuple[int, str]:
        """Start all ranks once; returns exit code and reason."""
        problem = self._wait_for_workers()
        if self._asked:
            return EXIT_PREEMPTED, "asked to stop before the ranks had started"
        if problem:
            return EXIT_FAILED, problem
        if not self._earlier_ranks_gone():
            return (
                EXIT_FAILED,
                (
                    f"ranks of an earlier launcher still run: {self._rendezvous.host} answers on port "
                    f"{self._rendezvous.port}"
                ),
            )
        self._store(replace(self._record, starts=self._record.starts + 1))
        remove_exit_files(
            self._folder, self._rendezvous.start
        )  # otherwise an earlier start's end would be taken for this one's
        before = _stamp(Run(self._folder).result)
        with tempfile.TemporaryDirectory(prefix="clipship-") as folder:
            code = run_generations(
                lambda generation: self._mpirun(Path(folder), generation),
                lambda generation: 0 if self._asked else self._asked_after(generation, shown_s=SHOWN_S),
                self._wait_for_workers_again,
                say,
            )
            return self._run_result(code, before)

    def _note_begin(self) -> None:
        self._began = self._began or time.time()

    def _asked_after(self, generation: int, *, shown_s: float = 0.0) -> int:
        """Returns as which generation the supervisors ask to be started again, 0 if they do not."""
        if not self._starts_again:
            return 0
        return asked_after(self._folder, self._rendezvous.start, generation, shown_s=shown_s)

    def _wait_for_workers_again(self) -> str:
        """Waits for the workers between two generations; returns why the next one cannot start, or ""."""
        problem = self._wait_for_workers()
        if self._asked or problem:
            return "asked to stop" if self._asked else problem
        return "" if self._earlier_ranks_gone() else "ranks of the generation before still run"

    def _wait_for_workers(self) -> str:
        """Waits until all workers answer; returns a sentence about those that do not, or ""."""
        limit_s, hosts = self._job.kubernetes.workers_ready_s, self._hosts
        missing = wait_for_all(
            hosts, self._ssh_port, limit_s, lambda: bool(self._asked), say, on_first=self._note_begin
        )
        self._rendezvous = _at_its_address(self._named_rendezvous)
        if not missing:
            return ""
        return (
            f"{len(missing)} of {len(hosts)} workers were not ready within "
            f"kubernetes.workers_ready_s = {limit_s:g} s: {listed(missing)}; "
            "`kubectl describe pod` says why; a pod that was evicted is replaced only after somebody has "
            "deleted it"
        )

    def _earlier_ranks_gone(self) -> bool:
        """Ask ranks of an earlier launcher to stop; returns whether none is left.

        A launcher that was killed may leave ranks behind, which would write into the same run folder.
        """
        limit = self._job.timeouts.checkpoint_s + self._job.timeouts.shutdown_s
        for patience in (limit, REPEAT_S + 30.0):
            if not send_stop_request(self._rendezvous, signal.SIGTERM):
                return True
            say("ranks of an earlier launcher still run: they are asked to save and exit")
            waits_s = every(WATCH_S, max(patience, REPEAT_S + 1.0))
            until(lambda: self._asked or not listens(self._rendezvous), waits_s)
        return not listens(self._rendezvous)

    def _mpirun(self, folder: Path, generation: int) -> int:
        start_s = self._job.timeouts.init_s + self._job.kubernetes.workers_ready_s
        self._watch = Watch(
            self._folder,
            self._rendezvous,
            self._job.timeouts.silence_s,
            start_s,
            lambda: self._asked_after(generation) > 0,
        )
        known_hosts = folder / "known_hosts"
        known_hosts.write_text(known_host(self._env), encoding="utf-8")
        told = told_variables(self._began, self._starts_again, generation)
        told |= {JOB_UID: self._env.get(JOB_UID, "")}
        variables = {
            **self._env,
            **ssh_variables(self._ssh_port, known_hosts),
            EXIT_DIR: str(folder),
            **told,
        }
        return supervise(
            ranks_command(self._job_path, self._job.resources.world_size, tuple(told)),
            variables,
            folder,
            self._pass_on,
            signal.SIGUSR2,
            self._watch.is_over,
        )

    def _run_result(self, code: int, before: int) -> tuple[int, str]:
        """Returns exit code and reason as the ranks' own supervisors recorded them.

        mpirun's exit code is used only if they recorded nothing.
        """
        run = Run(self._folder)

        def recorded() -> tuple[int, str] | None:
            record = exit_record_of(self._folder, self._rendezvous.start)
            if record is not None:
                return record.exit_code, record.headline().removeprefix("clipship: ")
            if (code == EXIT_DONE or _stamp(run.result) != before) and run.result.exists() and run.finished():
                return EXIT_DONE, "done"
            return None

        if end := shown(recorded, self._folder, SHOWN_S, WATCH_S / 2):
            return end
        if cause := self._watch.end:
            return cause.exit_code, cause.headline().removeprefix("clipship: ")
        if self._asked:
            return EXIT_PREEMPTED, "asked to stop before every rank had started"
        return (
            code or EXIT_FAILED,
            f"mpirun ended with exit code {code}, and no rank recorded why: this pod's log has its messages",
        )

    def _progress(self) -> str:
        saved = newest_step(self._folder / CHECKPOINTS)
        checkpoint = folder_name(saved) if saved else "none"
        return (
            f"last logged step: {_last_step(self._folder)}, newest checkpoint: {checkpoint}, run "
            f"folder: {self._folder}"
        )

    def _store(self, record: StartsSoFar) -> None:
        self._record = record
        try:
            add_starts(self._folder, record)
        except OSError as problem:
            say(
                f"{self._folder} cannot be written ({problem.strerror}): a new launcher would count the "
                "failures from zero again"
            )

    def _pass_on(self, number: int) -> bool:
        self._asked = self._asked or number
        return send_stop_request(self._rendezvous, number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked = self._asked or number

    def _pause(self, seconds: float) -> None:
        until(lambda: self._asked, every(0.1, seconds))


def told_variables(began: float | None, starts_again: str, generation: int) -> dict[str, str]:
    """Returns the variables that ranks get from the launcher, and not from their pods.

    `began` is the time from which the run's time counts, None if it is not known; `starts_again` is the value
    of STARTS_AGAIN, "" if a fault ends the run.
    """
    again = {STARTS_AGAIN: starts_again, GENERATION: str(generation)} if starts_again else {}
    return again | ({} if began is None else {BEGAN: f"{began:.3f}"})


def ranks_command(job_path: Path, ranks: int, exported: Sequence[str] = ()) -> list[str]:
    """Returns the command line of mpirun.

    It passes on the variables that are named in `exported`: ranks take the others from their pods.
    """
    mpirun = find_mpirun("the image has no Open MPI")
    rank = (sys.executable, "-P", "-m", "trainer.launch.kubernetes.pod.rank", str(job_path))
    return mpirun_command(mpirun, rank, ranks, HOSTFILE, exported)


def ssh_variables(port: int, known_hosts: Path) -> dict[str, str]:
    """Returns the variables with ssh's options for mpirun.

    A worker proves with the job's own key that it belongs to this job; ssh refuses a host without it.
    """
    options = f"-p {port} -o BatchMode=yes -o ConnectTimeout=20 -o ConnectionAttempts=10 -o LogLevel=ERROR"
    # mpirun waits for a node that lost power as long as its ssh does
    options += " -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
    options += (
        f" -o StrictHostKeyChecking=yes -o UserKnownHostsFile={known_hosts} -o GlobalKnownHostsFile=/dev/null"
    )
    return {"OMPI_MCA_plm_rsh_args": options, "PRTE_MCA_plm_ssh_args": options}


def _last_step(folder: Path) -> str:
    try:
        lines = last_text(folder / METRICS_FILE, 65536).splitlines()[-20:]
        records = [parse_json(line) for line in lines if line.endswith("}") and line.startswith("{")]
        steps = [record["step"] for record in records if isinstance(record.get("step"), int)]
    except (OSError, ValueError):
        steps = []
    return str(max(steps)) if steps else "none"  # a checkpoint is logged when it is written, some steps later


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _at_its_address(rendezvous: Rendezvous) -> Rendezvous:
    """Returns the rendezvous with the host's address in place of its name.

    The name disappears when the pod is asked to stop, and that is when its ranks must be reached.
    """
    try:
        return replace(
            rendezvous,
            host=str(socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_STREAM)[0][4][0]),
        )
    except OSError:
        return rendezvous


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
