"""Faults of `benchmarks.goodput`: which, when and to whom, drawn from a seed. Pure; no clock, no process."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

EVERY_S = 60.0
"""Seconds of a run for each of its faults."""
OF_NODES = ("node lost", "coordinator's node lost")
KINDS = {
    "rank killed": 1,
    "rank 0 killed": 1,
    "rank stopped": 1,
    **dict.fromkeys(OF_NODES, 1),
    "loader process killed": 1,
    "rank killed in a checkpoint": 1,
    "rank killed, another in the recovery": 2,
    "rank killed twice in a minute": 2,
}
"""Number of faults that each kind makes."""
EXTRA_KINDS = {"supervisor killed": 1, "coordinator killed": 1, "supervisor stopped": 1}
"""Kinds that are made only where they are asked for."""
FAULTS = sum(KINDS.values())
"""Number of faults that all kinds make."""


@dataclass(frozen=True)
class Fault:
    """Fault of one kind; `at_s` counts from the first step, `draw` in [0, 1) chooses the victim."""

    at_s: float
    kind: str
    draw: float


def deal(seed: int, faults: int, runs: int) -> list[list[Fault]]:
    """Returns the faults of each of several runs, at least so many in all.

    Each run has one of a node and one of a rank. With FAULTS and one or two runs every kind comes once.
    """
    draw, deck = random.Random(seed), list[str]()

    def next_kind(is_wanted: Callable[[str], bool]) -> str:
        if not any(map(is_wanted, deck)):
            deck.extend(draw.sample(list(KINDS), len(KINDS)))
        return deck.pop(next(place for place, kind in enumerate(deck) if is_wanted(kind)))

    hands = [[next_kind(OF_NODES.__contains__)] for _ in range(runs)]
    for hand in hands:
        hand.append(next_kind(lambda kind: kind not in OF_NODES))
    while sum(map(made, hands)) < faults:
        min(hands, key=made).append(next_kind(lambda kind: True))
    for hand in hands:
        draw.shuffle(hand)
    return [list(at_moments(hand, draw)) for hand in hands]


def only(kinds: Sequence[str], seed: int, faults: int) -> list[Fault]:
    """Returns faults of these kinds alone, in turns, at least so many."""
    chosen: list[str] = []
    for kind in itertools.cycle(kinds):
        if made(chosen) >= faults:
            break
        chosen.append(kind)
    return list(at_moments(chosen, random.Random(seed)))


def made(kinds: Sequence[str]) -> int:
    """Returns how many faults these kinds make."""
    return sum({**KINDS, **EXTRA_KINDS}[kind] for kind in kinds)


def at_moments(kinds: Sequence[str], draw: random.Random) -> Iterator[Fault]:
    """Yields a fault of each kind, each in a minute of its own; a kind that makes two takes two minutes."""
    begin_s = 0.0
    for kind in kinds:
        yield Fault(begin_s + EVERY_S * draw.uniform(0.15, 0.5), kind, draw.random())
        begin_s += EVERY_S * made([kind])
