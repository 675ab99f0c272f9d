"""Servers on this machine that answer as hubs do, as far as the hubs' clients ask, for models of a test."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.loopback import Answers, answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin")
"""Endings of files that the Hugging Face hub keeps in LFS, under their SHA-256."""
JSON = {"Content-Type": "application/json"}


@dataclass
class StubHub:
    """State of a hub: the folders of its models by name, or by name and revision, and the requests so far."""

    models: dict[Any, Path] = field(default_factory=dict)
    address: str = ""
    requests: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    """Bytes after which the connection ends, once, by the name of a file."""
    damage: set[str] = field(default_factory=set)
    """Files of which another byte than the hub's is sent."""
    answers: bool = True

    def forget(self) -> None:
        """Makes it a new hub at the same address."""
        vars(self).update(vars(StubHub(address=self.address)))

    def content(self, file: Path) -> bytes:
        """What is sent of a file."""
        content = file.read_bytes()
        return bytes([content[0] ^ 1]) + content[1:] if file.name in self.damage else content


def checksum(path: Path) -> str:
    """The name under which the Hugging Face hub keeps a file."""
    content = path.read_bytes()
    if path.name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


class HuggingFace(Answers):
    """Has models by name."""

    state: StubHub
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        self.state.requests.append(f"{self.command} {path}")
        if not self.state.answers:
            self.send(503)
        elif match := re.fullmatch(r"/api/models/(.+?)/(tree|revision)/[^/]+", path):
            self._about(match[1], match[2])
        elif match := re.fullmatch(r"/(.+)/resolve/[^/]+/([^/]+)", path):
            self._file(match[1], match[2])
        else:
            self._missing("RepoNotFound")

    def _about(self, name: str, what: str) -> None:
        folder = self.state.models.get(name)
        if folder is None:
            self._missing("RepoNotFound")
            return
        files = sorted(folder.iterdir())
        answer: Any = [
            {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": checksum(f)} for f in files
        ]
        if what == "revision":
            siblings = [{"rfilename": f.name} for f in files]
            answer = {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self.send(200, json.dumps(answer).encode(), JSON)

    def _file(self, name: str, file: str) -> None:
        path = self.state.models.get(name, Path("/nowhere")) / file
        if not path.is_file():
            self._missing("EntryNotFound")
            return
        content = self.state.content(path)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{checksum(path)}"', "Accept-Ranges": "bytes"}
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(begin[1]) if begin else 0
        if begin:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cut = self.state.cut.pop(file, None) if self.command == "GET" else None
        self.send(206 if begin else 200, content[first:], headers, cut)

    def _missing(self, code: str) -> None:
        self.send(404, b"{}", {"X-Error-Code": code})


class ModelScope(Answers):
    """Has models by name and revision."""

    state: StubHub
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        where = urlsplit(self.path)
        asked = {key: values[0] for key, values in parse_qs(where.query).items()}
        self.state.requests.append(self.path)
        match = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?", where.path)
        folder = self.state.models.get((match[1], asked.get("Revision", "master"))) if match else None
        if match is None or folder is None:
            self.send(404, json.dumps({"Code": 10010205001, "Message": "not found"}).encode(), JSON)
        elif match[2]:
            listing = [_listed(file) for file in sorted(folder.iterdir())]
            self.send(200, json.dumps({"Code": 200, "Data": {"Files": listing}}).encode(), JSON)
        else:
            self.send(200, self.state.content(folder / asked["FilePath"]), JSON)


@contextmanager
def stub_hub(kind: type[Answers] = HuggingFace) -> Iterator[StubHub]:
    """Yields a hub that answers as this kind does."""
    hub = StubHub()
    with answering(type("Handler", (kind,), {"state": hub})) as hub.address:
        yield hub


def _listed(file: Path) -> dict[str, object]:
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    about = {"Path": file.name, "Name": file.name, "Type": "blob"}
    return {**about, "Size": file.stat().st_size, "Sha256": checksum}
