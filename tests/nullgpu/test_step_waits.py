"""The host never waits for the GPU in a step, and a step takes no new memory. Each failure says where."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.null_gpu import CASES, Case, NewMemory, Steps
from tools import nullgpu
from trainer.comm.protocol import Comm

of_each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@of_each_case
def test_the_host_waits_for_nothing_in_a_step(steps_of: Callable[[Case], Steps], case: Case) -> None:
    """Logged steps are among them: a record is one copy, and is read a step later."""
    seen = steps_of(case).seen
    assert seen.waits == [], seen.table()
    assert seen["launches"] > 0


@of_each_case
def test_images_and_tokens_leave_pinned_memory(steps_of: Callable[[Case], Steps], case: Case) -> None:
    seen = steps_of(case).seen
    assert (seen["h2d_pageable"], seen["d2h_pageable"]) == (0, 0), seen.table()
    assert seen["h2d_pinned"] >= 2 * 5


@of_each_case
def test_a_step_allocates_nothing_anew(steps_of: Callable[[Case], Steps], case: Case) -> None:
    """Neither a segment of the GPU's memory nor page-locked memory of the host."""
    steps_of(case).check_memory()


def test_new_memory_is_named_with_file_and_line(gpu: Comm) -> None:
    torch.cuda.empty_cache()  # what earlier tests left would be taken
    with NewMemory() as memory:
        kept = torch.empty(96 * 2**20, dtype=torch.uint8, device="cuda")
    (event,) = (event for event in memory.events if event.bytes == kept.nbytes)
    assert event.what == "segment_alloc, GPU"
    assert f"{Path(__file__).name}:" in event.place
    assert f"{kept.nbytes:,} bytes  {event.place}" in memory.table()


def test_steps_that_take_new_memory_fail_and_say_where(gpu: Comm) -> None:
    steps = Steps(1, 3)
    steps.seen = nullgpu.Seen(counts={"mallocs": 1, "frees": 0, "host_allocs": 0})
    steps.memory.events = [nullgpu.Event("segment_alloc, GPU", 2**21, (("trainer/train/step.py", 80, "f"),))]
    with pytest.raises(AssertionError, match=r"'mallocs': 1.*\n.*2,097,152 bytes  trainer/train/step.py:80"):
        steps.check_memory()
