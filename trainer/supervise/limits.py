"""Limits that a supervisor needs from the job file.

A child process reads them, so that the memory of the job's model goes away with it. No torch.
"""

import json
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from trainer.errors import MachineError, Preempted


@dataclass(frozen=True)
class Limits:
    """Limits in seconds, the run folder ("" if not known), and the restarts that `[recovery]` allows.

    The defaults serve a job that cannot be read: its rank says why and leaves.
    """

    init_s: float = 300.0
    checkpoint_s: float = 600.0
    shutdown_s: float = 60.0
    silence_s: float = 6.0
    run_folder: str = ""
    max_restarts: int = 0
    same_fault_limit: int = 2
    backoff_s: float = 5.0
    min_nodes: int | None = None
    """Nodes whose ranks are the fewest with which the run goes on; None: as many as it began with."""
    run: str = ""
    """Name of the run."""
    notify: tuple[str, ...] = ()
    """Events of the run that are told, see `trainer.run.notify`."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of ranks that can train the job, smallest first; empty: not known."""
    even_nodes: bool = False
    """True: the ranks must be as many on each node."""

    def __post_init__(self) -> None:
        for name in ("world_sizes", "notify"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


READ_S = Limits.init_s
ASKED_S = 10.0
"""Seconds of them that are left once the run is asked to stop: most job files take one or two."""
_LOOK_S = 0.5


def read_limits(arguments: Sequence[str], asked: Sequence[int] = ()) -> Limits:
    """Reads the limits from the rank's arguments and from overrides in the environment.

    The arguments are JOB [--set KEY=VALUE ...]. Call it before any thread is started, since it forks. `asked`
    holds the requests to stop, and may grow meanwhile. Raises MachineError if the job is there and its limits
    do not come, since without them no fault would be survived; Preempted if there was a request then.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _child(arguments, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        if not _comes(pipe, asked):
            os.kill(child, signal.SIGKILL)  # and nobody waits for it: it may hang in a file system
            if asked:
                raise Preempted("asked to stop before the job file was read; the run can be started again")
            raise MachineError(
                f"the job file was not read within {READ_S:g} s: start the run again when its file system "
                "answers faster"
            )
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        how = os.waitstatus_to_exitcode(status)
        raise MachineError(f"the process that reads the job file ended without an answer (code {how})")
    answer = json.loads(text)
    if isinstance(answer, str):
        raise MachineError(f"the job file could not be read: {answer}")
    return Limits(**answer)


def _comes(pipe: IO[bytes], asked: Sequence[int]) -> bool:
    """Waits for the child's answer, and returns whether it has come in time."""
    left, until = READ_S, time.monotonic() + READ_S
    while not select.select([pipe], [], [], max(0.0, min(left, _LOOK_S)))[0]:
        now = time.monotonic()
        if asked:
            until = min(until, now + ASKED_S)
        if (left := until - now) <= 0:
            return False
    return True


def _child(arguments: Sequence[str], write_end: int) -> None:
    try:
        # It is imported in the child alone, so that the supervisor does not carry the job's model.
        from trainer.run.job_limits import limits_of_job

        answer: object = limits_of_job(arguments)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    try:
        os.write(write_end, json.dumps(answer).encode())
    finally:
        os._exit(0)
