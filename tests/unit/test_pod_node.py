"""Decisions of the first process of an Indexed Job's pod: how it leaves, and what it does when asked to stop.

tests/integration/test_job_pods.py has whole runs.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from signal import SIGCHLD, SIGINT, SIGTERM, getsignal, signal
from typing import Any

import pytest

from tests.support.jobs import tiny_job
from trainer.errors import EXIT_START_AGAIN
from trainer.launch.kubernetes.pod import node, starts
from trainer.run.exit_record import ExitRecord

UID = "00000000-0000-0000-0000-00000000c11b"


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: getsignal(number) for number in (SIGCHLD, SIGINT, SIGTERM)}
    yield
    for number, handler in before.items():
        signal(number, handler)


@pytest.fixture
def pod(tmp_path: Path) -> node.Node:
    job = tiny_job(logging={"runs": str(tmp_path)}, resources={"nodes": 2, "gpus_per_node": 1})
    (tmp_path / "tiny").mkdir()
    own = {"JOB_COMPLETION_INDEX": "1", "CLIPSHIP_LAUNCHER_JOB": UID, "CLIPSHIP_SUPERVISORS": "tiny-0:29400"}
    return node.Node(tmp_path / "job.toml", job, own)


@pytest.fixture
def start(tmp_path: Path) -> Any:
    begun = starts.open_start(tmp_path / "tiny", UID)
    for index in (0, 1):
        begun.mark(index)
    begun.begin("10.0.0.1")
    return begun


def test_a_run_that_a_second_signal_has_ended_is_over_for_the_next_pods(pod: node.Node, start: Any) -> None:
    record = ExitRecord(3, "tiny-1", 143, "a second signal (15) ended the run at once", time.time())
    (start.run_folder / "exit.json").write_text(json.dumps({**asdict(record), "start": start.name}))
    assert pod._leave_after(start, 143) == EXIT_START_AGAIN
    assert start.end is not None, "the next pods would wait for those of this start"
    assert start.end.code == 143


def test_a_pod_whose_supervisor_was_ended_by_a_signal_says_so_if_nobody_has_recorded_an_end(
    pod: node.Node, start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "SHOWN_S", 0.0)
    assert pod._leave_after(start, 137) == 137
    assert start.end is None
    assert "a supervisor of this pod was ended by signal 9" in capsys.readouterr().err


def test_a_supervisor_that_starts_after_a_request_to_stop_hears_of_it(
    pod: node.Node, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen
    monkeypatch.setattr("subprocess.Popen", lambda command, **keys: popen(["sleep", "60"]))

    def run(start_rank: Callable[..., Any], *_: object, asked: Callable[[], bool], **_keys: object) -> Any:
        assert asked()
        return start_rank(0, {}).process.wait()

    monkeypatch.setattr(node, "run_ranks", run)
    monkeypatch.setattr(pod, "_end_with", lambda start: None)
    monkeypatch.setattr(pod, "_leave_after", lambda start, code: code)
    pod._on_stop(SIGTERM, None)
    assert pod._run_ranks(start, is_back=False, came=0.0) == -SIGTERM
