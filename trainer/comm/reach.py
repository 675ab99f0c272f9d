"""Reaches the address at which ranks meet, MASTER_ADDR and MASTER_PORT, which rank 0 serves."""

import os
import socket
import time

from trainer.errors import InputError
from trainer.run.retry import Backoff, every, retried

RESOLVE_S = 30.0
"""Longest time to retry a name lookup, in seconds.

A name server may be busy, and a pod's name may appear after its ranks start.
"""
_RESOLVE_AGAIN_S = 1.0
_CONNECT_AGAIN = Backoff(0.01, 1.0)


def check_resolvable(host: str, port: int) -> None:
    """Raises InputError if the host has no address on this machine, after RESOLVE_S if it may still come."""
    try:
        retried(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
            every(_RESOLVE_AGAIN_S, RESOLVE_S),
            lambda error: getattr(error, "errno", None) == socket.EAI_AGAIN,
        )
    except OSError as error:
        raise InputError(
            f"MASTER_ADDR = {host!r} cannot be resolved on {os.uname().nodename}: {error}"
        ) from error


def wait_until_served(host: str, port: int, longest_s: float) -> bool:
    """Waits until somebody listens there, at most `longest_s` seconds; returns whether somebody does.

    torch would do that, too, but it tries again only after half a second, and then after ever longer waits.
    """
    deadline = time.monotonic() + longest_s

    def connect() -> None:
        left_s = max(0.0, deadline - time.monotonic())
        socket.create_connection((host, port), timeout=left_s).close()

    try:
        retried(connect, _CONNECT_AGAIN.within(longest_s), lambda error: isinstance(error, OSError))
    except OSError:
        return False
    return True
