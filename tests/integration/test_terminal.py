"""Looks at what commands show in a real terminal, narrow and wide, and what they leave in a log file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ends import write_job
from tests.support.terminal import Terminal

CLIPSHIP = [sys.executable, "-m", "trainer.cli.main"]
STEP_PARTS = ["epoch", "loss", "lr", "grad", "scale", "samples/s", "data", "ETA"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("run"), "torch", "clipship", "", steps=6)


@pytest.fixture(scope="module")
def ran(job: Path) -> Path:
    """The job, of which there is a run, whichever test comes first."""
    if not (job.parent / "runs" / "ends").exists():
        subprocess.run([*CLIPSHIP, "run", str(job), "--nproc", "1"], capture_output=True, check=True)
    return job


def ended(command: list[str], columns: int, **variables: str) -> Terminal:
    """Runs a command, which must end well, in a terminal of this width."""
    terminal = Terminal(command, columns, env={**os.environ, **variables})
    try:
        assert terminal.end() == 0, terminal.text
    finally:
        terminal.close()
    return terminal


def badly_wrapped(lines: list[str], columns: int) -> list[str]:
    """Returns the lines that the terminal breaks although a space was before its edge.

    Messages stay whole: a command in one can be copied from the terminal as it is.
    """
    return [
        line
        for line in lines
        if len(line) > columns and " " in line[:columns].strip()[14:] and not line.startswith("clipship: ")
    ]


@pytest.mark.parametrize("columns", [80, 200])
def test_lines_of_a_run_fit_the_terminal_and_a_start_says_what_it_does(job: Path, columns: int) -> None:
    variables = {"TERM": "xterm", "UNKNOWN": "so ranks import torch anew"} if columns == 80 else {}
    command = [*CLIPSHIP, "run", str(job), "--nproc", "2" if columns == 80 else "1", "--fresh"]
    terminal = ended(command, columns, **variables)
    lines = terminal.lines()
    assert badly_wrapped(lines, columns) == []
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 6, lines
    parts = [part for part in STEP_PARTS if f" {part}" in steps[-1]]
    if columns == 200:
        assert parts == STEP_PARTS
        return
    assert {"loss", "samples/s", "ETA"} <= {*parts} < {*STEP_PARTS}
    assert not [line for line in lines if re.match(r"loading torch|first step ", line)]
    assert re.search(r"\x1b\[Kloading torch  \d+ s\r", terminal.text)
    assert re.search(r"\r\x1b\[Krun folder  ", terminal.text), "rank 0 erases the line before it prints"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["run", "--help"],
        ["init", "--list"],
        ["explain", "optim.lr"],
        ["check", "JOB", "--nproc", "2"],
        ["status", "JOB"],
        ["stacks"],
        ["stacks", "explain", "2.14.1"],
        ["fabrics"],
        ["fabrics", "explain", "ib"],
    ],
    ids=" ".join,
)
def test_lines_of_commands_fit_the_terminal(
    job: Path, words: list[str], request: pytest.FixtureRequest
) -> None:
    if words[0] == "status":
        request.getfixturevalue("ran")
    command = [*CLIPSHIP, *(str(job) if word == "JOB" else word for word in words)]
    lines = ended(command, 80).lines()
    assert "\x1b" not in "".join(lines)
    assert len(lines) > 2
    assert badly_wrapped(lines, 80) == []


def test_a_log_file_has_whole_lines_and_nothing_that_moves(job: Path) -> None:
    command = [*CLIPSHIP, "run", str(job), "--nproc", "1", "--fresh"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not re.search(r"[\r\x1b]", done.stdout + done.stderr)
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert all(f" {part}" in line for part in STEP_PARTS for line in steps)
    assert len(steps) == 6


def test_a_terminal_that_cannot_move_gets_lines_and_no_colours(job: Path) -> None:
    command = [*CLIPSHIP, "run", str(job), "--nproc", "1", "--fresh"]
    assert "\x1b" not in ended(command, 80, TERM="dumb", NO_COLOR="1").text
