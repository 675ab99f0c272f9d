"""Values of a step are read when the next step is under way, or before what depends on them."""

from functools import partial

import pytest

from trainer.train.loop import LateReads


@pytest.mark.parametrize("late", [False, True])
def test_on_a_gpu_actions_wait_for_the_next_step_and_keep_their_order(late: bool) -> None:
    """On a CPU they run at once."""
    done: list[int] = []
    reads = LateReads(late=late)
    for number in (1, 2):
        reads.add(partial(done.append, number))
    assert done == ([] if late else [1, 2])
    reads.settle()
    reads.settle()
    assert done == [1, 2]


def test_what_follows_a_step_that_is_not_finite_is_not_written() -> None:
    done: list[int] = []

    def stop() -> None:
        raise ArithmeticError("the gradient of step 3 is NaN or infinite")

    reads = LateReads(late=True)
    reads.add(stop)
    reads.add(lambda: done.append(3))
    with pytest.raises(ArithmeticError):
        reads.settle()
    reads.settle()
    assert done == []
