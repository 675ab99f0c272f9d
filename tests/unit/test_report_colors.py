"""The report's colours: people with a colour-blind eye tell the curves of one chart apart."""

import math
import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from trainer.report import times

CSS = (Path(times.__file__).parent / "page.css").read_text()
SEEN: dict[str, Sequence[Sequence[float]]] = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)
    ),
}  # fmt: skip
"""Linear RGB as such an eye sees it: Machado, Oliveira and Fernandes 2009, severity 1."""
APART = 10
"""Least distance of two colours in CIELAB; about 2 is the least that people notice."""


def colors(scheme: str) -> dict[int, str]:
    """The page's colours by number, in the light or the dark scheme."""
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")
    return {
        int(n): color for n, color in re.findall(r"--c(\d+): #(\w{6})", dark if scheme == "dark" else light)
    }


def lab(color: str, eye: str) -> tuple[float, float, float]:
    """CIELAB of a colour as that eye sees it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    r, g, b = (min(1.0, max(0.0, sum(f * v for f, v in zip(row, linear, strict=True)))) for row in SEEN[eye])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: str, other: str, eye: str) -> float:
    return math.dist(lab(one, eye), lab(other, eye))


@pytest.mark.parametrize("eye", SEEN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_curves_of_eight_runs_are_told_apart(scheme: str, eye: str) -> None:
    found = colors(scheme)
    assert sorted(found) == list(range(1, 11))
    near = {
        (one, other): round(distance(found[one], found[other], eye), 1)
        for one, other in combinations(range(1, 9), 2)
        if distance(found[one], found[other], eye) < APART
    }
    assert near == {}


@pytest.mark.parametrize("eye", SEEN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_neighbours_in_the_time_of_a_run_are_told_apart(scheme: str, eye: str) -> None:
    found = colors(scheme)
    order = list(times._COLORS.values())
    near = {pair for pair in pairwise(order) if distance(found[pair[0]], found[pair[1]], eye) < APART}
    assert near == set()
