"""A server on this machine that answers as ModelScope does, as far as its own client asks."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.loopback import answering


@dataclass
class StubModelScope:
    """State of the server: its models, and the requests so far."""

    models: dict[tuple[str, str], Path]
    """Folder of each repository at each revision."""
    address: str = ""
    requests: list[str] = field(default_factory=list)
    damage: set[str] = field(default_factory=set)
    """Files of which another byte than the listing's checksum is sent."""

    def forget(self) -> None:
        """Makes it a new hub at the same address."""
        vars(self).update(vars(StubModelScope({}, self.address)))


@contextmanager
def stub_modelscope(models: dict[tuple[str, str], Path]) -> Iterator[StubModelScope]:
    hub = StubModelScope(models)

    class Handler(_Handler):
        state = hub

    with answering(Handler) as hub.address:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    state: StubModelScope
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        where = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(where.query).items()}
        self.state.requests.append(self.path)
        match = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?", where.path)
        folder = self.state.models.get((match[1], asked.get("Revision", "master"))) if match else None
        if match is None or folder is None:
            self._send(404, json.dumps({"Code": 10010205001, "Message": "not found"}).encode())
        elif match[2]:
            self._send(200, json.dumps({"Code": 200, "Data": {"Files": _listing(folder)}}).encode())
        else:
            self._file(folder / asked["FilePath"])

    def log_message(self, *_: Any) -> None: ...

    def _file(self, path: Path) -> None:
        content = path.read_bytes()
        if path.name in self.state.damage:
            content = bytes([content[0] ^ 1]) + content[1:]
        self._send(200, content)

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _listing(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "Path": file.name,
            "Name": file.name,
            "Type": "blob",
            "Size": file.stat().st_size,
            "Sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(folder.iterdir())
    ]
