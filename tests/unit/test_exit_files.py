"""Files that a start leaves in its run folder: how it ended, its word to the launcher, claims of generations.

The first record counts, not one of an earlier start. A file system that hangs delays nobody.
"""

import asyncio
import errno
import os
import resource
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.run import generations, launcher_word
from trainer.run.exit_files import ExitFiles, exit_record_of
from trainer.run.exit_record import ExitRecord
from trainer.run.file_work import FileWork
from trainer.safe_io.values import read_values


def keep(files: ExitFiles, reason: str) -> str:
    return asyncio.run(files.write("exit.json", asdict(ExitRecord(0, "n0", 1, reason, 0.0))))


def kept(folder: Path, start: str = "now") -> str | None:
    record = exit_record_of(folder, start)
    return None if record is None else record.reason


@pytest.mark.parametrize("start", ["now", ""], ids=["by a launcher", "by hand"])
def test_the_first_exit_record_of_a_start_is_not_overwritten(tmp_path: Path, start: str) -> None:
    (tmp_path / "goodput.jsonl").touch()
    assert keep(ExitFiles(str(tmp_path), start), "first") == str(tmp_path / "exit.json")
    keep(ExitFiles(str(tmp_path), start), "second")
    assert kept(tmp_path, start) == "first"
    assert {path.name for path in tmp_path.iterdir()} == {"exit.json", "goodput.jsonl", "artefacts"}
    assert len((tmp_path / "goodput.jsonl").read_text().splitlines()) == 1
    keep(ExitFiles(str(tmp_path), "the next"), "third")
    assert (kept(tmp_path, "now"), kept(tmp_path, "the next")) == (None, "third")
    for text in ("", "[]", '{"start": "now"}', '{"start": "now", "colour": 1}'):
        (tmp_path / "exit.json").write_text(text)
        assert kept(tmp_path) is None


def test_a_folder_is_made_where_the_ranks_never_met_and_one_that_takes_no_file_is_no_error(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs" / "one"
    assert keep(ExitFiles(str(folder), "now"), "refused") == str(folder / "exit.json")
    assert {path.name for path in folder.iterdir()} == {"exit.json", "artefacts"}, "it has not begun"
    assert keep(ExitFiles(""), "x") == ""
    (tmp_path / "file").write_text("")
    assert keep(ExitFiles(str(tmp_path / "file"), "now"), "x") == ""
    (folder / "exit.json").unlink()
    (folder / launcher_word.WORD).unlink()
    (folder / launcher_word.WORD).mkdir()
    assert keep(ExitFiles(str(folder), "now"), "x") == str(folder / "exit.json"), "the launcher is not told"
    (tmp_path / "exit.json").mkdir()
    assert keep(ExitFiles(str(tmp_path), "now"), "x") == ""


def test_file_work_that_hangs_is_left_behind() -> None:
    begin = time.monotonic()
    assert asyncio.run(FileWork().within(0.1, lambda: time.sleep(60))) is None
    assert time.monotonic() - begin < 30


# The word to whoever has started it, in lines that bash reads.

RECORD = ExitRecord(1, "n1", 1, "killed: a\nb=c", 5.0, details="a stack\nof lines", generation=2)
REQUEST = launcher_word.StartRequest(RECORD, steps_done=7, in_memory=6, fault_step=8)


def word(folder: Path) -> str | None:
    return read_values(folder / launcher_word.WORD).get("word")


def test_a_request_is_read_as_it_was_written_and_takes_nothing_back(tmp_path: Path) -> None:
    launcher_word.ask(tmp_path, "now", REQUEST, if_killed=False)
    assert launcher_word.requested_start(tmp_path, "now") == REQUEST
    assert launcher_word.requested_start(tmp_path, "another") is None
    launcher_word.ask(tmp_path, "now", REQUEST, if_killed=True)
    launcher_word.withdraw(tmp_path, "now")
    assert word(tmp_path) == "again"


def test_the_end_is_the_last_word_of_its_start(tmp_path: Path) -> None:
    reason = "its supervisor is gone: silent"
    end = ExitRecord(2, "n2", 1, reason, 1.0, left_out=("a", "b"))
    asyncio.run(ExitFiles(str(tmp_path), "now").write("exit.json", asdict(end)))
    launcher_word.ask(tmp_path, "now", REQUEST, if_killed=False)
    told = (tmp_path / "artefacts" / "launcher.env").read_text()
    assert told == (
        f"start=now\nword=end\nexit_code=1\nrank=2\nnode=n2\nreason={reason}\n"
        "left_out=a\nleft_out=b\nsaved=yes\nlost=yes\n"
    )
    launcher_word.ask(tmp_path, "the next", REQUEST, if_killed=False)
    assert word(tmp_path) == "again"


def test_the_end_is_told_though_a_request_is_being_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ExitFiles(str(tmp_path), "now")
    asyncio.run(files.request_start(REQUEST, if_killed=True))
    end = threading.Thread(target=keep, args=(files, "done"))

    def read_while_another_ends(path: Path) -> dict[str, str]:
        values = read_values(path)
        if end.ident is None:
            end.start()
            end.join(0.5)
        return values

    monkeypatch.setattr(launcher_word, "read_values", read_while_another_ends)
    asyncio.run(files.withdraw_start())
    end.join()
    assert word(tmp_path) == "end"


def test_what_another_start_has_asked_for_is_not_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ExitFiles(str(tmp_path), "now")
    asyncio.run(files.request_start(REQUEST, if_killed=True))
    holder = SimpleNamespace(start="another")
    monkeypatch.setattr("trainer.run.exit_files.who_holds", lambda folder: holder)
    asyncio.run(files.withdraw_start())
    assert word(tmp_path) == "again-if-killed"


AGAIN = "start=now\nword=again\nrequest="


@pytest.mark.parametrize("text", ["", "word=again", "\0", AGAIN + "\n", AGAIN + "{}\n", AGAIN + "null\n"])
def test_a_word_that_cannot_be_read_asks_for_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / launcher_word.WORD).parent.mkdir()
    (tmp_path / launcher_word.WORD).write_text(text)
    assert launcher_word.requested_start(tmp_path, "now") is None


# Claims of generations: one coordinator gets each number.


def its(generation: int, member: int = 0, start: str = "now") -> generations.GenerationClaim:
    return generations.GenerationClaim(start, generation, member, f"n{member}", "h", 7)


def newest(folder: Path) -> generations.GenerationClaim | None:
    return asyncio.run(ExitFiles(str(folder), "now").newest_claim())


def test_second_claim_of_a_generation_learns_whose_it_is(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    generations.claim(tmp_path, its(9, start="before"))
    assert generations.claim(tmp_path, its(2)) is None
    assert generations.claim(tmp_path, its(2, 5)) == its(2)
    assert generations.claim(tmp_path, its(3, 5)) is None
    assert newest(tmp_path) == its(3, 5), "those of earlier starts do not count"
    generations.remove_claims(tmp_path, "now")
    assert sorted(path.name for path in (tmp_path / "generations").iterdir()) == ["00002.json", "00003.json"]


def test_an_empty_claim_belongs_to_somebody_and_is_void_after_some_seconds(tmp_path: Path) -> None:
    """A file system without links shows one if its maker dies before it has written it."""
    path = tmp_path / "generations" / "00002.json"
    path.parent.mkdir()
    path.touch()
    with pytest.raises(OSError, match=r"00002\.json, which another supervisor has made, cannot be read"):
        generations.claim(tmp_path, its(2))
    assert newest(tmp_path) is None
    os.utime(path, (0, 0))
    for member in (0, 5):
        assert generations.claim(tmp_path, its(2, member)) == its(2, member), (
            "its own, which each passes over"
        )


def refused(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_a_claim_that_cannot_be_written_leaves_its_number_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refused)
    (tmp_path / "generations").mkdir()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most[1]))  # as on a disk without room
    try:
        with pytest.raises(OSError, match="File too large"):
            generations.claim(tmp_path, its(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert os.listdir(tmp_path / "generations") == []
    assert generations.claim(tmp_path, its(2, 5)) is None
    assert generations.claim(tmp_path, its(2)) == its(2, 5)
    assert os.listdir(tmp_path / "generations") == ["00002.json"]
