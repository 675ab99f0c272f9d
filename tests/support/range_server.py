"""A web server on loopback that answers requests for ranges of files, and fails when it is told to.

To a client without keys it is an S3 server, too, whose buckets are folders.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.loopback import Answers, answering

CODES = {403: "AccessDenied", 416: "InvalidRange", 503: "ServiceUnavailable"}
"""Codes of S3 by status."""
RETRY_AFTER_S = 3


class Ranges(Answers):
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

    def answer(self) -> None:
        kind = type(self)
        with kind.counting:
            fails = kind.failures > 0
            kind.failures -= fails
            fault = kind.faults.popleft() if self.command == "GET" and kind.faults else ""
        if fails:
            self.send_error(503)
        elif fault.isdecimal():
            self._refuse(int(fault))
        elif fault == "gone":
            self.hang_up()
        else:
            self._give(fault)

    def _give(self, fault: str) -> None:
        try:
            file = self.root / f"{self.path.lstrip('/')}{'index.html' * self.path.endswith('/')}"
            whole, status = file.read_bytes(), file.stat()
        except OSError:
            self.send_error(404)
            return
        headers = {
            "ETag": f'"{status.st_size}-{status.st_mtime_ns}"',
            "Last-Modified": self.date_time_string(int(status.st_mtime)),
            "Accept-Ranges": "bytes",
        }
        begin, end, code = 0, len(whole), 200
        if (asked := self.headers.get("Range")) and fault != "whole":
            self.asked.append(asked)
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end, code = int(first), min(len(whole), int(last or len(whole)) + 1), 206
            if begin >= len(whole):
                self._refuse(416)
                return
        end = (begin + end) // 2 if fault == "short" else end
        if code == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(whole)}"
        self.send(code, whole[begin:end], headers, cut=(end - begin) // 2 if fault == "cut" else None)

    def _refuse(self, status: int) -> None:
        """As S3 says it, and to be asked again after `RETRY_AFTER_S`."""
        content = f"<Error><Code>{CODES.get(status, 'Other')}</Code><Message>no</Message></Error>".encode()
        self.send(status, content, {"Content-Type": "application/xml", "Retry-After": RETRY_AFTER_S})


@contextmanager
def serving(root: Path) -> Iterator[tuple[str, type[Ranges]]]:
    """Its address, and the class whose attributes steer it."""
    state = {"root": root, "asked": [], "faults": deque(), "counting": threading.Lock()}
    handler = type("Handler", (Ranges,), state)
    with answering(handler) as address:
        yield address, handler
