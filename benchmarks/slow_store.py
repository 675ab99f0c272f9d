"""A web server that waits before its first byte and limits the rate of a connection, as object stores do.

`python -m benchmarks.slow_store FOLDER WAIT_MS MB_PER_S` prints its address and serves the files. GET
/counts gives the requests and bytes since the last such GET, as JSON; after GET /stall/SECONDS the next file
that is asked for comes that much later. It sends from the kernel's cache
without touching the bytes, so that it takes little of the processor from what is measured.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

AT_ONCE = 2**18
COPY = "copy-"
"""Begin of the name of a folder that holds all files once more."""


class SlowStore(BaseHTTPRequestHandler):
    """Answers requests for files and ranges of them, by one connection after another if a client asks so."""

    protocol_version = "HTTP/1.1"
    root: Path
    wait_s = stall_s = 0.0
    bytes_per_s = 1e8
    counting = threading.Lock()
    requests = sent = 0

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        if self.path == "/counts":
            self._counts()
        elif self.path.startswith("/stall/"):
            SlowStore.stall_s = float(self.path.rpartition("/")[2])
            self.send_response(204)
            self.end_headers()
        else:
            self._answer(body=True)

    def _counts(self) -> None:
        kind = SlowStore
        with kind.counting:
            text = json.dumps({"requests": kind.requests, "bytes": kind.sent}).encode()
            kind.requests = kind.sent = 0
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _answer(self, body: bool) -> None:
        with SlowStore.counting:
            stall_s, SlowStore.stall_s = SlowStore.stall_s, 0.0
        time.sleep(self.wait_s + stall_s)
        try:
            path = self.path.lstrip("/")
            file = os.open(
                self.root / (path.partition("/")[2] if path.startswith(COPY) else path), os.O_RDONLY
            )
        except OSError:
            self.send_error(404)
            return
        try:
            self._send(file, body)
        finally:
            os.close(file)

    def _send(self, file: int, body: bool) -> None:
        size = os.fstat(file).st_size
        begin, end = 0, size
        asked = self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(size, int(last or size) + 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size}"')
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        self.wfile.flush()
        with SlowStore.counting:
            SlowStore.requests += 1
            SlowStore.sent += end - begin if body else 0
        start, done = time.monotonic(), 0
        while body and done < end - begin:
            done += os.sendfile(
                self.connection.fileno(), file, begin + done, min(AT_ONCE, end - begin - done)
            )
            time.sleep(max(0.0, start + done / self.bytes_per_s - time.monotonic()))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that has enough closes its connection


def main(folder: str, wait_ms: str, mb_per_s: str) -> None:
    SlowStore.root, SlowStore.wait_s, SlowStore.bytes_per_s = (
        Path(folder),
        float(wait_ms) / 1000,
        float(mb_per_s) * 1e6,
    )
    with _Server(("127.0.0.1", 0), SlowStore) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
