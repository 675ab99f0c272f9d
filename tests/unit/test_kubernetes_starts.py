"""Starts of an Indexed Job's pods in the run folder."""

import os
from pathlib import Path

import pytest

from trainer.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_START_AGAIN
from trainer.launch.kubernetes.pod import starts


def test_a_pod_that_comes_again_is_known(tmp_path: Path) -> None:
    start = starts.open_start(tmp_path, "uid")
    assert start.missing(3) == [0, 1, 2]
    assert start.mark(1)
    assert not start.mark(1)
    assert start.missing(3) == [0, 2]
    start.unmark(1)
    assert start.mark(1)


def test_a_run_that_fails_more_often_than_it_may_ends_for_good(tmp_path: Path) -> None:
    for ends, left in ((EXIT_PREEMPTED, EXIT_PREEMPTED), (EXIT_FAILED, EXIT_START_AGAIN), (EXIT_FAILED,) * 2):
        end = starts.open_start(tmp_path, "uid").settle(ends, "why", retries=1)
        assert starts.leave_code(end) == left
    assert starts.open_start(tmp_path, "uid").number == 3, "it was started again"


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
    assert starts.open_start(tmp_path, "job") == first, "all pods of a job find the same"
    token = first.folder / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    token.write_text("")
    assert starts.open_start(tmp_path, "job") == first, "it may be written just now"
    os.utime(token, (0, 0))
    second = starts.open_start(tmp_path, "job")
    assert (second.number, len(second.token)) == (2, 32)
    assert starts.open_start(tmp_path, "job") == second
