"""Which members of a run make its next world: tables, without clock, process and file."""

from collections import Counter

import pytest

from trainer.supervise.coordinate.membership import Membership, Place, WorldPlan, source_of

SIZES = (1, 2, 4, 8, 16)


def membership(
    nodes: int = 4,
    each: int = 2,
    *,
    spares: int = 0,
    fewest: int | None = None,
    sizes: tuple[int, ...] = SIZES,
    even_nodes: bool = False,
) -> Membership:
    """All members are there: 0 and 1 on node a, 2 and 3 on b, and so on; the last nodes are spares."""
    wanted = (nodes - spares) * each
    fewest = wanted if fewest is None else fewest
    its = Membership(range(nodes * each), wanted, fewest, sizes, even_nodes=even_nodes)
    for member in range(nodes * each):
        its.join(member, "abcdefgh"[member // each])
    return its


def numbers(its: Membership) -> tuple[int, ...] | None:
    world = its.next_world()
    return None if world is None else world.numbers


@pytest.mark.parametrize(
    ("spares", "fewest", "lost", "world"),
    [
        (0, None, [], (0, 1, 2, 3, 4, 5, 6, 7)),
        (0, None, [3], None),
        (2, None, [], (0, 1, 2, 3)),
        (2, None, [0, 1], (2, 3, 4, 5)),
        (2, None, [3], (0, 1, 4, 5)),
        (2, None, [0, 1, 2], (4, 5, 6, 7)),
        (0, 2, [2, 3], (0, 1, 4, 5)),
        (0, 2, [1], (2, 3, 4, 5)),
        (0, 2, [1, 3, 5, 7], (0, 2, 4, 6)),
        (0, 4, [0, 1, 2, 3, 4], None),
        (0, 2, [0, 1, 2, 3, 4], (6, 7)),
    ],
    ids=[
        "all",
        "one lost, no fewer allowed",
        "spares wait",
        "spare node takes the place of a node",
        "of a node that lost one member, the whole spare node takes the place",
        "both spare nodes",
        "half of the ranks, which can share the batch",
        "whole nodes before others",
        "one of each node",
        "too few",
        "fewest",
    ],
)
def test_world_after_losses(
    spares: int, fewest: int | None, lost: list[int], world: tuple[int, ...] | None
) -> None:
    its = membership(spares=spares, fewest=fewest)
    for member in lost:
        its.lose(member)
    assert numbers(its) == world


@pytest.mark.parametrize(
    ("lost", "even", "other"),
    [
        ([], (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)),
        ([8, 9, 10, 11], (0, 1, 2, 4, 5, 6), (0, 1, 2, 3, 4, 5)),
        ([1, 8, 9, 10, 11], (0, 2, 3, 4, 5, 6), (0, 2, 4, 5, 6, 7)),
        ([0, 1, 2, 7, 8, 9, 10, 11], (4, 5, 6), (3, 4, 5, 6)),
        ([0, 1, 2, 5, 6, 7, 9, 10, 11], (3, 4, 8), (3, 4, 8)),
        ([0, 1, 2, 3, 5, 6, 7, 9, 10, 11], None, None),
    ],
    ids=["all", "a node", "one of a node, too", "a node of three", "one of each", "too few"],
)
def test_nodes_of_a_world_have_as_many_ranks_each_if_they_must(
    lost: list[int], even: tuple[int, ...] | None, other: tuple[int, ...] | None
) -> None:
    for even_nodes, world in ((True, even), (False, other)):
        its = membership(3, 4, fewest=3, sizes=(1, 2, 3, 4, 6, 12), even_nodes=even_nodes)
        for member in lost:
            its.lose(member)
        assert numbers(its) == world


def test_member_that_comes_back_has_its_place_again() -> None:
    its = membership()
    its.lose(2)
    assert numbers(its) is None
    its.join(2, "b")
    assert numbers(its) == tuple(range(8))


def test_node_with_two_faults_is_left_out_if_the_rest_makes_as_large_a_world() -> None:
    its = membership(spares=1, sizes=(2, 4, 6))
    its.record_fault("b")
    assert numbers(its) == (0, 1, 2, 3, 4, 5)
    its.record_fault("b")
    world = its.next_world()
    assert world is not None
    assert world.numbers == (0, 1, 4, 5, 6, 7)
    assert its.unused(world) == {"b": "it has failed 2 times"}
    its.lose(7)
    assert numbers(its) == (0, 1, 2, 4, 5, 6), "as few of it as possible, once the others are not enough"


@pytest.mark.parametrize(
    ("each", "bad", "wanted", "nodes"),
    [
        ({"a": 4, "b": 2, "c": 2, "d": 2}, "a", 4, {"b": 2, "c": 2}),
        ({"a": 4, "b": 4, "c": 2, "d": 2, "e": 2, "f": 2}, "a", 8, {"b": 2, "c": 2, "d": 2, "e": 2}),
        ({"a": 4, "b": 4, "c": 2, "d": 2, "e": 2}, "ab", 8, {"a": 2, "c": 2, "d": 2, "e": 2}),
        ({"a": 4, "b": 4, "c": 2}, "a", 8, {"a": 4, "b": 4}),
    ],
    ids=["fewer of more nodes", "of a whole node, too", "one of two", "none to take its place"],
)
def test_node_with_two_faults_is_left_out_of_even_nodes_too(
    each: dict[str, int], bad: str, wanted: int, nodes: dict[str, int]
) -> None:
    of = [node for node, count in each.items() for _ in range(count)]
    its = Membership(range(len(of)), wanted, 1, SIZES, even_nodes=True)
    for member, node in enumerate(of):
        its.join(member, node)
    for node in 2 * bad:
        its.record_fault(node)
    world = its.next_world()
    assert world is not None
    assert Counter(node for _, node in world.members) == nodes
    assert its.unused(world).keys() == set(bad) - nodes.keys()


def test_condemned_node_is_left_out_with_its_reason() -> None:
    its = membership(spares=1, sizes=(6,))
    its.exclude("a", "condemned", "its network is slow")
    world = its.next_world()
    assert world is not None
    assert world.numbers == (2, 3, 4, 5, 6, 7)
    assert its.unused(world) == {"a": "its network is slow"}


def test_unknown_sizes_allow_only_the_first_one() -> None:
    its = membership(fewest=1, sizes=())
    its.lose(0)
    assert numbers(its) is None


WORLD = WorldPlan(((0, "a"), (1, "a"), (2, "b"), (5, "c"), (6, "c"), (7, "c")))


@pytest.mark.parametrize(
    ("member", "place"),
    [
        (0, Place(0, 6, 0, 2, (0, 3))),
        (1, Place(1, 6, 1, 2, (0, 2))),
        (2, Place(2, 6, 0, 1, (1, 3))),
        (6, Place(4, 6, 1, 3, (1, 2))),
        (7, Place(5, 6, 2, 3, (0, 1))),
        (3, None),
    ],
)
def test_place_in_a_world(member: int, place: Place | None) -> None:
    assert WORLD.place(member) == place


def test_world_travels_as_runs_of_members() -> None:
    assert WORLD.to_text() == "0 1 a\n2 2 b\n5 7 c"
    assert WorldPlan.from_text(WORLD.to_text()) == WORLD
    large = WorldPlan(tuple((member, f"n{member // 8}") for member in range(10_000)))
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
    assert source_of(kept, nodes, WorldPlan(tuple(world.items())), saved) == source
