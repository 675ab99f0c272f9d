"""Which members of a run make its next world: tables, without clock, process and file."""

from collections import Counter
from typing import Any

import pytest

from trainer.supervise.coordinate import membership

SIZES = (1, 2, 4, 8, 16)


def joined(
    nodes: str,
    *,
    spares: int = 0,
    fewest: int | None = None,
    sizes: tuple[int, ...] = SIZES,
    even_nodes: bool = False,
) -> membership.Membership:
    """Members on these nodes, one letter each, who are all there; the last ones are spares."""
    wanted = len(nodes) - spares
    fewest = wanted if fewest is None else fewest
    its = membership.Membership(range(len(nodes)), wanted, fewest, sizes, even_nodes=even_nodes)
    for member, node in enumerate(nodes):
        its.join(member, node)
    return its


def world_of(its: membership.Membership) -> membership.WorldPlan:
    world = its.next_world()
    assert world is not None
    return world


def numbers(its: membership.Membership) -> tuple[int, ...] | None:
    world = its.next_world()
    return None if world is None else world.numbers


TWELVE: dict[str, Any] = {"nodes": "aaaabbbbcccc", "fewest": 3, "sizes": (1, 2, 3, 4, 6, 12)}


EVEN = {**TWELVE, "even_nodes": True}
LOSSES: dict[str, tuple[dict[str, Any], list[int], tuple[int, ...] | None]] = {
    "all": ({}, [], (0, 1, 2, 3, 4, 5, 6, 7)),
    "one lost, no fewer allowed": ({}, [3], None),
    "spares wait": ({"spares": 4}, [], (0, 1, 2, 3)),
    "spare node takes the place of a node": ({"spares": 4}, [0, 1], (2, 3, 4, 5)),
    "the whole spare node takes the place of one that lost one": ({"spares": 4}, [3], (0, 1, 4, 5)),
    "both spare nodes": ({"spares": 4}, [0, 1, 2], (4, 5, 6, 7)),
    "half of the ranks, which can share the batch": ({"fewest": 2}, [2, 3], (0, 1, 4, 5)),
    "whole nodes before others": ({"fewest": 2}, [1], (2, 3, 4, 5)),
    "one of each node": ({"fewest": 2}, [1, 3, 5, 7], (0, 2, 4, 6)),
    "too few": ({"fewest": 4}, [0, 1, 2, 3, 4], None),
    "fewest": ({"fewest": 2}, [0, 1, 2, 3, 4], (6, 7)),
    "sizes that are not known": ({"fewest": 1, "sizes": ()}, [0], None),
    "even: all": (EVEN, [], tuple(range(12))),
    "even: a node": (EVEN, [8, 9, 10, 11], (0, 1, 2, 4, 5, 6)),
    "not even: a node": (TWELVE, [8, 9, 10, 11], (0, 1, 2, 3, 4, 5)),
    "even: one of a node, too": (EVEN, [1, 8, 9, 10, 11], (0, 2, 3, 4, 5, 6)),
    "even: a node of three": (EVEN, [0, 1, 2, 7, 8, 9, 10, 11], (4, 5, 6)),
    "even: one of each": (EVEN, [0, 1, 2, 5, 6, 7, 9, 10, 11], (3, 4, 8)),
    "even: too few": (EVEN, [0, 1, 2, 3, 5, 6, 7, 9, 10, 11], None),
}


@pytest.mark.parametrize(("of", "lost", "world"), LOSSES.values(), ids=LOSSES)
def test_world_after_losses(of: dict[str, Any], lost: list[int], world: tuple[int, ...] | None) -> None:
    its = joined(**{"nodes": "aabbccdd", **of})
    for member in lost:
        its.lose(member)
    assert numbers(its) == world


def test_member_that_comes_back_has_its_place_again() -> None:
    its = joined("aabbccdd")
    its.lose(2)
    assert numbers(its) is None
    its.join(2, "b")
    assert numbers(its) == tuple(range(8))


def test_node_with_two_faults_is_left_out_if_the_rest_makes_as_large_a_world() -> None:
    its = joined("aabbccdd", spares=2, sizes=(2, 4, 6))
    its.record_fault("b")
    assert numbers(its) == (0, 1, 2, 3, 4, 5)
    its.record_fault("b")
    world = world_of(its)
    assert world.numbers == (0, 1, 4, 5, 6, 7)
    assert its.unused(world) == {"b": "it has failed 2 times"}
    its.lose(7)
    assert numbers(its) == (0, 1, 2, 4, 5, 6), "as few of it as possible, once the others are not enough"


@pytest.mark.parametrize(
    ("nodes", "bad", "wanted", "used"),
    [
        ("aaaabbccdd", "a", 4, {"b": 2, "c": 2}),
        ("aaaabbbbccddeeff", "a", 8, {"b": 2, "c": 2, "d": 2, "e": 2}),
        ("aaaabbbbccddee", "ab", 8, {"a": 2, "c": 2, "d": 2, "e": 2}),
        ("aaaabbbbcc", "a", 8, {"a": 4, "b": 4}),
    ],
    ids=["fewer of more nodes", "of a whole node, too", "one of two", "none to take its place"],
)
def test_node_with_two_faults_is_left_out_of_even_nodes_too(
    nodes: str, bad: str, wanted: int, used: dict[str, int]
) -> None:
    its = joined(nodes, spares=len(nodes) - wanted, fewest=1, even_nodes=True)
    for node in 2 * bad:
        its.record_fault(node)
    world = world_of(its)
    assert Counter(node for _, node in world.members) == used
    assert its.unused(world).keys() == set(bad) - used.keys()


WORLD = membership.WorldPlan(((0, "a"), (1, "a"), (2, "b"), (5, "c"), (6, "c"), (7, "c")))


def test_place_in_a_world() -> None:
    places = {member: WORLD.place(member) for member in (0, 1, 2, 6, 7, 3)}
    assert places == {
        0: membership.Place(0, 6, 0, 2, (0, 3)),
        1: membership.Place(1, 6, 1, 2, (0, 2)),
        2: membership.Place(2, 6, 0, 1, (1, 3)),
        6: membership.Place(4, 6, 1, 3, (1, 2)),
        7: membership.Place(5, 6, 2, 3, (0, 1)),
        3: None,
    }


def test_world_travels_as_runs_of_members() -> None:
    assert WORLD.to_text() == "0 1 a\n2 2 b\n5 7 c"
    assert membership.WorldPlan.from_text(WORLD.to_text()) == WORLD
    large = membership.WorldPlan(tuple((member, f"n{member // 8}") for member in range(10_000)))
    assert len(large.to_text()) < 25_000


@pytest.mark.parametrize(
    ("kept", "world", "saved", "source"),
    [
        ({0: 7, 3: 0}, {3: "c"}, 4, (4, 0)),
        ({0: 7, 1: 7, 3: 0}, {3: "c"}, 0, (0, 0)),
        ({0: 7, 3: 0}, {3: "c"}, 7, (7, None)),
        ({0: 7, 3: 0}, {3: "c"}, 9, (9, None)),
        ({0: 7, 2: 6}, {2: "b", 3: "c"}, 4, (6, None)),
        ({0: 7, 2: 3}, {2: "b", 3: "c"}, 4, (4, 0)),
        ({0: 6, 1: 7}, {0: "a"}, 4, (7, None)),  # members 0 and 1 share a node
        ({}, {3: "c"}, 4, (4, None)),
    ],
)
def test_world_goes_on_from_the_newest_step_in_its_own_memory_or_on_disk(
    kept: dict[int, int], world: dict[int, str], saved: int, source: tuple[int, int | None]
) -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "c"}
    assert membership.source_of(kept, nodes, membership.WorldPlan(tuple(world.items())), saved) == source


# Who is left out, as restarts.json has it and as people read it.

SLOW = "rank 1 works 0.9 s per step"


def test_each_row_says_who_why_and_since_when() -> None:
    its = joined("aabbccdd", spares=2, fewest=4, sizes=(4, 6))
    its.lose(2)
    first = membership.exclusions(its, world_of(its), (), 100.0)
    assert first == (membership.Exclusion("b", "gone", "gone", (2,), 100.0),)
    its.lose(3)
    its.exclude("a", "condemned", SLOW)
    its.lose(7)
    assert membership.exclusions(its, world_of(its), first, 200.0) == (
        membership.Exclusion("b", "gone", "gone", (2, 3), 100.0),
        membership.Exclusion("d", "gone", "gone", (7,), 200.0),
    ), "a condemned node is used if no other can take its place"


def test_condemned_node_is_left_out_and_named() -> None:
    its = joined("aabbccdd", spares=2, fewest=4, sizes=(4, 6))
    its.exclude("a", "condemned", SLOW)
    its.record_fault("c")
    world = world_of(its)
    assert world.numbers == (2, 3, 4, 5, 6, 7)
    assert its.unused(world) == {"a": SLOW}
    assert membership.exclusions(its, world, (), 5.0) == (
        membership.Exclusion("a", "condemned", SLOW, (), 5.0),
    )


def test_member_that_never_joined_is_gone_without_a_node() -> None:
    its = membership.Membership(range(3), 3, 2, (2, 3))
    for member in range(2):
        its.join(member, f"n{member}")
    its.lose(2)
    (row,) = membership.exclusions(its, world_of(its), (), 5.0)
    assert row == membership.Exclusion("", "gone", "gone", (2,), 5.0)
    assert membership.exclusions_text([row.__dict__]) == ["1 supervisor not seen yet: gone"]


def test_people_read_a_phrase_for_each_row() -> None:
    rows = [
        {"node": "n1", "kind": "gone", "reason": "gone", "members": [2, 3], "since": 1.0},
        {"node": "n2", "kind": "failed", "reason": "it has failed 2 times", "members": [], "since": 1.0},
        7,
    ]
    told = ["2 supervisors on n1: gone", "node n2: it has failed 2 times"]
    assert membership.exclusions_text(rows) == told
    assert membership.exclusions_text(None) == []
