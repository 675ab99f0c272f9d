"""Which supervisors a launcher starts again, when, and with which exit code it leaves."""

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.launch.ranks.localrun import start_here, start_on
from trainer.launch.ranks.started_ranks import run_ranks
from trainer.world import restart_policy

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
