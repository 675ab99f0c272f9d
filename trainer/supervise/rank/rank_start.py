"""Starts a rank's module: `python -m trainer.supervise.rank.rank_start MODULE [WORD ...]`.

Before it imports the module, it lets the supervisor ask for the stack, so that an import that hangs on a slow
file system shows where. If the supervisor asks for a fork server, a copy of this process stays behind after
its imports, and forks the ranks of later generations; `trainer.supervise.rank.fork_server` is the other side.
It imports no torch itself.
"""

import faulthandler
import gc
import importlib
import json
import os
import runpy
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainer.run.exit_record import RANK_DIR
from trainer.supervise.rank.fork_server import CHANNEL, KEEP, WAIT
from trainer.supervise.rank.rank_report import STACK_FILE, STACK_SIGNAL
from trainer.sysinfo import collector
from trainer.sysinfo.forks import can_fork, fork_for
from trainer.sysinfo.signals import reset_inherited_signals

_PRELOAD = "trainer.train.preload"
_ORDER_S = 3.0
_REQUEST_BYTES = 1 << 20


def main() -> None:
    """Prepare the dump of this process's stack, then run the module that the arguments name."""
    collector.begin_without()  # `run_rank` turns it on
    reset_inherited_signals(asks=False)
    _prepare_dump()
    sys.argv = sys.argv[1:]
    if leave_fork_server(_preload):
        _prepare_dump()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _prepare_dump() -> None:
    if folder := os.environ.get(RANK_DIR):  # a fork server that was started without a rank has none
        # The file stays open as long as the process lives.
        file = open(Path(folder, STACK_FILE), "a")  # noqa: SIM115
        faulthandler.enable(file)
        faulthandler.register(STACK_SIGNAL, file=file)


def _preload() -> None:
    # The layer of the training is above this one, which therefore does not import it by name.
    importlib.import_module(_PRELOAD).preload(sys.argv[1:])


def leave_fork_server(preload: Callable[[], None]) -> bool:
    """Imports by `preload` what a rank needs, and leaves a copy of this process behind as the fork server.

    Returns False in this process, which goes on as the rank, and True in each rank that the fork server forks
    later: its environment is already its own. Without a supervisor that asks for one, it does nothing.
    """
    number = os.environ.pop(CHANNEL, None)
    if number is None:
        return False
    with socket.socket(fileno=int(number)) as channel:
        channel.set_inheritable(False)
        preload()
        order = _order(channel)
        if order not in (KEEP, WAIT) or not _becomes_fork_server(order == KEEP):
            return False
        _serve(channel, os.getppid())
    return True


def _becomes_fork_server(by_copy: bool) -> bool:
    """Returns whether this process is the fork server, either itself or as the copy that is made here."""
    with suppress(OSError):  # no memory or too many processes
        if can_fork():
            gc.freeze()  # the collector would otherwise write to memory that the forks share
            return not by_copy or fork_for(os.getppid()) == 0
    if not by_copy:
        os._exit(0)
    return False


def _order(channel: socket.socket) -> bytes:
    """Returns the supervisor's first message; b"" if none comes, or if it wants no fork server."""
    channel.settimeout(_ORDER_S)
    try:
        return channel.recv(64)
    except OSError:
        return b""


def _serve(channel: socket.socket, supervisor: int) -> None:
    """Forks a rank at each request; returns in the ranks alone. The fork server ends with its supervisor."""
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


if __name__ == "__main__":
    main()
