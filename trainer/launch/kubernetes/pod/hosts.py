"""Worker pods as the launcher sees them: the operator's hostfile, and whether every sshd answers.

Imports no torch.
"""

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.errors import InputError

_AT_ONCE = 64
_ANSWER_S = 5.0
_AGAIN_S = 1.0
_REPORT_S = 30.0


def read_hostfile(path: Path) -> list[str]:
    """Returns the host names, `worker-0` first. Raises InputError if there are none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise InputError(
            f"{path} cannot be read ({problem.strerror}): the MPI Operator mounts it into the launcher"
        ) from None
    hosts = [line.split()[0] for line in lines if line.strip()]
    if not hosts:
        raise InputError(f"{path} names no worker")
    return hosts


def wait_for_all(
    hosts: Sequence[str],
    port: int,
    limit_s: float,
    given_up: Callable[[], bool],
    say: Callable[[str], None],
    *,
    on_first: Callable[[], None] = lambda: None,
) -> list[str]:
    """Wait until sshd answers on every host; calls `on_first` as soon as one answers.

    Returns the hosts that still do not answer after `limit_s` seconds, or when `given_up` becomes true.
    """
    begun = reported = time.monotonic()
    missing = list(hosts)
    while not given_up():
        before, missing = missing, _silent(missing, port)
        if len(before) == len(hosts) > len(missing):
            on_first()
        now = time.monotonic()
        if not missing or now - begun > limit_s:
            return missing
        if now - reported > _REPORT_S:
            reported = now
            say(f"{len(missing)} of {len(hosts)} workers do not answer yet: {listed(missing)}")
        time.sleep(_AGAIN_S)
    return missing


def listed(hosts: Sequence[str], most: int = 5) -> str:
    """Returns a short list of hosts, such as `a-worker-0, a-worker-3 and 12 more`."""
    names = [host.partition(".")[0] for host in hosts]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _silent(hosts: Sequence[str], port: int) -> list[str]:
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return [
            host
            for host, answers in zip(hosts, pool.map(lambda host: _answers(host, port), hosts), strict=True)
            if not answers
        ]


def _answers(host: str, port: int) -> bool:
    """Returns whether sshd greets on the host.

    A port that only accepts may belong to a pod that is terminating.
    """
    try:
        with socket.create_connection((host, port), _ANSWER_S) as connection:
            connection.settimeout(_ANSWER_S)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
