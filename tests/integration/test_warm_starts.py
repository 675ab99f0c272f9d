"""A process that is a fork of a warm interpreter is, for all that it can see, one that was executed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import until
from tests.support.warm import client
from trainer.world import rank_process

PROBE = "tests.support.process_probe"


@contextmanager
def executed() -> Iterator[None]:
    """Inside, every process is executed."""
    warm = client.current()
    client.use(None)
    try:
        yield
    finally:
        client.use(warm)


def both(*words: str, **options: Any) -> "list[subprocess.CompletedProcess[str]]":
    """Runs the command executed, and as a fork."""

    def run() -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)

    with executed():
        first = run()
    return [first, run()]


@pytest.fixture(autouse=True)
def _needs_warm_starts() -> None:
    if client.current() is None:
        pytest.skip("this kernel gives no warm starts: PR_SET_MM_MAP")


@pytest.mark.parametrize("options", [["-m"], ["-P", "-m"]])
def test_a_fork_sees_what_an_executed_process_sees(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    ours, theirs = os.pipe()
    env = {**os.environ, "RANK": "3", "PYTHONUNBUFFERED": "1"}
    env.pop("XDG_STATE_HOME")
    try:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        first, second = both(*options, PROBE, "a b", "", cwd=tmp_path, env=env, umask=0o27, pass_fds=[theirs])
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        os.close(ours)
        os.close(theirs)
    assert first.stderr == second.stderr == ""
    assert json.loads(second.stdout) == json.loads(first.stdout)


def test_a_rank_that_is_a_fork_has_a_session_and_the_signals_of_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", PROBE]
    with executed():
        assert rank_process.start_rank(command, os.environ).wait() == 0
    assert rank_process.start_rank(command, os.environ).wait() == 0
    first, second = map(json.loads, capfd.readouterr().out.splitlines())
    assert second == first
    assert second["leads"] == [True, True]
    assert second["death of the parent"] == signal.SIGKILL


@pytest.mark.parametrize("how", ["no", "code", "words", "raise", "interrupt", "kill"])
def test_a_fork_ends_as_an_executed_process(how: str) -> None:
    first, second = both("-m", PROBE, "end", how)
    assert (second.returncode, second.stdout) == (first.returncode, first.stdout)
    assert second.stderr.splitlines()[-1:] == first.stderr.splitlines()[-1:]


def test_a_fork_is_only_asked_for_what_it_can_be(tmp_path: Path) -> None:
    warm = client.current()
    assert warm is not None
    command, env = [sys.executable, "-m", PROBE], dict(os.environ)
    assert warm.gives(command, env)
    assert not warm.gives([sys.executable, "-c", "pass"], env)
    assert not warm.gives(["/bin/true", *command[1:]], env)
    assert not warm.gives(command, {**env, "PYTHONPATH": str(tmp_path)})
    assert not warm.gives(command, {**env, "MALLOC_ARENA_MAX": "1"})


def test_nothing_is_left_of_a_fork_that_is_killed() -> None:
    rank = rank_process.start_rank([sys.executable, "-m", PROBE], os.environ)
    copies = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
    rank_process.end_rank(rank)
    until(lambda: not any(Path("/proc", copy).exists() for copy in copies), limit_s=20, every_s=0.01)
