"""Messages about a run, as a web service gets them from the files that supervisors write."""

import asyncio
import json
import socketserver
from collections.abc import Iterator
from dataclasses import asdict
from email.message import Message
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.support.webhook import Webhook, webhook
from trainer.errors import InputError
from trainer.run import notify
from trainer.run.exit_files import ExitFiles
from trainer.run.exit_record import ExitRecord
from trainer.run.layout import EXIT_FILE, LOCK
from trainer.run.notify import ADDRESS, Notifier, _body, check_address
from trainer.supervise.restarts import Restart

BOTH = ("fault", "end")


@pytest.fixture
def service() -> Iterator[Webhook]:
    with webhook() as its:
        yield its


def files(folder: Path, service: Webhook, about: tuple[str, ...] = BOTH) -> ExitFiles:
    (folder / LOCK).touch()
    return ExitFiles(str(folder), "now", Notifier("demo", about, {ADDRESS: service.address}))


def end(reason: str) -> dict[str, Any]:
    return asdict(ExitRecord(3, "n1", 1, reason, 1.0, generation=2))


def test_the_end_is_told_once_with_its_facts(tmp_path: Path, service: Webhook) -> None:
    asyncio.run(files(tmp_path, service).write(EXIT_FILE, end("no space left")))
    asyncio.run(files(tmp_path, service).write(EXIT_FILE, end("a consequence")))
    assert service.got == [
        {
            "text": "demo: rank 3 on n1, generation 2, ended the run with exit code 1: no space left",
            "event": "end",
            "run": "demo",
            "exit_code": 1,
            "generation": 2,
        }
    ]


def test_each_restart_is_told_once(tmp_path: Path, service: Webhook) -> None:
    restarts = [
        Restart(2, "killed by SIGKILL", 1, "n1", 7, 6),
        Restart(3, "is back", 0, "n2", 9, 9, kind="taken in"),
    ]

    async def story() -> None:
        its = files(tmp_path, service)
        await its.update_restarts([restarts[0].to_json()])
        await its.update_restarts([{**restarts[0].to_json(), "seconds": 3.0}])
        await its.update_restarts([each.to_json() for each in restarts])
        await its.write(EXIT_FILE, end("x"))
        while len(service.got) < 3:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), 10))
    assert {(each["event"], each.get("generation"), each["text"]) for each in service.got[:3]} == {
        ("fault", 2, "demo: rank 1 on n1: killed by SIGKILL; the ranks go on from step 6"),
        ("fault", 3, "demo: is back; the ranks go on from step 9"),
        ("end", 2, "demo: rank 3 on n1, generation 2, ended the run with exit code 1: x"),
    }


def test_only_what_the_job_asks_for_is_told(tmp_path: Path, service: Webhook) -> None:
    its = files(tmp_path, service, about=("fault",))
    asyncio.run(its.write(EXIT_FILE, end("x")))
    assert service.got == []


@pytest.mark.parametrize(
    ("host", "body"),
    [
        ("open.feishu.cn", {"msg_type": "text", "content": {"text": "t"}}),
        ("oapi.dingtalk.com", {"msgtype": "text", "text": {"content": "t"}}),
        ("qyapi.weixin.qq.com", {"msgtype": "text", "text": {"content": "t"}}),
        ("discord.com", {"content": "t"}),
        ("hooks.slack.com", {"text": "t", "event": "end"}),
    ],
)
def test_each_chat_gets_the_form_that_it_reads(host: str, body: dict[str, Any]) -> None:
    assert _body(f"https://{host}/hook/x", "t", {"event": "end"}) == body


@pytest.mark.parametrize(
    ("status", "answer", "why"),
    [
        (404, b"", "HTTP 404 Not Found"),
        (
            200,
            json.dumps({"errcode": 310000, "errmsg": "keywords not in content"}).encode(),
            "keywords not in content",
        ),
    ],
)
def test_a_message_that_is_refused_is_said_without_the_address(
    service: Webhook,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    answer: bytes,
    why: str,
) -> None:
    monkeypatch.setattr(notify, "_FORMS", {("127.0.0.1",): lambda text: {"msgtype": "text"}})
    service.status, service.answer = status, answer
    Notifier("demo", BOTH, {ADDRESS: service.address}).tell("end", "done")
    said = capsys.readouterr().err
    assert "the message about the run's end was not sent" in said
    assert why in said
    assert "a-secret-token" not in said


@pytest.mark.parametrize(
    "address", ["https://127.0.0.1/x a-secret-token", "https://me:a-secret-token@127.0.0.1/x"]
)
def test_an_address_that_is_none_is_not_shown(capsys: pytest.CaptureFixture[str], address: str) -> None:
    Notifier("demo", BOTH, {ADDRESS: address}).tell("end", "done")
    said = capsys.readouterr().err
    assert f"the message about the run's end was not sent: the address in {ADDRESS} has" in said
    assert "a-secret-token" not in said


def test_a_redirection_is_told_without_its_address(
    service: Webhook, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def post(address: str, body: object) -> None:
        raise HTTPError(address, 302, "Found - Redirection to url 'ftp://x/a-secret-token'", Message(), None)

    monkeypatch.setattr(notify, "_post", post)
    Notifier("demo", BOTH, {ADDRESS: service.address}).tell("end", "done")
    assert "was not sent: HTTP 302 Found\n" in capsys.readouterr().err


def test_a_code_in_the_answer_of_another_service_is_no_refusal(
    service: Webhook, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answer = json.dumps({"code": 200, "data": "kept"}).encode()
    Notifier("demo", BOTH, {ADDRESS: service.address}).tell("end", "done")
    assert not capsys.readouterr().err
    assert len(service.got) == 1


def test_an_answer_that_is_none_of_a_web_service_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A supervisor writes exit.json and sends the message on its way out, which no error may cut short."""
    with socketserver.TCPServer(("127.0.0.1", 0), Garbage) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        notifier = Notifier("demo", BOTH, {ADDRESS: f"http://127.0.0.1:{server.server_address[1]}/"})
        written = asyncio.run(ExitFiles(str(tmp_path), "now", notifier=notifier).write(EXIT_FILE, end("x")))
        thread.join()
    assert written == str(tmp_path / EXIT_FILE)
    assert "was not sent" in capsys.readouterr().err


class Garbage(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"no HTTP\r\n\r\n")


def test_a_service_that_is_gone_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with webhook() as its:
        address = its.address
    Notifier("demo", BOTH, {ADDRESS: address}).tell("end", "done")
    assert "Connection refused" in capsys.readouterr().err


def test_a_job_that_tells_needs_an_address() -> None:
    with pytest.raises(InputError, match=rf"(?s){ADDRESS}, which is not set.*logging\.notify=\[\]"):
        check_address(BOTH, {})
    with pytest.raises(InputError, match="which is no address") as raised:
        check_address(BOTH, {ADDRESS: "hooks.example.org/secret"})
    assert "secret" not in str(raised.value).replace("secret:SECRET:KEY", "")
    check_address(BOTH, {ADDRESS: "https://hooks.example.org/secret"})
    check_address((), {})


def test_an_answer_that_is_nested_deeply_stops_nothing(
    service: Webhook, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answer = b"[" * 10_000
    Notifier("demo", BOTH, {ADDRESS: service.address}).tell("end", "done")
    assert len(service.got) == 1
    assert not capsys.readouterr().err
