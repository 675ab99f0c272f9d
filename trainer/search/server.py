"""Serves the page of a search on this machine. Imports no torch itself.

Every address begins with a random token, because other users of the machine can reach its loopback. A request
names a picture by its number in the index, never by a path, and gets its pixels encoded anew. Only local
names are answered, so that no other site's name leads a browser here (DNS rebinding).
"""

import hmac
import io
import json
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache, lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from secrets import token_urlsafe
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs

from jinja2 import Template

from trainer.errors import InputError
from trainer.report.folder import clean
from trainer.report.template import page_templates
from trainer.search.index import Index
from trainer.text.terminal import one_line
from trainer.text.wording import many

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
"""Names under which the page may be asked for; the port may be another one, that of a tunnel."""
MOST_RESULTS = 480
MOST_CHARACTERS = 1000
"""Longest text to search for; models cut long before."""
_SIDES = {"thumbnail": 360, "picture": 2048}
"""Longest side of a picture by its kind, in pixels."""
_LOSSLESS_PIXELS = 128 * 128
_THUMBNAILS = 1000
"""Thumbnails that are kept in memory."""
_IDLE_S = 60.0
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; style-src 'self'; "
    "script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
Answer = tuple[HTTPStatus, str, bytes]
"""Status, media type and content."""


class Server(ThreadingHTTPServer):
    """Listens from when it is made, and answers when it has an index and `serve_forever` is called."""

    daemon_threads = True
    index: Index
    about: str = ""
    """Words about the model, for the page's head."""

    def __init__(self, port: int) -> None:
        """Raises InputError if the port cannot be had; 0 lets the system choose one."""
        self.token = token_urlsafe(16)
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise InputError(
                f"--port {port}: {why}: choose another port, or leave --port out, so that the system chooses"
            ) from None
        self._thumbnail = lru_cache(_THUMBNAILS)(self._encoded)

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # that of HTTPServer asks a name server for this host's name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing about a browser that has left, and prints the traceback of a bug."""
        if not isinstance(sys.exception(), OSError):
            traceback.print_exc()

    def answer(self, path: str) -> Answer:
        """Returns the answer to a request for this path, which begins with a slash and has its query."""
        asked, _, query = path.partition("?")
        token, _, place = asked.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return _text(HTTPStatus.NOT_FOUND, "Open the address that the terminal shows.")
        kind, _, number = place.partition("/")
        if place in _PAGES:
            media, content = _PAGES[place]
            return HTTPStatus.OK, media, content(self)
        if place == "search":
            return self._search(parse_qs(query))
        if kind in _SIDES and 0 <= (picture := _number(number)) < len(self.index):
            try:
                return self._thumbnail(picture) if kind == "thumbnail" else self._encoded(picture, kind)
            except InputError:
                return _text(HTTPStatus.GONE, "This picture has been removed or changed.")
        return _text(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _search(self, query: dict[str, list[str]]) -> Answer:
        text, count = query.get("text", [""])[0].strip(), query.get("count", ["24"])[0]
        if not text:
            return _json(HTTPStatus.BAD_REQUEST, {"error": "Type a text to search for."})
        if len(text) > MOST_CHARACTERS:
            long = f"The text has {many(len(text), 'character')}; at most {MOST_CHARACTERS:,} are allowed."
            return _json(HTTPStatus.BAD_REQUEST, {"error": long})
        if not 0 < _number(count) <= MOST_RESULTS:
            return _json(HTTPStatus.BAD_REQUEST, {"error": f"count must be from 1 to {MOST_RESULTS}."})
        matches = self.index.nearest(text, _number(count))
        results = [
            {"number": each.number, "name": clean(one_line(each.name)), "similarity": each.similarity}
            for each in matches
        ]
        return _json(HTTPStatus.OK, {"results": results, "pictures": len(self.index)})

    def _encoded(self, number: int, kind: str = "thumbnail") -> Answer:
        """Returns the picture with this number, encoded anew. Raises InputError if it cannot be read."""
        shown = self.index.folder.decoded(self.index.names[number])
        small = shown.width * shown.height <= _LOSSLESS_PIXELS
        shown.thumbnail((_SIDES[kind], _SIDES[kind]))
        file = io.BytesIO()
        shown.save(file, "PNG" if small else "JPEG", quality=88)
        return HTTPStatus.OK, "image/png" if small else "image/jpeg", file.getvalue()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "clipship", ""
    timeout = _IDLE_S
    server: Server

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")
        if (host[0] or host[2]).lower() not in NAMES:
            answer = _text(HTTPStatus.FORBIDDEN, f"This page is at {HOST} only.")
        else:
            answer = self._answer()
        status, kind, content = answer
        self.send_response(status)
        fixed = kind.startswith("image/") and status == HTTPStatus.OK
        headers = {"Cache-Control": "private, max-age=3600" if fixed else "no-store", **_HEADERS}
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _answer(self) -> Answer:
        try:
            return self.server.answer(self.path)
        except Exception:  # a bug, which must not leave the page waiting
            traceback.print_exc()
            return _json(
                HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "The search failed; the terminal says why."}
            )

    def log_message(self, *_: object) -> None:
        """Logs nothing: addresses hold the token and what is searched for."""


@cache
def _template() -> Template:
    return page_templates("trainer.search").get_template("page.html.j2")


def _page(server: Server) -> bytes:
    index = server.index
    folder = clean(one_line(index.folder.path.resolve().name or "/"))
    count = many(len(index), "picture")
    text = _template().render(folder=folder, about=clean(server.about), count=count, total=len(index))
    return text.encode(errors="replace")


def _style(_server: Server) -> bytes:
    """Returns the report's style, whose colours and dark mode the page has, and its own."""
    return (files("trainer.report") / "page.css").read_bytes() + (
        files("trainer.search") / "page.css"
    ).read_bytes()


_PAGES: dict[str, tuple[str, Callable[[Server], bytes]]] = {
    "": ("text/html; charset=utf-8", _page),
    "page.css": ("text/css; charset=utf-8", _style),
    "page.js": (
        "text/javascript; charset=utf-8",
        lambda _: (files("trainer.search") / "page.js").read_bytes(),
    ),
}
"""Media type and content of what the page is made of, by its place behind the token."""


def _number(text: str) -> int:
    """Returns the whole number that the text is, and -1 for any other text."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


def _text(status: HTTPStatus, sentence: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{sentence}\n".encode()


def _json(status: HTTPStatus, value: dict[str, Any]) -> Answer:
    return status, "application/json", json.dumps(value).encode()
