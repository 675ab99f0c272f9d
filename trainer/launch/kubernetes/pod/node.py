"""First process in a pod of an Indexed Job: runs the supervisors of this pod's ranks.

Run as `python -m trainer.launch.kubernetes.pod.node JOB`. Kubernetes tells the pod its index, which is the
node's; the pods meet in the run folder (`starts`), and their supervisors at the pod of index 0. Asked to stop
(a drained node, a deleted pod), it asks the supervisors to save and leave. A pod that takes the place of a
lost one brings supervisors without a rank, to which the run gives one. The exit code tells the Job whether to
start another pod in this one's place. Imports no torch.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from trainer.config import Job
from trainer.config.loader import load_job
from trainer.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_LEFT_OUT,
    EXIT_PREEMPTED,
    InputError,
)
from trainer.launch.kubernetes.pod.last_word import leave
from trainer.launch.kubernetes.pod.names import JOB_UID
from trainer.launch.kubernetes.pod.starts import PodsStart, leave_code, open_start
from trainer.launch.kubernetes.pod.watch import SHOWN_S, WATCH_S
from trainer.launch.ranks.started_ranks import StartedRank, place_variables, run_ranks
from trainer.run.exit_files import exit_record_of
from trainer.run.exit_record import ExitRecord
from trainer.run.folder import run_folder
from trainer.run.goodput_log import BEGAN
from trainer.run.retry import shown
from trainer.run.starts import StartsSoFar
from trainer.sysinfo.addresses import is_here, listening_address
from trainer.sysinfo.children import reap, signal_all
from trainer.sysinfo.signals import reset_inherited_signals
from trainer.text.terminal import say
from trainer.world.rendezvous import Rendezvous
from trainer.world.variables import RESPAWNED

INDEX = "JOB_COMPLETION_INDEX"
"""Variable in which Kubernetes tells a pod of an Indexed Job its index."""
_REPORT_S = 30.0
_NAME_S = 120.0
_END_POLL_S = 5.0
_END_GRACE_S = 15.0
_SIGNALLED = 128


def main(arguments: Sequence[str]) -> int:
    """Run the pod; returns its exit code."""
    parser = argparse.ArgumentParser(prog="trainer.launch.kubernetes.pod.node")
    parser.add_argument("job", type=Path)
    options = parser.parse_args(arguments)
    reset_inherited_signals()
    try:
        return Node(options.job, load_job(options.job), os.environ).run()
    except InputError as problem:
        return leave(EXIT_BAD_INPUT, str(problem))
    except OSError as problem:
        return leave(EXIT_LEFT_OUT, f"the run folder cannot be used: {problem}")


class Node:
    """A pod of one node's ranks; `run` is its whole life."""

    def __init__(self, job_path: Path, job: Job, env: Mapping[str, str]) -> None:
        self._job_path, self._job, self._env = job_path, job, env
        self._folder = run_folder(job)
        self._index, self._rendezvous = place(env)
        self._pods = job.resources.nodes + job.recovery.spare_nodes
        self._recovers = job.recovery.max_restarts > 0
        self._asked = False
        self._supervisors: list[StartedRank] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, self._on_child)

    def run(self) -> int:
        """Join the present start, or the next one, and return the exit code of this pod."""
        came = time.time()
        while True:
            start = open_start(self._folder, self._env[JOB_UID])
            if end := start.end:
                return leave_with(end)
            is_first = start.mark(self._index)
            is_back = not is_first and start.began_at is not None
            if is_back and not self._recovers:
                say("this pod takes a lost one's place: it waits for the end of the start that lost it")
                self._wait_for_end(start)
                if not self._asked:
                    continue
            break
        if not is_back and (problem := self._wait_for_others(start)):
            start.settle(EXIT_FAILED, problem, self._retries)
        if end := start.end:
            return leave_with(end)
        if self._asked:
            if not is_back:
                start.unmark(self._index)
            return leave(EXIT_PREEMPTED, "asked to stop before the ranks had started")
        return self._run_ranks(start, is_back=is_back, came=came)

    def _wait_for_end(self, start: PodsStart) -> None:
        """Wait until a start that this pod's predecessor has left has ended; end it if all are gone."""
        self._wait(lambda: start.end is not None, self._job.timeouts.backstop_s)
        if start.end is None and not self._asked:
            start.settle(EXIT_FAILED, "the pods of the last start are gone", self._retries)

    @property
    def _retries(self) -> int:
        return self._job.kubernetes.retries

    def _wait_for_others(self, start: PodsStart) -> str:
        """Wait until all pods are there, and pod 0 has an address; returns why they cannot start, or ""."""
        limit_s = self._job.kubernetes.workers_ready_s
        if self._index == 0:
            if not self._wait(lambda: not start.missing(self._pods), limit_s, start):
                return self._not_there(start, limit_s)
            address = "" if self._asked else self._own_address()
            if address:
                start.begin(address)
            known = bool(address) or self._asked
            return "" if known else f"{self._rendezvous.host} is no address of this pod: {_DNS}"
        if not self._wait(lambda: start.began_at is not None or start.end is not None, limit_s, start):
            return self._not_there(start, limit_s)
        return ""

    def _own_address(self) -> str:
        """Returns the address at which the others reach this pod, which is the one of index 0; "" if unknown.

        The others get it from the run folder: a name server may know the name late, or a lost pod's address.
        One of IPv4 comes first, which Horovod needs.
        """
        host = self._rendezvous.host
        self._wait(lambda: is_here(host), _NAME_S)
        names = (host, os.uname().nodename)
        ways = [(name, family) for family in (socket.AF_INET, socket.AF_UNSPEC) for name in names]
        return next(filter(None, (listening_address(name, family) for name, family in ways)), "")

    def _not_there(self, start: PodsStart, limit_s: float) -> str:
        missing = ", ".join(map(str, start.missing(self._pods)[:5])) or "0"
        return (
            f"not all of {self._pods} pods were there within kubernetes.workers_ready_s = {limit_s:g} s; "
            f"missing: those of index {missing}; `kubectl describe pod` says why"
        )

    def _wait(self, reached: Callable[[], bool], limit_s: float, start: PodsStart | None = None) -> bool:
        """Waits until it is so, or until this pod is asked to stop; returns False after `limit_s` seconds."""
        begun = reported = time.monotonic()
        while not self._asked and not reached():
            now = time.monotonic()
            if now - begun > limit_s:
                return False
            if start is not None and now - reported > _REPORT_S:
                reported = now
                missing = start.missing(self._pods)
                say(f"{len(missing)} of {self._pods} pods are not there yet; index {missing[:5]}")
            time.sleep(WATCH_S)
        return True

    def _run_ranks(self, start: PodsStart, *, is_back: bool, came: float) -> int:
        first = start.began_at or self._rendezvous.host
        rendezvous = replace(self._rendezvous, host=first, token=start.token)
        common = {
            **rendezvous.variables(),
            "MASTER_ADDR": first,
            BEGAN: f"{came:.3f}",
            **({RESPAWNED: "1"} if is_back else {}),
        }
        ranks = self._job.resources.ranks_per_node
        first_rank = self._index * ranks

        def start_rank(local_rank: int, more: Mapping[str, str]) -> StartedRank:
            place = place_variables(first_rank + local_rank, self._pods * ranks, local_rank, ranks)
            variables = {**common, **place, **more}
            command = [sys.executable, "-P", "-m", "trainer.rank", str(self._job_path)]
            # Without a signal at this process's death: the kernel ends a pod's processes with its first one,
            # and a request to stop that reaches the supervisors just before would look like a drained node.
            process = subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL)
            started = StartedRank(process)
            self._supervisors.append(started)
            if self._asked:  # just before there was a process to pass it on to
                self._send(signal.SIGTERM)
            return started

        threading.Thread(target=self._end_with, args=(start,), daemon=True).start()
        code = run_ranks(
            start_rank,
            ranks,
            (),
            "clipship",
            keep_going=self._recovers,
            first_rank=first_rank,
            asked=lambda: self._asked,
        )
        return self._leave_after(start, code)

    def _leave_after(self, start: PodsStart, code: int) -> int:
        """Returns the exit code of this pod, after its supervisors have left with `code`."""
        end = start.end
        if end is None:
            record = self._record(start, SHOWN_S if code not in (EXIT_DONE, EXIT_BAD_INPUT) else 0.0)
            if record is None and code > _SIGNALLED:
                return leave(code, f"a supervisor of this pod was ended by signal {code - _SIGNALLED}")
            if record is None and code not in (EXIT_DONE, EXIT_BAD_INPUT, EXIT_PREEMPTED):
                return leave(EXIT_LEFT_OUT, f"the supervisors here left with {code}, and the run goes on")
            code = record.exit_code if record is not None else code
            headline = record.headline().removeprefix("clipship: ") if record is not None else ""
            reason = "done" if code == EXIT_DONE else headline or _UNRECORDED[code]
            end = start.settle(code, reason, self._retries)
        return leave_with(end)

    def _record(self, start: PodsStart, shown_s: float) -> ExitRecord | None:
        """Returns how the run has ended; None if its supervisors have recorded nothing."""
        return shown(lambda: exit_record_of(self._folder, start.name), self._folder, shown_s, WATCH_S / 2)

    def _end_with(self, start: PodsStart) -> None:
        """Ends supervisors that have not noticed the end of their start; runs in a thread of its own."""
        while True:
            time.sleep(_END_POLL_S)
            with suppress(OSError, ValueError):
                if start.end is not None:
                    break
        time.sleep(_END_GRACE_S)
        self._send(signal.SIGKILL)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            say("asked to stop: running ranks save and exit")
        self._asked = True
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        running = [started.process for started in self._supervisors if started.process.returncode is None]
        signal_all([process.pid for process in running], number)

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        """Reaps orphans, as a first process must, and leaves the supervisors to those who wait for them."""
        if os.getpid() == 1:
            reap(but={started.process.pid for started in self._supervisors})


_UNRECORDED = {
    EXIT_BAD_INPUT: "the supervisors refused the job: the log says why",
    EXIT_PREEMPTED: "asked to stop before every rank had started",
}
_DNS = "does the cluster's DNS know the job's headless Service?"


def place(env: Mapping[str, str]) -> tuple[int, Rendezvous]:
    """Returns the index of this pod, and where the supervisors meet. Raises InputError."""
    rendezvous, index = Rendezvous.from_env(env), env.get(INDEX, "")
    if rendezvous is None or not index.isdigit() or not env.get(JOB_UID):
        raise InputError(
            f"{INDEX}, {JOB_UID} or CLIPSHIP_SUPERVISORS is not set: run this in a pod of a Job that "
            "clipship has rendered"
        )
    return int(index), rendezvous


def leave_with(end: StartsSoFar) -> int:
    """Leaves as the end of the start says."""
    return leave(leave_code(end), f"{end.message}{'' if end.over else '; the pods start again'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
