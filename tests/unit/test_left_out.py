"""Who is left out of a generation's world, as restarts.json has it and as people read it."""

import json

from trainer.supervise.coordinate.membership import Exclusion, Membership, exclusions, exclusions_text
from trainer.supervise.restarts import Restart, restart_from_json


def four_nodes() -> Membership:
    """Eight members on four nodes, of which six make the world."""
    its = Membership(range(8), 6, 4, (4, 6))
    for member in range(8):
        its.join(member, f"n{member // 2}")
    return its


def test_each_row_says_who_why_and_since_when() -> None:
    its = four_nodes()
    its.lose(2)
    world = its.next_world()
    assert world is not None
    first = exclusions(its, world, (), 100.0)
    assert first == (Exclusion("n1", "gone", "gone", (2,), 100.0),)
    its.lose(3)
    its.exclude("n0", "condemned", "rank 1 works 0.9 s per step")
    its.lose(7)
    world = its.next_world()
    assert world is not None
    assert exclusions(its, world, first, 200.0) == (
        Exclusion("n1", "gone", "gone", (2, 3), 100.0),
        Exclusion("n3", "gone", "gone", (7,), 200.0),
    ), "a condemned node is used if no other can take its place"


def test_condemned_node_is_left_out_and_named() -> None:
    its = four_nodes()
    its.exclude("n0", "condemned", "rank 1 works 0.9 s per step")
    its.record_fault("n2")
    world = its.next_world()
    assert world is not None
    (row,) = exclusions(its, world, (), 5.0)
    assert row == Exclusion("n0", "condemned", "rank 1 works 0.9 s per step", (), 5.0)


def test_member_that_never_joined_is_gone_without_a_node() -> None:
    its = Membership(range(3), 3, 2, (2, 3))
    for member in range(2):
        its.join(member, f"n{member}")
    its.lose(2)
    world = its.next_world()
    assert world is not None
    (row,) = exclusions(its, world, (), 5.0)
    assert row == Exclusion("", "gone", "gone", (2,), 5.0)
    assert exclusions_text([row.__dict__]) == ["1 supervisor not seen yet: gone"]


def test_rows_are_read_back() -> None:
    row = Exclusion("n1", "failed", "it has failed 2 times", (), 100.0)
    restart = Restart(2, "killed", 1, "n1", 6, 4, left_out=(row,))
    table = json.loads(json.dumps(restart.to_json()))
    assert restart_from_json(table) == restart


def test_people_read_a_phrase_for_each_row() -> None:
    rows = [
        {"node": "n1", "kind": "gone", "reason": "gone", "members": [2, 3], "since": 1.0},
        {"node": "n2", "kind": "failed", "reason": "it has failed 2 times", "members": [], "since": 1.0},
        7,
    ]
    assert exclusions_text(rows) == [
        "2 supervisors on n1: gone",
        "node n2: it has failed 2 times",
    ]
    assert exclusions_text(None) == []
