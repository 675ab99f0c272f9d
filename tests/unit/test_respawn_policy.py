"""Which supervisors a launcher starts again, when, and with which exit code it leaves."""

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.terminal import LostConsole
from trainer.launch.ranks.localrun import start_here, start_on
from trainer.launch.ranks.started_ranks import run_ranks
from trainer.run.retry import Backoff
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


def waits_of(plan: restart_policy.RespawnPolicy, member: int, code: int, times: int) -> list[float]:
    now, waits = 0.0, list[float]()
    for _ in range(times):
        waits.append(again(plan, member, code, now))
        now += waits[-1]
    return waits


def test_a_killed_supervisor_is_started_again_after_a_wait_that_doubles() -> None:
    plan = restart_policy.RespawnPolicy(2)
    longest_s = restart_policy.KILLED.longest_s
    assert waits_of(plan, 1, BY_KILL, 8) == [1, 2, 4, 8, 16, 32, longest_s, longest_s]
    assert not plan.is_over
    assert again(plan, 1, BY_KILL, 1e4, lived_s=restart_policy.FORGIVEN_S + 1) == 1.0


def test_one_that_cannot_join_is_started_less_and_less_often() -> None:
    plan = restart_policy.RespawnPolicy(3)
    waits = waits_of(plan, 2, 124, 7)
    assert waits == [
        30,
        60,
        120,
        240,
        480,
        restart_policy.CUT_OFF.longest_s,
        restart_policy.CUT_OFF.longest_s,
    ]
    assert plan.in_vain(2) == 6
    assert again(plan, 2, 124, 1e5, lived_s=restart_policy.JOINED_S + 1) == restart_policy.CUT_OFF.first_s
    assert plan.in_vain(2) == 0, "it had joined"


def test_nobody_is_started_again_when_the_last_one_is_gone() -> None:
    plan = restart_policy.RespawnPolicy(2)
    assert end(plan, 0, BY_KILL) == 1.0
    assert end(plan, 1, -signal.SIGTERM) is None
    assert plan.due(1000.0) == []
    assert plan.is_over
    assert plan.exit_code == 128 + signal.SIGKILL  # the first one's


def test_nobody_is_started_again_while_the_run_ends() -> None:
    plan = restart_policy.RespawnPolicy(5)
    end(plan, 3, BY_KILL)
    end(plan, 0, 75)
    end(plan, 1, 75)
    assert not plan.is_ending
    end(plan, 4, 75)
    assert plan.is_ending
    assert plan.due(1000.0) == []
    assert end(plan, 2, BY_KILL, 1000.0) is None
    assert plan.is_over
    assert plan.exit_code == 75


def test_one_that_comes_back_in_vain_does_not_end_the_run_of_the_other() -> None:
    plan = restart_policy.RespawnPolicy(2)
    again(plan, 1, BY_KILL, 0.0)
    for number in range(1, 5):
        again(plan, 1, 1, 1e3 * number)
        assert not plan.is_ending
    assert not plan.is_overdue(1e4 + 10 * restart_policy.LEAVE_S)


@pytest.mark.parametrize("code", [0, 2, 75, 76])
def test_a_supervisor_that_leaves_with_the_whole_run_is_not_started_again(code: int) -> None:
    plan = restart_policy.RespawnPolicy(2)
    assert end(plan, 0, code) is None
    assert plan.due(10 * restart_policy.CUT_OFF.first_s) == []


def test_of_two_that_left_with_different_codes_the_latest_counts() -> None:
    plan = restart_policy.RespawnPolicy(2)
    end(plan, 1, 1)  # cut off
    end(plan, 0, 0, 500.0)
    assert plan.exit_code == 0


def test_those_that_stay_long_after_the_end_are_overdue() -> None:
    plan = restart_policy.RespawnPolicy(3)
    end(plan, 0, 0, 10.0)
    assert not plan.is_overdue(10.0 + 2 * restart_policy.LEAVE_S)  # one of three
    end(plan, 1, 0, 20.0)
    assert not plan.is_overdue(20.0 + restart_policy.LEAVE_S)
    assert plan.is_overdue(20.1 + restart_policy.LEAVE_S)


def test_a_supervisor_that_leaves_in_vain_is_spoken_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restart_policy, "CUT_OFF", Backoff(0.0, 0.0))
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


@pytest.mark.parametrize(("keep_going", "code"), [(True, 0), (False, 137)])
def test_a_lost_console_changes_no_exit_code(
    keep_going: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", LostConsole())
    assert run_ranks(stub(*COMES_BACK), 3, [], "clipship", keep_going=keep_going) == code


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


def test_a_successor_on_another_host_kills_what_is_left_of_the_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPSHIP_TOKEN", f"of {tmp_path}")
    ssh = no_ssh(tmp_path)
    old, bystander = (
        start_on(
            "another-host.invalid",
            ["sh", "-c", f"touch {tmp_path}/{member}; exec sleep 1000"],
            {},
            ssh,
            member,
        )
        for member in (0, 1)
    )
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        time.sleep(0.05)
    for left, staying in ((old, bystander), (bystander, None)):
        number = 0 if left is old else 1
        successor = start_on("another-host.invalid", ["true"], {"CLIPSHIP_RESPAWNED": "1"}, ssh, number)
        assert successor.process.wait() == 0
        assert left.process.wait() in (BY_KILL, 128 - BY_KILL)
        assert staying is None or staying.process.poll() is None
