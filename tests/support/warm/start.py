"""Starts a warm interpreter, and lets this process's `subprocess` use it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.warm import client
from tests.support.warm.server import READY

ROOT = Path(__file__).parents[3]


@contextmanager
def warm_starts(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Inside, `python -m MODULE` of ours is a fork; yields why not, if it is none.

    Only a start in this environment is one, since libraries read it where they are imported.
    """
    before = client.current()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        path = filter(None, (str(ROOT), environment.get("PYTHONPATH")))
        env = {**environment, "PYTHONPATH": os.pathsep.join(path)}
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
            client.use(before)
            process.send_signal(signal.SIGKILL)
            process.wait()
