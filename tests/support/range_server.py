"""A web server on loopback that answers requests for ranges of files, and fails when it is told to."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Ranges(BaseHTTPRequestHandler):
    """Serves byte ranges of the files below `root`, and for a folder its index.html.

    The first `failures` requests are answered with 503.
    """

    root: Path
    failures = 0
    counting: threading.Lock
    asked: list[str]
    sent = 0

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        kind = type(self)
        with kind.counting:
            fails = kind.failures > 0
            kind.failures -= fails
        if fails:
            self.send_error(503)
            return
        try:
            whole = (
                self.root / f"{self.path.lstrip('/')}{'index.html' * self.path.endswith('/')}"
            ).read_bytes()
        except OSError:
            self.send_error(404)
            return
        begin, end = 0, len(whole)
        if asked := self.headers.get("Range"):
            kind.asked.append(asked)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(len(whole), int(last or len(whole)) + 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(whole)}")
        self.end_headers()
        if body:
            kind.sent += end - begin
            self.wfile.write(whole[begin:end])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def serving(root: Path) -> Iterator[tuple[str, type[Ranges]]]:
    """Its address, and the class whose attributes steer it."""
    handler = type(
        "Handler",
        (Ranges,),
        {"root": root, "asked": [], "failures": 0, "counting": threading.Lock(), "sent": 0},
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}", handler
        http.shutdown()
