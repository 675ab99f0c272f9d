"""Each task of srun runs a supervisor, and runs it again if it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ended_on_failure
from trainer.launch.ranks.localrun import start_here, start_on
from trainer.launch.ranks.respawn import main
from trainer.launch.ranks.started_ranks import run_ranks
from trainer.world import restart_policy

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _signals_as_before() -> object:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return found


def test_a_killed_supervisor_is_started_again_and_then_joins_the_run(
    tmp_path: Path, waits: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = """
    if [ -z "$CLIPSHIP_RESPAWNED" ]; then kill -KILL $$; fi
    [ -e "$1" ] || { touch "$1"; kill -KILL $$; }
    echo "joins, given $2"; exit 7"""
    words = ["sh", "-c", supervisor, "sh", str(tmp_path / "killed-twice"), "a-word"]
    assert main([str(tmp_path), *words]) == 7
    line = "clipship: a supervisor on n1 was killed; it is started again in {} s\n"
    assert capfd.readouterr() == ("joins, given a-word\n", line.format(1) + line.format(2))
    assert waits == [1.0, 2.0]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("exit 124", 124),
        ("exit 137", 137),
        ("kill -TERM $$", 143),
        ("echo x >$0/exit.json; kill -KILL $$", 137),
    ],
    ids=["left", "left as if killed", "asked", "the run has ended"],
)
def test_a_supervisor_that_left_or_was_asked_to_is_not_started_again(
    ends: str, code: int, tmp_path: Path, waits: list[float]
) -> None:
    assert main([str(tmp_path), "sh", "-c", ends, str(tmp_path)]) == code
    assert waits == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_requests_to_stop_are_passed_on(number: signal.Signals, tmp_path: Path) -> None:
    """Slurm signals every process of a step, or under proctrack/cgroup the first one of each task alone."""
    name = number.name.removeprefix("SIG")
    asked = f"trap 'echo asked; exit 75' {name}; echo ready; while :; do sleep 0.05; done"
    words = [sys.executable, "-P", "-m", "trainer.launch.ranks.respawn", str(tmp_path), "sh", "-c", asked]
    with ended_on_failure(subprocess.Popen(words, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        assert process.communicate(timeout=20)[0] == "asked\n"
        assert process.returncode == 75


def test_a_request_to_stop_that_comes_while_nothing_runs_reaches_the_next_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the wait before the supervisor is started again."""
    monkeypatch.setattr(time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    first = tmp_path / "first"
    kills_itself = f"[ -e {first} ] && exec sleep 60; touch {first}; kill -KILL $$"
    assert main([str(tmp_path), "sh", "-c", kills_itself]) == 128 + signal.SIGTERM


@pytest.mark.parametrize("module", ["trainer.rank", "trainer.supervise.main", "trainer.launch.ranks.respawn"])
def test_supervisor_imports_neither_torch_nor_the_jobs_model(module: str) -> None:
    """Every rank of every node has them, so that they stay light."""
    heavy = f"import sys, {module}; print({{'torch', 'numpy', 'pydantic', 'click'}} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


# Which supervisors a launcher starts again, when, and with which exit code it leaves.

BY_KILL = -signal.SIGKILL


def end(
    plan: restart_policy.RespawnPolicy, member: int, code: int, now: float = 0.0, lived_s: float = 1.0
) -> float | None:
    return plan.record_end(member, code, now, lived_s=lived_s)


def again(plan: restart_policy.RespawnPolicy, member: int, code: int, now: float, **how: float) -> float:
    """Ends a member that is started again; returns the wait until then."""
    wait = end(plan, member, code, now, **how)
    assert wait is not None
    assert plan.due(now + wait - 0.01) == []
    assert plan.due(now + wait) == [member]
    assert plan.due(now + wait) == [], "once"
    return wait


def test_nobody_is_started_again_when_the_last_one_is_gone() -> None:
    plan = restart_policy.RespawnPolicy(2)
    assert end(plan, 0, BY_KILL) == 1.0
    assert end(plan, 1, -signal.SIGTERM) is None
    assert plan.due(1000.0) == []
    assert plan.is_over
    assert plan.exit_code == 128 + signal.SIGKILL  # the first one's


def test_nobody_is_started_again_while_the_run_ends() -> None:
    plan = restart_policy.RespawnPolicy(3)
    end(plan, 2, BY_KILL)
    end(plan, 0, 75)
    assert not plan.is_ending
    end(plan, 1, 75)
    assert plan.is_ending
    assert plan.due(1000.0) == []


def test_a_supervisor_that_leaves_in_vain_is_spoken_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        restart_policy, "CUT_OFF", replace(restart_policy.CUT_OFF, first_s=0.0, longest_s=0.0)
    )
    tries = tmp_path / "tries"
    tries.touch()
    in_vain = f'echo "${{CLIPSHIP_RESPAWNED:-0}}" >>{tries}; exit 124'
    waits = f"while [ $(grep -c . {tries}) -lt 5 ]; do sleep 0.05; done"
    assert run_ranks(stub(waits, waits, in_vain), 3, [], "clipship", keep_going=True) == 0
    assert tries.read_text().split()[:5] == ["0", "1", "2", "3", "4"]
    said = capfd.readouterr().err
    assert said.count("is started again") == 2
    assert said.count("since it left with an error") == 1


@pytest.mark.parametrize(
    ("code", "over_ssh", "itself"),
    [
        (0, False, True),
        (1, False, True),
        (143, False, True),
        (BY_KILL, False, False),
        (0, True, True),
        (124, True, True),
        (255, True, False),  # ssh lost its host
        (137, True, False),  # the shell there saw SIGKILL
        (143, True, True),  # a supervisor's own code after a second SIGTERM
        (-signal.SIGTERM, True, False),  # ssh itself was killed
    ],
)
def test_whether_a_supervisor_left_by_itself(code: int, over_ssh: bool, itself: bool) -> None:
    assert restart_policy.left_by_itself(code, over_ssh=over_ssh) is itself


def stub(*scripts: str) -> Any:
    """Returns a function that starts the shell script of a rank."""

    def start(rank: int, more: Mapping[str, str]) -> Any:
        return start_here(["sh", "-c", scripts[rank]], more)

    return start


SLEEPS = "exec sleep 1000"
KILLED_ONCE = '[ -n "$CLIPSHIP_RESPAWNED" ] || kill -KILL $$; touch again'
UNTIL_AGAIN = "while [ ! -e again ]; do sleep 0.05; done"
COMES_BACK = [UNTIL_AGAIN, UNTIL_AGAIN, KILLED_ONCE]


STOPPED = "so the other ranks were stopped"
DEATHS: dict[str, tuple[list[str], bool, list[int], int, str]] = {
    "the others go on and the dead one comes back": (
        COMES_BACK, True, [], 0, "rank 2's supervisor ended by SIGKILL; it is started again in 1 s",
    ),
    "the first ends the others": ([SLEEPS, "kill -9 $$"], False, [], 137, f"ended by SIGKILL, {STOPPED}"),
    "a signal without a name": ([SLEEPS, "kill -35 $$"], False, [], 163, f"ended by signal 35, {STOPPED}"),
    "a known cause is not told twice": ([SLEEPS, "touch rank-00001.json; exit 3"], False, [], 3, ""),
    "a signal ends all": ([SLEEPS, SLEEPS], True, [signal.SIGTERM], 143, ""),
}  # fmt: skip


@pytest.mark.parametrize(("scripts", "keep_going", "asked", "code", "said"), DEATHS.values(), ids=DEATHS)
def test_what_becomes_of_the_others_when_a_supervisor_ends(
    scripts: list[str],
    keep_going: bool,
    asked: list[int],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLIPSHIP_EXIT_DIR", str(tmp_path))
    assert run_ranks(stub(*scripts), len(scripts), asked, "clipship", keep_going=keep_going) == code
    told = capfd.readouterr().err
    assert said in told
    assert bool(told) == bool(said)


def no_ssh(folder: Path) -> list[str]:
    """Returns a stand-in for ssh, which notes its command line and runs it as another host's shell would."""
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\necho "$@" >>{folder}/seen\nshift\nexec sh -c "$*"\n')
    program.chmod(0o755)
    return [str(program)]


def test_the_environment_reaches_another_host_through_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET", "a word with 'quotes'")
    show = [sys.executable, "-c", "import os; print(os.environ['SECRET'], os.environ['RANK'])"]
    rank = start_on("another-host.invalid", show, {"RANK": "5"}, no_ssh(tmp_path), 5)
    assert rank.process.wait() == 0
    assert rank.host == "another-host.invalid"
    assert capfd.readouterr().out == "a word with 'quotes' 5\n"
    assert "SECRET" not in (tmp_path / "seen").read_text()
