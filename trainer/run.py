"""The run folder, the same everywhere: what a run was asked, what it said, what came out. Written by rank 0, but for the logs."""

import json
import logging
import os
import platform
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import jobfile
from trainer.errors import InputError, Preempted, Unfit
from trainer.health.last_words import forget_others
from trainer.health.tree import Meeting
from trainer.inputs import check_run_folder
from trainer.job import Job
from trainer.libraries import image_stack, nccl_facts
from trainer.run_lock import hold
from trainer.whole_file import write_json, write_whole
from trainer.world import World

if TYPE_CHECKING:  # it brings torch, which what reads run folders need not have
    from trainer.comm.protocol import Comm

log = logging.getLogger("clipship")

SHARED_S = 5.0
PACKAGES = ("torch", "torchvision", "open_clip_torch", "webdataset", "numpy", "pillow")


@dataclass(frozen=True)
class Run:
    """The places in a run folder."""

    folder: Path

    @property
    def job(self) -> Path:
        return self.folder / "job.toml"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    @property
    def environment(self) -> Path:
        return self.folder / "environment.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def finished(self) -> bool:
        """Does result.json say that the run is done?"""
        return self.result.exists() and json.loads(self.result.read_text())["reason"] == "done"

    def finished_as_asked(self, resume: str) -> bool:
        """Is the run done, and does `checkpoint.resume` not ask it back? The path that the start which ended it was given asks no more."""
        return self.finished() and resume in ("auto", "never", json.loads(self.result.read_text()).get("resume"))


def open_run(job: Job, comm: "Comm") -> Run:
    """Collective: make the job's run folder, or go on in it, and open this rank's log file.

    Raises InputError on every rank, Unfit where another start still writes the folder, Preempted where a stop is asked for meanwhile.
    """
    run = Run(Path(job.logging.runs) / job.name)
    problem: InputError | Unfit | Preempted | None = None
    if comm.world.rank == 0:
        try:
            _prepare(job, run, comm)
        except (InputError, Unfit, Preempted) as error:
            problem = error
    _refuse_together(problem, comm)
    check_shared(run.folder, comm)
    _log_to(run.logs / f"rank-{comm.world.rank:05d}.log", comm.world)
    environments = comm.all_gather_object(_environment(comm))
    if comm.world.rank == 0:
        write_json(run.environment, environments)
    return run


def versions() -> dict[str, str]:
    """Of the packages that a run's results depend on."""
    return {name: version(name) for name in PACKAGES}


def _prepare(job: Job, run: Run, comm: "Comm") -> None:
    """Make the folder ready for this start alone. Raises InputError, Unfit or Preempted."""
    try:
        check_run_folder(job)
        run.logs.mkdir(parents=True, exist_ok=True)
        meeting = Meeting.from_env(os.environ)
        start = meeting.start if meeting else ""
        longest_s = 0.75 * comm.pulse.left_s  # the model is still to be built, within the same limit
        hold(run.folder, comm.world.node, start, longest_s, _say_of_folder, lambda: comm.pulse.stop_asked)
        forget_others(run.folder, start)
        write_whole(run.job, jobfile.dump(job))
    except OSError as error:
        raise InputError(_not_written(run.folder, error)) from None


def _say_of_folder(text: str) -> None:
    log.info("%-12s %s", "run folder", text)


def _not_written(folder: Path, error: OSError) -> str:
    return f"the run folder {folder} cannot be written: {error}. Choose another with --set logging.runs=FOLDER"


def _refuse_together(problem: InputError | Unfit | Preempted | None, comm: "Comm") -> None:
    """Collective: raises on every rank what rank 0 has found wrong."""
    problem = comm.broadcast_object(problem)
    if problem is not None:
        raise problem


def check_place(folder: Path, comm: "Comm") -> None:
    """Collective: could a run folder be made there, for all to see? Nothing stays. Raises InputError on every rank."""
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    check_shared(Path(comm.broadcast_object(str(there))), comm)


def check_shared(folder: Path, comm: "Comm") -> None:
    """Collective: rank 0 must be able to write in the folder, and every rank see it. Raises InputError, naming the nodes that do not."""
    mark = folder / f".seen-by-all-{comm.broadcast_object(secrets.token_hex(8))}"  # a name that no network file system remembers
    problem = None
    if comm.world.rank == 0:
        try:
            mark.touch()
        except OSError as error:
            problem = InputError(_not_written(folder, error))
    _refuse_together(problem, comm)
    node = comm.broadcast_object(comm.world.node)
    blind = sorted({node for node, sees in comm.all_gather_object((comm.world.node, _appears(mark))) if not sees})
    if comm.world.rank == 0:
        mark.unlink()
    if blind:
        raise InputError(
            f"the run folder {folder} of {node} is not there on {', '.join(blind)}: "
            "put it on a file system that all nodes share, with --set logging.runs=FOLDER"
        )


def _appears(path: Path) -> bool:
    """Network file systems may show a new file some seconds late."""
    limit = time.monotonic() + SHARED_S
    while not path.exists():
        if time.monotonic() > limit:
            return False
        time.sleep(0.2)
    return True


def _log_to(path: Path, world: World) -> None:
    """Behind what earlier starts of the run have left there; a line parts them."""
    handler = logging.FileHandler(path, errors="backslashreplace")  # keys of samples may be any bytes
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    begin = f"start of rank {world.rank} of {world.size} on {world.node}, process {os.getpid()}, by {world.launcher}"
    logging.getLogger("clipship.log").info("---- %s", begin)


def _environment(comm: "Comm") -> Mapping[str, str]:
    world = comm.world
    return {
        "rank": str(world.rank),
        "node": world.node,
        "launcher": world.launcher,
        "backend": comm.name,
        "device": str(comm.device),
        "python": platform.python_version(),
        "executable": sys.executable,
        **versions(),
        **comm.versions(),
        **nccl_facts(),
        **{f"image_{name}": built for name, built in image_stack().items()},
    }
