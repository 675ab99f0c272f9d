"""The coordinator's table of states; what follows from it in any order the simulated world shows."""

import re
from pathlib import Path

import pytest

from trainer.supervise import messages
from trainer.supervise.coordinate import states


def test_an_event_that_a_state_does_not_have_is_refused_by_name() -> None:
    assert states.following(states.State.RUNNING, states.Event.FAULT) is states.State.DECIDING
    with pytest.raises(RuntimeError, match=r"START \(every supervisor is told .*\) in state RUNNING"):
        states.following(states.State.RUNNING, states.Event.START)


def test_every_state_is_reached_from_the_first_and_leads_to_the_end() -> None:
    reached = {states.State.STARTING}
    for _ in states.State:
        reached |= {after for state in reached for after in states.TABLE[state].leads_to.values()}
    assert reached == set(states.State) == set(states.TABLE)
    for state in set(states.State) - {states.State.ENDED}:
        assert {states.Event.END, states.Event.CUT_OFF} <= states.TABLE[state].leads_to.keys()
    assert not states.TABLE[states.State.ENDED].leads_to
    assert not states.TABLE[states.State.ENDED].takes


def test_ranks_run_between_a_start_and_a_fault_only() -> None:
    assert set(states.State) == {
        *states.WITH_RANKS,
        states.State.DECIDING,
        *states.BETWEEN,
        states.State.ENDED,
    }
    for state, row in states.TABLE.items():
        for event, after in row.leads_to.items():
            if after in states.WITH_RANKS and state not in states.WITH_RANKS:
                assert event is states.Event.START
            if after in states.BETWEEN and state not in states.BETWEEN:
                assert event is states.Event.RESTART


def test_whatever_is_told_about_ranks_is_taken_in_some_state() -> None:
    taken = set().union(*(row.takes for row in states.TABLE.values()))
    assert set(messages.AboutRank.__subclasses__()) <= taken


def test_page_on_architecture_draws_each_state_and_event() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    drawn = page.partition("### States of a run")[2].partition("### The life of a fault")[0]
    assert [
        each.name for each in (*states.State, *states.Event) if each.name not in re.findall(r"[A-Z_]+", drawn)
    ] == []
