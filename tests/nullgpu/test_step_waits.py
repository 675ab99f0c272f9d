"""The host never waits for the GPU in a step, and a step takes no new memory. Each failure says where."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.null_gpu import CASES, Case

of_each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@of_each_case
def test_the_host_waits_for_nothing_in_a_step(steps_of: Callable[[Case], Any], case: Case) -> None:
    """Logged steps are among them: a record is one copy, and is read a step later."""
    seen = steps_of(case)
    assert seen.waits == [], seen.table()
    assert seen["launches"] > 0


@of_each_case
def test_images_and_tokens_leave_pinned_memory(steps_of: Callable[[Case], Any], case: Case) -> None:
    seen = steps_of(case)
    assert (seen["h2d_pageable"], seen["d2h_pageable"]) == (0, 0), seen.table()
    assert seen["h2d_pinned"] >= 2 * 5


@of_each_case
def test_a_step_allocates_nothing_anew(steps_of: Callable[[Case], Any], case: Case) -> None:
    """Neither a segment of the GPU's memory nor page-locked memory of the host."""
    seen = steps_of(case)
    assert (seen["mallocs"], seen["frees"], seen["host_allocs"]) == (0, 0, 0)
