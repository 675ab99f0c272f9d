"""Lines of a rank's log say which generation of ranks wrote them, and a full memory leaves its exit code."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.run.exit_record import ExitRecord, record_cause
from trainer.world import heartbeat
from trainer.world.console import rank_formatter
from trainer.world.launchers import World

RANK = """
import resource, sys
from trainer.errors import InputError, Preempted
from trainer.world.console import exit_now, run_rank

def work(world, heartbeat):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # as on a full file system
    raise {error}

exit_now(run_rank(sys.stderr, work))
"""
ALONE = World(0, 1, 0, 1, "a", "test")


@pytest.mark.parametrize(
    ("generation", "level", "line"),
    [
        (1, logging.INFO, "INFO step 4"),
        (2, logging.INFO, "INFO step 4"),
        (1, logging.WARNING, "WARNING step 4"),
        (2, logging.WARNING, "WARNING [generation 2] step 4"),
        (12, logging.ERROR, "ERROR [generation 12] step 4"),
    ],
)
def test_what_is_wrong_names_its_generation_from_the_second_on(
    generation: int, level: int, line: str
) -> None:
    record = logging.LogRecord("clipship", level, "", 0, "step %d", (4,), None)
    world = replace(ALONE, generation=generation)
    for _ in range(2):  # several handlers format one record
        assert rank_formatter(world, "%(levelname)s ").format(record) == line
        assert rank_formatter(world).format(record) == line.partition(" ")[2]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            "Preempted('asked to stop: step 2 of 4 is saved')",
            75,
            "clipship: asked to stop: step 2 of 4 is saved (exit code 75)",
        ),
        (
            "InputError('data.train: no such file')",
            2,
            "clipship: rank 0 on here ended the run with exit code 2: data.train: no such file",
        ),
    ],
)
def test_a_rank_that_cannot_record_its_end_says_it_and_keeps_its_exit_code(
    error: str, code: int, line: str, tmp_path: Path
) -> None:
    heartbeat.make(tmp_path)
    env = {**os.environ, "CLIPSHIP_RANK_DIR": str(tmp_path), "CLIPSHIP_NODE": "here"}
    command = [sys.executable, "-c", RANK.format(error=error)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "clipship: why rank 0 on here ends cannot be recorded: [Errno 27]" in done.stderr
    assert line in done.stderr.splitlines()


def test_a_cause_that_cannot_be_recorded_counts_as_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, table: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.run.exit_record.write_json", full)
    record = ExitRecord(3, "b", 1, "a reason", 1.0)
    assert not record_cause(record, {"CLIPSHIP_EXIT_DIR": str(tmp_path)}), (
        "the supervisor would keep the details back"
    )
    assert "why rank 3 on b ends cannot be recorded: [Errno 28] No space" in capsys.readouterr().err
