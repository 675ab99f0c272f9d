"""Messages about a run to a chat or any web service: its end, and each fault after which it goes on.

`[logging] notify` says about what; the address, which is a secret in itself, is in the environment. Imports
no torch.
"""

import json
from collections.abc import Callable, Collection, Mapping
from http.client import HTTPException, InvalidURL, responses
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from trainer.errors import InputError
from trainer.run.exit_record import ExitRecord, rank_name
from trainer.safe_io.plain import parse_json
from trainer.text.masking import masked
from trainer.text.terminal import say

ADDRESS = "CLIPSHIP_NOTIFY_URL"
"""Variable with the address that gets the messages."""
SEND_S = 10.0
"""Longest that the end of a run waits for its message."""

_FORMS: Mapping[tuple[str, ...], Callable[[str], dict[str, Any]]] = {
    ("open.feishu.cn", "open.larksuite.com"): lambda text: {"msg_type": "text", "content": {"text": text}},
    ("oapi.dingtalk.com", "qyapi.weixin.qq.com"): lambda text: {"msgtype": "text", "text": {"content": text}},
    ("discord.com", "discordapp.com"): lambda text: {"content": text},
}
"""Forms that services expect, by their hosts: Feishu and Lark, DingTalk and WeCom, Discord. All others get a
table with `text`, as Slack, Mattermost and Google Chat show it, and the facts beside it."""
_REFUSALS = ("errcode", "code", "StatusCode")
"""Names under which these services say that they refused a message, in an answer that is otherwise good."""


def check_address(about: Collection[str], environment: Mapping[str, str]) -> None:
    """Raises InputError if events are to be told, and the environment has no address for them."""
    address = environment.get(ADDRESS, "")
    if about and not _is_address(address):
        what = "which is no address (http:// or https://)" if address else "which is not set"
        raise InputError(
            f"logging.notify = {json.dumps(sorted(about))} needs the variable {ADDRESS}, {what}: on "
            f'Kubernetes set kubernetes.env.{ADDRESS} = "secret:SECRET:KEY", elsewhere export it where you '
            "submit; without messages, set logging.notify=[]"
        )


def _is_address(text: str) -> bool:
    return text.startswith(("https://", "http://"))


class Notifier:
    """Sends messages about one run to the address in its environment."""

    def __init__(self, run: str, about: Collection[str], environment: Mapping[str, str]) -> None:
        """`about` has the events that are told: fault, end. Without an address nothing is sent."""
        self._run, self._about, self._address = run, frozenset(about), environment.get(ADDRESS, "")

    def tell(self, event: str, text: str, **facts: object) -> None:
        """Sends one message, within SEND_S seconds; a failure is said, and stops nothing."""
        if event not in self._about or not _is_address(self._address):
            return
        whole = masked(f"{self._run}: {text.removeprefix('clipship: ')}")
        try:
            told = {"event": event, "run": self._run, **facts}
            _post(self._address, _body(self._address, whole, told))
        except (OSError, ValueError, HTTPException) as error:
            say(f"warning: the message about the run's {event} was not sent: {_why(error)}")

    def tell_restart(self, row: Mapping[str, Any]) -> None:
        """Tells a restart, as restarts.json has it."""
        cause = str(row.get("cause"))
        if row.get("kind") not in ("unfit", "taken in"):
            cause = f"{rank_name(row.get('rank'), row.get('node'))}: {cause}"
        facts = {name: row.get(name) for name in ("generation", "step", "from_step", "node")}
        self.tell("fault", f"{cause}; the ranks go on from step {row.get('from_step')}", **facts)

    def tell_end(self, value: Mapping[str, Any]) -> None:
        """Tells how a start has ended, as exit.json has it."""
        if "end" not in self._about:
            return
        record = ExitRecord(**value)
        headline = record.headline() if record.exit_code else record.reason
        self.tell("end", headline, exit_code=record.exit_code, generation=record.generation)


SILENT = Notifier("", (), {})
"""Notifier that tells nobody."""


def _body(address: str, text: str, facts: Mapping[str, object]) -> dict[str, Any]:
    form = _form_of(address)
    return form(text) if form else {"text": text, **facts}


def _form_of(address: str) -> Callable[[str], dict[str, Any]] | None:
    """Returns the form of the service at an address; None for one that has none of its own."""
    host = urlsplit(address).hostname
    return next((form for hosts, form in _FORMS.items() if host in hosts), None)


def _post(address: str, body: Mapping[str, Any]) -> None:
    """Posts JSON.

    Raises OSError, HTTPException for what is no answer of a web service, and ValueError if the service says
    that it refuses the message.
    """
    headers = {"Content-Type": "application/json"}
    request = Request(address, json.dumps(body).encode(), headers)
    with urlopen(request, timeout=SEND_S) as answer:
        said = answer.read(10_000)
    try:
        told = parse_json(said)
    except ValueError:
        return  # most services answer a word
    if _form_of(address) is None or not isinstance(told, dict):
        return  # a code may mean anything
    if any(told.get(name) not in (None, 0, "0") for name in _REFUSALS):
        raise ValueError(json.dumps(told, ensure_ascii=False)[:200])


def _why(error: Exception) -> str:
    """Returns why a message was not sent, without the address, which texts of two kinds of errors have."""
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {responses.get(error.code, '')}"
    if isinstance(error, InvalidURL):
        return f"the address in {ADDRESS} has characters, a password or a port that no address can have"
    return str(getattr(error, "reason", error))
