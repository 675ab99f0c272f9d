"""Starts of an Indexed Job's pods in the run folder."""

import os
from pathlib import Path

import pytest

from trainer.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_START_AGAIN
from trainer.launch.kubernetes.pod import starts


def test_all_pods_of_a_job_find_the_same_start_and_its_token(tmp_path: Path) -> None:
    first, second = starts.open_start(tmp_path, "uid"), starts.open_start(tmp_path, "uid")
    assert first == second
    assert first.token == second.token
    assert len(first.token) == 32
    assert (first.folder / "token").stat().st_mode & 0o777 == 0o600
    assert starts.open_start(tmp_path, "another").token != first.token


def test_a_pod_that_comes_again_is_known(tmp_path: Path) -> None:
    start = starts.open_start(tmp_path, "uid")
    assert start.missing(3) == [0, 1, 2]
    assert start.mark(1)
    assert not start.mark(1)
    assert start.missing(3) == [0, 2]
    start.unmark(1)
    assert start.mark(1)


def test_a_start_begins_once(tmp_path: Path) -> None:
    start = starts.open_start(tmp_path, "uid")
    assert start.began_at is None
    start.begin("10.0.0.1")
    start.begin("10.0.0.2")
    assert start.began_at == "10.0.0.1"


def test_the_first_pod_to_tell_the_end_counts_and_the_next_start_follows(tmp_path: Path) -> None:
    start = starts.open_start(tmp_path, "uid")
    end = start.settle(EXIT_FAILED, "rank 3 failed", retries=1)
    assert start.settle(EXIT_DONE, "done", retries=1) == end
    assert (starts.leave_code(end), end.message) == (EXIT_START_AGAIN, "rank 3 failed")
    following = starts.open_start(tmp_path, "uid")
    assert following.number == 2
    assert following.token != start.token


def test_a_run_that_fails_more_often_than_it_may_ends_for_good(tmp_path: Path) -> None:
    assert (
        starts.leave_code(starts.open_start(tmp_path, "uid").settle(EXIT_FAILED, "why", retries=1))
        == EXIT_START_AGAIN
    )
    assert (
        starts.leave_code(starts.open_start(tmp_path, "uid").settle(EXIT_FAILED, "why", retries=1))
        == EXIT_FAILED
    )
    last = starts.open_start(tmp_path, "uid")
    assert last.number == 2, "a run that has ended for good was started again"
    assert last.end is not None
    assert starts.leave_code(last.end) == EXIT_FAILED


def test_a_request_to_stop_is_no_failure(tmp_path: Path) -> None:
    for _ in range(3):
        end = starts.open_start(tmp_path, "uid").settle(EXIT_PREEMPTED, "asked to stop", retries=0)
        assert starts.leave_code(end) == EXIT_PREEMPTED
    assert starts.open_start(tmp_path, "uid").number == 4


def test_what_is_done_and_what_cannot_work_end_for_good(tmp_path: Path) -> None:
    assert (
        starts.leave_code(starts.open_start(tmp_path, "a").settle(EXIT_DONE, "done", retries=3)) == EXIT_DONE
    )
    assert (
        starts.leave_code(starts.open_start(tmp_path, "b").settle(EXIT_BAD_INPUT, "no", retries=3))
        == EXIT_BAD_INPUT
    )
    assert [starts.open_start(tmp_path, job).number for job in "ab"] == [1, 1]


def test_an_end_that_another_pod_is_making_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is whole or, on a file system without links, empty for a moment."""
    monkeypatch.setattr(starts, "_BEING_WRITTEN_S", 0.0)
    start = starts.open_start(tmp_path, "uid")
    end = start.settle(EXIT_FAILED, "why", retries=1)
    whole = (start.folder / "end").read_text()
    (start.folder / "end").write_text("")
    with pytest.raises(OSError, match="has not filled it"):
        _ = start.end
    (start.folder / "end").write_text(whole)
    assert start.end == end


def test_a_start_whose_token_was_never_written_is_passed_over(tmp_path: Path) -> None:
    """Its pod died between making the file and filling it, on a file system without links."""
    first = starts.open_start(tmp_path, "job")
    assert starts.open_start(tmp_path, "job") == first
    token = first.folder / "token"
    token.write_text("")
    assert starts.open_start(tmp_path, "job") == first, "it may be written just now"
    os.utime(token, (0, 0))
    second = starts.open_start(tmp_path, "job")
    assert (second.number, len(second.token)) == (2, 32)
    assert starts.open_start(tmp_path, "job") == second
