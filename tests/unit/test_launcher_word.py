"""The word of a run to whoever has started it, in lines that bash reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from trainer.run.exit_record import ExitRecord, supervisor_lost
from trainer.run.launcher_word import WORD, StartRequest, ask, requested_start, tell_end, withdraw
from trainer.safe_io.values import last_values, read_values, value_lines

RECORD = ExitRecord(1, "n1", 1, "killed: a\nb=c", 5.0, details="a stack\nof lines", generation=2)
REQUEST = StartRequest(RECORD, steps_done=7, in_memory=6, fault_step=8)


def word(folder: Path) -> str | None:
    return read_values(folder / WORD).get("word")


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    ask(tmp_path, "now", REQUEST, if_killed=False)
    assert requested_start(tmp_path, "now") == REQUEST
    assert requested_start(tmp_path, "another") is None


def test_a_request_for_the_case_that_all_are_killed_counts_once_the_launcher_takes_it(tmp_path: Path) -> None:
    ask(tmp_path, "now", REQUEST, if_killed=True)
    assert requested_start(tmp_path, "now") is None
    with (tmp_path / WORD).open("a") as file:
        file.write("word=again\ntime=99\n")
    assert requested_start(tmp_path, "now") == replace(REQUEST, record=replace(RECORD, time=99.0))


def test_it_takes_nothing_back_and_only_itself_is_withdrawn(tmp_path: Path) -> None:
    ask(tmp_path, "now", REQUEST, if_killed=False)
    ask(tmp_path, "now", REQUEST, if_killed=True)
    withdraw(tmp_path, "now")
    assert word(tmp_path) == "again"
    ask(tmp_path, "now", replace(REQUEST, record=replace(RECORD, generation=3)), if_killed=True)
    withdraw(tmp_path, "another")
    assert word(tmp_path) == "again-if-killed"
    withdraw(tmp_path, "now")
    assert word(tmp_path) is None


def test_the_end_is_the_last_word_of_its_start(tmp_path: Path) -> None:
    end = {
        "exit_code": 1,
        "rank": 2,
        "node": "n2",
        "reason": supervisor_lost("silent"),
        "left_out": ["a", "b"],
    }
    tell_end(tmp_path, "now", end)
    ask(tmp_path, "now", REQUEST, if_killed=False)
    told = (tmp_path / WORD).read_text()
    assert told.startswith("start=now\nword=end\nexit_code=1\nrank=2\nnode=n2\nreason=its supervisor is gone")
    assert told.endswith("left_out=a\nleft_out=b\nsaved=yes\nlost=yes\n")
    ask(tmp_path, "the next", REQUEST, if_killed=False)
    assert word(tmp_path) == "again"


AGAIN = "start=now\nword=again\nrequest="


@pytest.mark.parametrize(
    "text",
    [
        "",
        "word=again",
        "\0",
        *(f"{AGAIN}{request}\n" for request in ("", "{}", "null")),
    ],
)
def test_a_word_that_cannot_be_read_asks_for_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / WORD).parent.mkdir()
    (tmp_path / WORD).write_text(text)
    assert requested_start(tmp_path, "now") is None


def test_a_value_stays_on_its_line_whatever_it_holds() -> None:
    text = value_lines({"a": "x\ny=z\x1b[1m", "b": None, "c": [1, 2], "d": False, "e": ""})
    assert text == "a=x y=z [1m\nc=1\nc=2\nd=no\ne=\n"
    assert last_values(text) == {"a": "x y=z [1m", "c": "2", "d": "no", "e": ""}
