"""Runs on the cluster that KUBECONFIG names, as their user starts and watches them: with the command line.

A folder of this machine, which must be a node of the cluster, is the volume that all pods share.
"""

import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from kubernetes.stream import stream

from tests.support.runs import COMMAND, content, losses
from trainer.demo.__main__ import prepare
from trainer.launch.kubernetes.cluster import Cluster
from trainer.launch.kubernetes.kinds import KINDS
from trainer.launch.kubernetes.patch import merged
from trainer.launch.kubernetes.pod_logs import disconnecting
from trainer.launch.kubernetes.state import pods_of
from trainer.safe_io.values import read_values

LIMIT_S = 600.0
"""For one job on a busy machine; no test says how long one takes."""
CHECKOUT = os.environ.get("CLIPSHIP_TEST_PATCH", "{}")
"""A patch as JSON for every job here: how to run a checkout's trainer in an image that has an older one."""
SMALL = {"spec": {"containers": [{"name": "launcher", "resources": {"requests": {"cpu": "50m"}}}]}}
"""Patch of a launcher that fits beside others on a small node."""
PATCH = merged({"launcher": SMALL}, json.loads(CHECKOUT), "kubernetes.patch")
"""[kubernetes.patch] of every job here."""
DONE = ("succeeded", "failed")


@dataclass
class Demo:
    """Jobs that learn digits."""

    cluster: Cluster
    folder: Path
    images: Mapping[str, str]

    @classmethod
    def make(cls, cluster: Cluster, folder: Path, images: Mapping[str, str]) -> "Demo":
        prepare(folder)
        (folder / "runs").mkdir()
        (folder / "runs").chmod(0o777)
        return cls(cluster, folder, images)

    def write(self, name: str, **sections: Mapping[str, Any]) -> Path:
        """A job file of the demo's training, on two workers of one rank each, with keys of
        sections replaced.
        """
        job: dict[str, Any] = tomllib.loads((self.folder / "job.toml").read_text())
        job |= {
            "name": name,
            "resources": {"nodes": 2, "gpus_per_node": 1, "cpus_per_gpu": 1},
            "image": {"tag": self.images["openmpi4"]},
        }
        job["kubernetes"] = {
            "namespace": self.cluster.namespace,
            "kind": "mpijob",
            "gpu_resource": "none",
            "cpu_request": 0.05,
            "cpu_limit": False,
            "shm_gb": 0.5,
            "mounts": {str(self.folder): f"host:{self.folder}"},
            "patch": {**PATCH},
        }
        job["data"]["workers"] = 0
        job["logging"]["every_steps"] = 1
        job["timeouts"] = {"silence_s": 60.0}  # a busy machine may leave a supervisor without CPU for long
        for section, keys in sections.items():
            job[section] = {**job.get(section, {}), **keys}
        if job["kubernetes"].get("kind") != "mpijob":
            job["kubernetes"]["patch"].pop("launcher", None)
        path = self.folder / "job-of-a-test.toml"
        path.write_text(tomli_w.dumps(job), encoding="utf-8")
        return path

    def clipship(self, *words: str, code: int | None = None) -> "subprocess.CompletedProcess[str]":
        command = [*COMMAND, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)
        assert code in (None, done.returncode), done.stderr
        return done

    def submit(self, name: str, **sections: Mapping[str, Any]) -> str:
        """The name of the job's object; NAMESPACE/NAME is all that stdout has."""
        answer = self.clipship("submit", str(self.write(name, **sections)), "--to", "kubernetes", code=0)
        namespace, _, mpijob = answer.stdout.strip().partition("/")
        assert namespace == self.cluster.namespace
        return mpijob

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def state(self, name: str) -> str:
        """The first word of `clipship status`."""
        answer = self.clipship("status", str(self.run(name)), code=0)
        rows = dict(line.split(maxsplit=1) for line in reversed(answer.stdout.splitlines()))
        return rows["state"].rstrip().partition(",")[0]

    def wait(self, name: str) -> str:
        """Until the job's object has succeeded or failed."""
        self.until(lambda: self.state(name) in DONE, lambda: f"{name} did not end:\n{self.said(name)}")
        return self.state(name)

    def wait_for_step(self, name: str, step: int) -> None:
        def reached() -> bool:
            return max(self.steps(name), default=0) >= step

        self.until(reached, lambda: f"{name} did not reach step {step}:\n{self.said(name)}", 0.2)

    def until(self, reached: Callable[[], bool], otherwise: Callable[[], str], every_s: float = 1.0) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            assert time.monotonic() < deadline, otherwise()
            if missing := self._images_missing():
                pytest.fail(f"the cluster has no image {', '.join(missing)}: {LOADS_IMAGES}")
            time.sleep(every_s)

    def _images_missing(self) -> set[str]:
        """Returns the images that pods wait for and that nobody has given to the cluster."""
        pods = self.cluster.core.list_namespaced_pod(self.cluster.namespace).items
        states = [state for pod in pods for state in pod.status.container_statuses or ()]
        return {
            str(state.image)
            for state in states
            if state.image in self.images.values()
            and state.state.waiting
            and state.state.waiting.reason in NO_IMAGE
        }

    def said(self, name: str) -> str:
        """Returns what its user would look at."""
        words = [self.clipship(command, str(self.run(name))) for command in ("status", "logs")]
        return "\n".join(answer.stdout + answer.stderr for answer in words)

    def lost_no_step(self, name: str) -> None:
        """Waits for the good end of the job's object: no step was lost or done twice."""
        assert self.wait(name) == "succeeded", self.said(name)
        assert self.steps(name) == list(range(1, self.result(name)["steps"] + 1))

    def steps(self, name: str) -> list[int]:
        return list(losses(self.run(name)))

    def result(self, name: str) -> dict[str, Any]:
        return content(self.run(name), "result.json")

    def exit(self, name: str) -> dict[str, Any]:
        return content(self.run(name), "exit.json")

    def elsewhere(self, name: str) -> Path:
        """A folder that knows what was submitted, and does not see the run folder."""
        folder = self.folder / "elsewhere" / name
        (folder / "artefacts").mkdir(parents=True)
        record = (self.run(name) / "artefacts" / "submission.json").read_text()
        (folder / "artefacts" / "submission.json").write_text(record)
        return folder

    def memory(self, name: str) -> dict[str, int]:
        """Returns the launcher's last count of its starts and failures."""
        counted = read_values(self.run(name) / "artefacts" / "starts.env")
        return {name: int(counted[name]) for name in ("starts", "failures")}

    def pods(self, mpijob: str, role: str) -> list[dict[str, Any]]:
        return [
            pod
            for pod in pods_of(self.cluster, KINDS["mpijob"], mpijob)
            if pod["metadata"]["labels"]["training.kubeflow.org/job-role"] == role
        ]

    def pods_of_index(self, job: str, index: int, kind: str = "job") -> list[dict[str, Any]]:
        """Returns the pods that have had this index and are still there, oldest first."""
        row = KINDS[kind]
        [label] = row.output
        pods = pods_of(self.cluster, row, job)
        return [pod for pod in pods if pod["metadata"]["labels"][label] == str(index)]

    def delete_pod(self, name: str, **options: Any) -> None:
        self.cluster.core.delete_namespaced_pod(name, self.cluster.namespace, **options)

    def evict_pod(self, name: str) -> None:
        """Asks for what `kubectl drain` asks for."""
        body = {"metadata": {"name": name, "namespace": self.cluster.namespace}}
        self.cluster.core.create_namespaced_pod_eviction(name, self.cluster.namespace, body)

    def kill_pod(self, name: str) -> None:
        """Kills all processes of a pod on this machine from outside: inside, none reaches the first."""
        uid = self.cluster.core.read_namespaced_pod(name, self.cluster.namespace).metadata.uid
        pids = [int(process.name) for process in Path("/proc").glob("[0-9]*") if uid in _cgroup(process)]
        assert pids, f"no process of {name} is on this machine"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def inside(self, pod: str, script: str) -> str:
        """Returns the output of a Python script in a pod."""
        words = ["/opt/clipship/bin/python", "-c", script]
        run = self.cluster.core.connect_get_namespaced_pod_exec
        answer = stream(
            run, pod, self.cluster.namespace, command=words, stdout=True, stderr=True, _preload_content=False
        )
        with disconnecting(answer):
            answer.run_forever(timeout=LIMIT_S)
            return str(answer.read_all())


def _cgroup(process: Path) -> str:
    try:
        return (process / "cgroup").read_text().replace("_", "-")  # systemd has no - in its names
    except OSError:  # it has ended
        return ""


NO_IMAGE = ("ErrImagePull", "ImagePullBackOff")
"""Reasons for which a pod waits for an image that does not come."""
LOADS_IMAGES = "`python -m tests.cluster.kubernetes.images COMMAND` builds them and hands each to the command"
PROCESSES = """
import os, sys
def processes(mark):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in open(f"/proc/{pid}/cmdline", "rb").read():
                yield int(pid)
        except OSError:
            pass
"""
KILL_RANK = PROCESSES + 'for pid in processes(b"\\0trainer.train\\0"): os.kill(pid, 9)'
STOP_ALL = PROCESSES + 'for pid in {*processes(b"")} - {1, os.getpid()}: os.kill(pid, 19)'
"""Suspends all processes of a pod but its first, so that none obeys a request to stop."""
ENVIRONMENT = (
    PROCESSES
    + "print(open(f\"/proc/{next(processes(bytes([0]) + b'trainer.train' + bytes([0])))}/environ\").read())"
)
COMMAND_LINES = PROCESSES + 'print([open(f"/proc/{pid}/cmdline").read() for pid in processes(b"")])'
