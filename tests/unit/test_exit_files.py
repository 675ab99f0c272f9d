"""Files that a start leaves when it ends: the first record counts, not one of an earlier start.

A file system that hangs delays nobody.
"""

import asyncio
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from trainer.run import launcher_word
from trainer.run.exit_files import ExitFiles, exit_record_of
from trainer.run.exit_record import ExitRecord
from trainer.run.file_work import THREADS
from trainer.run.launcher_word import StartRequest
from trainer.run.layout import ARTEFACTS, EXIT_FILE, GOODPUT_FILE
from trainer.safe_io.values import read_values


def record(reason: str) -> dict[str, object]:
    return asdict(ExitRecord(0, "n0", 1, reason, 0.0))


def keep(files: ExitFiles, reason: str) -> str:
    return asyncio.run(files.write(EXIT_FILE, record(reason)))


@pytest.mark.parametrize("start", ["now", ""], ids=["by a launcher", "by hand"])
def test_the_first_exit_record_of_a_start_is_not_overwritten(tmp_path: Path, start: str) -> None:
    (tmp_path / GOODPUT_FILE).touch()
    assert keep(ExitFiles(str(tmp_path), start), "first") == str(tmp_path / EXIT_FILE)
    keep(ExitFiles(str(tmp_path), start), "second")
    found = exit_record_of(tmp_path, start)
    assert found is not None
    assert found.reason == "first"
    assert {path.name for path in tmp_path.iterdir()} == {EXIT_FILE, GOODPUT_FILE, ARTEFACTS}
    assert len((tmp_path / GOODPUT_FILE).read_text().splitlines()) == 1


def test_the_end_is_told_though_a_request_is_being_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ExitFiles(str(tmp_path), "now")
    asyncio.run(files.request_start(StartRequest(ExitRecord(0, "n0", 1, "killed", 0.0)), if_killed=True))
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
    assert read_values(tmp_path / launcher_word.WORD)["word"] == "end"


def test_the_exit_record_is_there_though_the_launcher_cannot_be_told(tmp_path: Path) -> None:
    (tmp_path / launcher_word.WORD).mkdir(parents=True)
    assert keep(ExitFiles(str(tmp_path), "now"), "failed") == str(tmp_path / EXIT_FILE)
    assert exit_record_of(tmp_path, "now") is not None


def test_the_end_of_a_run_that_did_not_begin_leaves_no_goodput_file(tmp_path: Path) -> None:
    keep(ExitFiles(str(tmp_path), "now"), "refused")
    assert {path.name for path in tmp_path.iterdir()} == {EXIT_FILE, ARTEFACTS}


def test_a_start_by_hand_removes_the_exit_files_of_the_previous_one(tmp_path: Path) -> None:
    keep(ExitFiles(str(tmp_path)), "old")
    files = ExitFiles(str(tmp_path))
    asyncio.run(files.remove_old())
    keep(files, "new")
    assert json.loads((tmp_path / EXIT_FILE).read_text())["reason"] == "new"


def test_an_exit_record_of_an_older_start_is_replaced_and_never_used(tmp_path: Path) -> None:
    keep(ExitFiles(str(tmp_path), "before"), "old")
    assert exit_record_of(tmp_path, "now") is None
    keep(ExitFiles(str(tmp_path), "now"), "new")
    assert json.loads((tmp_path / EXIT_FILE).read_text())["reason"] == "new"


def test_a_file_that_is_no_exit_record_is_ignored(tmp_path: Path) -> None:
    for text in ("", "[]", '{"start": "now"}', '{"start": "now", "colour": 1}'):
        (tmp_path / EXIT_FILE).write_text(text)
        assert exit_record_of(tmp_path, "now") is None


def test_folder_is_made_where_the_ranks_never_met(tmp_path: Path) -> None:
    assert keep(ExitFiles(str(tmp_path / "runs" / "one"), "now"), "x") == str(
        tmp_path / "runs" / "one" / EXIT_FILE
    )


def test_folder_that_is_not_known_or_takes_no_file_is_no_error(tmp_path: Path) -> None:
    assert keep(ExitFiles(""), "x") == ""
    (tmp_path / "file").write_text("")
    assert keep(ExitFiles(str(tmp_path / "file"), "now"), "x") == ""
    (tmp_path / EXIT_FILE).mkdir()
    assert keep(ExitFiles(str(tmp_path), "now"), "x") == ""


def test_file_work_that_hangs_is_left_behind() -> None:
    begin = time.monotonic()
    assert asyncio.run(THREADS.within(0.1, lambda: time.sleep(60))) is None
    assert time.monotonic() - begin < 30


def test_a_task_is_cancelled_also_in_the_moment_in_which_its_result_comes() -> None:
    async def work() -> str:
        task = asyncio.create_task(THREADS.within(60.0, event.wait))
        await asyncio.sleep(0.1)
        event.set()
        time.sleep(0.3)  # the result has come, and the task has not been resumed since
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return "cancelled" if task.cancelled() else "gone on"

    event = threading.Event()
    assert asyncio.run(work()) == "cancelled"
