"""A real S3 server on loopback: rclone, which the tests' requirements bring."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import until
from trainer.sysinfo.addresses import free_port

RCLONE = Path(sys.executable).with_name("rclone")
KEY_ID, SECRET = "test-key-id", "test-s3cr3t"  # long enough for rclone


@contextmanager
def s3_server(folder: Path, *, keys: bool) -> Iterator[str]:
    """The address of a server whose buckets are the folders in `folder`; without `keys` it asks for none."""
    port = free_port("127.0.0.1")
    command = [str(RCLONE), "serve", "s3", "--addr", f"127.0.0.1:{port}", "--config", "", str(folder)]
    with (folder.parent / "rclone.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, *(["--auth-key", f"{KEY_ID},{SECRET}"] if keys else [])], stdout=log, stderr=log
        )
        try:
            until(lambda: _answers(port), server, limit_s=30, otherwise=lambda: "rclone does not answer")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0
