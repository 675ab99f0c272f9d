"""Starts a warm interpreter, and lets this process's `subprocess` use it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.warm import client
from tests.support.warm.server import READY

ROOT = Path(__file__).parents[3]


@contextmanager
def warm_starts() -> Iterator[str]:
    """Inside, `python -m MODULE` of ours is a fork; yields why not, if it is none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.warm.server", str(theirs.fileno())],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        answer = ours.recv(1000)
        if answer == READY:
            client.use(client.Warm(ours, env))
        try:
            yield "" if answer == READY else answer.decode() or "it ended"
        finally:
            client.use(None)
            process.send_signal(signal.SIGKILL)
            process.wait()
