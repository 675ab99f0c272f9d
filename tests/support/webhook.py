"""A web service on loopback that keeps what is posted to it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.loopback import answering


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

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            its.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(its.status)
            if its.location:
                self.send_header("Location", its.location)
            self.end_headers()
            self.wfile.write(its.answer)

        def log_message(self, *args: object) -> None:
            pass

    with answering(Handler) as server:
        its.address = f"{server}/hook/a-secret-token"
        yield its
