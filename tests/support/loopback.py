"""A web server on loopback, in threads of this process, for as long as a block lasts."""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import MappingProxyType
from typing import Any


class Answers(BaseHTTPRequestHandler):
    """Answers requests of each kind by `answer`, and says nothing of them."""

    def answer(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def send(
        self,
        status: int,
        content: bytes = b"",
        headers: Mapping[str, object] = MappingProxyType({}),
        cut: int | None = None,
    ) -> None:
        """Answers with the content, unless only its headers are asked for.

        With `cut`, the connection ends after so many bytes of it.
        """
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        if cut is not None:
            self.hang_up()

    def hang_up(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def answering(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yields the address of a server that answers by the handler: http://127.0.0.1:PORT."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
