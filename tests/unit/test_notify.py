"""Messages about a run, as a web service gets them from the files that supervisors write."""

import asyncio
import json
import socketserver
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.webhook import Webhook, webhook
from trainer.errors import InputError
from trainer.run.exit_files import ExitFiles
from trainer.run.notify import Notifier, check_address

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
