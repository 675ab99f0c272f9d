"""First processes of an Indexed Job's pods, as processes here: each start, loss and end of a pod.

tests/cluster/kubernetes has the same in real pods.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ends import ROOT, sigkill
from tests.support.faulty_rank import MOMENT, go_file
from tests.support.jobs import tiny_job
from tests.support.processes import command_line, until
from tests.support.runs import descendants, losses
from trainer.config.loader import dump_job
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_START_AGAIN
from trainer.sysinfo.addresses import free_port

LIMIT_S = 180.0
ON_CPU = {"gpu_resource": "none", "mounts": {"/mnt": "host:/mnt"}}
UID = "00000000-0000-0000-0000-00000000c11b"


class Pods:
    """Two pods of one rank, with what Kubernetes tells each."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.folder = folder
        self.run = folder / "runs" / "tiny"
        job = tiny_job(
            **{
                "logging": {"runs": str(folder / "runs"), "every_steps": 1},
                "resources": {"nodes": 2, "gpus_per_node": 1, "cpus_per_gpu": 1},
                "optim": {"global_batch_size": 8, "steps": 12, "warmup_steps": 0},
                "kubernetes": ON_CPU,
                **sections,
            }
        )
        (folder / "job.toml").write_text(dump_job(job))
        self._moment = folder / "moment"
        self.ports = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, index: int, fault: str = "", **variables: str) -> "subprocess.Popen[bytes]":
        """Starts a pod; `fault` is one of `tests.support.faulty_rank`."""
        faulty = {"FAULT": fault, MOMENT: str(self._moment), "PYTHONPATH": str(ROOT)}
        own = {
            "JOB_COMPLETION_INDEX": str(index),
            "CLIPSHIP_LAUNCHER_JOB": UID,
            "CLIPSHIP_NODE": f"tiny-{index}",
            "CLIPSHIP_SUPERVISORS": f"127.0.0.1:{self.ports[0]}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.ports[1]),
            "CLIPSHIP_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            **(faulty if fault else {}),
            **variables,
        }
        module = "tests.support.faulty_pod" if fault else "trainer.launch.kubernetes.pod.node"
        words = [sys.executable, "-P", "-m", module]
        with (self.folder / f"pod-{len(self.started)}-of-{index}.log").open("wb") as log:
            pod = subprocess.Popen(
                [*words, str(self.folder / "job.toml")],
                env={**os.environ, **own},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(pod)
        return pod

    def kill(self, pod: "subprocess.Popen[bytes]") -> None:
        """Kills the pod with all its processes, as the kernel does with a container: all at once."""
        sigkill((pod.pid, *descendants(pod.pid)))
        pod.wait()

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: step <= max([0, *self.steps()]))

    def go(self) -> None:
        """Lets a rank go on that the fault `wait` holds."""
        go_file(self._moment).touch()

    def steps(self) -> list[int]:
        return list(losses(self.run))

    def until(self, reached: Callable[[], bool]) -> None:
        until(reached, limit_s=LIMIT_S, otherwise=self.said)

    def codes(self, *pods: "subprocess.Popen[bytes]") -> list[int]:
        try:
            return [pod.wait(LIMIT_S) for pod in pods]
        except subprocess.TimeoutExpired:
            pytest.fail(self.said())

    def said(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Pods]]:
    made: list[Pods] = []

    def pods(**sections: Any) -> Pods:
        made.append(Pods(tmp_path, **sections))
        return made[-1]

    yield pods
    for pod in (pod for group in made for pod in group.started if pod.poll() is None):
        made[0].kill(pod)


RECOVERY = {"max_restarts": 3, "backoff_s": 0.0, "keep_every_steps": 1}
GOES_ON = {"CLIPSHIP_KEEPS_GOING": "1", "CLIPSHIP_RESPAWNS": "1"}
LONG = {"global_batch_size": 8, "steps": 60, "warmup_steps": 0}
HELD = "wait:0:step:20:1"
"""So that the run is under way when a test has waited for a step before that one."""


def test_pods_that_come_in_any_order_train_together_and_one_that_comes_late_is_done(
    make: Callable[..., Pods],
) -> None:
    pods = make()
    second = pods.start(1)
    first = pods.start(0)
    assert pods.codes(first, second) == [EXIT_DONE, EXIT_DONE], pods.said()
    assert pods.steps() == list(range(1, 13))
    assert pods.codes(pods.start(1)) == [EXIT_DONE]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_run_goes_on_in_its_next_generation_with_the_pod_that_replaces_a_lost_one(
    lost: int, make: Callable[..., Pods]
) -> None:
    pods = make(recovery=RECOVERY, optim=LONG)
    both = [pods.start(index, HELD, **GOES_ON) for index in (0, 1)]
    pods.wait_for_step(6)
    pods.kill(both[lost])
    both[lost] = pods.start(lost, **GOES_ON)
    assert pods.codes(*both) == [EXIT_DONE, EXIT_DONE], pods.said()
    assert pods.steps() == list(range(1, 61)), pods.said()
    [restart] = json.loads((pods.run / "result.json").read_text())["restarts"]
    assert (restart["generation"], restart["kind"]) == (2, "lost"), pods.said()


def test_without_recovery_a_lost_pod_ends_the_start_and_the_next_pods_resume_the_run(
    make: Callable[..., Pods],
) -> None:
    pods = make(optim=LONG, checkpoint={"every_steps": 5})
    first, second = pods.start(0, HELD), pods.start(1, HELD)
    pods.wait_for_step(12)
    pods.kill(second)
    replaced = pods.start(1)
    assert pods.codes(first) == [EXIT_START_AGAIN], pods.said()
    assert pods.codes(pods.start(0), replaced) == [EXIT_DONE, EXIT_DONE], pods.said()
    assert pods.steps()[-1] == 60


def test_a_pod_that_is_asked_to_stop_lets_all_save_and_the_next_pods_lose_no_step(
    make: Callable[..., Pods],
) -> None:
    pods = make(optim=LONG)
    first, second = pods.start(0, HELD), pods.start(1, HELD)
    pods.wait_for_step(6)
    second.terminate()
    pods.go()
    assert pods.codes(first, second) == [EXIT_PREEMPTED, EXIT_PREEMPTED], pods.said()
    assert pods.codes(pods.start(0), pods.start(1)) == [EXIT_DONE, EXIT_DONE], pods.said()
    assert pods.steps() == list(range(1, 61))


def test_a_run_that_fails_again_and_again_ends_for_good_with_its_cause(make: Callable[..., Pods]) -> None:
    pods = make(optim=LONG, kubernetes={**ON_CPU, "retries": 0})
    first, second = pods.start(0, HELD), pods.start(1, HELD)
    pods.wait_for_step(3)
    ranks = (
        pid for pid in descendants(first.pid) if b"\0trainer.supervise.rank.rank_start\0" in command_line(pid)
    )
    os.kill(next(ranks), signal.SIGKILL)
    assert pods.codes(first, second) == [EXIT_FAILED, EXIT_FAILED], pods.said()
    assert pods.codes(pods.start(1)) == [EXIT_FAILED], "a pod that came later started the run again"
    assert "rank 0 on tiny-0 ended the run with exit code 1: killed by SIGKILL" in pods.said()


def test_bad_input_ends_the_run_for_good(make: Callable[..., Pods], tmp_path: Path) -> None:
    pods = make(data={"train": str(tmp_path / "nothing" / "*.tar"), "format": "webdataset"})
    assert pods.codes(pods.start(0), pods.start(1)) == [EXIT_BAD_INPUT, EXIT_BAD_INPUT], pods.said()
    assert pods.codes(pods.start(0)) == [EXIT_BAD_INPUT]


def test_pods_that_wait_for_one_that_never_comes_name_it(make: Callable[..., Pods]) -> None:
    pods = make(kubernetes={**ON_CPU, "retries": 0, "workers_ready_s": 2.0})
    assert pods.codes(pods.start(0)) == [EXIT_FAILED]
    assert "missing: those of index 1" in pods.said()
