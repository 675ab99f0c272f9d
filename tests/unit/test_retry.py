"""Tries again after waits, and sees a file of another machine when it is there."""

import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.run import retry


def test_waits_double_up_to_the_longest_and_jitter_leaves_out_up_to_half() -> None:
    its = retry.Backoff(1.0, 60.0)
    assert [its.wait_s(failures) for failures in (1, 2, 3, 6, 7, 10_000)] == [1, 2, 4, 32, 60, 60]
    assert its.wait_s(3, jitter=1.0) == 2.0


def test_waits_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waits = retry.every(4.0, 10.0)
    found = []
    for wait_s in waits:
        found.append(wait_s)
        now[0] += wait_s
    assert found == [4.0, 4.0, 2.0]
    assert list(islice(retry.Backoff(1.0, 3.0).within(100.0), 3)) == [1.0, 2.0, 3.0]
    assert list(retry.every(1.0, 0.0)) == []


def test_an_error_that_may_pass_is_tried_again_and_told_and_the_last_is_raised() -> None:
    errors: list[Exception] = [OSError("first"), OSError("second"), KeyError("other")]
    told: list[tuple[str, float]] = []

    def attempt() -> None:
        raise errors.pop(0)

    def tell(error: Exception, wait_s: float) -> None:
        told.append((str(error), wait_s))

    with pytest.raises(OSError, match="second"):
        retry.retried(attempt, [0.0], lambda error: isinstance(error, OSError), tell)
    assert told == [("first", 0.0)]
    with pytest.raises(KeyError):
        retry.retried(attempt, [0.0], lambda error: isinstance(error, OSError), tell)
    assert len(told) == 1


def test_ranks_that_fail_together_do_not_ask_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    draws = [0.0, 0.5, 1.0, 0.5]
    monkeypatch.setattr(retry, "jitter", lambda: draws.pop(0))
    monkeypatch.setattr(retry, "time", SimpleNamespace(sleep=slept.append))

    def attempt() -> None:
        raise OSError("no")

    asked_s = iter([0.0, 0.0, 0.0, 30.0])
    with pytest.raises(OSError, match="no"):
        retry.retried(attempt, [1.0, 2.0, 4.0, 8.0], lambda error: True, least_s=lambda error: next(asked_s))
    assert slept == [1.0, 2.5, 6.0, 37.5], "never sooner than they would, nor than a store asks for"


def test_an_answer_is_asked_for_until_it_is_true_and_once_more_at_the_end() -> None:
    answers = [0, 0, 7]
    assert retry.until(lambda: answers.pop(0), [0.0] * 9) == 7
    answers = [0, 0]
    assert retry.until(lambda: answers.pop(0), [0.0]) == 0
    assert not answers


def test_a_file_of_another_machine_is_looked_for_at_least_once(tmp_path: Path) -> None:
    assert retry.shown((tmp_path / "no").exists, tmp_path / "no folder", 0.0) is False
    assert retry.shown(tmp_path.exists, tmp_path, 0.0)
