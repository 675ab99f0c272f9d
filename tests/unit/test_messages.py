"""Messages between supervisors: what travels comes out as it went in, and anything else is refused."""

from typing import Any

import pytest

from tests.unit.test_diagnosis import COMPUTING
from trainer.run.exit_record import ExitRecord
from trainer.supervise import messages

SAMPLES: list[messages.Message] = [
    messages.Joined(1, "n1", asked=True, signalled=True, in_memory=7, address=("h", 4711), above=0),
    messages.Joined(1, "n1"),
    messages.Failed(2, ExitRecord(0, "n0", 1, "killed", 1.0, restarts=({"rank": 1},)), step=4, killed=True),
    messages.Report(1, COMPUTING),
    messages.Meeting(2, {"MASTER_PORT": "1"}),
    messages.Progress(2, float("inf"), begun=True, ages={"stepped": 0.5}),
    messages.Several((messages.Joined(1, "n1"), messages.Ended(2, 1))),
    messages.CollectStacks((0, 3)),
    messages.Start(2, {"A": "b"}, "0 1 n0"),
    messages.End(1),
    messages.Roster(2, "0 1 n0", "0 2 n0", ((0, ("h", 1)),), ((1, ("h", 2)),)),
    messages.Beat(),
]
"""One of each kind of field; every other message has fields of these kinds only."""


def kinds_of_fields(message: type[messages.Message]) -> set[str]:
    return {str(each.type) for each in vars(message)["__dataclass_fields__"].values()}


def test_each_kind_of_field_has_a_sample() -> None:
    def kinds(types: Any) -> set[str]:
        return set().union(*map(kinds_of_fields, types))

    every = [*messages.Message.__subclasses__(), *messages.AboutRank.__subclasses__()]
    assert kinds(every) == kinds(map(type, SAMPLES))


@pytest.mark.parametrize(
    "table",
    [
        None,
        [],
        {"kind": 7},
        {"kind": ["Stop"]},
        {"kind": "AboutRank"},
        {"kind": "ExitRecord", "rank": 0},
        {"kind": "Regroup"},
        {"kind": "Regroup", "generation": True},
        {"kind": "Regroup", "generation": 2, "more": 1},
        {"kind": "Lost", "member": 1, "node": None, "reason": ""},
        {"kind": "CollectStacks", "ranks": [0, "1"]},
        {"kind": "Joined", "member": 1, "node": "n", "address": ["h"]},
        {"kind": "Failed", "generation": 1, "record": {"rank": 0}},
        {"kind": "Several", "messages": [{"kind": "Nothing"}]},
        {"kind": "Start", "generation": 1, "variables": {"A": 1}},
    ],
)
def test_what_is_no_message_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        messages.from_table(table)
