"""A web server on loopback that answers requests for ranges of files, and fails when it is told to.

To a client without keys it is an S3 server, too, whose buckets are folders.
"""

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.support.loopback import answering

CODES = {403: "AccessDenied", 416: "InvalidRange", 503: "ServiceUnavailable"}
"""Codes of S3 by status."""
RETRY_AFTER_S = 3


class Ranges(BaseHTTPRequestHandler):
    """Serves byte ranges of the files below `root`, and for a folder its index.html.

    The first `failures` requests are answered with 503. Each request for content takes one of `faults`: a
    status of HTTP, "cut" (the connection ends in mid-body), "gone" (it ends without an answer), "short" (half
    of the range comes, as if it were all), "whole" (the file comes in place of the range) or "" (no fault).
    """

    root: Path
    failures = 0
    faults: deque[str]
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
            fault = kind.faults.popleft() if body and kind.faults else ""
        if fails:
            self.send_error(503)
            return
        if fault.isdecimal():
            self._refuse(int(fault))
            return
        if fault == "gone":
            self._hang_up()
            return
        try:
            file = self.root / f"{self.path.lstrip('/')}{'index.html' * self.path.endswith('/')}"
            whole, status = file.read_bytes(), file.stat()
        except OSError:
            self.send_error(404)
            return
        begin, end = 0, len(whole)
        if (asked := self.headers.get("Range")) and fault != "whole":
            kind.asked.append(asked)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(len(whole), int(last or len(whole)) + 1)
        else:
            asked = None
        if asked and begin >= len(whole):
            self._refuse(416)
            return
        end = (begin + end) // 2 if fault == "short" else end
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{status.st_size}-{status.st_mtime_ns}"')
        self.send_header("Last-Modified", self.date_time_string(int(status.st_mtime)))
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(whole)}")
        self.end_headers()
        if body and fault == "cut":
            self.wfile.write(whole[begin : (begin + end) // 2])
            self._hang_up()
        elif body:
            kind.sent += end - begin
            self.wfile.write(whole[begin:end])

    def _refuse(self, status: int) -> None:
        """As S3 says it, and to be asked again after `RETRY_AFTER_S`."""
        content = f"<Error><Code>{CODES.get(status, 'Other')}</Code><Message>no</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/xml")
        self.send_header("Retry-After", str(RETRY_AFTER_S))
        self.end_headers()
        self.wfile.write(content)

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def serving(root: Path) -> Iterator[tuple[str, type[Ranges]]]:
    """Its address, and the class whose attributes steer it."""
    handler = type(
        "Handler",
        (Ranges,),
        {
            "root": root,
            "asked": [],
            "failures": 0,
            "faults": deque(),
            "counting": threading.Lock(),
            "sent": 0,
        },
    )
    with answering(handler) as address:
        yield address, handler
