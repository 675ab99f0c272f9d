"""Limits that a supervisor needs from the job file.

A child process reads them, so that the memory of the job's model goes away with it. No torch.
"""

import json
import os
import select
from collections.abc import Sequence
from dataclasses import dataclass

READ_S = 60.0


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

    def __post_init__(self) -> None:
        for name in ("world_sizes", "notify"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))


def read_limits(arguments: Sequence[str]) -> Limits:
    """Reads the limits from the rank's arguments and from overrides in the environment.

    The arguments are JOB [--set KEY=VALUE ...]. Call it before any thread is started, since it forks.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _child(arguments, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        text = pipe.read() if select.select([pipe], [], [], READ_S)[0] else b""
    if text:
        os.waitpid(child, 0)
    return Limits(**json.loads(text)) if text else Limits()


def _child(arguments: Sequence[str], write_end: int) -> None:
    try:
        # It is imported in the child alone, so that the supervisor does not carry the job's model.
        from trainer.run.job_limits import limits_of_job

        os.write(write_end, json.dumps(limits_of_job(arguments)).encode())
    finally:
        os._exit(0)
