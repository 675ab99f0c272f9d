"""A web service on loopback that keeps what is posted to it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.loopback import Answers, answering


@dataclass
class Webhook:
    """State of a service: messages that it has got, and its answer."""

    address: str = ""
    status: int = 200
    location: str = ""
    answer: bytes = b"ok"
    got: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def webhook() -> Iterator[Webhook]:
    """Yields a service, which is there as long as the block lasts."""
    its = Webhook()

    class Handler(Answers):
        def answer(self) -> None:
            if self.command == "POST":
                its.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send(its.status, its.answer, {"Location": its.location} if its.location else {})

    with answering(Handler) as server:
        its.address = f"{server}/hook/a-secret-token"
        yield its
