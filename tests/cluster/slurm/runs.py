"""Runs on the cluster of a test, as their user starts and watches them: with the command line."""

import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from tests.cluster.slurm.cluster import Cluster
from tests.support.runs import COMMAND, content, losses
from trainer.demo.__main__ import prepare

HOSTILE = {
    "LIST": "a,b=c d",
    "QUOTES": "'\"`$(false)`\\",
    "LINES": "one\ntwo\n",
    "EMPTY": "",
    "PERCENT": "%t %j #",
    "UTF8": "é\t",
}
SHORT = {"epochs": 1, "warmup_steps": 4}
_STAND_IN = """\
#!{python}
import os, shutil, sys
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["SLURM_PROCID"]
shutil.copyfile("/proc/self/environ", f"{{sys.argv[-1]}}.{{rank}}.environ")
"""
LIMIT_S = 1500.0
"""For one job on a busy machine; no test says how long one takes."""


@dataclass
class Demo:
    """Jobs that learn digits, in a folder that both nodes see."""

    cluster: Cluster
    folder: Path

    @classmethod
    def make(cls, cluster: Cluster) -> "Demo":
        folder = cluster.folder / "demo"
        prepare(folder)
        return cls(cluster, folder)

    def write(self, name: str, **sections: Mapping[str, Any]) -> Path:
        """A job file of the demo's training, on two nodes of two ranks, with keys of sections replaced."""
        job: dict[str, Any] = tomllib.loads((self.folder / "job.toml").read_text())
        job |= {
            "name": name,
            "resources": {"nodes": 2, "gpus_per_node": 2, "cpus_per_gpu": 1, "device": "cpu"},
        }
        job["slurm"] = {"gpus": "gpus-per-node", "time": "30", "python": sys.executable, "signal_lead_s": 20}
        job["data"]["workers"] = 0
        job["logging"]["every_steps"] = 1
        job["timeouts"] = {"silence_s": 60.0}  # a busy machine may leave a supervisor without CPU for long
        for section, keys in sections.items():
            merged = {**job.get(section, {}), **keys}
            job[section] = {key: value for key, value in merged.items() if value is not None}
        path = self.folder / "job-of-a-test.toml"
        path.write_text(tomli_w.dumps(job))
        return path

    def clipship(
        self, *words: str, code: int | None = None, timeout_s: float = 120
    ) -> "subprocess.CompletedProcess[str]":
        done = self.cluster.run(*COMMAND, *words, check=False, cwd=self.folder, timeout_s=timeout_s)
        assert code in (None, done.returncode), done.stderr
        return done

    def submit(self, name: str, **sections: Mapping[str, Any]) -> str:
        """The job's id, which is all that stdout has."""
        answer = self.clipship("submit", str(self.write(name, **sections)), "--to", "slurm", code=0)
        assert answer.stdout.strip().isdigit(), answer.stdout
        return answer.stdout.strip()

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def output(self, name: str, job_id: str) -> str:
        """Returns what the batch script and the ranks wrote."""
        path = self.run(name) / "logs" / f"slurm-{job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def losses(self, name: str) -> dict[int, float]:
        return losses(self.run(name))

    def result(self, name: str) -> dict[str, Any]:
        return content(self.run(name), "result.json")

    def wait_for_step(self, name: str, step: int, job_id: str) -> None:
        self.until(
            lambda: max(self.losses(name), default=0) >= step,
            f"{name} does not reach step {step}",
            name,
            job_id,
        )

    def wait(self, name: str, job_id: str) -> Mapping[str, str]:
        """Until the job has ended for good; what scontrol says of it then."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.cluster.job(job_id)["JobState"] in over, "the job does not end", name, job_id)
        return self.cluster.job(job_id)

    def completed(self, name: str, job_id: str, restarts: str | None = "0") -> Mapping[str, str]:
        """Waits for the job's good end, after which each step of the run has been done once."""
        ended = self.wait(name, job_id)
        found = ended["JobState"], ended["Restarts"]
        assert found == ("COMPLETED", restarts or found[1]), self.output(name, job_id)
        assert sorted(self.losses(name)) == list(range(1, self.result(name)["steps"] + 1))
        return ended

    def sbatch(self, script: Path, *words: str) -> tuple[str, Path]:
        """Submits a script by hand; returns the job's id, and the file that gets its output."""
        job = self.cluster.run("sbatch", "--parsable", *words, str(script), cwd=self.folder).stdout.strip()
        return job, self.folder / f"slurm-{job}.out"

    def rendered(self, name: str, **sections: Mapping[str, Any]) -> Path:
        """The batch script of a job, as a file beside the job's."""
        script = self.folder / f"{name}.sbatch"
        script.write_text(self.clipship("render", "slurm", str(self.write(name, **sections))).stdout)
        return script

    def preempt(self) -> None:
        """Submits a job for all nodes, of a partition that goes first."""
        urgent = self.folder / "urgent.sbatch"
        urgent.write_text("#!/bin/sh\n#SBATCH --nodes=3 --exclusive --partition=all --time=5\nsleep 5\n")
        self.sbatch(urgent)

    def until(self, happened: Callable[[], bool], otherwise: str, name: str, job_id: str) -> None:
        limit = time.monotonic() + LIMIT_S
        while not happened():
            assert time.monotonic() < limit, f"{otherwise}\n{self.output(name, job_id)}"
            time.sleep(0.5)

    def stand_in(self) -> str:
        """A Python that keeps its environment instead of running a rank."""
        python = self.folder / "python"
        python.write_text(_STAND_IN.format(python=sys.executable))
        python.chmod(0o755)
        return str(python)

    def variables(self, name: str, **sections: Mapping[str, object]) -> list[dict[str, str]]:
        """Returns the environment of each of the four ranks, if its Python is the stand-in."""
        job = self.submit(name, **sections)
        assert self.wait(name, job)["JobState"] == "COMPLETED", self.output(name, job)
        found = [_environment(path) for path in sorted((self.run(name) / "artefacts").glob("*.environ"))]
        assert len(found) == 4
        return found


def _environment(path: Path) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in path.read_bytes().decode().split("\0") if "=" in entry)
