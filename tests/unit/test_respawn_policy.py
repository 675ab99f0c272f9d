"""Which supervisors a launcher starts again, when, and with which exit code it leaves."""

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.terminal import LostConsole
from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_PREEMPTED, EXIT_START_AGAIN, EXIT_TIMED_OUT
from trainer.launch.ranks.localrun import start_here, start_on
from trainer.launch.ranks.started_ranks import StartedRank, StartRank, run_ranks
from trainer.run.retry import Backoff
from trainer.world import restart_policy
from trainer.world.restart_policy import (
    CUT_OFF,
    FORGIVEN_S,
    JOINED_S,
    KILLED,
    LEAVE_S,
    RespawnPolicy,
    left_by_itself,
)
from trainer.world.variables import RESPAWNED

BY_KILL = -signal.SIGKILL


def end(plan: RespawnPolicy, member: int, code: int, now: float = 0.0, lived_s: float = 1.0) -> float | None:
    return plan.record_end(member, code, now, lived_s=lived_s)


def test_a_killed_supervisor_is_started_again_after_a_wait_that_doubles() -> None:
    plan = RespawnPolicy(2)
    now, waits = 0.0, []
    for _ in range(8):
        wait = end(plan, 1, BY_KILL, now)
        assert wait is not None
        waits.append(wait)
        assert plan.due(now + wait - 0.01) == []
        now += wait
        assert plan.due(now) == [1]
        assert plan.due(now) == []  # once
    assert waits == [1, 2, 4, 8, 16, 32, KILLED.longest_s, KILLED.longest_s]
    assert not plan.is_over


def test_the_wait_is_short_again_for_a_supervisor_that_had_lived_long() -> None:
    plan = RespawnPolicy(2)
    for _ in range(3):
        end(plan, 1, BY_KILL)
        plan.due(100.0)
    assert end(plan, 1, BY_KILL, lived_s=FORGIVEN_S + 1) == 1.0


def test_nobody_is_started_again_when_the_last_one_is_gone() -> None:
    plan = RespawnPolicy(2)
    assert end(plan, 0, BY_KILL) == 1.0
    assert end(plan, 1, -signal.SIGTERM) is None
    assert plan.due(1000.0) == []
    assert plan.is_over
    assert plan.exit_code == 128 + signal.SIGKILL  # the first one's


def test_nobody_is_started_again_while_the_run_ends() -> None:
    plan = RespawnPolicy(5)
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
    plan = RespawnPolicy(2)
    now = 0.0
    for _ in range(5):
        wait = end(plan, 1, BY_KILL if not now else 1, now)
        assert wait is not None
        now += wait
        assert plan.due(now) == [1]
        assert not plan.is_ending
    assert not plan.is_overdue(now + 10 * LEAVE_S)


def test_one_that_cannot_join_is_started_less_and_less_often() -> None:
    plan = RespawnPolicy(3)
    now, waits = 0.0, []
    for _ in range(7):
        wait = end(plan, 2, EXIT_TIMED_OUT, now)
        assert wait is not None
        waits.append(wait)
        now += wait
        assert plan.due(now) == [2]
    assert waits == [30, 60, 120, 240, 480, CUT_OFF.longest_s, CUT_OFF.longest_s]
    assert plan.in_vain(2) == 6
    assert end(plan, 2, EXIT_TIMED_OUT, lived_s=JOINED_S + 1) == CUT_OFF.first_s
    assert plan.in_vain(2) == 0, "it had joined"


def test_a_supervisor_that_leaves_in_vain_is_spoken_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(restart_policy, "CUT_OFF", Backoff(0.0, 0.0))
    tries = tmp_path / "tries"
    tries.touch()
    in_vain = f'echo "${{CLIPSHIP_RESPAWNED:-0}}" >>{tries}; exit {EXIT_TIMED_OUT}'
    waits = f"while [ $(grep -c . {tries}) -lt 5 ]; do sleep 0.05; done"
    assert run_ranks(stub(waits, waits, in_vain), 3, [], "clipship", keep_going=True) == 0
    assert tries.read_text().split()[:5] == ["0", "1", "2", "3", "4"]
    said = capfd.readouterr().err
    assert said.count("is started again") == 2
    assert said.count("since it left with an error") == 1


def test_a_supervisor_that_leaves_while_the_others_go_on_was_cut_off_and_comes_back() -> None:
    plan = RespawnPolicy(3)
    assert end(plan, 2, 1) == CUT_OFF.first_s
    assert not plan.is_ending
    assert plan.due(CUT_OFF.first_s) == [2]
    for member in (0, 1, 2):
        end(plan, member, 0)
    assert plan.exit_code == 0


@pytest.mark.parametrize("code", [EXIT_DONE, EXIT_BAD_INPUT, EXIT_PREEMPTED, EXIT_START_AGAIN])
def test_a_supervisor_that_leaves_with_the_whole_run_is_not_started_again(code: int) -> None:
    plan = RespawnPolicy(2)
    assert end(plan, 0, code) is None
    assert plan.due(10 * CUT_OFF.first_s) == []


def test_of_two_that_left_with_different_codes_the_latest_counts() -> None:
    plan = RespawnPolicy(2)
    end(plan, 1, 1)  # cut off
    end(plan, 0, 0, 500.0)
    assert plan.exit_code == 0


def test_those_that_stay_long_after_the_end_are_overdue() -> None:
    plan = RespawnPolicy(3)
    end(plan, 0, 0, 10.0)
    assert not plan.is_overdue(10.0 + 2 * LEAVE_S)  # one of three
    end(plan, 1, 0, 20.0)
    assert not plan.is_overdue(20.0 + LEAVE_S)
    assert plan.is_overdue(20.1 + LEAVE_S)


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
    assert left_by_itself(code, over_ssh=over_ssh) is itself


def stub(*scripts: str) -> StartRank:
    """Returns a function that starts the shell script of a rank."""

    def start(rank: int, more: Mapping[str, str]) -> StartedRank:
        return start_here(["sh", "-c", scripts[rank]], more)

    return start


def test_the_others_go_on_and_the_dead_one_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    again = f'[ -n "$CLIPSHIP_RESPAWNED" ] || kill -KILL $$; touch {tmp_path}/again'
    waits = f"while [ ! -e {tmp_path}/again ]; do sleep 0.05; done"
    assert run_ranks(stub(waits, waits, again), 3, [], "clipship", keep_going=True) == 0
    assert (
        "clipship: rank 2's supervisor ended by SIGKILL; it is started again in 1 s" in capfd.readouterr().err
    )


@pytest.mark.parametrize(("keep_going", "code"), [(True, 0), (False, 128 + signal.SIGKILL)])
def test_a_lost_console_changes_no_exit_code(
    keep_going: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", LostConsole())
    again = '[ -n "$CLIPSHIP_RESPAWNED" ] || kill -KILL $$'
    ranks = stub("sleep 2", "sleep 2", again)
    assert run_ranks(ranks, 3, [], "clipship", keep_going=keep_going) == code


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (35, "signal 35")])
def test_without_keep_going_the_first_death_ends_the_others(
    number: int, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = stub("exec sleep 1000", f"kill -{int(number)} $$")
    assert run_ranks(ranks, 2, [], "clipship", keep_going=False) == 128 + number
    assert f"rank 1 ended by {name}, so the other ranks were stopped" in capfd.readouterr().err


def test_death_whose_cause_is_known_is_not_told_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-00001.json").touch()
    monkeypatch.setenv("CLIPSHIP_EXIT_DIR", str(tmp_path))
    assert run_ranks(stub("exec sleep 1000", "exit 3"), 2, [], "clipship", keep_going=False) == 3
    assert capfd.readouterr().err == ""


def test_a_signal_ends_all_even_where_the_others_would_go_on() -> None:
    code = run_ranks(
        stub("exec sleep 1000", "exec sleep 1000"), 2, [signal.SIGTERM], "clipship", keep_going=True
    )
    assert code == 128 + signal.SIGTERM


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
        successor = start_on("another-host.invalid", ["true"], {RESPAWNED: "1"}, ssh, number)
        assert successor.process.wait() == 0
        assert left.process.wait() in (BY_KILL, 128 - BY_KILL)
        assert staying is None or staying.process.poll() is None
