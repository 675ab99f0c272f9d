"""Starts the real trainer with a fault, the way `clipship run` starts a job, and says how it ended.

`python -m tests.support.ends JOB RANKS` is that start, in a process of its own, which tests send signals to.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import faults, runs
from tests.support.faulty_rank import MOMENT, THEN, go_file
from tests.support.jobs import tiny_job
from tests.support.pictures import picture
from tests.support.processes import until
from trainer.config.loader import dump_job, load_job
from trainer.data.pack import write_shard
from trainer.launch import local
from trainer.launch.hosts import parse_hosts
from trainer.sysinfo.children import processes_with, signal_all

CLIPSHIP = pytest.param("torch", "clipship", id="torch-clipship")
MPIRUN = pytest.param("torch", "mpirun", id="torch-mpirun", marks=pytest.mark.mpi)
HOROVOD_MPIRUN = pytest.param(
    "horovod", "mpirun", id="horovod-mpirun", marks=[pytest.mark.mpi, pytest.mark.horovod]
)
HOROVOD = pytest.param("horovod", "clipship", id="horovod-clipship", marks=pytest.mark.horovod)
STARTS = (CLIPSHIP, MPIRUN, HOROVOD_MPIRUN, HOROVOD)
full = pytest.mark.full
ROOT = Path(__file__).parents[2]

LIMITS = {
    "init_s": 200.0,
    "first_step_s": 100.0,
    "step_s": 90.0,
    "data_s": 80.0,
    "eval_s": 60.0,
    "checkpoint_s": 60.0,
    "shutdown_s": 60.0,
    "silence_s": 60.0,
}
"""No healthy phase reaches these, on a machine that does much else too.

That in data is longer than a store is asked again: 40 to 60 s, by chance.
"""
SHORT = {"step": 6.0, "data": 4.0, "evaluation": 6.0, "checkpoint": 9.0, "shutdown": 6.0}
"""Limits by phase, from the fault on, for those that wait for a limit to pass."""
LATEST_S = 40.0
"""The contract: exit 124 within 15 s after the limit, on a machine that does nothing else."""
DEATH_S = 30.0
"""The contract: nobody outlives the first by more than 10 s, on a machine that does nothing else."""


def starts(*often: Any) -> pytest.MarkDecorator:
    """Every pair of backend and launcher; those that are not named here run only with `-m full`."""
    cases = [
        start if start in often else pytest.param(*start.values, id=start.id, marks=[*start.marks, full])
        for start in STARTS
    ]
    return pytest.mark.parametrize(("backend", "launcher"), cases)


@dataclass(frozen=True)
class End:
    """The end of a run: its output, folder and time."""

    output: str
    errors: str
    folder: Path
    seconds: float
    """Seconds from the fault to the end of the launcher; NaN if there was no fault."""

    @property
    def diagnosis(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "diagnosis.json").read_text())
        return found

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))


@dataclass
class Running:
    """A start under way."""

    process: subprocess.Popen[str]
    folder: Path
    moment: Path

    def reached(self, step: int) -> None:
        """Returns once rank 0 has logged the step."""
        metrics = self.folder / "metrics.jsonl"
        self.until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text())

    def has_fault(self) -> None:
        """Returns once the fault has happened."""
        self.until(self.moment.exists)

    def until(self, reached: Callable[[], object]) -> None:
        """Returns once it is so, while the run goes on."""
        until(reached, self.process)

    def go(self) -> None:
        """Lets a rank go on that the fault `wait` holds."""
        go_file(self.moment).touch()

    def end(self, code: int = 0) -> End:
        """Waits for it; it must leave with this exit code."""
        output, errors = self.process.communicate(timeout=280)
        seconds = time.time() - float(self.moment.read_text()) if self.moment.exists() else float("nan")
        faults.measured.append(seconds)
        assert self.process.returncode == code, errors
        return End(output, errors, self.folder, seconds)

    def all_end(self, code: int = 0) -> End:
        """Waits for it as `end` does; no process of it may be left."""
        end = self.end(code)
        assert not ranks_left(self)
        return end


def begin(
    tmp_path: Path,
    backend: str,
    launcher: str,
    fault: str = "",
    *,
    ranks: int = 2,
    steps: int = 6,
    **sections: Any,
) -> Running:
    """Starts the ranks of a job of a few steps, see `write_job`; `around` are words before the command."""
    python: Path | None = sections.pop("python", None)
    hosts: str = sections.get("hosts", "")
    around: list[str] = sections.pop("around", [])
    path = write_job(tmp_path, backend, launcher, fault, steps=steps, **sections)
    command = [
        *around,
        str(python or sys.executable),
        "-m",
        "tests.support.ends",
        str(path),
        str(ranks),
        *([hosts] if hosts else []),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return Running(process, tmp_path / "runs" / "ends", tmp_path / "moment")


def write_job(
    tmp_path: Path, backend: str, launcher: str, fault: str = "", *, steps: int = 6, **sections: Any
) -> Path:
    """Writes a job file with a checkpoint and an evaluation every second step.

    `timeouts` hold from the start, `then` from the fault on.
    """
    moment = tmp_path / "moment"
    for left in (moment, go_file(moment)):  # of an earlier start
        left.unlink(missing_ok=True)
    variables: dict[str, str] = {THEN: json.dumps(sections.pop("then", {})), **sections.pop("variables", {})}
    hosts: str = sections.pop("hosts", "")
    if hosts:
        variables = {**variables, "PYTHONPATH": str(ROOT)}  # ssh brings none
    optim: dict[str, Any] = sections.pop("optim", {})
    job = tiny_job(
        name="ends",
        comm={
            "backend": backend,
            "launcher": launcher,
            "deterministic": sections.pop("deterministic", False),
        },
        optim={"steps": steps, **optim},
        resources={"cpus_per_gpu": 1},
        timeouts={**LIMITS, **sections.pop("timeouts", {})},
        checkpoint={"every_steps": 2, **sections.pop("checkpoint", {})},
        eval={
            "zero_shot": (str(labelled_shard(tmp_path)),),
            "class_names": ("one", "two"),
            "every_steps": 2,
            "batch_size": 2,
        },
        logging={"runs": str(tmp_path / "runs"), "every_steps": 1},
        env={"FAULT": fault, MOMENT: str(moment), **variables},
        **sections,
    )
    path = tmp_path / "job.toml"
    path.write_text(dump_job(job))
    return path


def labelled_shard(folder: Path) -> Path:
    """Eight pictures of two classes."""
    path = folder / "labelled.tar"
    black = picture(0, side=32)
    write_shard(((str(number), {"png": black, "cls": b"%d" % (number % 2)}) for number in range(8)), path)
    return path


def losses(folder: Path) -> dict[int, float]:
    """Loss of each step from the first on; none is missing, and none comes twice."""
    assert (folder / "metrics.jsonl").read_text().endswith("\n"), "its last line is whole"
    found = runs.losses(folder)
    assert list(found) == list(range(1, len(found) + 1))
    return found


def restarts(folder: Path, file: str = "result.json") -> list[dict[str, Any]]:
    """What a file of a run folder says of each restart of the last start."""
    found: list[dict[str, Any]] = json.loads((folder / file).read_text())["restarts"]
    return found


def ranks_left(running: Running) -> list[int]:
    """Processes that belong to the run and still live."""
    return processes_with(os.fsencode(running.moment), "environ")


def sigkill(pids: Sequence[int]) -> None:
    """Kills all at once: none sees the end of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        signal_all(pids, number)


def main(job_path: str, ranks: str, hosts: str = "") -> int:
    command = (sys.executable, "-P", "-m", "tests.support.faulty_rank", job_path)
    os.environ["PYTHONPATH"] = str(ROOT)  # for the ranks: `-P` hides the working folder
    job = load_job(Path(job_path))
    return local.start_ranks(
        command,
        job,
        nproc=None if hosts else int(ranks),
        hosts=parse_hosts(hosts) if hosts else None,
        folder=Path(job.logging.runs, job.name),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
