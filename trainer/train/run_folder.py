"""Opens the run folder, which is the same everywhere: what a run was asked, what it logged, what came out.

Rank 0 writes it, except for the other ranks' logs.
"""

import logging
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trainer.comm.rank_zero import of_rank_0
from trainer.comm.shared_folder import check_shared
from trainer.config import Job
from trainer.config.loader import dump_job
from trainer.errors import InputError
from trainer.preflight.host_probe import try_place
from trainer.run.exit_files import remove_other_exit_files
from trainer.run.folder import check_run_folder, not_written
from trainer.run.layout import Run, rank_log
from trainer.run.lock import hold
from trainer.safe_io.atomic import write_json, write_whole
from trainer.safe_io.plain import open_plain, still_there
from trainer.sysinfo.libraries import image_stack, nccl_facts
from trainer.sysinfo.versions import versions
from trainer.world.console import rank_formatter
from trainer.world.launchers import World
from trainer.world.rendezvous import Rendezvous

if TYPE_CHECKING:  # protocol imports torch, which readers of run folders do not need
    from trainer.comm.protocol import Comm

log = logging.getLogger("clipship")


def open_run(job: Job, comm: "Comm") -> Run:
    """Collective: makes the job's run folder, or goes on in it, and opens this rank's log file.

    Raises InputError on every rank, MachineError if another start still writes the folder, and Preempted if a
    stop is requested meanwhile.
    """
    run = Run(Path(job.logging.runs) / job.name)
    of_rank_0(comm, lambda: _prepare(job, run, comm))
    check_shared(run.folder, comm)
    _log_to(run.logs / rank_log(comm.world.rank), comm.world)
    environments = comm.all_gather_object(_environment(comm))
    if comm.world.rank == 0:
        write_json(run.environment, environments)
    return run


def _prepare(job: Job, run: Run, comm: "Comm") -> None:
    """Makes the folder ready for this start alone. Raises InputError, MachineError or Preempted."""
    try:
        check_run_folder(job)
        run.logs.mkdir(parents=True, exist_ok=True)
        rendezvous = Rendezvous.from_env(os.environ)
        start = rendezvous.start if rendezvous else ""
        longest_s = (
            0.75 * comm.heartbeat.remaining_s
        )  # the rest of the phase's limit is left for building the model
        hold(
            run.folder,
            comm.world.node,
            start,
            longest_s,
            _say_of_folder,
            lambda: comm.heartbeat.stop_requested,
            comm.world.generation,
        )
        for missing in try_place(job, run.folder) if comm.world.generation == 1 else ():
            _say_of_folder(missing)
        remove_other_exit_files(run.folder, start)
        write_whole(run.job, dump_job(job), private=True)
    except OSError as error:
        raise InputError(not_written(run.folder, error)) from None


def _say_of_folder(text: str) -> None:
    log.info("%-12s %s", "run folder", text)


class _PlainFile(logging.FileHandler):
    """Log file that follows no link and waits for no FIFO."""

    def _open(self) -> TextIOWrapper:
        opened = open(self.baseFilename, self.mode, errors=self.errors, opener=open_plain)  # noqa: SIM115
        return cast(TextIOWrapper, opened)

    def emit(self, record: logging.LogRecord) -> None:
        """Makes the file again if somebody has removed it, or its folder; not the run folder."""
        with suppress(OSError):
            if not Path(self.baseFilename).exists():
                Path(self.baseFilename).parent.mkdir(exist_ok=True)
                self.stream = still_there(cast(TextIOWrapper, self.stream))
        super().emit(record)


def _log_to(path: Path, world: World) -> None:
    """Appends this rank's log to its file; a line marks the start."""
    try:
        handler = _PlainFile(path, errors="backslashreplace")  # sample keys may be any bytes
    except OSError as error:
        raise InputError(not_written(path, error)) from None
    handler.setFormatter(rank_formatter(world, "%(asctime)s %(levelname)s "))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    begin = (
        f"start of rank {world.rank} of {world.size} on {world.node}, "
        f"process {os.getpid()}, by {world.launcher}, generation {world.generation}"
    )
    logging.getLogger("clipship.log").info("---- %s", begin)


def _environment(comm: "Comm") -> Mapping[str, str]:
    world = comm.world
    return {
        "rank": str(world.rank),
        "node": world.node,
        "launcher": world.launcher,
        "generation": str(world.generation),
        "backend": comm.name,
        "device": str(comm.device),
        "python": platform.python_version(),
        "executable": sys.executable,
        **versions(),
        **comm.versions(),
        **nccl_facts(),
        **{f"image_{name}": built for name, built in image_stack().items()},
    }
