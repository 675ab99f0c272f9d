"""Which members of a run make its next world, and which faults it survives: no clock, process or file."""

from dataclasses import replace
from typing import Any

import pytest

from trainer.supervise.coordinate import membership
from trainer.world.restart_policy import Fault, GoOn, RestartPolicy


def joined(
    nodes: str, spares: int = 0, sizes: tuple[int, ...] = (1, 2, 4, 8), fewest: int = 0, **of: bool
) -> membership.Membership:
    """Members on these nodes, one letter each, who are all there; the last ones are spares."""
    wanted = len(nodes) - spares
    its = membership.Membership(range(len(nodes)), wanted, fewest or wanted, sizes, **of)
    for member, node in enumerate(nodes):
        its.join(member, node)
    return its


EVEN: dict[str, Any] = {"nodes": 4 * "a" + 4 * "b" + 4 * "c", "sizes": (1, 2, 3, 4, 6, 12), "fewest": 3}
EVEN["even_nodes"] = True


LOSSES: dict[str, tuple[dict[str, Any], list[int], tuple[int, ...] | None]] = {
    "one lost, no fewer allowed": ({}, [3], None),
    "the whole spare node takes the place of one that lost one": ({"spares": 4}, [3], (0, 1, 4, 5)),
    "both spare nodes": ({"spares": 4}, [0, 1, 2], (4, 5, 6, 7)),
    "half of the ranks, which can share the batch": ({"fewest": 2}, [2, 3], (0, 1, 4, 5)),
    "whole nodes before others": ({"fewest": 2}, [1], (2, 3, 4, 5)),
    "too few": ({"fewest": 4}, [0, 1, 2, 3, 4], None),
    "sizes that are not known": ({"fewest": 1, "sizes": ()}, [0], None),
    "even: a node": (EVEN, [8, 9, 10, 11], (0, 1, 2, 4, 5, 6)),
    "even: one of a node, too": (EVEN, [1, 8, 9, 10, 11], (0, 2, 3, 4, 5, 6)),
    "even: one of each": (EVEN, [0, 1, 2, 5, 6, 7, 9, 10, 11], (3, 4, 8)),
}


def numbers(its: membership.Membership) -> tuple[int, ...] | None:
    world = its.next_world()
    return None if world is None else world.numbers


@pytest.mark.parametrize(("of", "lost", "world"), LOSSES.values(), ids=LOSSES)
def test_world_after_losses(of: dict[str, Any], lost: list[int], world: tuple[int, ...] | None) -> None:
    its = joined(**{"nodes": "aabbccdd", **of})
    for member in lost:
        its.lose(member)
    assert numbers(its) == world


def test_node_with_two_faults_is_left_out_if_the_rest_makes_as_large_a_world() -> None:
    its = joined("aabbccdd", spares=2, sizes=(2, 4, 6))
    its.record_fault("b")
    assert numbers(its) == (0, 1, 2, 3, 4, 5)
    its.record_fault("b")
    assert numbers(its) == (0, 1, 4, 5, 6, 7)
    its.lose(7)
    assert numbers(its) == (0, 1, 2, 4, 5, 6), "as few of it as possible, if the others are too few"


def test_unfit_node_is_no_part_of_a_world_however_small_that_is() -> None:
    its = joined("aabb", fewest=1)
    its.exclude("a", "unfit", "it has failed the preflight")
    its.exclude("b", "condemned", "its network is slow")
    assert numbers(its) == (2, 3), "a node that is only slow is better than none"
    its.exclude("b", "unfit", "it has failed the preflight")
    assert numbers(its) is None


# Which faults are the same, and how long a run waits before it goes on.

FAULT = Fault(1, "n1", 812, "killed by SIGKILL in step, step 812")


@pytest.mark.parametrize(
    ("cause", "one", "other"),
    [
        ("connection to [10.0.0.{}]:{} refused, handle 0x7f{}", (1, 22, "ab"), (2, 4711, 99)),
        ("longer than {} s, learned from the last {} (99 % took at most {} s)", (12, 150, 0.7), (9, 300, 1)),
    ],
    ids=["addresses", "a hang with another learned limit"],
)
def test_causes_may_differ_in_their_numbers(cause: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    first, second = (replace(FAULT, cause=cause.format(*numbers)) for numbers in (one, other))
    assert first.is_like(replace(second, node="n7")), "rank 1 may be elsewhere by then"
    assert not first.is_like(replace(second, cause="RuntimeError: closed"))


@pytest.mark.parametrize(
    ("jitter", "expected"), [(0.0, [0, 4, 8, 16, 32, 32, 32]), (1.0, [0, 2, 4, 8, 16, 16, 16])]
)
def test_wait_doubles_up_to_eight_times_and_at_most_half_of_it_is_left_out(
    jitter: float, expected: list[int]
) -> None:
    its = RestartPolicy(10, 2, 4.0, jitter=lambda: jitter)
    waits = [its.decide(replace(FAULT, step=step), 0) for step in range(1, 8)]
    assert [wait.wait_s for wait in waits if isinstance(wait, GoOn)] == expected


# Who is left out, as restarts.json has it and as people read it.
