"""A server on this machine that answers as the Hugging Face hub does, for models in a test's folders."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.support.loopback import answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin")
"""Endings of files that the hub keeps in LFS, under their SHA-256."""


@dataclass
class StubHub:
    """State of the server: its models, and the requests so far."""

    models: dict[str, Path]
    address: str = ""
    requests: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    """Bytes after which the connection ends, once, by the name of a file."""
    damage: set[str] = field(default_factory=set)
    """Files of which another byte than the hub's is sent."""
    answers: bool = True

    def forget(self) -> None:
        """Makes it a new hub at the same address."""
        vars(self).update(vars(StubHub({}, self.address)))


@contextmanager
def stub_hub(**models: Path) -> Iterator[StubHub]:
    """Yields a hub with the models; `__` in a name stands for a slash, `_` for a hyphen."""
    hub = StubHub({name.replace("__", "/").replace("_", "-"): folder for name, folder in models.items()})

    class Handler(_Handler):
        state = hub

    with answering(Handler) as hub.address:
        yield hub


def checksum(path: Path) -> str:
    """The name under which the hub keeps a file."""
    content = path.read_bytes()
    if path.name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    state: StubHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_: Any) -> None: ...

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.state.requests.append(f"{self.command} {path}")
        if not self.state.answers:
            self._send(503, b"", body)
        elif match := re.fullmatch(r"/api/models/(.+?)/(tree|revision)/[^/]+", path):
            self._about(match[1], match[2], body)
        elif match := re.fullmatch(r"/(.+)/resolve/[^/]+/([^/]+)", path):
            self._file(match[1], match[2], body)
        else:
            self._missing("RepoNotFound", body)

    def _about(self, name: str, what: str, body: bool) -> None:
        folder = self.state.models.get(name)
        if folder is None:
            self._missing("RepoNotFound", body)
            return
        files = sorted(folder.iterdir())
        answer: Any = [
            {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": checksum(f)} for f in files
        ]
        if what == "revision":
            siblings = [{"rfilename": f.name} for f in files]
            answer = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self._send(200, json.dumps(answer).encode(), body, {"Content-Type": "application/json"})

    def _file(self, name: str, file: str, body: bool) -> None:
        path = self.state.models.get(name, Path("/nowhere")) / file
        if not path.is_file():
            self._missing("EntryNotFound", body)
            return
        content = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{checksum(path)}"', "Accept-Ranges": "bytes"}
        if file in self.state.damage:
            content = bytes([content[0] ^ 1]) + content[1:]
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(begin[1]) if begin else 0
        if begin:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cut = self.state.cut.pop(file, None) if body else None
        self._send(206 if begin else 200, content[first:], body, headers, cut)

    def _missing(self, code: str, body: bool) -> None:
        self._send(404, b"{}", body, {"X-Error-Code": code})

    def _send(
        self, status: int, content: bytes, body: bool, headers: Any = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[:cut])
            if cut is not None:
                self.close_connection = True
