"""Messages between supervisors: what travels comes out as it went in, and anything else is refused."""

import json
from typing import Any

import pytest

from tests.unit.test_diagnosis import COMPUTING
from trainer.run.exit_record import ExitRecord
from trainer.supervise import messages
from trainer.supervise.coordinate.states import TABLE
from trainer.supervise.messages import Message, from_table, to_line

SAMPLES: list[Message] = [
    messages.Joined(
        1, "n1", idle=True, asked=True, signalled=True, in_memory=7, address=("h", 4711), above=0
    ),
    messages.Joined(1, "n1"),
    messages.Lost(1, "n1", "gone", silent=True),
    messages.Cut(0, "n0", "rank 1 on n1"),
    messages.StopRequest(15, 0, "n0", again=True),
    messages.Done(2, 0, 75, "asked to stop"),
    messages.Failed(2, ExitRecord(0, "n0", 1, "killed", 1.0, restarts=({"rank": 1},)), step=4, killed=True),
    messages.Late(1, "step lasts too long"),
    messages.Report(1, COMPUTING),
    messages.Stack(1, 0, "a stack"),
    messages.Ended(2, 1, in_memory=5),
    messages.Meeting(2, {"MASTER_PORT": "1"}),
    messages.Progress(2, float("inf"), begun=True, ages={"stepped": 0.5}),
    messages.BadNode(1, "n1", "it is slow"),
    messages.Several((messages.Joined(1, "n1"), messages.Ended(2, 1))),
    messages.Stop(to_grow=True),
    messages.Collect(),
    messages.CollectStacks((0, 3)),
    messages.Regroup(2),
    messages.Meet(1, 2),
    messages.Start(2, {"A": "b"}, "0 1 n0"),
    messages.End(1),
    messages.CutOff(),
    messages.Roster(2, "0 1 n0", "0 2 n0", ((0, ("h", 1)),), ((1, ("h", 2)),)),
    messages.Beat(),
    messages.JoinAgain(),
    messages.Orphaned(0, "n0", "gone", cut=True, relayed=True),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_message_comes_out_as_it_went_in(message: Message) -> None:
    line = to_line(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert from_table(json.loads(line)) == message


def test_each_type_has_a_sample() -> None:
    assert {type(each).__name__ for each in SAMPLES} == messages._KINDS.keys() - {"AboutRank"}


@pytest.mark.parametrize(
    "table",
    [
        None,
        [],
        {},
        {"kind": 7},
        {"kind": ["Stop"]},
        {"kind": "AboutRank"},
        {"kind": "Message"},
        {"kind": "ExitRecord", "rank": 0},
        {"kind": "Regroup"},
        {"kind": "Regroup", "generation": "2"},
        {"kind": "Regroup", "generation": True},
        {"kind": "Regroup", "generation": 2, "more": 1},
        {"kind": "Lost", "member": 1, "node": None, "reason": ""},
        {"kind": "CollectStacks", "ranks": 3},
        {"kind": "CollectStacks", "ranks": [0, "1"]},
        {"kind": "Joined", "member": 1, "node": "n", "address": ["h"]},
        {"kind": "Failed", "generation": 1, "record": {"rank": 0}},
        {"kind": "Several", "messages": [{"kind": "Nothing"}]},
        {"kind": "Start", "generation": 1, "variables": {"A": 1}},
    ],
)
def test_what_is_no_message_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_table(table)


def test_coordinator_takes_in_some_state_whatever_is_told_about_ranks() -> None:
    taken = set().union(*(row.takes for row in TABLE.values()))
    assert set(messages.AboutRank.__subclasses__()) <= taken
