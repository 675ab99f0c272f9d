"""The coordinator's table of states; what follows from it in any order the simulated world shows."""

import re
from pathlib import Path

import pytest

from trainer.supervise import messages
from trainer.supervise.coordinate.states import BETWEEN, TABLE, WITH_RANKS, Event, State, following


def test_an_event_that_a_state_does_not_have_is_refused_by_name() -> None:
    assert following(State.RUNNING, Event.FAULT) is State.DECIDING
    with pytest.raises(RuntimeError, match=r"START \(every supervisor is told .*\) in state RUNNING"):
        following(State.RUNNING, Event.START)


def test_every_state_is_reached_from_the_first_and_leads_to_the_end() -> None:
    reached = {State.STARTING}
    for _ in State:
        reached |= {after for state in reached for after in TABLE[state].leads_to.values()}
    assert reached == set(State) == set(TABLE)
    for state in set(State) - {State.ENDED}:
        assert {Event.END, Event.CUT_OFF} <= TABLE[state].leads_to.keys()
    assert not TABLE[State.ENDED].leads_to
    assert not TABLE[State.ENDED].takes


def test_ranks_run_between_a_start_and_a_fault_only() -> None:
    assert set(State) == {*WITH_RANKS, State.DECIDING, *BETWEEN, State.ENDED}
    for state, row in TABLE.items():
        for event, after in row.leads_to.items():
            if after in WITH_RANKS and state not in WITH_RANKS:
                assert event is Event.START
            if after in BETWEEN and state not in BETWEEN:
                assert event is Event.RESTART


def test_whatever_is_told_about_ranks_is_taken_in_some_state() -> None:
    taken = set().union(*(row.takes for row in TABLE.values()))
    assert set(messages.AboutRank.__subclasses__()) <= taken


def test_page_on_architecture_draws_each_state_and_event() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    drawn = page.partition("### States of a run")[2].partition("### The life of a fault")[0]
    assert [each.name for each in (*State, *Event) if each.name not in re.findall(r"[A-Z_]+", drawn)] == []
