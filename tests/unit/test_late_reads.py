"""Values of a step are read when the next step is under way, or before what depends on them."""

import pytest

from trainer.train.loop import LateReads


def test_on_a_cpu_an_action_runs_at_once() -> None:
    done: list[int] = []
    reads = LateReads(late=False)
    reads.add(lambda: done.append(1))
    assert done == [1]
    reads.settle()
    assert done == [1]


def test_on_a_gpu_actions_wait_for_the_next_step_and_keep_their_order() -> None:
    done: list[int] = []
    reads = LateReads(late=True)
    reads.add(lambda: done.append(1))
    reads.add(lambda: done.append(2))
    assert done == []
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
