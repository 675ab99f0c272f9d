"""Reaches the address at which ranks meet, MASTER_ADDR and MASTER_PORT, which rank 0 serves."""

import os
import socket
import time

from trainer.errors import InputError

RESOLVE_S = 30.0
"""Longest time to retry a name lookup, in seconds.

A name server may be busy, and a pod's name may appear after its ranks start.
"""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 1.0


def check_resolvable(host: str, port: int) -> None:
    """Raises InputError if the host has no address on this machine, after RESOLVE_S if it may still come."""
    limit = time.monotonic() + RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > limit:
                raise InputError(
                    f"MASTER_ADDR = {host!r} cannot be resolved on {os.uname().nodename}: {error}"
                ) from error
        time.sleep(1)


def wait_until_served(host: str, port: int, longest_s: float) -> bool:
    """Waits until somebody listens there, at most `longest_s` seconds; returns whether somebody does.

    torch would do that, too, but it tries again only after half a second, and then after ever longer waits.
    """
    deadline, wait_s = time.monotonic() + longest_s, _FIRST_WAIT_S
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left).close()
            return True
        except OSError:
            time.sleep(min(wait_s, left))
            wait_s = min(1.5 * wait_s, _LONGEST_WAIT_S)
    return False
