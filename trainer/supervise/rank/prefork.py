"""The rank's side of the nursery: a copy of a rank, taken after its imports, forks further ranks.

The supervisor's side is `trainer.supervise.rank.fork_server`. It imports no torch itself.
"""

import faulthandler
import gc
import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from trainer.supervise.rank.fork_server import CHANNEL, KEEP, WAIT
from trainer.supervise.rank.rank_report import STACK_SIGNAL
from trainer.sysinfo.forks import can_fork, fork_for

_ORDER_S = 3.0
_REQUEST_BYTES = 1 << 20


def leave_nursery(preload: Callable[[], None]) -> bool:
    """Imports by `preload` what a rank needs, and leaves a copy of this process behind as the nursery.

    Returns False in this process, which goes on as the rank, and True in each rank that the nursery forks
    later: its environment is already its own. Without a supervisor that asks for a nursery, it does nothing.
    """
    number = os.environ.pop(CHANNEL, None)
    if number is None:
        return False
    with socket.socket(fileno=int(number)) as channel:
        channel.set_inheritable(False)
        preload()
        order = _order(channel)
        if order not in (KEEP, WAIT) or not _becomes_nursery(order == KEEP):
            return False
        _serve(channel, os.getppid())
    return True


def _becomes_nursery(by_copy: bool) -> bool:
    """Returns whether this process is the nursery, either itself or as the copy that is made here."""
    with suppress(OSError):  # no memory or too many processes
        if can_fork():
            gc.collect()
            gc.freeze()  # the collector would otherwise write to memory that the forks share
            return not by_copy or fork_for(os.getppid()) == 0
    if not by_copy:
        os._exit(0)
    return False


def _order(channel: socket.socket) -> bytes:
    """Returns the supervisor's first message; b"" if none comes, or if the supervisor wants no nursery."""
    channel.settimeout(_ORDER_S)
    try:
        return channel.recv(64)
    except OSError:
        return b""


def _serve(channel: socket.socket, supervisor: int) -> None:
    """Forks a rank at each request; returns in the ranks alone. The nursery ends with its supervisor."""
    faulthandler.unregister(STACK_SIGNAL)  # its file is the first rank's
    faulthandler.disable()
    channel.settimeout(None)
    with suppress(OSError):  # the supervisor no longer wants it
        channel.send(str(os.getpid()).encode())
    while message := _next(channel):
        if fork_for(supervisor) == 0:
            request = json.loads(message)
            for name in request["unset"]:
                os.environ.pop(name, None)
            os.environ.update(request["set"])
            channel.send(str(os.getpid()).encode())
            return
    os._exit(0)


def _next(channel: socket.socket) -> bytes:
    try:
        return channel.recv(_REQUEST_BYTES)
    except OSError:
        return b""
