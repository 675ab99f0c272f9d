"""Runs of tiny jobs with real processes: start, kill, start again, look at what they logged."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import tomli_w

from tests.support.faulty_rank import MOMENT
from tests.support.jobs import VIT
from trainer.sysinfo.children import signal_all

LIMIT_S = 240.0
COMMAND = (sys.executable, "-m", "trainer.cli.main")
AHEAD = 8
"""Steps that a run may do after the one at which it is to be killed."""


@dataclass
class TinyRun:
    """A job file of its own in a folder, and the run folder that it makes."""

    folder: Path
    name: str = "tiny"
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def write(self, **sections: dict[str, Any]) -> Path:
        """The job file: a tiny ViT on synthetic samples, with keys of sections replaced."""
        self.job = {
            "name": self.name,
            "data": {"format": "synthetic", "synthetic_samples": 80, "workers": 0},
            "model": {"name": VIT},
            "optim": {"global_batch_size": 16, "steps": 12, "lr": 1e-3},
            "logging": {"every_steps": 1},
            "timeouts": {"silence_s": 60.0},  # a busy machine may leave a supervisor without CPU for long
        }
        for section, keys in sections.items():
            self.job[section] = {**self.job.get(section, {}), **keys}
        path = self.folder / f"{self.name}.toml"
        path.write_text(tomli_w.dumps(self.job))
        return path

    def command(self, ranks: int, *words: str) -> list[str]:
        job = str(self.folder / f"{self.name}.toml")
        return [*COMMAND, "run", job, "--nproc", str(ranks), *words]

    def start(
        self, ranks: int, *words: str, code: int = 0, stdin: IO[bytes] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """To its end with this exit code; stdout and stderr as text."""
        return clipship(*self.command(ranks, *words)[len(COMMAND) :], code=code, stdin=stdin)

    def start_and_kill(self, ranks: int, at_step: int, delay_s: float = 0.0) -> None:
        """SIGKILL everything of a start, so many seconds after its metrics show the step.

        Its rank 0 stands still a few steps later, so that a late kill still comes before its end.

        :raises AssertionError: the start ended before, by itself
        """
        job = str(self.folder / f"{self.name}.toml")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ends", job, str(ranks)],
            env={
                **os.environ,
                "FAULT": f"slow:0:step:{at_step + AHEAD}",
                MOMENT: str(self.folder / "moment"),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        limit = time.monotonic() + LIMIT_S
        while self.last_step() < at_step and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.005)
        time.sleep(delay_s)
        ended = process.poll()
        kill_tree(process.pid)
        process.wait()
        assert ended is None, f"ended with {ended} at step {self.last_step()}, before it was killed"

    def events(self) -> list[dict[str, Any]]:
        return events(self.run)

    def losses(self) -> dict[int, float]:
        return losses(self.run)

    def last_step(self) -> int:
        return max((event["step"] for event in self.events()), default=0)

    def result(self) -> dict[str, Any]:
        return content(self.run, "result.json")


def tiny_run(folder: Path, name: str = "tiny", /, **sections: dict[str, Any]) -> TinyRun:
    """A run with a job file of these keys, which is to be started."""
    run = TinyRun(folder, name)
    run.write(**sections)
    return run


def clipship(*words: str | Path, code: int | None = 0, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs our command line to its end with this exit code, or any; stdout and stderr as text."""
    command = [*COMMAND, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, **options)
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def events(run: Path) -> list[dict[str, Any]]:
    """All lines of a run folder's metrics.jsonl but one that is being written."""
    path = run / "metrics.jsonl"
    *lines, _ = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines]


def losses(run: Path) -> dict[int, float]:
    """By step; a step that is logged twice is an error of the run's."""
    records = [event for event in events(run) if "loss" in event]
    by_step = {record["step"]: record["loss"] for record in records}
    assert len(by_step) == len(records), [record["step"] for record in records]
    return by_step


def content(run: Path, file: str) -> dict[str, Any]:
    """Content of a JSON file of a run folder."""
    found: dict[str, Any] = json.loads((run / file).read_text())
    return found


def kill_tree(root: int) -> None:
    """SIGKILL a process and all that descends from it, parents first, so that nobody can tidy up."""
    signal_all([root, *descendants(root)], signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Numbers of all processes that a process has started, and those have."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, edge = [], [root]
    while edge := [pid for pid, parent in parents.items() if parent in edge]:
        found += edge
    return found
