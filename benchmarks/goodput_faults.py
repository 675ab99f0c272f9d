"""Faults of `benchmarks.goodput`: which, when and to whom, drawn from a seed. Pure; no clock, no process."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

EVERY_S = 60.0
KINDS = {
    "rank killed": 1,
    "rank 0 killed": 1,
    "rank stopped": 1,
    "node lost": 1,
    "coordinator's node lost": 1,
    "loader process killed": 1,
    "rank killed in a checkpoint": 1,
    "rank killed, another in the recovery": 2,
    "rank killed twice in a minute": 2,
}
"""Number of faults that each kind makes."""


@dataclass(frozen=True)
class Fault:
    """Fault of one kind; `at_s` counts from the first step, `draw` in [0, 1) chooses the victim."""

    at_s: float
    kind: str
    draw: float


def faults(seed: int) -> Iterator[Fault]:
    """Yields faults without end, one in 60 s on average; every kind comes once before any comes again.

    A kind that makes two takes two minutes.
    """
    draw = random.Random(seed)
    begin_s = 0.0
    while True:
        for kind in draw.sample(list(KINDS), len(KINDS)):
            yield Fault(begin_s + EVERY_S * draw.uniform(0.4, 0.8), kind, draw.random())
            begin_s += EVERY_S * KINDS[kind]
