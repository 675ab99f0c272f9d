"""A real S3 server on loopback: rclone, which the tests' requirements bring."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
            _wait_for(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()
            server.wait()


def _wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        assert server.poll() is None, "rclone has ended"
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("rclone does not answer")
