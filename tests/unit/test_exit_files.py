"""Files that a start leaves in its run folder: how it ended, its word to the launcher, claims of generations.

The first record counts, not one of an earlier start. A file system that hangs delays nobody.
"""

import asyncio
import errno
import json
import os
import resource
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.webhook import Webhook, webhook
from trainer.errors import InputError
from trainer.run import generations, launcher_word
from trainer.run.exit_files import ExitFiles, exit_record_of
from trainer.run.exit_record import ExitRecord
from trainer.run.file_work import FileWork
from trainer.run.notify import Notifier, check_address
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


# Messages about a run, as a web service gets them from the files that supervisors write.

ADDRESS = "CLIPSHIP_NOTIFY_URL"
BOTH = ("fault", "end")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def service() -> Iterator[Webhook]:
    with webhook() as its:
        yield its


@pytest.fixture
def anywhere(service: Webhook, monkeypatch: pytest.MonkeyPatch) -> Webhook:
    """A proxy: it answers in place of every service in the world."""
    monkeypatch.setenv("http_proxy", service.address.partition("/hook")[0])
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr("urllib.request._opener", None)  # which keeps the proxies of its first request
    return service


def files(folder: Path, service: Webhook, about: tuple[str, ...] = BOTH) -> ExitFiles:
    folder.mkdir(exist_ok=True)
    (folder / ".lock").touch()
    return ExitFiles(str(folder), "now", Notifier("demo", about, {ADDRESS: service.address}))


def tell(address: str) -> None:
    Notifier("demo", BOTH, {ADDRESS: address}).tell("end", "t")


def end(reason: str) -> dict[str, Any]:
    return {
        "rank": 3, "node": "n1", "exit_code": 1, "reason": reason, "time": 1.0, "details": "", "generation": 2
    }  # fmt: skip


def test_each_restart_is_told_once(tmp_path: Path, service: Webhook) -> None:
    killed = {"generation": 2, "cause": "killed by SIGKILL", "rank": 1, "node": "n1", "from_step": 6}
    back = {"generation": 3, "cause": "is back", "rank": 0, "node": "n2", "from_step": 9, "kind": "taken in"}

    async def story() -> None:
        its = files(tmp_path, service)
        await its.update_restarts([killed])
        await its.update_restarts([{**killed, "seconds": 3.0}])
        await its.update_restarts([killed, back])
        await its.write("exit.json", end("x"))
        while len(service.got) < 3:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), 10))
    asyncio.run(files(tmp_path / "other", service, about=("fault",)).write("exit.json", end("not asked for")))
    assert len(service.got) == 3
    ended = next(each for each in service.got if each["event"] == "end")
    assert (ended["run"], ended["exit_code"]) == ("demo", 1)
    assert {(each["event"], each.get("generation"), each["text"]) for each in service.got} == {
        ("fault", 2, "demo: rank 1 on n1: killed by SIGKILL; the ranks go on from step 6"),
        ("fault", 3, "demo: is back; the ranks go on from step 9"),
        ("end", 2, "demo: rank 3 on n1, generation 2, ended the run with exit code 1: x"),
    }


@pytest.mark.parametrize(
    ("host", "body"),
    [
        ("open.feishu.cn", {"msg_type": "text", "content": {"text": "demo: t"}}),
        ("oapi.dingtalk.com", {"msgtype": "text", "text": {"content": "demo: t"}}),
        ("qyapi.weixin.qq.com", {"msgtype": "text", "text": {"content": "demo: t"}}),
        ("discord.com", {"content": "demo: t"}),
        ("hooks.slack.com", {"text": "demo: t", "event": "end", "run": "demo"}),
    ],
)
def test_each_chat_gets_the_form_that_it_reads(anywhere: Webhook, host: str, body: dict[str, Any]) -> None:
    tell(f"http://{host}/hook/x")
    assert anywhere.got == [body]


REFUSED = json.dumps({"errcode": 310000, "errmsg": "keywords not in content"}).encode()


@pytest.mark.parametrize(
    ("address", "answer", "why"),
    [
        ("http://x/a-secret-token", (404, "", b""), "HTTP 404 Not Found"),
        ("http://oapi.dingtalk.com/a-secret-token", (200, "", REFUSED), "keywords not in content"),
        ("http://x/a-secret-token", (302, "file:///a-secret-token", b""), "HTTP 302 Found\n"),
        ("https://127.0.0.1/x a-secret-token", (200, "", b""), f"the address in {ADDRESS} has"),
        ("https://me:a-secret-token@127.0.0.1/x", (200, "", b""), f"the address in {ADDRESS} has"),
    ],
    ids=["no such page", "refused", "elsewhere", "no address", "a password"],
)
def test_a_message_that_is_not_sent_is_said_without_the_address(
    anywhere: Webhook, capsys: Capture, address: str, answer: tuple[int, str, bytes], why: str
) -> None:
    anywhere.status, anywhere.location, anywhere.answer = answer
    tell(address)
    said = capsys.readouterr().err
    assert "the message about the run's end was not sent: " in said
    assert why in said
    assert "a-secret-token" not in said


@pytest.mark.parametrize("answer", [REFUSED, b"[" * 10_000], ids=["a code", "depth"])
def test_an_answer_of_another_service_is_no_refusal(service: Webhook, capsys: Capture, answer: bytes) -> None:
    service.answer = answer
    tell(service.address)
    assert not capsys.readouterr().err
    assert len(service.got) == 1


def test_an_answer_that_is_none_of_a_web_service_stops_nothing(capsys: Capture) -> None:
    """A supervisor sends the message on its way out, which no error may cut short."""
    with socketserver.TCPServer(("127.0.0.1", 0), Garbage) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        tell(f"http://127.0.0.1:{server.server_address[1]}/")
        thread.join()
    assert "was not sent" in capsys.readouterr().err


class Garbage(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"no HTTP\r\n\r\n")


def test_a_job_that_tells_needs_an_address() -> None:
    with pytest.raises(InputError, match=rf"(?s){ADDRESS}, which is not set.*logging\.notify=\[\]"):
        check_address(BOTH, {})
    with pytest.raises(InputError, match="which is no address") as raised:
        check_address(BOTH, {ADDRESS: "hooks.example.org/secret"})
    assert "secret" not in str(raised.value).replace("secret:SECRET:KEY", "")
    check_address(BOTH, {ADDRESS: "https://hooks.example.org/secret"})
    check_address((), {})
